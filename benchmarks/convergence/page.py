"""The page of the runs: which precisions are inside, the tasks, and where runs end."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.convergence.task import WAYS, Task
from benchmarks.convergence.tasks import TASKS
from benchmarks.results import Results
from benchmarks.show import markdown_table
from flax_amp.debug import TrainingComparison

# Of the runs in one precision: a `flax_amp.debug.TrainedPrecision` as a dict, and the
# number of steps of each run.
Figures = dict[str, Any]


def figures(found: TrainingComparison) -> dict[str, Figures]:
    """Returns what is stored of a comparison, for float32 and for each precision."""
    told = found.to_dict()
    stored = {"float32": told["reference"]}
    stored |= {trained["name"]: trained for trained in told["precisions"]}
    return {name: x | {"steps": found.steps} for name, x in stored.items()}


def outside(results: Results) -> list[str]:
    """Returns the tasks with their precisions that are outside."""
    return [
        f"{task} {way}"
        for task, way, told in _compared(results)
        if not told["gap"]["is_inside"]
    ]


def page(results: Results) -> str:
    """Returns the page in Markdown."""
    compared, out = _compared(results), outside(results)
    names = f": {', '.join(out)}" if out else ""
    header = "task | precision | ends of the seeds | gap | limit | detectable | is"
    header += " | skipped steps | final scale"
    rows = [_row(TASKS[task], task, way, told) for task, way, told in compared]
    table = markdown_table(header.split(" | "), rows, words=3)
    return f"""# Where training ends

Whole runs of six small tasks, in half precision and in fp8, compared with float32 by
`flax_amp.debug.compare_training`: [the tasks, the precisions and the
test](../README.md#convergence). `make convergence` makes this page. What stands here
was run by:

{results.made_with()}

**{len(compared) - len(out)} of {len(compared)} are inside, {len(out)} outside{names}.**

## Tasks

{_task_table(results)}

## Precisions

Metrics of the seeds 0, 1, ... in order. A gap is the mean difference to float32 with
the same seed, above 0 if the precision is worse. It is inside up to the limit, and one
of the size *detectable* would be called outside in 90 % of such comparisons.

{table}
"""


def _compared(results: Results) -> list[tuple[str, str, Figures]]:
    """Returns task, precision and figures of all that is compared with float32."""
    return [
        (task, way, results.cells[task][way])
        for task in TASKS
        for way in WAYS
        if way != "float32" and way in results.cells.get(task, {})
    ]


def _ends(task: Task, told: Figures) -> list[float]:
    """Returns the metric at the end of each run; a comparison has its negative."""
    return [-float(x) if task.higher else float(x) for x in told["ends"]]


def _task_table(results: Results) -> str:
    header = "task | model and data | metric | steps | seeds | float32 | sd"
    rows = []
    for name, task in TASKS.items():
        if told := results.cells.get(name, {}).get("float32"):
            ends = _ends(task, told)
            counts = [str(told["steps"]), str(len(ends))]
            spread = f"{statistics.stdev(ends):.2g}"
            rows.append([name, task.title, task.metric, *counts, _mean(ends), spread])
    return markdown_table(header.split(" | "), rows, words=3)


def _row(task: Task, name: str, way: str, told: Figures) -> list[str]:
    gap = told["gap"]
    is_inside = gap["is_inside"]
    sizes = [f"{float(gap[key]):.2g}" for key in ("mean", "limit", "detectable")]
    return [
        name,
        way,
        ", ".join(f"{end:.4g}" for end in _ends(task, told)),
        *sizes,
        "inside" if is_inside else "**outside**",
        ", ".join(map(str, told["skipped"])) if any(told["skipped"]) else "0",
        ", ".join(f"{x:.0f}" for x in told["scales"]) if way == "float16" else "",
    ]


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}"
