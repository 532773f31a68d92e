"""The result of `explain`, as text and as a page."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from html import escape

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._training.arguments import check_count, first_of
from flax_amp.debug._problems import Problem, without_numbers
from flax_amp.debug._record import Equation, Totals
from flax_amp.debug._report import (
    Part,
    Report,
    amount,
    as_text,
    bytes_text,
    is_half,
    percent,
    plural,
    short,
    table,
)

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
_NOT_IN_FP8 = "not in fp8: "  # how the reason of such a product begins


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """What mixed precision does to a function, and why. Made by `flax_amp.explain`.

    It prints as a report, and shows itself as a page in a notebook.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      equations: the equations of the function, as they are emitted.
      added: the casts that `amp` puts in, and the arrays that the backward pass stores,
        with their module and line.
      problems: what a person has to act on, the most important first.
      notes: what limits these figures, and what was chosen.
      loss_reads: the half-precision results that the loss is computed from.
      has_stored: whether it is known what the backward pass stores.
    """

    name: str
    compute_dtype: str
    equations: tuple[Equation, ...]
    added: tuple[Equation, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    loss_reads: tuple[str, ...] = ()
    has_stored: bool = False

    @property
    def totals(self) -> Totals:
        """The sums over the whole function."""
        return self.totals_of("")

    @property
    def stored(self) -> Counter[str] | None:
        """The bytes that the backward pass stores, by dtype; `None` if not known."""
        return self.totals.stored if self.has_stored else None

    def totals_of(self, path: str) -> Totals:
        """Returns the sums over a module and the modules inside: `GPT/Block_0`."""
        rows = (*self.equations, *self.added)
        inside = f"{path}/".lstrip("/")
        return Totals.of(row for row in rows if f"{row.path}/".startswith(inside))

    def report(self, *, depth: int | None = None, only: str | None = None) -> str:
        """Returns the report as text.

        Args:
          depth: how many levels of modules to show. `None`: as many as fit a screen.
          only: `"problems"` to leave out the modules; `"equations"` for a list of all
            equations, with what each computes in and what becomes of its result.

        Raises:
          ValueError: if `only` is something else, or `depth` is negative.
        """
        return as_text(self._parts(depth, only))

    def to_html(self) -> str:
        """Returns one page that needs nothing else, in which modules can be folded."""
        return _page(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def _parts(
        self, depth: int | None = None, only: str | None = None
    ) -> Iterator[Part]:
        if only not in (None, *ONLY):
            expected = f"{' or '.join(map(repr, ONLY))}, or None"
            raise ValueError(f"report: got only={only!r}; expected {expected}.")
        if depth is not None:
            check_count(depth, f"report: got {depth=}", "of levels", least=0)
        if only == "equations":
            yield _equations(self)
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(self.name), f"in {self.compute_dtype}", style="bold")
        for label, text in _totals(self).items():
            grid.add_row(label, Text(text))
        yield grid
        count = len(self.problems)
        headline = plural(count, "problem") if count else "No problems found."
        yield Text(f"\n{headline}", "bold red" if count else "green")
        for problem in self.problems:
            title = problem.title(self.totals.flops)
            yield Padding(Text(f"{title}: {problem.message}", "yellow"), (0, 0, 0, 2))
            yield Padding(Text(problem.where), (0, 0, 0, 4))
        if only is None:
            yield ""
            yield _tree(self, depth)
        yield from (Text(f"Note: {note}.") for note in self.notes)


# --- text ----------------------------------------------------------------------------


def _totals(found: Explanation) -> dict[str, str]:
    """Returns the figures of the whole function as words, by what they are about."""
    totals, dtype = found.totals, short(found.compute_dtype)
    rows = {"matmuls": "none"}
    if totals.flops:
        share = percent(totals.low_flops, totals.flops)
        flops = f"{amount(totals.flops)}FLOP forward"
        rows["matmuls"] = f"{flops}, {share} in half precision"
    if in_fp8 := _in_fp8(found):
        rows["in fp8"] = in_fp8
    rows["casts"] = (
        f"{totals.casts_down:,} to {dtype}, {totals.casts_up:,} to f32, "
        f"in a program of {len(found.equations):,} equations"
    )
    if found.loss_reads:
        rows["the loss"] = f"reads {dtype}: {first_of(found.loss_reads, 2, '; ')}"
    if found.has_stored:
        text = _by_dtype(totals.stored)
        rows["stored"] = f"{text}, for the gradient of the first argument"
    return rows


def _in_fp8(found: Explanation) -> str:
    """Returns the share of products in fp8, and why others are not, if any is asked."""
    rows = [row for row in found.equations if row.flops]
    flops = sum(row.flops for row in rows if row.is_in_fp8)
    reasons = (row.reason for row in rows if row.reason.startswith(_NOT_IN_FP8))
    others = Counter(reason.removeprefix(_NOT_IN_FP8) for reason in reasons)
    if not flops and not others:
        return ""
    why = "; ".join(f"{reason} ({n})" for reason, n in others.most_common())
    share = f"{flops / found.totals.flops:.0%} of them"
    return f"{share}, not: {why}" if why else share


def _by_dtype(sizes: Counter[str]) -> str:
    """Returns numbers of bytes as words, the largest first."""
    shown = (f"{bytes_text(n)} {short(d)}" for d, n in sizes.most_common(4) if n)
    return " + ".join(shown) or "nothing"


def _equations(found: Explanation) -> Table:
    """Returns what each equation computes in and gives, module by module."""
    modules: dict[str, list[list[str]]] = {}
    for row in found.equations:
        cells = [f"  {row.primitive}", short(row.computes_in), row.result]
        modules.setdefault(row.path or found.name, []).append(cells)
    rows = [x for path, cells in modules.items() for x in ([path, "", ""], *cells)]
    return table(["equation", "computes in", "result"], rows, (1, 2))


def _modules(found: Explanation) -> dict[tuple[str, ...], list[Equation]]:
    """Returns the rows inside of each module, by its path without numbers of layers.

    Twelve layers are one, `GPT/Block_*`. A module comes before those in it.
    """
    modules: dict[tuple[str, ...], list[Equation]] = {(): []}
    for row in (*found.equations, *found.added):
        path = tuple(filter(None, without_numbers(row.path).split("/")))
        for end in range(len(path) + 1):
            modules.setdefault(path[:end], []).append(row)
    place = {path: i for i, path in enumerate(modules)}
    order = sorted(modules, key=lambda p: [place[p[:i]] for i in range(len(p) + 1)])
    return {path: modules[path] for path in order}


def _tree(found: Explanation, depth: int | None) -> Table:
    modules = _modules(found)
    levels = range(1, 1 + max(map(len, modules)))
    if depth is None:  # as many as fit a screen
        fit = (n for n in levels if sum(len(path) <= n for path in modules) <= _LINES)
        depth = max(fit, default=1)
    headers = ["\nmodule", "forward\nFLOP", "in\nhalf"]
    headers.append(f"casts to\n{short(found.compute_dtype)}/f32")
    headers += ["stored\nhalf", "stored\nother"] * found.has_stored
    cells = [
        _cells(found, path, rows)
        for path, rows in modules.items()
        if len(path) <= depth
    ]
    return table([*headers, "stays in\nfloat32"], cells, (len(headers),))


def _cells(
    found: Explanation, path: tuple[str, ...], rows: list[Equation]
) -> list[str]:
    totals = Totals.of(rows)
    half = sum(n for dtype, n in totals.stored.items() if is_half(dtype))
    sizes = map(bytes_text, (half, totals.stored.total() - half))
    stays = Counter(row.primitive for row in rows if row.stays_by_rule)
    name = found.name
    if path:
        copies = {tuple(row.path.split("/")[: len(path)]) for row in rows}
        names = {copy[-1] for copy in copies}
        name = names.pop() if len(names) == 1 else path[-1]
        name += f"  x{len(copies)}" if len(copies) > 1 else ""
    return [
        "  " * len(path) + name,
        amount(totals.flops) if totals.flops else "",
        percent(totals.low_flops, totals.flops),
        f"{totals.casts_down}/{totals.casts_up}",
        *(sizes if found.has_stored else ()),
        " ".join(name for name, _ in stays.most_common(3)),
    ]


# --- the page ------------------------------------------------------------------------

_PAGE = """<!doctype html><meta charset=utf-8><title>{title}</title><style>
.amp {{ color-scheme: light dark; font: 14px/1.6 system-ui, sans-serif }}
.amp * {{ overflow-wrap: anywhere; white-space: pre-wrap }}
</style><div class=amp><pre>{head}</pre>{modules}</div>
"""


def _page(found: Explanation) -> str:
    """Returns the page: the problems as text, and the equations of each module."""
    modules = []
    for path, rows in _modules(found).items():
        name, flops, half, *_ = _cells(found, path, rows)
        stored = f"{_by_dtype(Totals.of(rows).stored)} stored"
        facts = [f"{flops}FLOP", f"{half} in half", stored] if flops else [stored]
        summary = escape(f"{name.strip()}: {', '.join(facts)}")
        own = [row for row in rows if without_numbers(row.path) == "/".join(path)]
        modules.append(
            f'<details style="margin-left:{len(path)}em"><summary>{summary}</summary>'
            f"<ul>{''.join(map(_item, own))}</ul></details>"
        )
    title = escape(f"{found.name} in {found.compute_dtype}")
    head = escape(found.report(only="problems"))
    return _PAGE.format(title=title, head=head, modules="".join(modules))


def _item(row: Equation) -> str:
    dtypes = dict.fromkeys((str(row.before), str(row.after)))
    size = f"{amount(row.flops)}FLOP" if row.flops else bytes_text(row.stored.total())
    what = f"{row.primitive} {row.shape}"
    facts = (what, size, " => ".join(dtypes), row.reason, row.result, row.source)
    return f"<li>{escape(' · '.join(filter(None, facts)))}</li>"
