"""Pages in Markdown with their tables."""

import pathlib
from collections.abc import Sequence


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 2
) -> str:
    """Returns a table in Markdown; the first columns are words, the rest numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)


def write_page(path: pathlib.Path, text: str) -> None:
    """Writes a page into its folder, which is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path}")
