"""The figure of the README, where matplotlib is installed."""

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Results
from benchmarks.show import can_draw, drawn

_MODELS = {
    "vit_s16": "ViT-S/16",
    "gpt_scan": "GPT, 12 layers",
    "llama": "Llama, scanned",
    "moe": "mixture of experts",
    "resnet50": "ResNet-50",
    "mamba": "Mamba",
}
_VARIANTS = {
    "float32": ("float32", "#BBBBBB"),
    "hand_bf16": ("cast by hand", "#E69F00"),
    "amp_bf16": ("flax_amp", "#0072B2"),
}
_PANELS = {"estimated_time": "estimated time of a step", "temp_mb": "temporary memory"}


def draw_gain(found: Sequence[Results], path: pathlib.Path) -> None:
    """Draws time and memory of a step on a TPU v5e, as percentages of float32."""
    drawable = [r for r in found if (r.command, r.target, r.size) == _DRAWN]
    if not drawable or not can_draw():
        return
    cells = {m: c for m, c in drawable[-1].models() if {*_VARIANTS} <= {*c}}
    with drawn(path, (9.6, 4.6), dpi=110) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (key, title) in zip(axes, _PANELS.items(), strict=True):
            _bars(axis, key, {m: cells[m] for m in _MODELS if m in cells})
            axis.set_title(f"{title}, % of float32", fontsize=11, loc="left")
        figure.suptitle("One training step, compiled for a TPU v5e", fontsize=12)


_DRAWN = ("tpu", "v5e", "full")


def _bars(axis: Any, key: str, models: dict[str, Any]) -> None:
    """Draws the variants of each model below each other; the first has their names."""
    text: Any = dict(va="center", fontsize=9, color="#333333", zorder=3)
    text["bbox"] = dict(facecolor="white", edgecolor="none", pad=0.8)
    for index, cells in enumerate(models.values()):
        for place, (variant, (name, colour)) in enumerate(_VARIANTS.items()):
            y = index + 0.28 * (place - 1)
            percent = 100 * cells[variant][key] / cells["float32"][key]
            axis.barh(y, percent, 0.25, color=colour)
            label = f"{percent:.0f}" if index else f"{percent:.0f}  {name}"
            axis.text(percent + 1.5, y, label, **text)
    axis.set(xlim=(0, 150), yticks=range(len(models)))
    axis.set_yticklabels([_MODELS[m] for m in models], fontsize=10)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.axvline(100, color="#888888", linewidth=0.8, zorder=0)
    axis.set_xticks([0, 50, 100])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
