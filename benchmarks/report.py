"""`report`: tables and plots of all that is in the folder of results."""

import sys
from collections.abc import Iterable, Sequence

from benchmarks import plots
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.sections import SECTIONS, Section, failures, section
from benchmarks.show import markdown_table

_TITLE = """# Results

Made by `python -m benchmarks report` from the JSON files in this folder, which hold the
raw figures. A training step is `value_and_grad` and adamw, parameters in float32.

- `float32`: the model as it is. `hand_bf16`: its layers with `dtype=bfloat16`.
  `smcast_bf16`: the same with a float32 softmax.
- `amp_bf16`: `flax_amp.amp` around the loss of the float32 model. `amp_step_bf16`:
  `flax_amp.make_train_step`, which also skips what is not finite.
- `jmp_bf16`, `mpx_bf16`, `jaxamp_bf16`: packages of others.
- `hand_fp16`: layers with `dtype=float16` and Flax's `DynamicScale`. `amp_fp16`:
  `make_train_step` with its loss scaler.
"""

# Of the summary, by title: command, part, variant and column of the section
_SUMMARY = {
    "TPU time": ("tpu", "compiled", "amp_bf16", "est. ms"),
    "TPU bytes": ("tpu", "compiled", "amp_bf16", "GB"),
    "TPU memory": ("tpu", "compiled", "amp_bf16", "temp MB"),
    "TPU peak": ("tpu", "compiled", "amp_bf16", "peak MB"),
    "H200 memory": ("gpu-aot", "compiled", "amp_bf16", "temp MB"),
    "H200 time": ("gpu", "measured", "amp_bf16", "ms"),
    "H200 time, float16 step": ("gpu", "measured", "amp_fp16", "ms"),
    "error": ("error", "gradients", "amp_bf16", "ratio"),
    "trace + lower": ("host", "trace", "amp_bf16", "least CPU s"),
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
        for shown in SECTIONS:
            if shown.command == results.command:
                parts += _section(shown, results)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _summary(found: Sequence[Results]) -> str:
    """Returns a table of ratios, a row for each model; of several targets the last."""
    table: dict[str, dict[str, float]] = {}
    for title, (command, part, label, column) in _SUMMARY.items():
        for results in found:
            if results.command != command or results.size != "full":
                continue
            for model, cells in results.parts(part):
                ratio = section(command, part).ratio(column, label, cells)
                if ratio is not None:
                    table.setdefault(model, {})[title] = ratio
    titles = [t for t in _SUMMARY if any(t in row for row in table.values())]
    if not titles:
        return ""
    rows = [
        [model, *(f"{row[t]:.2f}" if t in row else "" for t in titles)]
        for model, row in table.items()
    ]
    text = (
        "`amp` as a ratio to the hand-set model of the same run; trace + lower to the "
        "float32 model. Less is better."
    )
    return f"{text}\n\n{markdown_table(['model', *titles], rows, words=1)}"


def _section(shown: Section, results: Results) -> list[str]:
    parts = list(results.parts(shown.part))
    rows = shown.rows(parts)
    without = [
        f"- No figures for {', '.join(cells)}: `{reason}`"
        for reason, cells in failures(parts).items()
    ]
    if not parts:
        return []
    size = ", tiny sizes" if results.size == "tiny" else ""
    title = f"## {shown.title} ({results.target}{size})"
    table = markdown_table(shown.header(), rows) if rows else ""
    texts = [title, shown.note, _runs(shown, results), table, "\n".join(without)]
    return texts + (_collectives(results) if shown.command == "mesh" else [])


def _runs(shown: Section, results: Results) -> str:
    """Returns the commands, dates and versions behind a table."""
    parts = results.parts(shown.part)
    lines = []
    for index in sorted({f["run"] for _, cells in parts for f in cells.values()}):
        run = results.runs[index]
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        command, date, machine = run["command"], run["date"], run["machine"]
        lines.append(f"- `{command}`, {date}, {machine}; {versions}")
    return "\n".join(dict.fromkeys(lines))


def _collectives(results: Results) -> list[str]:
    """Returns the table of what the chips exchange."""
    rows = []
    cells = [
        (model, label, {(c["kind"], c["dtype"]): c for c in figures["collectives"]})
        for model, cells in results.parts("compiled")
        for label, figures in cells.items()
        if "error" not in figures
    ]
    kinds = sorted({kind for *_, by_kind in cells for kind in by_kind})
    for model, label, by_kind in cells:
        moved = [by_kind.get(kind) for kind in kinds]
        texts = [
            f"{c['bytes'] / 1e6:.1f} ({c['text_bytes'] / 1e6:.1f})" if c else ""
            for c in moved
        ]
        rows.append([model, label, *texts])
    if not rows:
        return []
    header = ["model", "variant", *(f"{kind} {dtype}" for kind, dtype in kinds)]
    return [
        "MB that a chip sends or receives in a step, by kind and dtype; in "
        "brackets those in the text of the program, loop bodies once.",
        markdown_table(header, rows),
    ]
