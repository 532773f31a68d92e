"""The page of the runs: the rule, the tasks, every run; and the curves of all runs."""

import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.convergence.run import (
    EVALUATIONS,
    LAST,
    Run,
    ends_of,
    is_in,
    limit,
    runs_of,
)
from benchmarks.convergence.task import PATIENCE, WAYS
from benchmarks.convergence.tasks import TASKS
from benchmarks.results import Results
from benchmarks.show import can_draw, drawn, markdown_table

# The colours of Okabe and Ito, told apart without seeing red or green.
_COLOURS = {
    "float32": "#888888",
    "hand_bf16": "#E69F00",
    "bfloat16": "#0072B2",
    "float16": "#D55E00",
    "small_moments": "#56B4E9",
    "small_state": "#009E73",
    "fp8": "#000000",
}


def page(results: Results) -> str:
    """Returns the page in Markdown."""
    out = outside(results)
    names = f": {', '.join(out)}" if out else ""
    count = sum(len(ends_of(results, t, w)) for t in _tasks(results) for w in _judged())
    return f"""# Where training ends

Whole runs of six small tasks, in float32, in half precision and in fp8. A seed
determines the first parameters and the batches, whatever the precision. `float32` and
`hand_bf16` (the same model with `dtype=bfloat16` in every layer) are plain Flax and
optax, with nothing of flax_amp in the step but the class of the state. `bfloat16` and
`float16` are `AmpTrainState` with `make_train_step`. `small_moments` is `bfloat16` with
both moments of the optimizer stored in bfloat16 by `flax_amp.optim.small_state`;
`small_state` stores the parameters in it, too. `fp8` is `bfloat16` with
`flax_amp.use_fp8(emulate=True)` for all scopes. In float16 the scale doubles after
{PATIENCE + 1} finite updates in a row, so that it grows too far and updates are skipped
even in a short run. The metric is always measured in float32, on what is held out; the
end of a run is the mean of its last {LAST} evaluations of {EVALUATIONS}.

**The rule**: a run is *in* if its end is not worse than the mean of the float32 ends by
more than three of their standard deviations, or by more than the resolution of the
metric (one test image) if that is more. An end that is better is in. By chance alone,
one run in about forty would be out with five float32 seeds, one in about 230 with
twenty (Student's t).

The models are tiny and the runs short, because CPUs emulate half precision. They say
where training ends, not how long it takes.

`make convergence` makes this page. What stands here was run by:

{results.made_with()}

**{count - len(out)} of {count} runs are in, {len(out)} out{names}.**

![The metric of each task over the steps](convergence.png)

## Tasks

{_task_table(results)}

## Runs

Metrics of the seeds 0, 1, ... in order; **bold** is out. With two states, both are
listed: discriminator, generator.

{_run_table(results)}
"""


def outside(results: Results) -> list[str]:
    """Returns the names of the runs that are out."""
    return [
        f"{task} {way} {seed}"
        for task in _tasks(results)
        for way in _judged()
        for seed, end in ends_of(results, task, way).items()
        if not is_in(TASKS[task], _float32(results, task), end)
    ]


def _judged() -> list[str]:
    return [way for way in WAYS if way != "float32"]


def _tasks(results: Results) -> list[str]:
    """Returns the tasks that have enough float32 runs for a spread."""
    return [task for task in TASKS if len(_float32(results, task)) > 1]


def _float32(results: Results, task: str) -> list[float]:
    return [*ends_of(results, task, "float32").values()]


def _task_table(results: Results) -> str:
    header = "task | model and data | metric | steps | seeds | float32 | sd | is in"
    rows = []
    for name in _tasks(results):
        task, ends = TASKS[name], _float32(results, name)
        counts = [str(task.steps), str(len(ends))]
        figures = [f"{statistics.fmean(ends):.4g}", f"{statistics.stdev(ends):.2g}"]
        figures += [f"{'≥' if task.higher else '≤'} {limit(task, ends):.4g}"]
        rows.append([name, task.title, task.metric, *counts, *figures])
    return markdown_table(header.split(" | "), rows, words=3)


def _run_table(results: Results) -> str:
    header = (
        "task | precision | ends of the seeds | mean | float32, same seeds | in | "
        "skipped updates | final scale"
    )
    rows = [
        _row(results, task, way)
        for task in _tasks(results)
        for way in WAYS
        if ends_of(results, task, way)
    ]
    return markdown_table(header.split(" | "), rows, words=3)


def _row(results: Results, task: str, way: str) -> list[str]:
    float32, ends = ends_of(results, task, "float32"), ends_of(results, task, way)
    runs = [*runs_of(results, task, way).values()]
    holds = [is_in(TASKS[task], [*float32.values()], end) for end in ends.values()]
    pairs = zip(ends.values(), holds, strict=True)
    texts = [f"{end:.4g}" if fine else f"**{end:.4g}**" for end, fine in pairs]
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


def _each(runs: list[Run], key: str) -> str:
    """Returns a figure of every seed, and of each state of a seed."""
    return ", ".join(" and ".join(f"{x:.0f}" for x in run[key]) for run in runs)


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws every run as a line, where matplotlib is installed."""
    names = [name for name in TASKS if name in results.cells]
    if not can_draw() or not names:
        return
    with drawn(path, (10, 3.1 * -(-len(names) // 3) + 0.4), dpi=80) as figure:
        panels = figure.subplots(-(-len(names) // 3), 3, squeeze=False).ravel()
        for panel in panels[len(names) :]:
            panel.remove()
        for panel, name in zip(panels, names, strict=False):
            _panel(panel, name, results)
        labels = (panel.get_legend_handles_labels() for panel in figure.axes)
        where: Any = dict(loc="outside lower center", ncols=len(WAYS), frameon=False)
        figure.legend(*max(labels, key=lambda pair: len(pair[1])), **where)


def _panel(panel: Any, name: str, results: Results) -> None:
    task = TASKS[name]
    for way in _COLOURS:
        for index, run in enumerate(runs_of(results, name, way).values()):
            steps = run["every"] * (1 + np.arange(len(run["curve"])))
            wide = {"lw": 2.4, "alpha": 0.45} if way == "float32" else {"lw": 0.9}
            label = way if index == 0 else None
            look: Any = wide | {"color": _COLOURS[way], "label": label}
            panel.plot(steps, run["curve"], **look)
    panel.set_title(task.title, fontsize=10, loc="left")
    panel.set_ylabel(task.metric, fontsize=9)
    panel.set_xlabel("step", fontsize=9)
    panel.tick_params(labelsize=8)
    if task.resolution:  # an accuracy
        panel.set_ylim(0.85, 1.0)
    panel.grid(color="#e0e0e0", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)
