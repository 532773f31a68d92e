"""One picture of a run: loss, scale, gradient norm, learning rate and skip rate."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flax_amp.metrics._jsonl import read

_RED = "#c8102e"
# The last part of a name -> its title, and its share of the height.
_PANELS = {
    "loss": ("loss", 2.4),
    "scale": ("loss scale", 1.5),
    "grad_norm": ("gradient norm", 1.5),
    "learning_rate": ("learning rate", 1.1),
    "skip_rate": ("skip rate", 0.9),
}
Run = str | os.PathLike[str]


def plot(*runs: Run, out: Run | None = None) -> Path:
    """Draws what runs have logged, one below the other, over the same steps.

    Drawn are all metrics named `loss`, `scale`, `grad_norm`, `learning_rate` or
    `skip_rate`, also with a prefix: `train/loss`, but no scale that is 1 throughout.
    Where steps were skipped, the scale has a cross, and in the picture of a single run
    the background is red. NaN is a gap.

    Args:
      runs: the folders of the runs, as `create_writer` gets them.
      out: the file, whose ending is the format, such as `.png` or `.svg`. By default
        `plot.png` in the folder of the run; in this one, if there are several.

    Returns:
      The path of the file.

    Raises:
      FileNotFoundError: if a run has no `metrics.jsonl`, or `out` no folder.
      ImportError: if matplotlib is not installed.
      ValueError: if the runs have logged none of these metrics, if a step or a value of
        them is no number, or if the format is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "flax_amp.metrics.plot needs matplotlib, which is not installed. In a "
            "clone of flax_amp, run: pip install '.[plot]'"
        ) from error
    logged = dict(zip(_names(runs), map(read, runs), strict=True))
    panels = [name for name in _PANELS if any(_series(logged, name))]
    scales = [y for *_, y, _ in _series(logged, "scale")]
    if len(panels) > 1 and scales and all((y == 1).all() for y in scales):
        panels.remove("scale")  # nothing is scaled
    if not panels:
        raise ValueError(
            f"plot: {', '.join(map(str, runs)) or 'no run'} has logged none of "
            f"{', '.join(_PANELS)}; expected one of them at least. Log what "
            "flax_amp.metrics.StepMetrics computes."
        )
    heights = [_PANELS[name][1] for name in panels]
    figure = Figure(figsize=(9, 0.9 + 1.05 * sum(heights)), layout="constrained")
    title = next(iter(logged)) if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    shape: dict[str, Any] = dict(squeeze=False, sharex=True, height_ratios=heights)
    for axes, name in zip(
        figure.subplots(len(panels), **shape).flat, panels, strict=True
    ):
        _draw(axes, name, logged)
    axes.set_xlabel("step")
    own = Path(runs[0]) if os.path.isdir(runs[0]) else Path(runs[0]).parent
    path = Path(out or (own if len(runs) == 1 else Path()) / "plot.png")
    figure.savefig(path, dpi=150)
    return path


def _names(runs: tuple[Run, ...]) -> list[str]:
    """Returns the parts of the paths in which they differ."""
    paths = [os.path.abspath(run) for run in runs]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else None
    return [os.path.relpath(p, common) if common else Path(p).name for p in paths]


def _series(logged: dict[str, Any], panel: str) -> list[tuple[Any, ...]]:
    """Returns label, steps, values, and where steps were skipped, of each line."""
    found = []
    for run, scalars in logged.items():
        for name in (x for x in scalars if x.rpartition("/")[2] == panel):
            prefix = name.removesuffix(panel)
            steps, values = np.array(scalars[name], float).T
            rates = dict(scalars.get(f"{prefix}skip_rate", []))
            skipped = np.array([rates.get(int(step), 0) > 0 for step in steps])
            label = f"{run} " * (len(logged) > 1) + prefix.rstrip("/")
            found.append((label, steps, values, skipped))
    return found


def _draw(axes: Any, name: str, logged: dict[str, Any]) -> None:
    lines = _series(logged, name)
    every = np.concatenate([values for _, _, values, _ in lines])
    every = every[np.isfinite(every)]
    note = "" if len(every) else "every value is NaN"
    if name == "skip_rate" and len(every) and not every.any():
        note = "no step was skipped"
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#ddd", linewidth=0.6)
    axes.set_title(_PANELS[name][0], loc="left", fontsize=10)
    axes.set_title(
        note, loc="right", fontsize=8.5, color=_RED if not len(every) else "#777"
    )
    for label, steps, values, skipped in lines:
        alone = "o" if len(steps) <= 40 else ""
        (line,) = axes.plot(steps, values, marker=alone, ms=2.5, lw=1.3, label=label)
        if skipped.any() and len(logged) == 1:
            widths = np.diff(
                steps, prepend=2 * steps[0] - steps[1] if len(steps) > 1 else 0
            )
            spans = np.stack([steps - widths, widths], axis=1)[skipped]
            across = axes.get_xaxis_transform()
            axes.broken_barh(
                spans, (0, 1), transform=across, color=_RED, alpha=0.1, lw=0
            )
        if skipped.any() and name == "scale":
            at = dict(color=line.get_color() if len(logged) > 1 else _RED, ms=5)
            axes.plot(steps[skipped], values[skipped], "x", **at)
    if any(label for label, *_ in lines):
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    is_wide = len(every) and every.min() > 0 and every.max() > 20 * every.min()
    if len(every) and every.min() > 0 and name == "scale":
        axes.set_yscale("log", base=2)
    elif is_wide and name in ("loss", "grad_norm"):
        axes.set_yscale("log")


# The command `python -m flax_amp plot`


def add_plot(commands: Any) -> None:
    """Adds the command to the subparsers of `python -m flax_amp`."""
    command = commands.add_parser("plot", help="draw what runs have logged")
    command.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    command.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf")
    command.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> int:
    try:
        print(f"wrote {plot(*args.runs, out=args.out)}")
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
