"""The report of `compare_precision` in a terminal."""

import dataclasses
import io
import math
import shutil
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._tree import pick
from flax_amp.debug._compare_model import Comparison, ModuleErrors, Setting
from flax_amp.debug._terminal import size

OUTSIDE = "(outside of modules)"
_WIDTHS = (80, 120)
_HELPS = 0.9  # what a remedy that helps leaves of the error of the gradients, at most


def as_text(found: Comparison, top: int) -> str:
    """Returns the report without colors."""
    low, high = _WIDTHS
    width = min(max(shutil.get_terminal_size((100, 40)).columns, low), high)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(found, top=top))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def render(found: Comparison, *, top: int = 12) -> RenderableType:
    """Returns the report for a console of rich; arguments as in `Comparison.report`."""
    check_top(top, "report")
    parts = [
        _header(found),
        Padding(_Modules(found, top), (1, 0, 0, 0)),
        *_remedies(found),
    ]
    if len(found.settings) > 1:
        parts.append(_settings("\nsettings", found.settings))
    parts += [Text(f"Note: {note}.", style="dim") for note in found.notes]
    return Group(*parts)


def check_top(top: int, caller: str) -> None:
    """Raises a ValueError unless `top` is a positive number of modules."""
    if type(top) is not int or top < 1:
        raise ValueError(f"{caller}: got {top=!r}; expected a number of modules.")


def _header(found: Comparison) -> RenderableType:
    row = found.settings[0]
    scale = f", loss scale {found.scale:g}" if found.scale != 1 else ""
    grid = Table.grid(padding=(0, 2))
    title = Text(found.name, style="bold")
    grid.add_row(title, f"in {found.compute_dtype} against float32{scale}")
    before, after = found.loss
    grid.add_row(
        "loss", f"{before:.6g} in float32, {after:.6g}, error {error(row.loss_error)}"
    )
    lost = f", {percent(row.nonfinite)} not finite" if row.nonfinite else ""
    grid.add_row("gradients", f"error {error(row.gradient_error)}{lost}")
    grid.add_row("stored", _cost(row))
    return grid


def _cost(row: Setting) -> str:
    stored = "unknown" if row.stored is None else size(row.stored) or "nothing"
    low = (
        ""
        if row.low_share is None
        else f", {percent(row.low_share)} of products in half"
    )
    return f"{stored} for the backward pass{low}"


# The headers of the columns, and whether a narrow terminal has them.
_COLUMNS = (
    ("\nmodule, the worst first", True),
    ("own\nfwd", True),
    ("own\nbwd", True),
    ("own\nparam", True),
    ("total\nfwd", True),
    ("total\nbwd", False),
    ("total\nparam", False),
    ("flush\nin f16", True),
    ("max\nvalue", True),
    ("max\ngrad", False),
)
_NAME = 36  # the width for names, below which columns are left out


@dataclasses.dataclass
class _Modules:
    """The table. Names of modules are shortened before figures are."""

    found: Comparison
    top: int

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        modules = self.found.modules[: self.top]
        rows = [[header for header, _ in _COLUMNS], *map(_cells, modules)]
        wide = self._room(rows, options.max_width) >= _NAME
        if not wide:
            keep = [shown for _, shown in _COLUMNS]
            rows = [pick(row, keep) for row in rows]
        room = max(self._room(rows, options.max_width), 12)
        table = Table(
            box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False
        )
        for i, header in enumerate(rows[0]):
            justify: Any = "right" if i else "left"
            table.add_column(header, justify=justify, no_wrap=True)
        for module, row in zip(modules, rows[1:], strict=True):
            style = "red" if module.harm > self.found.threshold else ""
            name = row[0] if len(row[0]) <= room else "…" + row[0][1 - room :]
            table.add_row(*map(Text, (name, *row[1:])), style=style)
        yield table
        if not wide:
            yield Text("A wider terminal has more columns.", style="dim")
        more = len(self.found.modules) - self.top
        if more > 0:
            yield Text(f"... and {more} with less harm", style="dim")

    def _room(self, rows: list[list[str]], width: int) -> int:
        """Returns the width that is left for names."""
        figures = list(zip(*(row[1:] for row in rows), strict=True))
        cells = [
            [line for cell in column for line in cell.split("\n")] for column in figures
        ]
        return width - sum(max(map(len, column)) + 2 for column in cells) - 2


def _cells(module: ModuleErrors) -> list[str]:
    name = module.path or OUTSIDE
    if module.iterations:
        worst = max(range(len(module.iterations)), key=module.iterations.__getitem__)
        name += f"  loop x{len(module.iterations)}, worst {worst}"
    largest = module.largest_value, module.largest_gradient
    return [
        name,
        *(error(value) for errors in (module.own, module.total) for value in errors),
        percent(module.flushed) if module.flushed else "",
        *(f"{value:.2g}" if value else "" for value in largest),
    ]


def error(value: float | None) -> str:
    """Returns a relative error in a few characters."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"


def percent(value: float) -> str:
    """Returns a share, never rounded to none or to all."""
    if value in (0, 1):
        return f"{value:.0%}"
    return "<0.1%" if value < 0.001 else f"{100 * min(value, 0.999):.3g}%"


def _remedies(found: Comparison) -> Iterator[RenderableType]:
    if not found.remedies:
        if all(module.harm <= found.threshold for module in found.modules):
            yield Text(f"\nNo module adds more than {error(found.threshold)}.", "green")
        return
    before = found.settings[0]
    yield _settings("\nremedies, tried", (before, *found.remedies))
    helpful = [
        remedy.policy
        for remedy in found.remedies
        if remedy.gradient_error < _HELPS * before.gradient_error
    ]
    if helpful:
        yield Text("\nAdd to amp_policy, as flax_amp.default_amp_policy | {...}:")
        yield from (Text(f"  {line}", style="bold") for line in helpful)
    else:
        yield Text("\nNone of them helps: the gradients stay as wrong as they are.")


def _settings(title: str, rows: tuple[Setting, ...]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(title, no_wrap=True, overflow="ellipsis")
    for header in (
        "error of\nloss",
        "\ngradients",
        "not\nfinite",
        "\nstored",
        "in\nhalf",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.name),
            error(row.loss_error),
            error(row.gradient_error),
            percent(row.nonfinite) if row.nonfinite else "",
            "" if row.stored is None else size(row.stored),
            "" if row.low_share is None else percent(row.low_share),
        )
    return Padding(table, (1, 0, 0, 0))
