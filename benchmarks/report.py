"""`report`: the tables of all that is in the folder of results, and their figure."""

import sys
from collections.abc import Sequence

from benchmarks import plots
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.show import markdown_table, write_page
from benchmarks.tables import SECTIONS

_TITLE = """# Results

Made by `python -m benchmarks report` from the JSON files in this folder, which hold the
raw figures. A training step is `value_and_grad` and adamw, parameters in float32. In
brackets: the ratio to `hand_bf16` (float16: `hand_fp16`), and to `smcast_bf16` where
there is a softmax in half precision.

- `float32`: the model as it is. `hand_bf16`: its layers with `dtype=bfloat16`.
  `smcast_bf16`: the expert's, which casts the scores of each softmax to float32 and
  the probabilities back.
- `amp_bf16`: `flax_amp.amp` around the loss of the float32 model. `amp_step_bf16`:
  `flax_amp.make_train_step`, which also skips what is not finite. `guarded_bf16`: the
  same by hand.
- `amp_small_moments`, `amp_small_state`: the same with a state in bfloat16.
- `amp_fp8`: with matmuls in fp8; `amp_fp8_emulated`: with its numbers, on any device.
- `jmp_bf16`, `mpx_bf16`, `jaxamp_bf16`: packages of others.
- `hand_fp16`: layers with `dtype=float16` and Flax's `DynamicScale`. `amp_fp16`:
  `make_train_step` with its loss scaler.

Pages of their own: [programs of other packages](corpus.md),
[where training ends](convergence.md), [the soak](soak.md), [the step](step.md).
"""

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
    found = [each for each in read_all(asked.folder) if each.command in SECTIONS]
    if not found:
        sys.exit(f"error: there are no results in {asked.folder}")
    plots.draw_gain(found, asked.folder / "gain.png")
    parts = [_TITLE, "## Summary", _summary(found), "![gain](gain.png)"]
    parts += [part for results in found for part in _section(results)]
    page = "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
    write_page(asked.folder / "README.md", page)
    print(_summary(found))


def _summary(found: Sequence[Results]) -> str:
    """Returns a table of ratios, a row for each model."""
    table: dict[str, dict[str, str]] = {}
    titles: dict[str, None] = {}  # those with figures, in order
    for title, (command, label, key) in _SUMMARY.items():
        for results in found:
            if results.command != command or results.size != "full":
                continue
            named = title.format(target=results.target)
            for model, cells in results.models():
                ratios = SECTIONS[command].ratios(key, label, cells)
                if ratios:
                    titles[named] = None
                    texts = [f"{ratio:.2f}" for ratio in ratios]
                    table.setdefault(model, {})[named] = ", ".join(texts)
    rows = [[m, *(row.get(t, "") for t in titles)] for m, row in table.items()]
    text = (
        "`amp` as a ratio to the plain hand-set model, and to the expert's where there "
        "is a softmax in half precision; trace + lower to the float32 model. Less is "
        "better."
    )
    return f"{text}\n\n{markdown_table(['model', *titles], rows, words=1)}"


def _section(results: Results) -> list[str]:
    """Returns the parts of the section of a file of results."""
    section, rows, without = SECTIONS[results.command], [], []
    for model, cells in results.models():
        for label, figures in cells.items():
            if "error" in figures:
                why = f"`{figures['error']}`"
                without.append(f"- No figures for {model} {label}: {why}")
            else:
                rows.append([model, label, *section.row(label, cells)])
    header = ["model", "variant", *section.titles]
    filled = [i for i in range(len(header)) if any(row[i] for row in rows)]
    rows = [[row[i] for i in filled] for row in rows]
    size = ", tiny sizes" if results.size == "tiny" else ""
    return [
        f"## {section.title} ({results.target}{size})",
        section.note,
        results.made_with(),
        markdown_table([header[i] for i in filled], rows),
        "\n".join(without),
    ]
