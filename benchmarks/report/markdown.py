"""The report in Markdown: a section for each command and environment."""

from collections.abc import Iterable, Sequence

from benchmarks.report.summary import summary
from benchmarks.results import Results
from benchmarks.sections import SECTIONS, Section, failures
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
  `make_train_step` with its loss scaler. `amp_fp16_cond`: the same with the `cond` of
  `optax.apply_if_finite` in place of the select. `jmp_fp16`: jmp with its loss scaler.
"""


def document(found: Sequence[Results], plots: Iterable[str]) -> str:
    """Writes the report.

    Args:
      found: all the results.
      plots: names of the files of the plots.

    Returns:
      Markdown.
    """
    parts = [_TITLE, "## Summary", summary(found)]
    parts += [f"![{_caption(name)}]({name})" for name in plots]
    for results in found:
        for section in SECTIONS:
            if section.command == results.command:
                parts += _section(section, results)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _caption(name: str) -> str:
    return name.split(".")[0].replace("-", " ").replace("_", " ")


def _section(section: Section, results: Results) -> list[str]:
    parts = list(results.parts(section.part))
    rows = [row for model, cells in parts for row in section.rows(model, cells)]
    without = [
        f"- No figures for {', '.join(cells)}: `{reason}`"
        for reason, cells in failures(parts).items()
    ]
    if not rows and not without:
        return []
    size = ", tiny sizes" if results.size == "tiny" else ""
    title = f"## {section.title} ({results.target}{size})"
    table = markdown_table(section.header(), rows) if rows else ""
    texts = [title, section.note, _runs(section, results), table, "\n".join(without)]
    if section.command == "mesh":
        texts += _collectives(results, section.part)
    return texts


def _runs(section: Section, results: Results) -> str:
    """Returns the commands, dates and versions behind a table."""
    used = sorted(
        {
            figures["run"]
            for _, cells in results.parts(section.part)
            for figures in cells.values()
        }
    )
    lines = []
    for run in (results.runs[index] for index in used):
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        lines.append(
            f"- `{run['command']}`, {run['date']}, {run['machine']}; {versions}"
        )
    return "\n".join(dict.fromkeys(lines))


def _collectives(results: Results, part: str) -> list[str]:
    """Returns the table of what the chips exchange."""
    texts = []
    for model, cells in results.parts(part):
        kinds = {
            (c["kind"], c["dtype"])
            for figures in cells.values()
            for c in figures.get("collectives", ())
        }
        columns = sorted(kinds)
        rows = []
        for label, figures in cells.items():
            if "error" in figures:
                continue
            by_kind = {(c["kind"], c["dtype"]): c for c in figures["collectives"]}
            rows.append([model, label, *(_moved(by_kind.get(k)) for k in columns)])
        if rows:
            texts.append(
                "MB that a chip sends or receives in a step, by kind and dtype; in "
                "brackets those in the text of the program, loop bodies once."
            )
            header = ["model", "variant", *(f"{kind} {dt}" for kind, dt in columns)]
            texts.append(markdown_table(header, rows))
    return texts


def _moved(collective: dict[str, float] | None) -> str:
    if collective is None:
        return ""
    in_run, in_text = collective["bytes"] / 1e6, collective["text_bytes"] / 1e6
    return f"{in_run:.1f} ({in_text:.1f})"
