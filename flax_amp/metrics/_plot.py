"""One picture of a run: loss, scale, gradient norm, learning rate and skip rate."""

import os
from collections.abc import Iterator, Sequence
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


class Line(NamedTuple):
    """A series of a run, and how it is drawn."""

    steps: np.ndarray
    values: np.ndarray
    color: str
    style: Any
    names: tuple[str, str]  # of the run, if there are several, and the prefix
    skipped: np.ndarray  # whether steps were, in each window
    total: int  # of all skipped steps


def plot(
    *runs: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
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
    _picture(Figure, runs, panels).savefig(path, dpi=150)
    return path


def _target(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None
) -> Path:
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


def _picture(
    figure_class: Any,
    runs: Sequence[str | os.PathLike[str]],
    panels: dict[str, list[Line]],
) -> Any:
    heights = [_PANELS[name][1] for name in panels]
    figure = figure_class(figsize=(9, 0.9 + 1.05 * sum(heights)), layout="constrained")
    names = _names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    all_axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, name, lines, is_single=len(runs) == 1)
    _note_skips(all_axes[0], panels, is_single=len(runs) == 1)
    all_axes[-1].set_xlabel("step", color="#444")
    all_axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.draw_without_rendering()  # lays it out: labels are spread in points
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        _label(axes, name, lines)
    return figure


def _names(runs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns the parts of the paths in which they differ."""
    paths = [os.path.abspath(run) for run in runs]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else None
    return [os.path.relpath(p, common) if common else Path(p).name for p in paths]


def _find_lines(runs: Sequence[str | os.PathLike[str]]) -> dict[str, list[Line]]:
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
                style = _LINES[index % len(_LINES)]
                skipped = np.array([rates.get(int(s), 0) > 0 for s in steps])
                totals = logged.get(f"{prefix}skipped_total", [(0, 0)])
                names = (label * (len(runs) > 1), prefix.rstrip("/"))
                look = (color, style, names, skipped, int(totals[-1][1]))
                lines.append(Line(steps, values, *look))
    panels = {name: lines for name, lines in panels.items() if lines}
    if len(panels) > 1 and all((x.values == 1).all() for x in panels.get("scale", ())):
        panels.pop("scale", None)  # nothing is scaled
    return panels


def _draw(axes: Any, name: str, lines: Sequence[Line], *, is_single: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#ddd", linewidth=0.6)
    axes.tick_params(labelsize=8, colors="#444")
    axes.margins(x=0.01, y=0.12)
    axes.set_title(_PANELS[name][0], loc="left", fontsize=10, color="#222")
    for line in lines:
        few = len(line.steps) <= 40
        look: dict[str, Any] = dict(ls=line.style, color=line.color, lw=1.3)
        if name == "skip_rate":  # a rate is that of the steps before
            look["drawstyle"] = "steps-pre"
        dots = None if few else _dots(line, name)
        axes.plot(
            line.steps, line.values, marker="o", markersize=2.5, markevery=dots, **look
        )
        if is_single:
            spans, across = list(_spans(line)), axes.get_xaxis_transform()
            axes.broken_barh(
                spans, (0, 1), transform=across, color=_RED, alpha=0.1, lw=0
            )
        if name == "scale" and line.skipped.any():
            axes.plot(
                line.steps[line.skipped],
                line.values[line.skipped],
                "x",
                color=_RED if is_single else line.color,
                markersize=5 if line.skipped.sum() <= 60 else 3,
                markeredgewidth=1.2,
            )
    _scale(axes, name, np.concatenate([line.values for line in lines]))


def _note_skips(axes: Any, panels: dict[str, list[Line]], *, is_single: bool) -> None:
    """Says what the crosses are, and how many steps were skipped."""
    every = [line for lines in panels.values() for line in lines]
    has_crosses = any(line.skipped.any() for line in panels.get("scale", ()))
    marks = ["red"] * is_single + ["×"] * has_crosses
    if marks and any(line.skipped.any() for line in every):
        count = max(line.total for line in every) if is_single else 0
        what = (
            f"{count:,} step{'s' * (count > 1)} skipped" if count else "steps skipped"
        )
        color = _RED if is_single else "#444"
        note = f"{', '.join(marks)}: {what}"
        axes.set_title(note, loc="right", fontsize=8.5, color=color)


def _dots(line: Line, name: str) -> list[int]:
    """Returns the points with NaN on both sides, and means beside skipped steps."""
    seen = np.pad(np.isfinite(line.values), 1)
    is_alone = ~seen[:-2] & ~seen[2:]
    is_mean = line.skipped & (name in ("loss", "grad_norm"))
    return np.flatnonzero(seen[1:-1] & (is_alone | is_mean)).tolist()


def _spans(line: Line) -> Iterator[tuple[float, float]]:
    """Yields where each stretch of windows with skipped steps begins, and its width."""
    before = np.concatenate([line.steps[:1] - np.diff(line.steps[:2]), line.steps[:-1]])
    if len(line.steps) == 1:
        before = line.steps - 1
    for start, end in zip(before[line.skipped], line.steps[line.skipped], strict=True):
        yield start, end - start


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
    """Writes name and last value beside the end of each line, apart from each other."""
    ends = []
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.values))
        if len(finite):
            value = line.values[finite[-1]]
            y = axes.transData.transform((0, value))[1] * 72 / axes.figure.dpi
            ends.append((y, value, line))
    ends.sort(key=lambda end: end[0])
    prefixes = {line.names[1] for line in lines}
    top = axes.bbox.y1 * 72 / axes.figure.dpi
    places = _spread([y for y, *_ in ends], top)
    for (y, value, line), place in zip(ends, places, strict=True):
        words = (line.names[0], line.names[1] if len(prefixes) > 1 else "")
        axes.annotate(
            " ".join([*filter(None, words), _value(name, value)]),
            (1, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, place - y),
            textcoords="offset points",
            color=line.color,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )


def _spread(heights: Sequence[float], top: float) -> list[float]:
    """Moves heights, which rise, apart: upward, and back where that is too high."""
    places: list[float] = []
    for y in heights:
        places.append(max([y, *(last + _GAP for last in places[-1:])]))
    limit = top
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - _GAP
    return places


def _value(name: str, value: float) -> str:
    if name == "skip_rate":
        return f"{100 * value:.3g} %"
    power = np.log2(value) if name == "scale" and value > 0 else 0.5
    if power == round(power) and not 0 <= power <= 16:
        return f"$2^{{{power:.0f}}}$"
    return f"{value:.0f}" if power == round(power) else f"{value:.3g}"
