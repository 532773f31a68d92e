"""`report`: tables and plots of all that is in the folder of results."""

import sys
from collections.abc import Sequence

from benchmarks import plots
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.sections import SECTIONS
from benchmarks.show import markdown_table, write_page

_TITLE = """# Results

Made by `python -m benchmarks report` from the JSON files in this folder, which hold the
raw figures. A training step is `value_and_grad` and adamw, parameters in float32. In
brackets: the ratio to `hand_bf16` (float16: `hand_fp16`), and to `smcast_bf16` where
there is a softmax in half precision.

- `float32`: the model as it is. `hand_bf16`: its layers with `dtype=bfloat16`.
  `smcast_bf16`: the expert's, which casts the scores of each softmax to float32 and
  the probabilities back.
- `amp_bf16`: `flax_amp.amp` around the loss of the float32 model. `amp_step_bf16`:
  `flax_amp.make_train_step`, which also skips what is not finite.
- `amp_small_moments`, `amp_small_state`: the same with a state in bfloat16.
- `twin_bf16`: the model with nothing but its matmuls in bfloat16, without `amp`.
- `amp_fp8`, `amp_fp8_all`, `flax_fp8`: with matmuls in fp8; `amp_fp8_emulated`: with
  its numbers, on any device.
- `jmp_bf16`, `mpx_bf16`, `jaxamp_bf16`: packages of others.
- `hand_fp16`: layers with `dtype=float16` and Flax's `DynamicScale`. `amp_fp16`:
  `make_train_step` with its loss scaler.

Pages of their own: [programs of other packages](corpus.md),
[where training ends](convergence.md), [the soak](soak.md), [the step](step.md).
"""

# Of the summary, by title: command, variant and column of the section
_SUMMARY = {
    "{target} time": ("tpu", "amp_bf16", "est. time"),
    "{target} bytes": ("tpu", "amp_bf16", "GB"),
    "{target} memory": ("tpu", "amp_bf16", "temp MB"),
    "{target} compiled bytes": ("gpu-aot", "amp_bf16", "GB"),
    "{target} compiled memory": ("gpu-aot", "amp_bf16", "temp MB"),
    "{target} compiled kernels": ("gpu-aot", "amp_bf16", "kernels"),
    "{target} time, bfloat16": ("gpu", "amp_bf16", "ms"),
    "{target} time, float16 step": ("gpu", "amp_fp16", "ms"),
    "error": ("error", "amp_bf16", "ratio"),
    "error, float16": ("error", "amp_fp16", "ratio"),
    "trace + lower": ("host", "amp_bf16", "least CPU s"),
}


def run(asked: Request) -> None:
    """Writes README.md and the plots into the folder of results."""
    found = read_all(asked.folder)
    if not found:
        sys.exit(f"error: there are no results in {asked.folder}")
    plots.draw_gain(found, asked.folder / "gain.png")
    write_page(asked.folder / "README.md", _document(found))
    print(_summary(found))


def _document(found: Sequence[Results]) -> str:
    parts = [_TITLE, "## Summary", _summary(found), "![gain](gain.png)"]
    for results in found:
        parts += _section(results)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _summary(found: Sequence[Results]) -> str:
    """Returns a table of ratios, a row for each model."""
    table: dict[str, dict[str, str]] = {}
    titles: dict[str, None] = {}  # those with figures, in order
    for title, (command, label, column) in _SUMMARY.items():
        for results in found:
            if results.command != command or results.size != "full":
                continue
            named = title.format(target=results.target)
            for model, cells in results.models():
                ratios = SECTIONS[command].ratios(column, label, cells)
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
    """Returns the title, the note, the runs and the tables of a file of results."""
    section, rows, without = SECTIONS[results.command], [], []
    for model, cells in results.models():
        for label, figures in cells.items():
            if "error" in figures:
                why = f"`{figures['error']}`"
                without.append(f"- No figures for {model} {label}: {why}")
            else:
                rows.append([model, label, *section.row(label, cells)])
    size = ", tiny sizes" if results.size == "tiny" else ""
    header = ["model", "variant", *(column.title for column in section.columns)]
    return [
        f"## {section.title} ({results.target}{size})",
        section.note,
        _runs(results),
        markdown_table(header, rows),
        "\n".join(without),
        *_collectives(results),
    ]


def _runs(results: Results) -> str:
    """Returns the commands, dates and versions behind a table."""
    used = {cell["run"] for _, cells in results.models() for cell in cells.values()}
    lines = []
    for run in (results.runs[index] for index in sorted(used)):
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        made_by = f"`{run['command']}`, {run['date']}, {run['machine']}"
        lines.append(f"- {made_by}; {versions}")
    return "\n".join(dict.fromkeys(lines))


def _collectives(results: Results) -> list[str]:
    """Returns the table of what the chips exchange."""
    cells = [
        (model, label, {(c["kind"], c["dtype"]): c for c in figures["collectives"]})
        for model, cells in results.models()
        for label, figures in cells.items()
        if figures.get("collectives")
    ]
    kinds = sorted({kind for *_, moved in cells for kind in moved})
    if not kinds:
        return []
    rows = [
        [m, v, *(f"{c[k]['bytes'] / 1e6:.1f}" if k in c else "" for k in kinds)]
        for m, v, c in cells
    ]
    header = ["model", "variant", *(f"{kind} {dtype}" for kind, dtype in kinds)]
    text = "MB that a chip sends or receives in a step, by kind and dtype."
    return [text, markdown_table(header, rows)]
