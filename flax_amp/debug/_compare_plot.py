"""The picture of `compare_precision`: errors, and exponents beside float16's range."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_amp.debug._compare_model import Comparison, ModuleErrors
from flax_amp.debug._compare_report import error
from flax_amp.debug._compare_stats import EXPONENTS, FLUSHED

# Up to these exponents float16 has no digits, some, and all of them.
_BORDERS = (FLUSHED, -14, 16)
_BLUE, _ORANGE, _GREEN, _RED = "#2f6db5", "#d9822b", "#3a923a", "#c0392b"
_SIDES = (("forward", "o", _BLUE), ("backward", "s", _ORANGE), ("params", "^", _GREEN))
_LABEL = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#7a3b12"}
_LOWEST, _HIGHEST = 1e-6, 10.0  # where errors are drawn that are beyond


def draw(found: Comparison, path: str | os.PathLike[str], top: int) -> None:
    """Draws the worst modules into a file; see `Comparison.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "Comparison.plot: matplotlib is not installed; expected it for pictures. "
            "Run `pip install matplotlib`, or print the report."
        ) from missing
    modules = found.modules[:top]
    figure = Figure(figsize=(15, 2.0 + 0.3 * len(modules)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.1, 1, 1))
    _draw_errors(axes[0], found, modules)
    _draw_exponents(axes[1], [m.values for m in modules], "activations", 1.0)
    _draw_exponents(axes[2], [m.gradients for m in modules], "gradients", found.scale)
    labels = [(m.path or "(outside of modules)")[-44:] for m in modules]
    axes[0].set_yticks(range(len(labels)), labels, fontsize=9)
    axes[0].set_ylim(len(modules) - 0.5, -0.5)  # the worst one on top
    row = found.settings[0]
    figure.suptitle(
        f"{found.name} in {found.compute_dtype} against float32: error of the loss "
        f"{error(row.loss_error)}, of the gradients {error(row.gradient_error)}"
    )
    figure.savefig(path, dpi=120)


def _draw_errors(axes: Any, found: Comparison, modules: Sequence[ModuleErrors]) -> None:
    for row, module in enumerate(modules):
        color = _RED if module.harm > found.threshold else "#b9c4d0"
        length = _place(module.harm) - _LOWEST
        axes.barh(row, length, left=_LOWEST, height=0.72, color=color, alpha=0.35)
    for side, (label, marker, color) in enumerate(_SIDES):
        # The hollow marks first: an error that is all a module's own hides that it is.
        total, own = ([m.total[side] for m in modules], [m.own[side] for m in modules])
        for errors, face, name in ((total, "none", None), (own, color, label)):
            marks = [(_place(x), i) for i, x in enumerate(errors) if x is not None]
            x, y = np.reshape(marks, (-1, 2)).T
            style = {"color": color, "markerfacecolor": face, "markersize": 5}
            # An error of 0 stands on the left border.
            y = y + 0.2 * (side - 1)
            axes.plot(x, y, marker, label=name, clip_on=False, **style)
    axes.axvline(found.threshold, color=_RED, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(_LOWEST, _HIGHEST)
    style = {"transform": axes.get_xaxis_transform(), **_LABEL}
    axes.text(_HIGHEST, 1.005, "larger, inf", **{**style, "ha": "right"})
    axes.text(found.threshold, 1.005, "stands out", **style)
    axes.set_title(
        "relative error: what the module adds (filled, bar)\n"
        "and what leaves it with what arrived (hollow)\n",
        fontsize=10,
    )
    axes.figure.legend(loc="outside lower left", ncol=3, fontsize=9, frameon=False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _place(value: float) -> float:
    return min(max(value, _LOWEST), _HIGHEST)


def _draw_exponents(
    axes: Any, rows: Sequence[dict[int, int]], what: str, scale: float
) -> None:
    """Draws how many numbers have each exponent."""
    _draw_range(axes, math.log2(scale))
    edges = np.arange(EXPONENTS[0] - 1, EXPONENTS[-1] + 1)
    for row, counts in enumerate(rows):
        most = max(counts.values(), default=1)
        heights = np.array([0.85 * counts.get(e, 0) / most for e in EXPONENTS])
        # Steps that rise from the bottom of the row; the axis points down.
        base = row + 0.45
        axes.stairs(base - heights, edges, baseline=base, fill=True, color=_BLUE)
        axes.axhline(base, color="#dddddd", linewidth=0.6, zorder=0)
    scaled = f", times the scale {scale:g}" if scale != 1 else ""
    axes.set_title(
        f"exponents of {what} in float32,\nand the range of float16{scaled}\n",
        fontsize=10,
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
    axes.tick_params(axis="y", length=0)


def _draw_range(axes: Any, shift: float) -> None:
    """Draws the range of float16, for numbers that a scale moves by `shift`."""
    flushed, subnormal, overflow = (border - shift for border in _BORDERS)
    low, high = flushed - 12, overflow + 5
    axes.set_xlim(low, high)
    for left, right, color, text in (
        (low, flushed, _RED, "becomes 0"),
        (flushed, subnormal, _ORANGE, "loses digits"),
        (overflow, high, _RED, "inf"),
    ):
        axes.axvspan(left, right, color=color, alpha=0.16, linewidth=0)
        style = {"transform": axes.get_xaxis_transform(), **_LABEL}
        axes.text((left + right) / 2, 1.005, text, **style)
