"""One picture of a run: loss, scale, gradient norm, learning rate and skip rate.

It is an image, and no page of widgets, so that it can be pasted anywhere. The lines
have labels at the right edge of their panel in the place of a legend.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_amp.metrics._jsonl import read

_COLORS = ("#0b62a4", "#c4540a", "#1b7f5c", "#8a4fbf", "#8c6d1f", "#5b6770")
_RED = "#c8102e"
_LINES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), "-.")
# The last part of a name -> what it is called, its share of the height.
_PANELS = {
    "loss": ("loss", 2.4),
    "scale": ("loss scale", 1.5),
    "grad_norm": ("gradient norm", 1.5),
    "learning_rate": ("learning rate", 1.1),
    "skip_rate": ("skip rate", 0.9),
}
_GAP = 12  # points between the labels of two lines

Run = str | os.PathLike[str]


class Line(NamedTuple):
    """A series of a run, and how it is drawn."""

    steps: np.ndarray
    values: np.ndarray
    look: dict[str, Any]  # color and style, as matplotlib calls them
    run: str  # its name; empty if there is no other
    prefix: str  # of the name of the metric
    skipped: np.ndarray  # whether steps were, in each window
    total: int  # of all skipped steps


def plot(*runs: Run, out: Run | None = None) -> Path:
    """Draws what runs have logged, one below the other, over the same steps.

    Drawn are all metrics named `loss`, `scale`, `grad_norm`, `learning_rate` or
    `skip_rate`, also with a prefix: `train/loss`, but no scale that is 1 throughout.
    Where steps were skipped, the scale has a cross, and in the picture of a single run
    the background is red; a dot is the mean of the finite steps there. NaN is a gap.

    Args:
      runs: the folders of the runs, as `create_writer` gets them.
      out: the file, whose ending is the format, such as `.png` or `.svg`; or a
        folder, for `plot.png` in it. By default that of the run; this one, if there
        are several.

    Returns:
      The path of the file.

    Raises:
      FileNotFoundError: if a run has no `metrics.jsonl`, or `out` no folder.
      ImportError: if matplotlib is not installed.
      ValueError: if no run is given, if the runs have logged none of these metrics, if
        a step or a value of them is no number, or if the format is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot: matplotlib is not installed; expected it, to draw with. In a "
            "clone of flax_amp, run `pip install '.[plot]'`."
        ) from error
    if not runs:
        raise ValueError("plot: got no run; expected the folder of one, or of several.")
    path = _target(runs, out)
    panels = _find_lines(runs)
    if not panels:
        raise ValueError(
            f"plot: {', '.join(map(str, runs))} has logged none of "
            f"{', '.join(_PANELS)}; expected one of them at least. Log what "
            "flax_amp.metrics.StepMetrics computes."
        )
    names = _names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    _picture(Figure, title, panels).savefig(path, dpi=150)
    return path


def _target(runs: Sequence[Run], out: Run | None) -> Path:
    """Returns the path of the picture, whose folder and format are known to exist."""
    from matplotlib.backend_bases import FigureCanvasBase

    if out is None:
        first = Path(runs[0])
        folder = first if first.is_dir() else first.parent
        out = folder if len(runs) == 1 else Path()
    path = Path(out)
    path = path / "plot.png" if path.is_dir() else path
    formats = FigureCanvasBase.get_supported_filetypes()
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"plot: the folder {path.parent} of out does not exist; expected one that "
            "does. Make it first."
        )
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"plot: out is {str(path)!r}, whose ending {path.suffix!r} is no format; "
            f"expected one of {', '.join(sorted(formats))}, such as plot.png."
        )
    return path


def _picture(figure_class: Any, title: str, panels: dict[str, list[Line]]) -> Any:
    heights = [_PANELS[name][1] for name in panels]
    figure = figure_class(figsize=(9, 0.9 + 1.05 * sum(heights)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    all_axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, name, lines)
    _note_skips(all_axes[0], panels)
    all_axes[-1].set_xlabel("step", color="#444")
    all_axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.draw_without_rendering()  # lays it out: labels are spread in points
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        _label(axes, name, lines)
    return figure


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns the parts of the paths in which they differ."""
    paths = [os.path.abspath(run) for run in runs]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else None
    return [os.path.relpath(p, common) if common else Path(p).name for p in paths]


def _find_lines(runs: Sequence[Run]) -> dict[str, list[Line]]:
    """Returns the lines of each panel that has any."""
    panels: dict[str, list[Line]] = {name: [] for name in _PANELS}
    for number, (run, label) in enumerate(zip(runs, _names(runs), strict=True)):
        logged = read(run)
        for panel, lines in panels.items():
            series = [n for n in logged if n.rpartition("/")[2] == panel]
            for index, name in enumerate(series):
                prefix = name.removesuffix(panel)
                rates = dict(logged.get(f"{prefix}skip_rate", []))
                steps, values = np.array(logged[name], float).T
                color = _COLORS[(number if len(runs) > 1 else index) % len(_COLORS)]
                look = dict(color=color, ls=_LINES[index % len(_LINES)])
                skipped = np.array([rates.get(int(s), 0) > 0 for s in steps])
                totals = logged.get(f"{prefix}skipped_total", [(0, 0)])
                name_of_run = label if len(runs) > 1 else ""
                names = name_of_run, prefix.rstrip("/")
                line = Line(steps, values, look, *names, skipped, int(totals[-1][1]))
                lines.append(line)
    panels = {name: lines for name, lines in panels.items() if lines}
    if len(panels) > 1 and all((x.values == 1).all() for x in panels.get("scale", ())):
        panels.pop("scale", None)  # nothing is scaled
    return panels


def _draw(axes: Any, name: str, lines: Sequence[Line]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#ddd", linewidth=0.6)
    axes.tick_params(labelsize=8, colors="#444")
    axes.margins(x=0.01, y=0.12)
    axes.set_title(_PANELS[name][0], loc="left", fontsize=10, color="#222")
    for line in lines:
        # A rate is that of the steps before.
        look = line.look | ({"ds": "steps-pre"} if name == "skip_rate" else {})
        dots = None if len(line.steps) <= 40 else _dots(line, name)
        axes.plot(line.steps, line.values, "o", ms=2.5, markevery=dots, lw=1.3, **look)
        if not line.run:
            _shade(axes, line)
        if name == "scale" and line.skipped.any():
            axes.plot(
                line.steps[line.skipped],
                line.values[line.skipped],
                "x",
                color=line.look["color"] if line.run else _RED,
                markersize=5 if line.skipped.sum() <= 60 else 3,
                markeredgewidth=1.2,
            )
    _scale(axes, name, np.concatenate([line.values for line in lines]))


def _shade(axes: Any, line: Line) -> None:
    """Makes the background red in each window with skipped steps, which ends there."""
    widths = np.diff(line.steps)
    first = widths[:1] if len(widths) else [1]  # as wide as the next one
    widths = np.concatenate([first, widths])
    spans = np.stack([line.steps - widths, widths], axis=1)[line.skipped]
    across = axes.get_xaxis_transform()
    axes.broken_barh(spans, (0, 1), transform=across, color=_RED, alpha=0.1, lw=0)


def _note_skips(axes: Any, panels: dict[str, list[Line]]) -> None:
    """Says what the crosses are, and how many steps were skipped."""
    every = [line for lines in panels.values() for line in lines]
    if not any(line.skipped.any() for line in every):
        return
    is_single = not any(line.run for line in every)
    has_crosses = any(line.skipped.any() for line in panels.get("scale", ()))
    marks = ["red"] * is_single + ["×"] * has_crosses
    count = max(line.total for line in every) if is_single else 0
    what = f"{count:,} step{'s' * (count > 1)} skipped" if count else "steps skipped"
    note = f"{', '.join(marks)}: {what}" if marks else ""
    color = _RED if is_single else "#444"
    axes.set_title(note, loc="right", fontsize=8.5, color=color)


def _dots(line: Line, name: str) -> list[int]:
    """Returns the points with NaN on both sides, and means beside skipped steps."""
    seen = np.pad(np.isfinite(line.values), 1)
    is_alone = ~seen[:-2] & ~seen[2:]
    is_mean = line.skipped & (name in ("loss", "grad_norm"))
    return np.flatnonzero(seen[1:-1] & (is_alone | is_mean)).tolist()


def _scale(axes: Any, name: str, values: np.ndarray) -> None:
    """Sets the axis of the values."""
    from matplotlib import ticker

    values = values[np.isfinite(values)]
    axis = axes.yaxis
    if not len(values):
        axes.set_yticks([])
        _say(axes, "every value is NaN", _RED)
        return
    low, high = values.min(), values.max()
    if name == "scale" and low > 0:
        axes.set_yscale("log", base=2)
        margin = max(2**0.7, (high / low) ** 0.08)
        axes.set_ylim(low / margin, high * margin)
        axis.set_major_locator(ticker.LogLocator(base=2, numticks=6))
        axis.set_minor_locator(ticker.NullLocator())
    elif name == "skip_rate":
        axes.set_ylim(0, 1.15 * high or 1)
        axis.set_major_locator(ticker.MaxNLocator(3))
        axis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
        if not high:
            axes.set_yticks([0])
            _say(axes, "no step was skipped", "#777")
    elif name != "learning_rate" and low > 0 and high > 20 * low:
        axes.set_yscale("log")
        subs = (1, 2, 5) if high < 500 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
        axis.set_minor_formatter(ticker.NullFormatter())
        axis.set_major_formatter("{x:g}")
    else:
        axis.set_major_locator(ticker.MaxNLocator(4))
        axis.set_major_formatter("{x:.3g}")
        if low == high:
            axes.set_yticks([low])


def _say(axes: Any, text: str, color: str) -> None:
    """Writes into the middle of a panel."""
    where = dict(transform=axes.transAxes, ha="center", va="center")
    axes.text(0.5, 0.5, text, color=color, fontsize=9, **where)


def _label(axes: Any, name: str, lines: Sequence[Line]) -> None:
    """Writes the last value of each line to the right of its panel, none over another.

    The name of the run stands before it, and the prefix, where there are several.
    """
    to_points = 72 / axes.figure.dpi  # from pixels; an inch has 72 points
    ends = []
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.values))
        if len(finite):
            value = line.values[finite[-1]]
            y = axes.transData.transform((0, value))[1] * to_points
            ends.append((y, value, line))
    ends.sort(key=lambda end: end[0])
    has_prefixes = len({line.prefix for line in lines}) > 1
    top = axes.bbox.y1 * to_points
    places = _spread(np.array([y for y, *_ in ends]), top)
    for (y, value, line), place in zip(ends, places, strict=True):
        words = (line.run, line.prefix if has_prefixes else "")
        axes.annotate(
            " ".join([*filter(None, words), _value(name, value)]),
            (1, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, place - y),
            textcoords="offset points",
            color=line.look["color"],
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )


def _spread(heights: np.ndarray, top: float) -> np.ndarray:
    """Moves heights, which rise, apart: upward, and back where that is too high."""
    gaps = _GAP * np.arange(len(heights))
    places = np.maximum.accumulate(heights - gaps) + gaps
    return np.minimum(places, top - gaps[::-1])


def _value(name: str, value: float) -> str:
    if name == "skip_rate":
        return f"{100 * value:.3g} %"
    power = np.log2(value) if name == "scale" and value > 0 else 0.5
    if power == round(power) and not 0 <= power <= 16:
        return f"$2^{{{power:.0f}}}$"
    return f"{value:.0f}" if power == round(power) else f"{value:.3g}"
