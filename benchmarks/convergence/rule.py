"""When the end of a run counts as an end that a float32 run may have."""

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.convergence.task import Task

LAST = 5  # evaluations that are averaged
_DEVIATIONS = 3.0


def final(curve: Sequence[float]) -> float:
    """Returns the metric at the end of a run: the mean of the last evaluations."""
    return statistics.fmean(curve[-LAST:])


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the float32 runs of a task end, and how far from them another may."""

    mean: float
    deviation: float
    margin: float
    higher: bool

    @property
    def limit(self) -> float:
        """The worst end that is inside."""
        return self.mean - self.margin if self.higher else self.mean + self.margin

    def holds(self, end: float) -> bool:
        """Returns whether an end is inside; it may be better, not worse. NaN is not."""
        return end >= self.limit if self.higher else end <= self.limit


def spread(task: Task, finals: Sequence[float]) -> Spread:
    """Returns the spread of a task from the ends of its float32 runs.

    The margin is three standard deviations of one run, or the resolution of the metric
    if that is more.
    """
    deviation = statistics.stdev(finals)
    margin = max(_DEVIATIONS * deviation, task.resolution)
    return Spread(statistics.fmean(finals), deviation, margin, task.better == "higher")
