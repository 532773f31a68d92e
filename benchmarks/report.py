"""`report`: tables and plots of all that is in the folder of results."""

import sys
from collections.abc import Iterable, Sequence

from benchmarks import plots
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.sections import SECTIONS, failures
from benchmarks.show import markdown_table

_TITLE = """# Results

Made by `python -m benchmarks report` from the JSON files in this folder, which hold the
raw figures. A training step is `value_and_grad` and adamw, parameters in float32.

- `float32`: the model as it is. `hand_bf16`: its layers with `dtype=bfloat16`.
  `smcast_bf16`: the expert's, which casts the scores of each softmax to float32 and
  the probabilities back.
- `amp_bf16`: `flax_amp.amp` around the loss of the float32 model. `amp_step_bf16`:
  `flax_amp.make_train_step`, which also skips what is not finite.
- `amp_small_moments`, `amp_small_state`: the same with a state in bfloat16.
- `amp_fp8`, `amp_fp8_all`, `flax_fp8`: with matrix products in fp8.
- `jmp_bf16`, `mpx_bf16`, `jaxamp_bf16`: packages of others.
- `hand_fp16`: layers with `dtype=float16` and Flax's `DynamicScale`. `amp_fp16`:
  `make_train_step` with its loss scaler.
- `amp_fp8_emulated`: `amp_bf16` with matrix products by weights, of any size, in fp8.
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
    names = plots.draw_all(found, asked.folder)
    path = asked.folder / "README.md"
    path.write_text(_document(found, names))
    print(f"{_summary(found)}\n\nwrote {path}" + "".join(f", {n}" for n in names))


def _document(found: Sequence[Results], plots: Iterable[str]) -> str:
    parts = [_TITLE, "## Summary", _summary(found)]
    parts += [f"![{n.split('.')[0].replace('-', ' ')}]({n})" for n in plots]
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
    section, models = SECTIONS[results.command], list(results.models())
    size = ", tiny sizes" if results.size == "tiny" else ""
    without = [
        f"- No figures for {', '.join(cells)}: `{reason}`"
        for reason, cells in failures(models).items()
    ]
    return [
        f"## {section.title} ({results.target}{size})",
        section.note,
        _runs(results),
        markdown_table(section.header(), section.rows(models)),
        "\n".join(without),
        *(_collectives(results) if results.command in ("mesh", "fp8") else []),
        *_exchanges(results),
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
        if "error" not in figures
    ]
    kinds = sorted({kind for *_, moved in cells for kind in moved})
    if not kinds:
        return []
    rows = []
    for model, label, moved in cells:
        found = (moved.get(kind) for kind in kinds)
        texts = [
            f"{c['bytes'] / 1e6:.1f} ({c['text_bytes'] / 1e6:.1f})" if c else ""
            for c in found
        ]
        rows.append([model, label, *texts])
    header = ["model", "variant", *(f"{kind} {dtype}" for kind, dtype in kinds)]
    return [
        "MB that a chip sends or receives in a step, by kind and dtype; in "
        "brackets those in the text of the program, loop bodies once.",
        markdown_table(header, rows),
    ]


def _exchanges(results: Results) -> list[str]:
    """Returns the table of how many collectives run, where they were counted."""
    rows = [
        [model, label, *(str(value) for value in counts.values())]
        for model, cells in results.models()
        for label, figures in cells.items()
        for counts in figures.get("exchanges", ())
    ]
    if not rows:
        return []
    titles = ["runs", "of scalars", "in text", "of scalars"]
    header = ["model", "variant", "kind", *titles]
    text = (
        "How many collectives a step runs, and how many of them exchange nothing but "
        "scalars; the same in the text of the program, loop bodies once."
    )
    return [text, markdown_table(header, rows, words=3)]
