"""Pages in Markdown: their tables, by what they were made, how they are written."""

import pathlib
from collections.abc import Sequence

import jax

from benchmarks import environment


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 2
) -> str:
    """Returns a table in Markdown; the first columns are words, the rest numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)


def made_by() -> str:
    """Returns by which command, on what machine and with which JAX a page was made."""
    command, machine = environment.command_line(), environment.machine()
    return f"Made by `{command}`, {machine}, JAX {jax.__version__}"


def write_page(path: pathlib.Path, text: str) -> None:
    """Writes a page into its folder, which is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path}")
