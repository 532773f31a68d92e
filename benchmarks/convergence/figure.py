"""The curves of all runs, a panel for each task."""

import pathlib
from typing import Any

import numpy as np

from benchmarks.convergence.results import Results
from benchmarks.convergence.tasks import TASKS
from benchmarks.show import can_draw, drawn, legend_below

# The colours of Okabe and Ito, told apart without seeing red or green.
_COLOURS = {
    "float32": "#888888",
    "hand_bf16": "#E69F00",
    "bfloat16": "#0072B2",
    "float16": "#D55E00",
}


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws every run as a line, where matplotlib is installed."""
    if not can_draw():
        return
    names = [name for name in TASKS if results.runs.get(name)]
    rows = -(-len(names) // 4)
    with drawn(path, (13, 3.1 * rows + 0.4), dpi=80) as figure:
        panels = figure.subplots(rows, 4, squeeze=False).ravel()
        for panel in panels[len(names) :]:
            panel.remove()
        for panel, name in zip(panels, names, strict=False):
            _panel(panel, name, results.runs[name])
        for line in legend_below(figure, [*_COLOURS]).get_lines():
            line.set_linewidth(3.0)


def _panel(panel: Any, name: str, ways: dict[str, dict[str, Any]]) -> None:
    task = TASKS[name]
    for way, colour in _COLOURS.items():
        for index, run in enumerate(ways.get(way, {}).values()):
            steps = run["every"] * (1 + np.arange(len(run["curve"])))
            label = way if index == 0 else None
            wide = way == "float32"
            look = {"lw": 2.4, "alpha": 0.45} if wide else {"lw": 0.9}
            panel.plot(steps, run["curve"], color=colour, label=label, **look)
    panel.set_title(task.title, fontsize=10, loc="left")
    panel.set_ylabel(task.metric, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.set_xlabel("step", fontsize=9)
    if task.better == "lower" and _is_wide(ways):
        panel.set_yscale("log", subs=(2, 3, 5, 7))
        panel.yaxis.set_major_formatter("{x:.2g}")
        panel.yaxis.set_minor_formatter("{x:.2g}")
    elif task.resolution:  # an accuracy
        panel.set_ylim(0.85, 1.0)
    panel.grid(color="#e0e0e0", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def _is_wide(ways: dict[str, dict[str, Any]]) -> bool:
    """Returns whether the curves need a logarithmic axis."""
    ends = [x for runs in ways.values() for run in runs.values() for x in run["curve"]]
    return bool(max(ends) > 4 * min(ends))
