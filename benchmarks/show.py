"""Prints progress and tables; with rich where it is installed, plainly elsewhere."""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Results
from benchmarks.sections import SECTIONS, failures


class Progress:
    """Prints a line for each cell as it is done.

    Args:
      total: how many cells there are.
    """

    def __init__(self, total: int):
        self._total = total
        self._done = 0

    def cell(self, model: str, variant: str, text: str) -> None:
        """Prints the figures of a cell, or why there are none."""
        self._done += 1
        count = f"[{self._done}/{self._total}]".rjust(9)
        print(f"{count} {model:17}{variant:24} {text}", flush=True)


def results(found: Results) -> None:
    """Prints the tables of a command, with ratios."""
    for section in SECTIONS:
        if section.command == found.command:
            rows = [
                row
                for model, variants in found.parts(section.part)
                for row in section.rows(model, variants)
            ]
            if rows:
                table(section.title, section.header(), rows)
            for reason, cells in failures(found.parts(section.part)).items():
                print(f"No figures for {', '.join(cells)}: {reason}", flush=True)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first two columns are words, the rest numbers."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n{plain_table(header, rows)}", flush=True)
        return
    shown = Table(title=title, title_justify="left", title_style="bold")
    for position, name in enumerate(header):
        justify: Any = "left" if position < 2 else "right"
        shown.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        shown.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else 240
    Console(highlight=False, width=width).print(shown)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text, its columns aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        pairs = list(zip(row, widths, strict=True))
        words = [text.ljust(width) for text, width in pairs[:2]]
        numbers = [text.rjust(width) for text, width in pairs[2:]]
        lines.append("  ".join(words + numbers).rstrip())
    return "\n".join(lines)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 2
) -> str:
    """Returns a table in Markdown; the first columns are words, the rest numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)
