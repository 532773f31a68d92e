"""The base class of all reports, their table, and the words for numbers."""

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# How many characters a table needs to the right of its first column: the widest table,
# of the roundings in `compare_precision`, needs 56.
_WIDTH_BESIDE_NAMES = 58

# A part of a report. A string stays one line, and blocks of other types are wrapped.
Block = str | Text | Table | Padding


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Report:
    """The result of a tool, for `print`, or with `to_dict()` for `json.dump`."""

    name: str  #: the name of the user's function
    notes: tuple[str, ...] = ()  #: sentences that limit the statements of the report

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        raise NotImplementedError

    def _show(self, only: str | None = None, **options: Any) -> Console:
        """Prints the report, or the part `only`, without reading markup in names."""
        console = Console(markup=False, emoji=False, highlight=False, **options)
        notes = (Text(f"Note: {note}.") for note in self.notes)
        for part in (*self._parts(only), *notes):
            console.print(part, soft_wrap=isinstance(part, str))
        return console

    def _recorded(self, only: str | None = None) -> Console:
        options = dict(file=io.StringIO(), record=True, force_jupyter=False)
        return self._show(only, width=_width(), **options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as dicts, lists, strings and numbers.

        JSON has no infinity and no NaN: both become strings, which `float` reads.
        """
        text = json.dumps(dataclasses.asdict(self))
        return json.loads(text, parse_constant=str)

    def _text(self, only: str | None = None) -> str:
        lines = self._recorded(only).export_text().splitlines()
        return "\n".join(line.rstrip() for line in lines)

    __str__ = _text

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}: print it to read it>"

    def _repr_html_(self) -> str:
        return self._recorded().export_html(
            inline_styles=True, code_format="<pre>{code}</pre>"
        )


def _width() -> int:
    """Returns the width of the terminal in characters, limited to 80 up to 120."""
    # The exact numbers do not matter: with 80, the columns beside the names have room,
    # and lines of more than 120 characters are hard to read. Where the size of the
    # terminal is unknown, the width is 100.
    return min(max(shutil.get_terminal_size((100, 40)).columns, 80), 120)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = ()
) -> Table:
    """Returns a table.

    Column 0 and the columns in `left` are left-aligned. Where there is no room, names
    in column 0 are cut, and texts in the columns of `left` are broken into lines.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    # A long name is cut: on two lines, the name would look like two modules.
    width = _width() - _WIDTH_BESIDE_NAMES
    made.add_column(headers[0], no_wrap=True, max_width=width)
    for i, header in enumerate(headers[1:], 1):
        justify: Any = "left" if i in left else "right"
        made.add_column(header, justify=justify, no_wrap=i not in left, overflow="fold")
    for cells in rows:
        made.add_row(*map(Text, cells))
    return made


# --- words ---------------------------------------------------------------------------


def amount(number: float, unit: str) -> str:
    """Returns a number with three digits and a prefix, `262 GFLOP`, and "" for 0."""
    if not number:
        return ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":  # 999.5 would be written as `1e+03`
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}".rstrip()


def percent(share: float | None) -> str:
    """Returns a share as text, `100 %` only for the whole, and "" for `None`."""
    if share is None:
        return ""
    shown = 100 if share == 1 else min(100 * share, 99.9)
    return f"{shown:.3g} %"


def plural(count: int, noun: str) -> str:
    """Returns `1 step`, or `2 steps`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def short(dtype: str) -> str:
    """Returns a dtype as JAX writes it in jaxprs, `bf16` for `bfloat16`."""
    return re.sub("^(bf|f|u|i|c)[a-z]*", r"\1", dtype)


def is_half(dtype: str) -> bool:
    """Whether a dtype is a float of fewer than four bytes."""
    # `float64` begins with `float6`, the name of floats of six bits with `float6_`.
    return dtype.startswith(("bfloat16", "float16", "float8", "float6_", "float4"))


def policy_text(
    keys: Sequence[str], lines: Sequence[str], own: bool, value: str = "jnp.float32"
) -> Iterator[str]:
    """Yields the code of a policy with a value for some modules and lines of code.

    Args:
      keys: the modules, as keys of the policy.
      lines: the lines of code outside of modules.
      own: whether the user has a policy, which the keys are then added to.
      value: the code of the value that the keys and the lines get.
    """
    if keys:
        entries = ", ".join(f'"{key}": {value}' for key in keys)
        base = "your_policy" if own else "flax_amp.default_amp_policy"
        yield f"  amp_policy={base} | {{{entries}}}"
    if lines and value == "jnp.float32":
        yield f"  flax_amp.amp_stop around {', '.join(lines)}"
    elif lines:
        scope = f"  a jax.named_scope around {', '.join(lines)}"
        yield f"{scope}, with the value {value} in the policy"
