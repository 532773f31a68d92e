"""The page of the runs: which ends are in, the tasks, and every run."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.convergence.task import WAYS, Task
from benchmarks.convergence.tasks import TASKS
from benchmarks.results import Results
from benchmarks.show import markdown_table

LAST = 5  # evaluations that are averaged
EVALUATIONS = 20  # at equal distances
_DEVIATIONS = 3.0
Run = dict[str, Any]


def final(curve: Sequence[float]) -> float:
    """Returns the metric at the end of a run: the mean of the last evaluations."""
    return statistics.fmean(curve[-LAST:])


def limit(task: Task, ends: Sequence[float]) -> float:
    """Returns the worst end that is in, from those of the float32 runs.

    The margin is three standard deviations of one run, or the resolution of the metric
    if that is more.
    """
    margin = max(_DEVIATIONS * statistics.stdev(ends), task.resolution)
    return statistics.fmean(ends) + (-margin if task.higher else margin)


def is_in(task: Task, ends: Sequence[float], end: float) -> bool:
    """Returns whether an end is in; it may be better, not worse. NaN is not."""
    worst = limit(task, ends)
    return end >= worst if task.higher else end <= worst


def verdicts(results: Results) -> dict[str, bool]:
    """Returns of each run that is not in float32 whether it is in."""
    return {
        f"{task} {way} {seed}": is_in(TASKS[task], [*float32.values()], end)
        for task, float32 in _tasks(results).items()
        for way in WAYS
        if way != "float32"
        for seed, end in _ends(results, task, way).items()
    }


def page(results: Results) -> str:
    """Returns the page in Markdown."""
    judged = verdicts(results)
    out = [name for name, holds in judged.items() if not holds]
    names = f": {', '.join(out)}" if out else ""
    rows = [
        _row(results, task, way, judged) for task in _tasks(results) for way in WAYS
    ]
    header = "task | precision | ends of the seeds | mean | float32, same seeds | in"
    header += " | skipped updates | final scale"
    table = markdown_table(header.split(" | "), [row for row in rows if row], words=3)
    return f"""# Where training ends

Whole runs of six small tasks, in float32, in half precision and in fp8. A run is in if
its end is not worse than the float32 ends by more than three of their standard
deviations: [the tasks, the precisions and the rule](../README.md#convergence).
`make convergence` makes this page. What stands here was run by:

{results.made_with()}

**{sum(judged.values())} of {len(judged)} runs are in, {len(out)} out{names}.**

## Tasks

{_task_table(results)}

## Runs

Metrics of the seeds 0, 1, ... in order; **bold** is out. With two states, both are
listed: discriminator, generator.

{table}
"""


def _runs(results: Results, task: str, way: str) -> dict[str, Run]:
    return results.cells.get(f"{task} {way}", {})


def _ends(results: Results, task: str, way: str) -> dict[str, float]:
    """Returns the metric at the end of each run, by seed."""
    runs = _runs(results, task, way)
    return {seed: final(run["curve"]) for seed, run in runs.items()}


def _tasks(results: Results) -> dict[str, dict[str, float]]:
    """Returns the float32 ends of the tasks that have enough of them for a spread."""
    found = {task: _ends(results, task, "float32") for task in TASKS}
    return {task: ends for task, ends in found.items() if len(ends) > 1}


def _task_table(results: Results) -> str:
    header = "task | model and data | metric | steps | seeds | float32 | sd | is in"
    rows = []
    for name, float32 in _tasks(results).items():
        task, ends = TASKS[name], [*float32.values()]
        counts = [str(task.steps), str(len(ends))]
        figures = [_mean(ends), f"{statistics.stdev(ends):.2g}"]
        figures += [f"{'≥' if task.higher else '≤'} {limit(task, ends):.4g}"]
        rows.append([name, task.title, task.metric, *counts, *figures])
    return markdown_table(header.split(" | "), rows, words=3)


def _row(results: Results, task: str, way: str, judged: dict[str, bool]) -> list[str]:
    float32, ends = _ends(results, task, "float32"), _ends(results, task, way)
    runs = _runs(results, task, way).values()
    holds = [judged.get(f"{task} {way} {seed}", True) for seed in ends]
    pairs = zip(ends.values(), holds, strict=True)
    texts = [f"{end:.4g}" if fine else f"**{end:.4g}**" for end, fine in pairs]
    if not runs:
        return []
    row = [task, way, ", ".join(texts), _mean(ends.values())]
    if way == "float32":
        return [*row, *[""] * 4]
    return [
        *row,
        _mean(float32[seed] for seed in ends if seed in float32),
        f"{sum(holds)} of {len(ends)}",
        _each(runs, "skipped") if any(any(run["skipped"]) for run in runs) else "0",
        _each(runs, "scale") if way == "float16" else "",
    ]


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.4g}"


def _each(runs: Iterable[Run], key: str) -> str:
    """Returns a figure of every seed, and of each state of a seed."""
    return ", ".join(" and ".join(f"{x:.0f}" for x in run[key]) for run in runs)
