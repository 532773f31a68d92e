"""Plots of the results, where matplotlib is installed."""

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Results
from benchmarks.sections import SECTIONS
from benchmarks.show import can_draw, drawn, legend_below

Ratios = dict[str, dict[str, float]]  # by model and variant

# The colours of Okabe and Ito, told apart without seeing red or green.
_COLOURS = {
    "float32": "#999999",
    "smcast_bf16": "#F0E442",
    "amp_bf16": "#0072B2",
    "jmp_bf16": "#E69F00",
    "mpx_bf16": "#CC79A7",
    "jaxamp_bf16": "#009E73",
}
_HIGHEST = 2.5  # bars that go further are cut and say how far

_TEXTS = {
    "est. time": "estimated time",
    "GB": "bytes accessed",
    "temp MB": "temporary memory",
}
# What the figure of the README shows: models with their names, variants with theirs
_GAIN_MODELS = {
    "vit_s16": "ViT-S/16",
    "gpt_unroll": "GPT, 12 layers",
    "llama": "Llama, scanned",
    "moe": "mixture of experts",
    "resnet50": "ResNet-50",
    "mlp": "MLP",
}
_GAIN_VARIANTS = {
    "float32": ("float32", "#BBBBBB"),
    "hand_bf16": ("cast by hand", "#E69F00"),
    "amp_bf16": ("flax_amp", "#0072B2"),
}
# By the name of the file: command, title, and a column for each panel
_PLOTS = {
    "tpu-v5e": ("tpu", "Compiled for a TPU v5e", ("est. time", "GB", "temp MB")),
    "h200-memory": ("gpu-aot", "Compiled for an H200", ("temp MB",)),
}


def draw_all(found: Sequence[Results], folder: pathlib.Path) -> list[str]:
    """Draws what there are results for; returns the names of the files."""
    if not can_draw():
        return []
    names = []
    for name, (command, title, columns) in _PLOTS.items():
        for results in found:  # of several versions the last one is drawn
            drawn = results.command == command and results.target in name
            if drawn and results.size == "full":
                ratios = {column: _ratios(results, column) for column in columns}
                if any(ratios.values()):
                    _draw(folder / f"{name}.png", title, ratios)
                    names.append(f"{name}.png")
                if command == "tpu" and _gains(results, "est. time"):
                    _draw_gain(folder / "gain.png", results)
                    names.append("gain.png")
    return list(dict.fromkeys(names))


def _ratios(results: Results, column: str) -> Ratios:
    """Returns the ratios to the hand-set model."""
    section, found = SECTIONS[results.command], {}
    for model, cells in results.models():
        row = {v: section.ratios(column, v, cells) for v in _COLOURS}
        found[model] = {v: ratios[0] for v, ratios in row.items() if ratios}
    return {model: row for model, row in found.items() if row}


def _draw(path: pathlib.Path, title: str, ratios: dict[str, Ratios]) -> None:
    rows, names = len(ratios), {m for models in ratios.values() for m in models}
    size = (max(10, 0.75 * len(names)), 0.9 + 2.3 * rows)
    with drawn(path, size, dpi=110) as figure:
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        for axis, (column, models) in zip(axes, ratios.items(), strict=True):
            _bars(axis, models)
            axis.set_ylabel(f"{_TEXTS[column]}\n(hand_bf16 = 1)")
        legend_below(figure, [*_COLOURS])
        text = f"{title}: ratio to the hand-set bfloat16 model, less is better"
        figure.suptitle(text)


def _bars(axis: Any, models: Ratios) -> None:
    """Draws the variants of each model side by side, amp with its ratio."""
    highest = max(ratio for row in models.values() for ratio in row.values())
    top = min(_HIGHEST, highest) * 1.06
    width = 0.84 / max(len(row) for row in models.values())
    inside: Any = dict(ha="center", rotation=90, fontsize=8, zorder=4)
    seen: set[str] = set()
    for index, row in enumerate(models.values()):
        for position, (variant, ratio) in enumerate(row.items()):
            x = index + (position - (len(row) - 1) / 2) * width
            label = None if variant in seen else variant
            look: Any = dict(label=label, color=_COLOURS[variant], zorder=2)
            axis.bar(x, min(ratio, top), 0.92 * width, **look)
            seen.add(variant)
            if variant == "amp_bf16":
                text = f"{ratio:.2f}"
                axis.text(x, 0.04, text, va="bottom", color="white", **inside)
            elif ratio > top:
                axis.text(x, 0.97 * top, f"{ratio:.1f}", va="top", **inside)
    axis.axhline(1, color="black", linewidth=0.9, zorder=3)
    axis.set(ylim=(0, top), xlim=(-0.5, len(models) - 0.5))
    names = [m if len(m) < 12 else "\n".join(m.rsplit("_", 1)) for m in models]
    axis.set_xticks(range(len(models)), names)
    axis.set_yticks([0, 0.5, 1, 1.5, 2, 2.5][: 1 + int(top / 0.5)])
    axis.tick_params(axis="x", length=0, labelsize=9)
    axis.grid(axis="y", color="#e0e0e0", linewidth=0.6, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_gain(path: pathlib.Path, results: Results) -> None:
    """Draws time and memory of a step beside float32 and beside the hand-set model."""
    panels = {"est. time": "estimated time of a step", "temp MB": "temporary memory"}
    with drawn(path, (9.6, 4.6), dpi=110) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (column, title) in zip(axes, panels.items(), strict=True):
            _gain_bars(axis, _gains(results, column))
            axis.set_title(f"{title}, % of float32", fontsize=11, loc="left")
        figure.suptitle("One training step, compiled for a TPU v5e", fontsize=12)


def _gains(results: Results, column: str) -> Ratios:
    """Returns the ratios of the models of the figure that have all of its variants."""
    ratios, variants = _ratios(results, column), {"float32", "amp_bf16"}
    return {m: ratios[m] for m in _GAIN_MODELS if variants <= ratios.get(m, {}).keys()}


def _gain_bars(axis: Any, ratios: Ratios) -> None:
    text: Any = dict(va="center", fontsize=9, color="#333333", zorder=3)
    text["bbox"] = dict(facecolor="white", edgecolor="none", pad=0.8)
    for index, row in enumerate(ratios.values()):
        row = row | {"hand_bf16": 1.0}
        for place, (variant, (name, colour)) in enumerate(_GAIN_VARIANTS.items()):
            y, share = index + 0.28 * (place - 1), 100 * row[variant] / row["float32"]
            axis.barh(y, share, 0.25, color=colour)
            # The first group says what the bars are, all others how long.
            label = f"{share:.0f}" if index else f"{share:.0f}  {name}"
            if index or share < 100:
                axis.text(share + 1.5, y, label, **text)
            else:
                axis.text(98, y, name, va="center", ha="right", fontsize=9)
    axis.set(xlim=(0, 138), yticks=range(len(ratios)))
    axis.set_yticklabels([_GAIN_MODELS[m] for m in ratios], fontsize=10)
    axis.set_ylim(len(ratios) - 0.5, -0.5)
    axis.axvline(100, color="#888888", linewidth=0.8, zorder=0)
    axis.set_xticks([0, 50, 100])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
