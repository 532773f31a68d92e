"""A picture of runs: loss, scale, gradient norm, learning rate and skip rate."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flax_amp.metrics._log import read

# The exact sizes in this module do not matter: the picture has to be readable. Lengths
# are inches, and widths of lines, markers and letters are points.
#
# For the last part of a name: the title, and the share of the height.
_PANELS = {
    "loss": ("loss", 2.4),
    "scale": ("loss scale", 1.5),
    "grad_norm": ("gradient norm", 1.5),
    "learning_rate": ("learning rate", 1.1),
    "skip_rate": ("skip rate", 0.9),
}
_RED = "#c8102e"  # of crosses
Run = str | os.PathLike[str]
# A line: its label, its steps, its values, and the last steps of the windows with
# skipped steps.
_Line = tuple[str, np.ndarray, np.ndarray, np.ndarray]


def plot(*runs: Run, out: Run | None = None) -> Path:
    """Draws what runs have logged, and returns the path of the picture.

    Drawn are all metrics named `loss`, `scale`, `grad_norm`, `learning_rate` or
    `skip_rate`, also with a prefix: `train/loss`, but no scale that is 1 throughout.
    There are red crosses at the logged steps before which steps were skipped. NaN is a
    gap.

    Args:
      runs: the folders of the runs, as `create_writer` gets them.
      out: the file, whose ending is the format, such as `.png` or `.svg`. By default
        `plot.png` in the folder of the run; with several runs, in the current folder.

    Raises:
      FileNotFoundError: if a run has no `metrics.jsonl`, or `out` no folder.
      ValueError: if the runs have logged none of these metrics.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        told = "plot needs matplotlib. In a clone of flax_amp: pip install '.[plot]'"
        raise ImportError(told) from error
    panels = _panels_of(runs)
    heights = [_PANELS[name][1] for name in panels]
    figure = Figure(figsize=(9, 0.9 + 1.05 * sum(heights)), layout="constrained")
    folder = Path(runs[0])
    if not folder.is_dir():
        folder = folder.parent
    title = folder.name
    if len(runs) > 1:
        title = f"{len(runs)} runs"
        folder = Path()
    figure.suptitle(title)
    shape: dict[str, Any] = dict(squeeze=False, sharex=True, height_ratios=heights)
    grid = figure.subplots(len(panels), **shape).flat
    for axes, name in zip(grid, panels, strict=True):
        _draw(axes, name, panels[name])
    axes.set_xlabel("step")
    if any(skipped.size for lines in panels.values() for *_, skipped in lines):
        style: dict[str, Any] = dict(marker="x", ms=4, linestyle="", color=_RED)
        handle = Line2D([], [], label="steps were skipped", **style)
        figure.legend(handles=[handle], fontsize=7, frameon=False, loc="upper right")
    path = Path(out or folder / "plot.png")
    figure.savefig(path, dpi=150)
    return path


def _panels_of(runs: Sequence[Run]) -> dict[str, list[_Line]]:
    """Returns the lines of each panel by name, or raises an error if there are none."""
    logged = {str(run): read(run) for run in runs}
    panels = {name: found for name in _PANELS if (found := _lines(logged, name))}
    if all((values == 1).all() for _, _, values, _ in panels.get("scale", [])):
        panels.pop("scale", None)  # nothing is scaled
    if not panels:
        raise ValueError(
            f"plot: {', '.join(map(str, runs)) or 'no run'} has logged none of "
            f"{', '.join(_PANELS)}; expected at least one of these metrics."
        )
    return panels


def _lines(logged: dict[str, Any], panel: str) -> list[_Line]:
    """Returns the lines of a panel: for each run, a line for each prefix of a name."""
    found = []
    for run, scalars in logged.items():
        for name in (x for x in scalars if x.rpartition("/")[2] == panel):
            prefix = name.removesuffix(panel)
            rates = scalars.get(f"{prefix}skip_rate", [])
            skipped = np.array([step for step, rate in rates if rate > 0])
            label = f"{run} " * (len(logged) > 1) + prefix.rstrip("/")
            steps, values = np.array(scalars[name], float).T
            found.append((label, steps, values, skipped))
    return found


def _draw(axes: Any, name: str, lines: list[_Line]) -> None:
    values = np.concatenate([y for _, _, y, _ in lines])
    values = values[np.isfinite(values)]
    axes.set_title(_PANELS[name][0], loc="left", fontsize=10)
    axes.grid(axis="y", color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    red = dict(color=_RED, clip_on=False, transform=axes.get_xaxis_transform())
    for label, steps, y, skipped in lines:
        # The exact number does not matter: many markers hide the line.
        marker = "o" if len(steps) <= 40 else ""
        axes.plot(steps, y, marker=marker, ms=2.5, lw=1.3, label=label)
        if skipped.size:
            axes.plot(skipped, 0 * skipped, "x", ms=4, **red)
    if any(label for label, *_ in lines):
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    low = min(values, default=0)
    high = max(values, default=0)
    # On a linear axis, values below a twentieth of the largest value would lie in the
    # lowest 5 % of the panel, and look alike.
    if low > 0 and (name == "scale" or high > 20 * low):
        axes.set_yscale("log", base=2 if name == "scale" else 10)


def add_plot(commands: Any) -> None:
    """Adds the command `plot` to the parsers of `python -m flax_amp`."""
    command = commands.add_parser("plot", help="draw what runs have logged")
    command.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    command.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf")
    command.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> int:
    print(f"wrote {plot(*args.runs, out=args.out)}")
    return 0
