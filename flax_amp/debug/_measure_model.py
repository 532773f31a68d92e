"""What `measure` found. Data only, and its table."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flax_amp.debug._terminal import size, text_of

_NAME = 12  # characters of the name of a program that the table has room for
_ON_A_CPU = (
    "This is a CPU, on which XLA emulates half precision: step times, compile times, "
    "memory and bytes tell nothing about mixed precision on a GPU or a TPU. Only what "
    "tracing and lowering take is nearly the same everywhere."
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one program takes. `None` where that is not known.

    Attributes:
      name: its dtype, or "beside".
      trace_s: processor seconds of tracing and lowering, the least of two times. In a
        training step, also that in float32, they are with those of `amp`.
      compile_s: seconds of compiling.
      step_ms: milliseconds from the call to the end of a step, the least of all turns.
      temp_bytes: temporary memory on each device, beside arguments and results.
      accessed_bytes: XLA's estimate of the bytes that a step reads and writes. It
        counts the body of a loop once.
    """

    name: str
    trace_s: float
    compile_s: float
    step_ms: float | None
    temp_bytes: int | None
    accessed_bytes: int | None

    def over(self, other: "Figures") -> dict[str, float | None]:
        """Returns the ratio of each figure to that of another program."""
        pairs = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)[1:]
        }
        return {name: x / y if x and y else None for name, (x, y) in pairs.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """What mixed precision takes beside float32. Made by `flax_amp.debug.measure`.

    It prints as a table.

    Attributes:
      name: the name of the function.
      program: what was measured: a training step, or a loss with its gradient.
      platform: that of the devices, such as "gpu".
      devices: how many, and of which kind.
      turns: how many steps of each program were timed; 0 if they were only compiled.
      rows: the programs: float32, bfloat16, float16, and what was asked for beside.
      notes: what limits these figures.
    """

    name: str
    program: str
    platform: str
    devices: str
    turns: int
    rows: tuple[Figures, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, strings and numbers, for `json.dump`.

        `to_float32` of each row has the ratios to the row of float32.
        """
        rows = [
            dataclasses.asdict(row) | {"to_float32": row.over(self.rows[0])}
            for row in self.rows
        ]
        return vars(self) | {"rows": rows, "notes": [*self.notes]}

    def render(self) -> RenderableType:
        """Returns the table for a console of rich."""
        how = f"the least of {self.turns} turns" if self.turns else "not run"
        return Group(
            Text(f"{self.name}: {self.program} on {self.devices}, {how}", style="bold"),
            Text(_ON_A_CPU if self.platform == "cpu" else self._meaning()),
            Text(),
            self._table(),
            *(Text(f"Note: {note}.", style="dim") for note in self.notes),
        )

    def _meaning(self) -> str:
        words = {"step_ms": "the time", "temp_bytes": "the temporary memory"}
        parts = []
        for row in self.rows[1:]:
            ratios = row.over(self.rows[0])
            known = [
                f"{ratios[key]:.2f} of {words[key]}" for key in words if ratios[key]
            ]
            if known:
                parts.append(f"{row.name} takes {' and '.join(known)}")
        return f"Beside float32, {'; '.join(parts)}." if parts else ""

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("", max_width=_NAME, no_wrap=True, overflow="ellipsis")
        headers = "trace +\nlower, s", "\ncompile, s", "\nstep, ms"
        for header in (*headers, "temporary\nmemory", "bytes\naccessed"):
            table.add_column(header, justify="center", no_wrap=True)
        columns = zip(*map(self._cells, self.rows), strict=True)
        cells = zip(*map(_aligned, columns), strict=True)
        for row, line in zip(self.rows, cells, strict=True):
            table.add_row(row.name, *line)
        return table

    def _cells(self, row: Figures) -> Iterator[tuple[str, str]]:
        """Yields each figure as text, with its ratio to that of float32."""
        is_first = row is self.rows[0]
        for key, ratio in row.over(self.rows[0]).items():
            value = getattr(row, key)
            show = size if key.endswith("bytes") else _seconds
            text = "-" if value is None else show(value) or "0"
            yield text, "" if is_first or ratio is None else f"x{ratio:.2f}"

    def __str__(self) -> str:
        return text_of(self.render())

    def __repr__(self) -> str:
        return f"<Measurement of {self.name} on {self.devices}; print it to read it>"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _aligned(column: tuple[tuple[str, str], ...]) -> list[str]:
    """Returns cells in which values and ratios stand below each other."""
    widths = [max(map(len, part)) for part in zip(*column, strict=True)]
    return [f"{x:>{widths[0]}} {y:<{widths[1]}}" for x, y in column]
