"""The picture of `compare_precision`: errors, and exponents beside float16's range."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_amp.debug._compare_model import Comparison, Errors, ModuleErrors
from flax_amp.debug._compare_report import OUTSIDE, check_top

# From these exponents on, float16 has all its digits, some, and none; and the last one.
_NORMAL, _SUBNORMAL, _LAST = -14, -24, 15
_BLUE, _ORANGE, _GREEN, _RED = "#2f6db5", "#d9822b", "#3a923a", "#c0392b"
_SIDES = (
    ("forward", "o", _BLUE),
    ("backward", "s", _ORANGE),
    ("parameters", "^", _GREEN),
)
_LABEL = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#7a3b12"}
_LOWEST = 1e-6  # where smaller errors are drawn


def draw(found: Comparison, path: str | os.PathLike[str], top: int) -> None:
    """Draws the worst modules into a file; see `Comparison.plot`."""
    check_top(top, "plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Comparison.plot: matplotlib is not installed; expected it for pictures. "
            "Run `pip install matplotlib`, or print the report."
        ) from error
    modules = found.modules[:top]
    height = 2.0 + 0.3 * len(modules)
    figure = Figure(figsize=(15, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.1, 1, 1))
    _draw_errors(axes[0], found, modules)
    values = [module.values for module in modules]
    gradients = [module.gradients for module in modules]
    _draw_exponents(axes[1], found, values, "activations", 1.0)
    _draw_exponents(axes[2], found, gradients, "gradients", found.scale)
    labels = [_shortened(module.path or OUTSIDE) for module in modules]
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(modules) - 0.5, -0.5)  # the worst one on top
    row = found.settings[0]
    figure.suptitle(
        f"{found.name} in {found.compute_dtype} against float32: "
        f"error of the loss {row.loss_error:.1e}, of the gradients "
        f"{row.gradient_error:.1e}",
        fontsize=12,
    )
    figure.savefig(path, dpi=120)


def _shortened(path: str, length: int = 44) -> str:
    return path if len(path) <= length else "…" + path[1 - length :]


def _draw_errors(axes: Any, found: Comparison, modules: Sequence[ModuleErrors]) -> None:
    finite = [
        error
        for module in modules
        for errors in (module.own, module.total)
        for error in errors
        if error is not None and math.isfinite(error)
    ]
    limit = 10 ** math.ceil(math.log10(max([*finite, found.threshold, 0.1])) + 0.1)
    axes.axvspan(limit, 8 * limit, color=_RED, alpha=0.16, linewidth=0)
    for row, module in enumerate(modules):
        color = _RED if module.harm > found.threshold else "#b9c4d0"
        length = _place(module.harm, limit) - _LOWEST
        axes.barh(row, length, left=_LOWEST, height=0.72, color=color, alpha=0.35)
        # The hollow marks first: an error that is all a module's own hides that it is.
        _draw_row(axes, row, module.total, limit, filled=False)
        _draw_row(axes, row, module.own, limit, filled=True)
    axes.axvline(found.threshold, color=_RED, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(_LOWEST, 8 * limit)
    style = {"transform": axes.get_xaxis_transform(), **_LABEL}
    axes.text(2.8 * limit, 1.005, "not finite", **style)
    axes.text(found.threshold, 1.005, "stands out", **{**style, "ha": "right"})
    axes.set_title(
        "relative error: what the module adds (filled, bar)\n"
        "and what leaves it with what arrived (hollow)\n",
        fontsize=10,
    )
    for name, marker, color in _SIDES:
        style = {"color": color, "linestyle": "", "markersize": 5}
        axes.plot([], [], marker=marker, label=name, **style)
    axes.figure.legend(loc="outside lower left", ncol=3, fontsize=9, frameon=False)
    axes.tick_params(axis="y", labelsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_row(axes: Any, row: int, errors: Errors, limit: float, filled: bool) -> None:
    for offset, (error, side) in enumerate(zip(errors, _SIDES, strict=True)):
        if error is None:
            continue
        _, marker, color = side
        face = color if filled else "none"
        style = {"color": color, "markerfacecolor": face, "markersize": 5}
        style["clip_on"] = False  # an error of 0 stands on the left border
        axes.plot(_place(error, limit), row + 0.2 * (offset - 1), marker, **style)


def _place(error: float, limit: float) -> float:
    return max(error, _LOWEST) if math.isfinite(error) else 2.8 * limit


def _draw_exponents(
    axes: Any,
    found: Comparison,
    rows: Sequence[tuple[int, ...]],
    what: str,
    scale: float,
) -> None:
    """Draws how many numbers have each exponent, and where float16 has no room."""
    first, last = found.exponents
    edges = np.arange(first, last + 2)
    shift = math.log2(scale)  # the scale moves the range
    borders = [x - shift for x in (_SUBNORMAL - 1, _NORMAL, _LAST + 1)]
    flushed, subnormal, overflow = borders
    axes.axvspan(first, flushed, color=_RED, alpha=0.16, linewidth=0)
    axes.axvspan(flushed, subnormal, color=_ORANGE, alpha=0.16, linewidth=0)
    axes.axvspan(overflow, last + 1, color=_RED, alpha=0.16, linewidth=0)
    for row, counts in enumerate(rows):
        if not counts or not max(counts):
            continue
        heights = 0.85 * np.asarray(counts) / max(counts)
        # Steps that rise from the bottom of the row; the axis points down.
        axes.stairs(
            row + 0.45 - heights, edges, baseline=row + 0.45, fill=True, color=_BLUE
        )
    axes.set_xlim(max(first, flushed - 12), min(last + 1, overflow + 5))
    transform = axes.get_xaxis_transform()
    low, high = axes.get_xlim()
    for left, right, text in (
        (low, flushed, "becomes 0"),
        (flushed, subnormal, "loses digits"),
        (overflow, high, "inf"),
    ):
        if right - left > 2:
            middle = (left + right) / 2
            axes.text(middle, 1.005, text, transform=transform, **_LABEL)
    scaled = f", times the scale {scale:g}" if scale != 1 else ""
    axes.set_title(
        f"exponents of {what} in float32,\nand the range of float16{scaled}\n",
        fontsize=10,
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
    axes.tick_params(axis="y", length=0)
    for row in range(len(rows)):
        axes.axhline(row + 0.45, color="#dddddd", linewidth=0.6, zorder=0)
