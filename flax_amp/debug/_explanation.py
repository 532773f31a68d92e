"""The result of `explain`, as text and as a page: totals, problems, a tree of modules.

Twelve equal layers are one line of text, `Block_0..11  x12`, with the sums of all of
them.
"""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._training.arguments import check_count
from flax_amp.debug._model import (
    NOT_IN_FP8,
    Equation,
    Module,
    Problem,
    Totals,
    is_half,
    short,
    total,
    without_numbers,
)
from flax_amp.debug._report import (
    Part,
    Report,
    amount,
    as_text,
    bytes_text,
    percent,
    plural,
    table,
)

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
_COSTLY = 0.05  # the share of all FLOPs from which on a page unfolds a module


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """What mixed precision does to a function, and why. Made by `flax_amp.explain`.

    It prints as a report, and shows itself as a page in a notebook.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      root: the modules and their equations.
      problems: what a person has to act on, the most important first.
      stored: the bytes that the backward pass stores, by dtype; `None` if the function
        has no derivative, or none was asked for.
      notes: what limits these figures.
    """

    name: str
    compute_dtype: str
    root: Module
    problems: tuple[Problem, ...]
    stored: Counter[str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def equations(self) -> list[Equation]:
        """All equations, module by module."""
        return list(self.root.walk())

    @property
    def totals(self) -> Totals:
        """The sums over all equations."""
        return self.root.totals

    def report(self, *, depth: int | None = None, only: str | None = None) -> str:
        """Returns the report as text.

        Args:
          depth: how many levels of modules to show. `None`: as many as fit a screen.
          only: `"problems"` to leave out the modules; `"equations"` for a list of all
            equations, with what each computes in and what becomes of its result.

        Raises:
          ValueError: if `only` is something else, or `depth` is negative.
        """
        return as_text(render(self, depth=depth, only=only))

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        return found | {"totals": self.totals.to_dict(), "modules": found.pop("root")}

    def to_html(self) -> str:
        """Returns one page that needs nothing else, in which modules can be folded."""
        return page(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def _summary(self) -> str:
        return f"{self.totals.equations} equations"


# --- text ----------------------------------------------------------------------------


def render(
    found: Explanation, *, depth: int | None = None, only: str | None = None
) -> list[Part]:
    """Returns the parts of the report; `depth` and `only` are those of `report`."""
    if only not in (None, *ONLY):
        expected = f"{' or '.join(map(repr, ONLY))}, or None"
        raise ValueError(f"report: got only={only!r}; expected {expected}.")
    if depth is not None:
        check_count(depth, f"report: got {depth=}", "of levels", least=0)
    if only == "equations":
        return [_equations(found.root)]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(Text(found.name), f"in {found.compute_dtype}", style="bold")
    for label, text in _totals(found).items():
        grid.add_row(label, text)
    parts: list[Part] = [grid, "", *_problems(found)]
    if only is None:
        parts += ["", _tree(found, depth)]
    return parts + [Text(f"Note: {note}.", style="dim") for note in found.notes]


def _totals(found: Explanation) -> dict[str, str]:
    """Returns the figures of the whole function as words, by what they are about."""
    totals, dtype = found.totals, short(found.compute_dtype)
    rows = {"products": "none"}
    if totals.flops:
        share = percent(totals.low_flops, totals.flops)
        flops = f"{amount(totals.flops)}FLOP forward"
        rows["products"] = f"{flops}, {share} in half precision"
    if in_fp8 := _in_fp8(found):
        rows["in fp8"] = in_fp8
    rows["casts"] = (
        f"{totals.casts_down:,} to {dtype}, {totals.casts_up:,} to f32, "
        f"in a program of {totals.equations:,} equations"
    )
    if found.stored is not None:
        stored = _by_dtype(found.stored)
        rows["stored"] = f"{stored}, for the gradient of the first argument"
    return rows


def _in_fp8(found: Explanation) -> str:
    """Returns the share of products in fp8, and why others are not, if any is asked."""
    rows = [row for row in found.equations if row.flops]
    flops = sum(row.flops for row in rows if row.is_in_fp8)
    reasons = (row.reason for row in rows if row.reason.startswith(NOT_IN_FP8))
    others = Counter(reason.removeprefix(NOT_IN_FP8) for reason in reasons)
    if not flops and not others:
        return ""
    why = "; ".join(f"{reason} ({n})" for reason, n in others.most_common())
    share = f"{flops / found.totals.flops:.0%} of them"
    return f"{share}, not: {why}" if why else share


def _by_dtype(stored: Counter[str]) -> str:
    """Returns numbers of bytes as words, the largest first."""
    shown = (f"{bytes_text(n)} {short(d)}" for d, n in stored.most_common(4) if n)
    return " + ".join(shown) or "nothing"


def _problems(found: Explanation) -> Iterator[Part]:
    yield Text(_headline(found), "bold red" if found.problems else "green")
    for problem in found.problems:
        title, place = _as_words(problem, found.totals)
        yield Padding(Text(f"{title}: {problem.message}", "yellow"), (0, 0, 0, 2))
        if place:
            yield Padding(Text(place, "dim"), (0, 0, 0, 4))


def _headline(found: Explanation) -> str:
    count = len(found.problems)
    return plural(count, "problem") if count else "No problems found."


def _as_words(problem: Problem, totals: Totals) -> tuple[str, str]:
    """Returns the title of a problem, and where it is."""
    title = problem.kind + (f" x{problem.count}" if problem.count else "")
    if problem.flops and totals.flops:
        part = problem.flops / totals.flops
        title += f", {f'{part:.0%}' if part >= 0.01 else '<1%'} of FLOPs"
    inside = "in " if problem.paths and problem.paths != ("",) else ""
    place = f"{inside}{problem.where}" if problem.paths else ""
    return title, ", ".join(filter(None, (place, problem.source)))


def _equations(root: Module) -> Table:
    """Returns what each equation computes in and gives, module by module."""
    rows, modules = [], [root]
    while modules:
        module = modules.pop(0)
        modules = [*module.children.values(), *modules]
        if module.equations:
            rows.append([module.path or module.name, "", ""])
        for row in module.equations:
            rows.append([f"  {row.primitive}", short(row.computes_in), row.result])
    styles = ["" if row[0].startswith(" ") else "bold" for row in rows]
    return table(["equation", "computes in", "result"], rows, (1, 2), styles)


# --- the tree ------------------------------------------------------------------------


@dataclasses.dataclass
class _Branch:
    """A line of the tree: equal modules, or the equations of a module itself."""

    label: str
    depth: int
    equations: list[Equation]
    copies: int = 1
    times: int = 1

    @functools.cached_property
    def totals(self) -> Totals:
        return total(self.equations)


def _lines(
    modules: Sequence[Module], depth: int, above: _Branch | None = None
) -> list[_Branch]:
    """Returns the lines of equal modules and of what is in them.

    The modules are siblings, or in equal places of equal siblings; `above` is the line
    of what they stand in.
    """
    label = _common_name(modules)
    every = [equation for module in modules for equation in module.walk()]
    times = min((equation.times for equation in every), default=1)
    copies = len(modules) // (above.copies if above else 1)
    label += f"  x{copies}" if copies > 1 else ""
    if above and times > above.times > 0:
        label += f"  loop x{times // above.times}"
    line = _Branch(label, above.depth + 1 if above else 0, every, len(modules), times)
    if line.depth >= depth:
        return [line]
    own = [equation for module in modules for equation in module.equations]
    sums = total(own)
    has_figures = sums.flops or sums.casts_down or sums.casts_up
    itself = [_Branch("(itself)", line.depth + 1, own)]
    inside = [_lines(members, depth, line) for members in _equal_children(modules)]
    return [
        line,
        *(itself if modules[0].children and has_figures else ()),
        *itertools.chain(*inside),
    ]


def _equal_children(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Yields those of the modules in equal modules that equal each other."""
    groups: dict[Any, list[Module]] = {}
    for children in zip(*(module.children.values() for module in modules), strict=True):
        groups.setdefault(_signature(children[0]), []).extend(children)
    yield from groups.values()


def _signature(module: Module) -> Any:
    """Returns what equal modules have in common."""
    rows = [(e.primitive, e.after, e.flops, e.shape) for e in module.equations]
    children = [_signature(child) for child in module.children.values()]
    return without_numbers(module.name), tuple(rows), tuple(children)


def _common_name(modules: Sequence[Module]) -> str:
    """Returns one name for modules that differ in a number: `Block_0..11`."""
    names = list(dict.fromkeys(module.name for module in modules))
    numbers = [re.findall(r"\d+", name) for name in names]
    if len(names) == 1 or any(len(found) != 1 for found in numbers):
        return without_numbers(names[0]) if len(names) > 1 else names[0]
    values = sorted(int(found[0]) for found in numbers)
    if values == list(range(values[0], values[0] + len(values))):
        span = f"{values[0]}..{values[-1]}"
    else:
        span = ",".join(map(str, values)) if len(values) < 5 else "*"
    return re.sub(r"\d+", span, names[0])


def _tree(found: Explanation, depth: int | None) -> Table:
    root = found.root
    shown = _lines([root], 1 if depth is None else depth)
    for deeper in itertools.count(2) if depth is None else ():
        more = _lines([root], deeper)
        if len(more) == len(shown) or len(more) > _LINES:
            break
        shown = more
    has_stored = found.stored is not None
    headers = ["\nmodule", "forward\nFLOP", "in\nhalf"]
    headers.append(f"casts to\n{short(found.compute_dtype)}/f32")
    headers += ["stored\nhalf", "stored\nother"] * has_stored
    rows = [_cells(line, has_stored) for line in shown]
    lacking = (line.totals.low_flops < line.totals.flops for line in shown)
    styles = ["red" if lacks else "" for lacks in lacking]
    left = (len(headers),)
    return table([*headers, "stays in\nfloat32"], rows, left, styles)


def _cells(line: _Branch, has_stored: bool) -> list[str]:
    totals = line.totals
    half = sum(n for dtype, n in totals.stored.items() if is_half(dtype))
    stored = map(bytes_text, (half, totals.stored.total() - half))
    stays = Counter(row.primitive for row in line.equations if row.stays_by_rule)
    return [
        "  " * line.depth + line.label,
        amount(totals.flops) if totals.flops else "",
        percent(totals.low_flops, totals.flops),
        f"{totals.casts_down}/{totals.casts_up}",
        *(stored if has_stored else ()),
        " ".join(name for name, _ in stays.most_common(3)),
    ]


# --- the page ------------------------------------------------------------------------

_PAGE = """<!doctype html><meta charset=utf-8><title>{title}</title><style>
.amp {{ color-scheme: light dark; font: 14px/1.6 system-ui, sans-serif }}
.amp details, .amp p {{ margin: 0 0 0 1em; overflow-wrap: anywhere }}
.amp small {{ opacity: .7 }}
</style><div class=amp><h3>{title}</h3>{parts}</div>
"""


def page(found: Explanation) -> str:
    """Returns one page that needs nothing else; a browser folds its modules."""
    parts = [_line(label, text) for label, text in _totals(found).items()]
    parts.append(f"<h4>{_headline(found)}</h4>")
    for problem in found.problems:
        title, place = _as_words(problem, found.totals)
        parts.append(_line(title, f"{problem.message} {place}"))
    parts.append(_folded(found.root, found.totals.flops))
    parts += [_line("Note", note) for note in found.notes]
    title = escape(f"{found.name} in {found.compute_dtype}")
    return _PAGE.format(title=title, parts="".join(parts))


def _line(name: str, text: str) -> str:
    return f"<p><b>{escape(name)}</b> <small>{escape(text)}</small></p>"


def _folded(module: Module, flops: int) -> str:
    """Returns a module that can be folded; `flops` are those of the whole function."""
    inside = [_folded(child, flops) for child in module.children.values()]
    is_costly = not module.path or module.totals.flops > _COSTLY * flops
    is_open = " open" if inside and is_costly else ""
    for row in module.equations:
        dtypes = dict.fromkeys((str(row.before), str(row.after)))
        facts = (_words(row), " => ".join(dtypes), row.reason, row.result, row.source)
        times = f" x{row.times}" if row.times > 1 else ""
        name = f"{row.primitive} {row.shape}{times}"
        inside.append(_line(name, " · ".join(filter(None, facts))))
    head = f"<b>{escape(module.name)}</b> <small>{_words(module.totals)}</small>"
    return f"<details{is_open}><summary>{head}</summary>{''.join(inside)}</details>"


def _words(row: Equation | Totals) -> str:
    """Returns the figures of an equation or a module in one line."""
    share = percent(row.low_flops, row.flops)
    facts = {
        f"{amount(row.flops)}FLOP, {share} in half": row.flops,
        f"casts {row.casts_down}/{row.casts_up}": row.casts_down + row.casts_up,
        f"{_by_dtype(row.stored)} stored": sum(row.stored.values()),
    }
    return ", ".join(text for text, count in facts.items() if count)
