"""What the results of all tools share: text for a terminal, plain data, a page."""

import dataclasses
import html
import json
import math
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_TEMPLATE = Path(__file__).with_name("page.html")
_HEIGHT = 640  # of the frame in a notebook


class Line(NamedTuple):
    """A line of a report, and its style on a terminal with colors, as rich names it."""

    text: str
    style: str = ""


class Report:
    """The result of a tool: `print` it, or hand `to_dict()` to `json.dump`."""

    name: str  # of the user's function

    def _lines(self) -> Iterator[str]:
        raise NotImplementedError

    def _summary(self) -> str:
        """What the `repr` tells."""
        raise NotImplementedError

    def report(self) -> str:
        """Returns the report as text."""
        return "\n".join(line.rstrip() for line in self._lines())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, strings and numbers, for `json.dump`.

        JSON has no infinity and no NaN: they are the strings `"inf"`, `"-inf"` and
        `"nan"`, which `float` reads.
        """
        return fields(self)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} of {self.name}: {self._summary()}; print it to read it>"


# --- plain data ----------------------------------------------------------------------


def fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as plain data."""
    names = (field.name for field in dataclasses.fields(value))
    return {name: plain(getattr(value, name)) for name in names}


def plain(value: Any) -> Any:
    """Returns dicts, lists, strings and numbers that JSON has."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return fields(value)
    if hasattr(value, "_asdict"):  # a NamedTuple
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [*map(plain, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- text ----------------------------------------------------------------------------


def report_width() -> int:
    """Returns how many columns a report as text takes."""
    return min(max(shutil.get_terminal_size((100, 40)).columns, 80), 120)


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> Iterator[str]:
    """Yields the lines of a text, `first` before the first one, `rest` before others.

    An indentation of a line stays.
    """
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=first + indent,
            subsequent_indent=rest,
            break_on_hyphens=False,
        ) or [""]
        first = rest


def table(
    rows: Iterable[Sequence[str]], width: int, left: Collection[int] = (0,)
) -> Iterator[str]:
    """Yields the lines of a table.

    Args:
      rows: the cells of each row, those of the headers too.
      width: how many columns of characters it may take.
      left: the columns that stand at the left side of theirs. They are shortened, the
        widest first, if there is no room: no figure is dropped.
    """
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # One character at a time: columns that are both too wide end up equally narrow.
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(left, key=widths.__getitem__)
        widths[widest] -= 1
        if not widths[widest]:
            break
    for row in rows:
        cells = (
            _cut(cell, room, i).ljust(room) if i in left else cell.rjust(room)
            for i, (cell, room) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _cut(cell: str, room: int, column: int) -> str:
    """Shortens a cell: names keep their end, where they differ, and all else the start.

    The indentation of a name stays, too.
    """
    if len(cell) <= room:
        return cell
    if column:
        return cell[: room - 1] + "…"
    name = cell.lstrip()
    indent = len(cell) - len(name)
    return cell[:indent] + shortened(name, max(room - indent, 1))


def shortened(name: str, room: int) -> str:
    """Returns the end of a name that is too long."""
    return name if len(name) <= room else "…" + name[len(name) + 1 - room :]


def amount(number: float) -> str:
    """Returns a number with three digits and a prefix of the SI: `262 G`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            break
        number /= 1000
    return f"{number:.3g} {prefix}"


def size(count: int) -> str:
    """Returns a number of bytes: `1.28 GB`."""
    return f"{amount(count)}B" if count else ""


# --- the page ------------------------------------------------------------------------


def page(title: str, data: dict[str, Any]) -> str:
    """Returns one page that needs nothing else: `page.html` with plain data in it."""
    # A `</script>` in a string would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", text)


def frame(page: str) -> str:
    """Returns a page in a frame, so that its styles leave a notebook alone."""
    source = html.escape(page, quote=True)
    style = f'width="100%" height="{_HEIGHT}" style="border: 0"'
    return f'<iframe srcdoc="{source}" {style}></iframe>'
