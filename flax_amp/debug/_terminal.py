"""The report in a terminal: totals, problems, and a tree of modules.

Twelve equal layers are one line, `Block_0..11  x12`, with the sums of all of them.
"""

import dataclasses
import io
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._rewriter.plan import LEAVES_ONLY, NO_OPERAND
from flax_amp.debug._model import (
    Equation,
    Explanation,
    Module,
    Problem,
    Totals,
    is_half,
    short,
    total,
)
from flax_amp.debug._problems import fold, where

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
_NAME = 0.32  # the share of the width that a name may take with steps of its path
_WIDE = 100  # columns from which on there is room for what is kept in float32
# What has these reasons has nothing to round.
_NO_DATA = {*map(str, (LEAVES_ONLY, NO_OPERAND))}


def as_text(found: Explanation, *, depth: int | None, only: str | None) -> str:
    """Returns the report without colors."""
    return text_of(render(found, depth=depth, only=only))


def text_of(report: RenderableType) -> str:
    """Returns what a console of rich prints, without colors."""
    # In a notebook, rich would show the report itself and leave the file empty.
    console = Console(
        file=io.StringIO(),
        width=report_width(),
        color_system=None,
        force_jupyter=False,
    )
    console.print(report)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def report_width() -> int:
    """Returns how many columns a report as text takes."""
    return min(max(shutil.get_terminal_size((100, 40)).columns, 80), 120)


def render(
    found: Explanation, *, depth: int | None = None, only: str | None = None
) -> RenderableType:
    """Returns the report for a console of rich; arguments as in `report`."""
    if only not in (None, *ONLY):
        expected = f"{' or '.join(map(repr, ONLY))}, or None"
        raise ValueError(f"report: got only={only!r}; expected {expected}.")
    if depth is not None and (type(depth) is not int or depth < 0):
        raise ValueError(f"report: got {depth=!r}; expected a number of levels.")
    if only == "equations":
        return _equations(found.root)
    parts = [_header(found), *_problems(found)]
    if only is None:
        parts.append(_tree(found, depth))
    parts += [Text(f"Note: {note}.", style="dim") for note in found.notes]
    return Group(*parts)


def _header(found: Explanation) -> RenderableType:
    totals, dtype = found.totals, short(found.compute_dtype)
    share = "none"
    if totals.flops:
        share = (
            f"{amount(totals.flops)}FLOP forward, {percent(totals)} in half precision"
        )
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(found.name, style="bold"), Text(f"in {found.compute_dtype}"))
    grid.add_row("products", share)
    grid.add_row(
        "casts",
        f"{totals.casts_down:,} to {dtype}, {totals.casts_up:,} to f32, "
        f"in a program of {totals.equations:,} equations",
    )
    if found.stored_without_recompute is not None:
        without = size(found.stored_without_recompute.total()) or "nothing"
        grid.add_row(
            "stored",
            f"{_by_dtype(totals.stored)}, for the gradient of the first argument; "
            f"{without} if nothing were recomputed",
        )
    return grid


def _by_dtype(stored: Counter[str]) -> str:
    shown = (f"{size(n)} {short(d)}" for d, n in stored.most_common(4) if n)
    return " + ".join(shown) or "nothing"


def _problems(found: Explanation) -> Iterator[RenderableType]:
    count = len(found.problems)
    if not count:
        yield Text("\nNo problems found.", style="green")
        return
    yield Text(f"\n{count} problem{'s' * (count > 1)}", style="bold red")
    for problem in found.problems:
        yield Padding(_problem(problem, found.totals), (0, 0, 0, 2))


def _problem(problem: Problem, totals: Totals) -> Text:
    text = Text()
    text.append(problem.kind, style="bold yellow")
    if problem.count:
        text.append(f" x{problem.count}")
    if problem.flops and totals.flops:
        share = problem.flops / totals.flops
        text.append(f", {f'{share:.0%}' if share >= 0.01 else '<1%'} of FLOPs")
    text.append(f": {problem.message}")
    if problem.paths:
        inside = "" if problem.paths == ("",) else "in "
        text.append(f"\n  {inside}{where(problem)}")
        text.append(f", {problem.source}" if problem.source else "", style="dim")
    return text


def _equations(root: Module) -> RenderableType:
    """Returns a table of what each equation computes in and of what it gives."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in ("equation", "computes in", "result"):
        table.add_column(header, overflow="fold")
    modules = [root]
    while modules:
        module = modules.pop(0)
        modules = [*module.children.values(), *modules]
        if module.equations:
            table.add_row(Text(module.path or module.name, style="bold"))
        for row in module.equations:
            dtype = short(row.computes_in)
            table.add_row(Text(f"  {row.primitive}"), Text(dtype), Text(row.result))
    return table


# --- the tree ------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    """A line of the tree: equal modules, or the equations of a module itself."""

    label: str
    depth: int
    equations: list[Equation]
    copies: int = 1
    times: int = 1

    @property
    def totals(self) -> Totals:
        return total(self.equations)


def lines(
    modules: Sequence[Module], depth: int, above: Line | None = None
) -> list[Line]:
    """Returns the lines of equal modules and of what is in them.

    Args:
      modules: the modules, siblings or in equal places of equal siblings.
      depth: how many levels to go down.
      above: the line of what they stand in.
    """
    label, modules = _behind_steps(modules)
    every = [equation for module in modules for equation in module.walk()]
    times = min((equation.times for equation in every), default=1)
    copies = len(modules) // (above.copies if above else 1)
    label += f"  x{copies}" if copies > 1 else ""
    if above and times > above.times > 0:
        label += f"  loop x{times // above.times}"
    line = Line(label, above.depth + 1 if above else 0, every, len(modules), times)
    if line.depth >= depth:
        return [line]
    inside = [lines(members, depth, line) for members in _equal_children(modules)]
    return [line, *_itself(modules, line.depth + 1), *itertools.chain(*inside)]


def _behind_steps(modules: Sequence[Module]) -> tuple[str, Sequence[Module]]:
    """Returns the name and the modules of a line.

    A mere step of the path, with nothing but equal modules in it, gets no line.
    """
    label = _common_name(modules)
    while not modules[0].equations:
        inside = [child for module in modules for child in module.children.values()]
        if len(set(map(signature, inside))) != 1:
            break
        modules = inside
        label = f"{label}/{_common_name(modules)}".strip("/")
    return label, modules


def _itself(modules: Sequence[Module], depth: int) -> list[Line]:
    """Returns the line of what modules compute beside the modules in them, if any."""
    own = [equation for module in modules for equation in module.equations]
    sums = total(own)
    has_figures = sums.flops or sums.casts_down or sums.casts_up
    return [Line("(itself)", depth, own)] if modules[0].children and has_figures else []


def _equal_children(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Yields those of the modules in equal modules that equal each other."""
    groups: dict[Any, list[Module]] = {}
    for children in zip(*(module.children.values() for module in modules), strict=True):
        groups.setdefault(signature(children[0]), []).extend(children)
    yield from groups.values()


def signature(module: Module) -> Any:
    """Returns what equal modules have in common."""
    rows = [(e.primitive, e.after, e.flops, e.shape) for e in module.equations]
    children = [signature(child) for child in module.children.values()]
    return fold(module.name), tuple(rows), tuple(children)


def _common_name(modules: Sequence[Module]) -> str:
    """Returns one name for modules that differ in a number: `Block_0..11`."""
    names = list(dict.fromkeys(module.name for module in modules))
    numbers = [re.findall(r"\d+", name) for name in names]
    if len(names) == 1 or any(len(found) != 1 for found in numbers):
        return fold(names[0]) if len(names) > 1 else names[0]
    values = sorted(int(found[0]) for found in numbers)
    if values == list(range(values[0], values[0] + len(values))):
        span = f"{values[0]}..{values[-1]}"
    else:
        span = ",".join(map(str, values)) if len(values) < 5 else "*"
    return re.sub(r"\d+", span, names[0])


def _tree(found: Explanation, depth: int | None) -> RenderableType:
    root = found.root
    if depth is None:
        shown = lines([root], 1)
        for deeper in itertools.count(2):
            more = lines([root], deeper)
            if len(more) == len(shown) or len(more) > _LINES:
                break
            shown = more
    else:
        shown = lines([root], depth)
    has_stored = found.stored_without_recompute is not None
    rows = [_cells(line, has_stored) for line in shown]
    headers = [
        "\nmodule",
        "forward\nFLOP",
        "in\nhalf",
        f"casts to\n{short(found.compute_dtype)}/f32",
    ]
    headers += ["stored\nhalf", "stored\nother"] if has_stored else []
    return Padding(_Tree(headers, rows, shown), (1, 0, 0, 0))


@dataclasses.dataclass
class _Tree:
    """The table. It drops no figures: names of modules are shortened first."""

    headers: list[str]
    rows: list[list[str]]
    lines: list[Line]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        is_wide = options.max_width >= _WIDE
        table = Table(
            box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False
        )
        for i, header in enumerate(self.headers):
            # rich narrows those columns that may wrap, the widest first.
            table.add_column(header, justify="right" if i else "left", no_wrap=bool(i))
        if is_wide:
            table.add_column("kept in\nfloat32", style="dim")
        for line, row in zip(self.lines, self.rows, strict=True):
            totals = line.totals
            style = "red" if totals.low_flops < totals.flops else ""
            name, *figures = row
            if (
                len(name.strip()) > _NAME * options.max_width
            ):  # without mere steps of the path
                name = re.sub(r"\S+/", "…/", name)
            kept = [_kept_in_float32(line.equations)] if is_wide else []
            cells = [name, *figures, *kept]
            texts = (Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells)
            table.add_row(*texts, style=style)
        yield table
        if not is_wide:
            yield Text(
                "The column 'kept in float32' takes a wider terminal.", style="dim"
            )


def _cells(line: Line, has_stored: bool) -> list[str]:
    totals = line.totals
    cells = [
        "  " * line.depth + line.label,
        amount(totals.flops) if totals.flops else "",
        percent(totals),
        f"{totals.casts_down}/{totals.casts_up}",
    ]
    if has_stored:
        half = sum(n for d, n in totals.stored.items() if is_half(d))
        cells += [size(half), size(totals.stored.total() - half)]
    return cells


def _kept_in_float32(equations: Sequence[Equation]) -> str:
    """Names the primitives whose results stay in float32 by a rule."""
    names = Counter(
        e.primitive
        for e in equations
        if e.kept == "float32" and e.kept_by not in _NO_DATA
    )
    return " ".join(name for name, _ in names.most_common(3))


# --- numbers -------------------------------------------------------------------------


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


def percent(totals: Totals) -> str:
    """Returns the share of products in half precision, never rounded up to all."""
    if totals.low_share is None:
        return ""
    share = 100 * totals.low_share
    return f"{share:.0f} %" if share in (0, 100) else f"{min(share, 99.9):.3g} %"
