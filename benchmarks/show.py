"""Pages in Markdown with their tables, and figures where matplotlib is installed."""

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

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


def can_draw() -> bool:
    """Returns whether figures can be drawn, and says so if not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("no figures: matplotlib is not installed")
    return found


@contextlib.contextmanager
def drawn(path: pathlib.Path, size: tuple[float, float], dpi: int) -> Iterator[Any]:
    """Yields a figure, whose size is in inches; it is written at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    figure.savefig(path, dpi=dpi, facecolor="white", metadata={"Software": None})
