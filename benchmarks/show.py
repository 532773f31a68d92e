"""Tables, in files and in the terminal."""

from collections.abc import Sequence

from benchmarks.results import Results
from benchmarks.sections import SECTIONS, failures


def results(found: Results) -> None:
    """Prints the tables of a command, with ratios."""
    for section in SECTIONS:
        if section.command == found.command:
            parts = list(found.parts(section.part))
            rows = section.rows(parts)
            if rows:
                table = markdown_table(section.header(), rows)
                print(f"\n{section.title}\n\n{table}", flush=True)
            for reason, cells in failures(parts).items():
                print(f"No figures for {', '.join(cells)}: {reason}", flush=True)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 2
) -> str:
    """Returns a table in Markdown; the first columns are words, the rest numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)
