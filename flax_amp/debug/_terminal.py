"""The report in a terminal: totals, problems, and a tree of modules.

Twelve equal layers are one line, `Block_0..11  x12`, with the sums of all of them.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._rewriter.fp8_rule import NOT_IN_FP8
from flax_amp._rewriter.plan import ReasonKind
from flax_amp._training.arguments import check_count
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
from flax_amp.debug._report import Part, amount, bytes_text, table

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
# What has these reasons has nothing to round.
_NO_DATA = (ReasonKind.LEAVES_ONLY, ReasonKind.NO_OPERAND)


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
    parts: list[Part] = [_header(found), "", *_problems(found)]
    if only is None:
        parts += ["", _tree(found, depth)]
    return parts + [Text(f"Note: {note}.", style="dim") for note in found.notes]


def totals_of(found: Explanation) -> dict[str, str]:
    """Returns the figures of the whole function as words, by what they are about."""
    totals, dtype = found.totals, short(found.compute_dtype)
    rows = {"products": "none"}
    if totals.flops:
        rows["products"] = (
            f"{amount(totals.flops)}FLOP forward, {_share(totals)} in half precision"
        )
    if in_fp8 := _in_fp8(found):
        rows["in fp8"] = in_fp8
    rows["casts"] = (
        f"{totals.casts_down:,} to {dtype}, {totals.casts_up:,} to f32, "
        f"in a program of {totals.equations:,} equations"
    )
    if found.stored_without_recompute is not None:
        without = bytes_text(found.stored_without_recompute.total()) or "nothing"
        rows["stored"] = (
            f"{by_dtype(totals.stored)}, for the gradient of the first argument; "
            f"{without} if nothing were recomputed"
        )
    return rows


def _in_fp8(found: Explanation) -> str:
    """Returns the share of products in fp8, and why others are not, if any is asked."""
    rows = [row for row in found.equations if row.flops]
    flops = sum(row.flops for row in rows if row.is_in_fp8)
    others = Counter(
        row.reason.removeprefix(NOT_IN_FP8)
        for row in rows
        if row.reason.startswith(NOT_IN_FP8)
    )
    if not flops and not others:
        return ""
    reasons = "; ".join(f"{why} ({n})" for why, n in others.most_common())
    share = f"{flops / found.totals.flops:.0%} of them"
    return f"{share}, not: {reasons}" if reasons else share


def by_dtype(stored: Counter[str]) -> str:
    """Returns numbers of bytes as words, the largest first."""
    shown = (f"{bytes_text(n)} {short(d)}" for d, n in stored.most_common(4) if n)
    return " + ".join(shown) or "nothing"


def _header(found: Explanation) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(Text(found.name), f"in {found.compute_dtype}", style="bold")
    for label, text in totals_of(found).items():
        grid.add_row(label, text)
    return grid


def _problems(found: Explanation) -> Iterator[Part]:
    yield Text(headline(found), "bold red" if found.problems else "green")
    for problem in found.problems:
        title, place = as_words(problem, found.totals)
        yield Padding(Text(f"{title}: {problem.message}", "yellow"), (0, 0, 0, 2))
        if place:
            yield Padding(Text(place, "dim"), (0, 0, 0, 4))


def headline(found: Explanation) -> str:
    """Returns how many problems there are."""
    count = len(found.problems)
    return f"{count} problem{'s' * (count > 1)}" if count else "No problems found."


def as_words(problem: Problem, totals: Totals) -> tuple[str, str]:
    """Returns the title of a problem, and where it is."""
    title = problem.kind + (f" x{problem.count}" if problem.count else "")
    if problem.flops and totals.flops:
        part = problem.flops / totals.flops
        title += f", {f'{part:.0%}' if part >= 0.01 else '<1%'} of FLOPs"
    inside = "in " if problem.paths and problem.paths != ("",) else ""
    place = f"{inside}{where(problem)}" if problem.paths else ""
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
class Branch:
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
    modules: Sequence[Module], depth: int, above: Branch | None = None
) -> list[Branch]:
    """Returns the lines of equal modules and of what is in them.

    Args:
      modules: the modules, siblings or in equal places of equal siblings.
      depth: how many levels to go down.
      above: the line of what they stand in.
    """
    label = _common_name(modules)
    every = [equation for module in modules for equation in module.walk()]
    times = min((equation.times for equation in every), default=1)
    copies = len(modules) // (above.copies if above else 1)
    label += f"  x{copies}" if copies > 1 else ""
    if above and times > above.times > 0:
        label += f"  loop x{times // above.times}"
    line = Branch(label, above.depth + 1 if above else 0, every, len(modules), times)
    if line.depth >= depth:
        return [line]
    inside = [lines(members, depth, line) for members in _equal_children(modules)]
    return [line, *_itself(modules, line.depth + 1), *itertools.chain(*inside)]


def _itself(modules: Sequence[Module], depth: int) -> list[Branch]:
    """Returns the line of what modules compute beside the modules in them, if any."""
    own = [equation for module in modules for equation in module.equations]
    sums = total(own)
    has_figures = sums.flops or sums.casts_down or sums.casts_up
    if not (modules[0].children and has_figures):
        return []
    return [Branch("(itself)", depth, own)]


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


def _tree(found: Explanation, depth: int | None) -> Table:
    root = found.root
    shown = lines([root], 1 if depth is None else depth)
    for deeper in itertools.count(2) if depth is None else ():
        more = lines([root], deeper)
        if len(more) == len(shown) or len(more) > _LINES:
            break
        shown = more
    has_stored = found.stored_without_recompute is not None
    headers = ["\nmodule", "forward\nFLOP", "in\nhalf"]
    headers.append(f"casts to\n{short(found.compute_dtype)}/f32")
    headers += ["stored\nhalf", "stored\nother"] * has_stored
    rows = [_cells(line, has_stored) for line in shown]
    lacking = (line.totals.low_flops < line.totals.flops for line in shown)
    styles = ["red" if lacks else "" for lacks in lacking]
    left = (len(headers),)
    return table([*headers, "kept in\nfloat32"], rows, left, styles)


def _cells(branch: Branch, has_stored: bool) -> list[str]:
    totals = branch.totals
    cells = [
        "  " * branch.depth + branch.label,
        amount(totals.flops) if totals.flops else "",
        _share(totals),
        f"{totals.casts_down}/{totals.casts_up}",
    ]
    if has_stored:
        cells += map(bytes_text, halves_and_others(totals.stored))
    return [*cells, _kept_in_float32(branch.equations)]


def halves_and_others(stored: Counter[str]) -> tuple[int, int]:
    """Returns the bytes in half precision, and all others."""
    half = sum(n for dtype, n in stored.items() if is_half(dtype))
    return half, stored.total() - half


def _kept_in_float32(equations: Sequence[Equation]) -> str:
    """Names the primitives whose results stay in float32 by a rule."""
    names = Counter(
        e.primitive
        for e in equations
        if e.kept == "float32" and e.kept_by not in _NO_DATA
    )
    return " ".join(name for name, _ in names.most_common(3))


def _share(totals: Totals) -> str:
    return percent(totals.low_flops, totals.flops)


def percent(part: int, whole: int) -> str:
    """Returns a share of FLOPs, never rounded up to all; nothing if there are none."""
    if part in (0, whole):
        return f"{part / whole:.0%}".replace("%", " %") if whole else ""
    return f"{min(100 * part / whole, 99.9):.3g} %"
