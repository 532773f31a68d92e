"""All tasks."""

from benchmarks.convergence import digits, others
from benchmarks.convergence.task import Task

TASKS: dict[str, Task] = digits.TASKS | others.TASKS
