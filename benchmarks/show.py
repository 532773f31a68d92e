"""Tables in Markdown."""

from collections.abc import Sequence


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 2
) -> str:
    """Returns a table in Markdown; the first columns are words, the rest numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)
