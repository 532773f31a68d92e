"""`report`: the tables of all that is in the folder of results, and their figure."""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import models, variants
from benchmarks.request import Request
from benchmarks.results import Figures, Results
from benchmarks.show import markdown_table, write_page
from benchmarks.tables import SECTIONS

_TITLE = """# Results

Made by `python -m benchmarks report` from the JSON files in this folder, which hold the
raw figures: [what the variants and the columns are](../README.md#what-is-compared). In
brackets: the ratio to `hand_bf16` (float16: `hand_fp16`), and to `smcast_bf16` where
there is a softmax in half precision; of fp8 to `amp_bf16`, of tracing to `float32`.

Pages of their own: [programs of other packages](corpus.md),
[where training ends](convergence.md), [the soak](soak.md), [the step](step.md),
[times on a CPU](cpu.md).

## Five models

The tables of the first page: `amp` in bfloat16 over the model in float32, and over the
model with `dtype=bfloat16` in each layer. Less is better.
"""

_TITLE_OF_SUMMARY = """## Summary

`amp` as a ratio to the plain hand-set model, and to the expert's where there is a
softmax in half precision; trace + lower to the float32 model. Less is better.
"""

_ON_A_CPU = """# Times on a CPU

Made by `python -m benchmarks report` from what `python -m benchmarks cpu` measured: a
whole training step, and the loss alone, of small models. The variants take turns. In
brackets: the ratio to `float32`, of the least, of the medians, and of the memory. The
error is that of the gradient, as this CPU computes it, to the one in `float32`.
"""

# Of the tables of the first page, by title: command, target and figure. The CPU is any.
_FIRST_PAGE = {
    "time, TPU v5e": ("tpu", "v5e", "estimated_time"),
    "memory, TPU v5e": ("tpu", "v5e", "temp_mb"),
    "memory, H200": ("gpu-aot", "h200", "temp_mb"),
    "time, CPU": ("cpu", "", "step_ms:least"),
    "gradient error": ("error", "cpu", "errors"),
}
_FIVE = {
    "vit_s16": "ViT-S/16",
    "gpt_scan": "GPT",
    "llama": "Llama",
    "bert": "BERT",
    "resnet50": "ResNet-50",
}
_BASES = {"float32": "over float32", "hand_bf16": "over `dtype=bfloat16`"}

# Of the summary, by title: command, variant and figure
_SUMMARY = {
    "{target} time": ("tpu", "amp_bf16", "estimated_time"),
    "{target} bytes": ("tpu", "amp_bf16", "gb_accessed"),
    "{target} memory": ("tpu", "amp_bf16", "temp_mb"),
    "{target} compiled bytes": ("gpu-aot", "amp_bf16", "gb_accessed"),
    "{target} compiled memory": ("gpu-aot", "amp_bf16", "temp_mb"),
    "{target} compiled kernels": ("gpu-aot", "amp_bf16", "kernels"),
    "{target} time, bfloat16": ("gpu", "amp_bf16", "step_ms"),
    "{target} time, float16 step": ("gpu", "amp_fp16", "step_ms"),
    "error": ("error", "amp_bf16", "errors"),
    "error, float16": ("error", "amp_fp16", "errors"),
    "trace + lower": ("host", "amp_bf16", "cpu_s"),
}


def run(asked: Request) -> None:
    """Writes README.md and the figure into the folder of results."""
    files = [Results.read(path) for path in sorted(asked.folder.glob("*.json"))]
    found = [each for each in files if each.command in SECTIONS]
    if not found:
        sys.exit(f"error: there are no results in {asked.folder}")
    on_cpus = [each for each in found if each.command == "cpu"]
    found = [each for each in found if each.command != "cpu"]
    if on_cpus:
        _write(asked.folder / "cpu.md", [_ON_A_CPU, *map(_section, on_cpus)])
    summary = _summary(found)
    first_page = [_first_page(found + on_cpus, base) for base in _BASES]
    parts = [
        _TITLE,
        *first_page,
        _TITLE_OF_SUMMARY,
        summary,
        "![gain](gain.png)",
        *map(_section, found),
    ]
    _write(asked.folder / "README.md", parts)
    for results in found:
        if (results.command, results.target, results.size) == ("tpu", "v5e", "full"):
            draw_gain(results, asked.folder / "gain.png")
    print(summary)


def _write(path: pathlib.Path, parts: Sequence[str]) -> None:
    write_page(path, "\n\n".join(part.strip() for part in parts) + "\n")


def _models(results: Results) -> Iterator[tuple[str, dict[str, Figures]]]:
    """Yields each model and its cells by variant, in the order of the lists."""
    for model in sorted(results.cells, key=models.NAMES.index):
        cells = results.cells[model]
        yield model, {name: cells[name] for name in variants.NAMES if name in cells}


def _summary(found: Sequence[Results]) -> str:
    """Returns a table of ratios, a row for each model."""
    table: dict[str, dict[str, str]] = {}
    titles: dict[str, None] = {}  # those with figures, in order
    for title, (command, label, key) in _SUMMARY.items():
        for results in found:
            if results.command != command or results.size != "full":
                continue
            named = title.format(target=results.target)
            for model, cells in _models(results):
                ratios = SECTIONS[command].ratios(key, label, cells)
                if ratios:
                    titles[named] = None
                    texts = [f"{ratio:.2f}" for ratio in ratios]
                    table.setdefault(model, {})[named] = ", ".join(texts)
    rows = [[m, *(row.get(t, "") for t in titles)] for m, row in table.items()]
    return markdown_table(["model", *titles], rows, words=1)


def _first_page(found: Sequence[Results], base: str) -> str:
    """Returns a table of the first page: ratios to a variant, a column for a model.

    Of several files of a command, such as for two versions of JAX, the last one counts.
    """
    rows = []
    for title, (command, target, key) in _FIRST_PAGE.items():
        section = dataclasses.replace(SECTIONS[command], baselines=(base,))
        cells: dict[str, Any] = {}
        for each in found:
            is_target = each.target == target or not target
            if each.command == command and is_target and each.size != "tiny":
                cells |= each.cells
        ratios = [section.ratios(key, "amp_bf16", cells.get(x, {})) for x in _FIVE]
        if any(ratios):
            rows.append([title, *(f"{x[0]:.2f}" if x else "-" for x in ratios)])
    return markdown_table([_BASES[base], *_FIVE.values()], rows, words=1)


def _section(results: Results) -> str:
    """Returns the section of a file of results."""
    section, rows, without = SECTIONS[results.command], [], []
    for model, cells in _models(results):
        for label, figures in cells.items():
            if "error" in figures:
                why = f"`{figures['error']}`"
                without.append(f"- No figures for {model} {label}: {why}")
            else:
                rows.append([model, label, *section.row(label, cells)])
    header = ["model", "variant", *section.titles]
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    rows = [[row[i] for i in filled] for row in rows]
    table = markdown_table([header[i] for i in filled], rows)
    size = ", tiny sizes" if results.size == "tiny" else ""
    title = f"## {section.title} ({results.target}{size})"
    parts = [title, results.made_with(), table, "\n".join(without)]
    if results.command == "cpu":
        parts.insert(2, results.about_cpus())
    return "\n\n".join(parts)


# --- the figure of the front page ----------------------------------------------------

_MODELS = {
    "vit_s16": "ViT-S/16",
    "gpt_scan": "GPT, 12 layers",
    "llama": "Llama, scanned",
    "moe": "mixture of experts",
    "resnet50": "ResNet-50",
    "mamba": "Mamba",
}
_BARS = {
    "float32": ("float32", "#BBBBBB"),
    "hand_bf16": ("cast by hand", "#E69F00"),
    "amp_bf16": ("flax_amp", "#0072B2"),
}
_PANELS = {"estimated_time": "estimated time of a step", "temp_mb": "temporary memory"}


def draw_gain(results: Results, path: pathlib.Path) -> None:
    """Draws time and memory of a step on a TPU v5e, as percentages of float32."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no figure: matplotlib is not installed")
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    cells = {m: c for m, c in results.cells.items() if {*_BARS} <= {*c}}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (key, title) in zip(axes, _PANELS.items(), strict=True):
        _draw_bars(axis, key, {m: cells[m] for m in _MODELS if m in cells})
        axis.set_title(f"{title}, % of float32", fontsize=11, loc="left")
    figure.suptitle("One training step, compiled for a TPU v5e", fontsize=12)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


def _draw_bars(axis: Any, key: str, models: dict[str, Any]) -> None:
    """Draws the variants of each model below each other; the first has their names."""
    text: Any = dict(va="center", fontsize=9, color="#333333", zorder=3)
    text["bbox"] = dict(facecolor="white", edgecolor="none", pad=0.8)
    for index, cells in enumerate(models.values()):
        for place, (variant, (name, colour)) in enumerate(_BARS.items()):
            y = index + 0.28 * (place - 1)
            percent = 100 * cells[variant][key] / cells["float32"][key]
            axis.barh(y, percent, 0.25, color=colour)
            label = f"{percent:.0f}" if index else f"{percent:.0f}  {name}"
            axis.text(percent + 1.5, y, label, **text)
    axis.set(xlim=(0, 150), xticks=[0, 50, 100], yticks=range(len(models)))
    axis.set_yticklabels([_MODELS[m] for m in models], fontsize=10)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.axvline(100, color="#888888", linewidth=0.8, zorder=0)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
