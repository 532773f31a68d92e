"""The picture of `compare_precision`: errors, and exponents beside float16's range."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_amp.debug._compare_model import Comparison, Errors, ModuleErrors
from flax_amp.debug._compare_report import error
from flax_amp.debug._compare_stats import EXPONENTS, FLUSHED

# The exponents up to which float16 has no digits, and some, and has none again.
_BORDERS = {"0": FLUSHED, "few digits": -14, "inf": 16}
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
    for side, marker in zip(Errors._fields, "os^", strict=True):
        errors = ((getattr(m.own, side), i) for i, m in enumerate(modules))
        marks = [
            (min(max(x, _LOWEST), _HIGHEST), i) for x, i in errors if x is not None
        ]
        x, y = np.reshape(marks, (-1, 2)).T
        axes.plot(x, y, marker, label=side, clip_on=False, markersize=5)
    axes.axvline(found.threshold, color="red", linestyle=":", label="stands out")
    axes.set_xscale("log")
    axes.set_xlim(_LOWEST, _HIGHEST)
    axes.set_title("relative error that the module adds", fontsize=10)
    axes.figure.legend(loc="outside lower left", ncol=4, fontsize=9, frameon=False)
    axes.grid(color="#dddddd", linewidth=0.6)


def _draw_exponents(
    axes: Any, rows: Sequence[dict[int, int]], what: str, scale: float
) -> None:
    """Draws the share of numbers with each exponent, and the range of float16."""
    counts = np.array([[row.get(e, 0) for e in EXPONENTS] for row in rows])
    shares = counts / np.maximum(counts.max(1, keepdims=True), 1)
    extent = (EXPONENTS[0] - 1, EXPONENTS[-1], len(rows) - 0.5, -0.5)
    axes.imshow(shares, cmap="Blues", aspect="auto", extent=extent)
    for text, border in _BORDERS.items():
        x = border - math.log2(scale)
        axes.axvline(x, color="red", linewidth=1)
        side = "left" if text == "inf" else "right"
        axes.text(x, -0.5, f" {text} ", ha=side, va="bottom", fontsize=8)
    scaled = f", times the scale {scale:g}" if scale != 1 else ""
    axes.set_title(
        f"exponents of {what} in float32,\nand the range of float16{scaled}\n",
        fontsize=10,
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
