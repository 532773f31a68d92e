"""The report in a terminal: totals, problems, and a tree of modules.

Twelve equal layers are one line, `Block_0..11  x12`, with the sums of all of them.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

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
from flax_amp.debug._report import Line, amount, size, table, wrapped

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
_NAME = 0.32  # the share of the width that a name may take with steps of its path
_WIDE = 100  # columns from which on there is room for what is kept in float32
# What has these reasons has nothing to round.
_NO_DATA = (ReasonKind.LEAVES_ONLY, ReasonKind.NO_OPERAND)


def render(
    found: Explanation,
    width: int,
    *,
    depth: int | None = None,
    only: str | None = None,
) -> Iterator[Line]:
    """Yields the lines of the report; `depth` and `only` as in `Explanation.report`."""
    if only not in (None, *ONLY):
        expected = f"{' or '.join(map(repr, ONLY))}, or None"
        raise ValueError(f"report: got only={only!r}; expected {expected}.")
    if depth is not None:
        check_count(depth, f"report: got {depth=}", "of levels", least=0)
    if only == "equations":
        yield from _equations(found.root)
        return
    yield from _header(found, width)
    yield from _problems(found, width)
    if only is None:
        yield Line("")
        yield from _tree(found, depth, width)
    for note in found.notes:
        yield from (Line(x, "dim") for x in wrapped(f"Note: {note}.", width))


def _header(found: Explanation, width: int) -> Iterator[Line]:
    totals, dtype = found.totals, short(found.compute_dtype)
    rows = {found.name: f"in {found.compute_dtype}", "products": "none"}
    if totals.flops:
        rows["products"] = (
            f"{amount(totals.flops)}FLOP forward, {percent(totals)} in half precision"
        )
    rows["casts"] = (
        f"{totals.casts_down:,} to {dtype}, {totals.casts_up:,} to f32, "
        f"in a program of {totals.equations:,} equations"
    )
    if found.stored_without_recompute is not None:
        without = size(found.stored_without_recompute.total()) or "nothing"
        rows["stored"] = (
            f"{_by_dtype(totals.stored)}, for the gradient of the first argument; "
            f"{without} if nothing were recomputed"
        )
    room = max(map(len, rows)) + 2
    for label, text in rows.items():
        lines = wrapped(text, width, label.ljust(room), " " * room)
        yield from (Line(x, "bold" if label == found.name else "") for x in lines)


def _by_dtype(stored: Counter[str]) -> str:
    shown = (f"{size(n)} {short(d)}" for d, n in stored.most_common(4) if n)
    return " + ".join(shown) or "nothing"


def _problems(found: Explanation, width: int) -> Iterator[Line]:
    count = len(found.problems)
    yield Line("")
    if not count:
        yield Line("No problems found.", "green")
        return
    yield Line(f"{count} problem{'s' * (count > 1)}", "bold red")
    for problem in found.problems:
        text = _problem(problem, found.totals)
        yield from (Line(x, "yellow") for x in wrapped(text, width, "  ", "  "))
        if problem.paths:
            inside = "" if problem.paths == ("",) else "in "
            source = f", {problem.source}" if problem.source else ""
            text = f"  {inside}{where(problem)}{source}"
            yield from (Line(x, "dim") for x in wrapped(text, width, "  ", "  "))


def _problem(problem: Problem, totals: Totals) -> str:
    count = f" x{problem.count}" if problem.count else ""
    share = ""
    if problem.flops and totals.flops:
        part = problem.flops / totals.flops
        share = f", {f'{part:.0%}' if part >= 0.01 else '<1%'} of FLOPs"
    return f"{problem.kind}{count}{share}: {problem.message}"


def _equations(root: Module) -> Iterator[Line]:
    """Yields what each equation computes in and what it gives, module by module."""
    rows, modules = [["equation", "computes in", "result"]], [root]
    while modules:
        module = modules.pop(0)
        modules = [*module.children.values(), *modules]
        if module.equations:
            rows.append([module.path or module.name, "", ""])
        for row in module.equations:
            rows.append([f"  {row.primitive}", short(row.computes_in), row.result])
    widest = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    for text in table(rows, widest, left=(0, 1, 2)):
        yield Line(text, "" if text.startswith(" ") else "bold")


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
    label, modules = _behind_steps(modules)
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


def _tree(found: Explanation, depth: int | None, width: int) -> Iterator[Line]:
    root = found.root
    shown = lines([root], 1 if depth is None else depth)
    for deeper in itertools.count(2) if depth is None else ():
        more = lines([root], deeper)
        if len(more) == len(shown) or len(more) > _LINES:
            break
        shown = more
    has_stored, is_wide = found.stored_without_recompute is not None, width >= _WIDE
    dtype = short(found.compute_dtype)
    above = ["", "forward", "in", "casts to"]
    headers = ["module", "FLOP", "half", f"{dtype}/f32"]
    if has_stored:
        above += ["stored", "stored"]
        headers += ["half", "other"]
    left = [0]
    if is_wide:
        left.append(len(headers))
        above, headers = [*above, "kept in"], [*headers, "float32"]
    rows = [_cells(line, has_stored, is_wide, width) for line in shown]
    lacking = (line.totals.low_flops < line.totals.flops for line in shown)
    styles = ["bold", "bold", *("red" if lacks else "" for lacks in lacking)]
    yield from map(Line, table([above, headers, *rows], width, left), styles)
    if not is_wide:
        yield Line("The column 'kept in float32' takes a wider terminal.", "dim")


def _cells(branch: Branch, has_stored: bool, is_wide: bool, width: int) -> list[str]:
    totals = branch.totals
    name = "  " * branch.depth + branch.label
    if len(branch.label) > _NAME * width:  # without mere steps of the path
        name = re.sub(r"\S+/", "…/", name)
    cells = [
        name,
        amount(totals.flops) if totals.flops else "",
        percent(totals),
        f"{totals.casts_down}/{totals.casts_up}",
    ]
    if has_stored:
        half = sum(n for d, n in totals.stored.items() if is_half(d))
        cells += [size(half), size(totals.stored.total() - half)]
    return cells + [_kept_in_float32(branch.equations)] * is_wide


def _kept_in_float32(equations: Sequence[Equation]) -> str:
    """Names the primitives whose results stay in float32 by a rule."""
    names = Counter(
        e.primitive
        for e in equations
        if e.kept == "float32" and e.kept_by not in _NO_DATA
    )
    return " ".join(name for name, _ in names.most_common(3))


def percent(totals: Totals) -> str:
    """Returns the share of products in half precision, never rounded up to all."""
    if totals.low_share is None:
        return ""
    share = 100 * totals.low_share
    return f"{share:.0f} %" if share in (0, 100) else f"{min(share, 99.9):.3g} %"
