"""The summary for the README of the project: ratios to the hand-set model."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.results import Results
from benchmarks.sections import Section, paired_ratios, section
from benchmarks.show import markdown_table

Cells = Mapping[str, Mapping[str, Any]]
Ratio = Callable[[Cells], float | None]

# title: command, part, label, column of the section
_COLUMNS = {
    "TPU time": ("tpu", "compiled", "amp_bf16", "est. ms"),
    "TPU bytes": ("tpu", "compiled", "amp_bf16", "GB"),
    "TPU memory": ("tpu", "compiled", "amp_bf16", "temp MB"),
    "H200 memory": ("gpu-aot", "compiled", "amp_bf16", "temp MB"),
    "H200 time": ("gpu", "measured", "amp_bf16", "ms"),
    "H200 time, float16 step": ("gpu", "measured", "amp_fp16", "ms"),
    "error": ("error", "gradients", "amp_bf16", ""),
    "trace + lower": ("host", "trace", "amp_bf16", "least CPU s"),
}


def summary(found: Sequence[Results]) -> str:
    """Returns a Markdown table of ratios, a row for each model.

    Args:
      found: all the results; of several environments the last one counts.

    Returns:
      The table with a line that explains it, or "" where there is nothing to show.
    """
    table: dict[str, dict[str, float]] = {}
    for title, (command, part, label, column) in _COLUMNS.items():
        shown = section(command, part)
        for results in found:
            if results.command != command or not _counts(results):
                continue
            for model, cells in results.parts(part):
                ratio = _ratio(shown, column, label, cells)
                if ratio is not None:
                    table.setdefault(model, {})[title] = ratio
    titles = [t for t in _COLUMNS if any(t in row for row in table.values())]
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


def _counts(results: Results) -> bool:
    """Whether results are no try: tiny sizes tell nothing of time and memory."""
    return results.size == "full"


def _ratio(shown: Section, column: str, label: str, cells: Cells) -> float | None:
    if column:
        return shown.ratio(column, label, cells)
    figures = cells.get(label)
    baseline = shown.compared_with(label, cells) if figures else None
    if figures is None or baseline is None or "error" in figures:
        return None
    return statistics.fmean(paired_ratios(figures, baseline))
