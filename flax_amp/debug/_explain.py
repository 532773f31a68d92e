"""`explain`: what mixed precision does to each equation of a function, and why."""

import dataclasses
import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from typing import Any

import jax
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp._rewriter.policy_warnings import PolicyWarning
from flax_amp._rewriter.transform import trace_call
from flax_amp._training.arguments import first_of
from flax_amp.debug._call import Call, tool
from flax_amp.debug._problems import (
    Problem,
    find_problems,
    loss_reads,
    without_numbers,
)
from flax_amp.debug._record import Equation, Recorder, low_share, stored_bytes
from flax_amp.debug._report import (
    Block,
    Report,
    amount,
    as_text,
    percent,
    plural,
    short,
    table,
)
from flax_amp.policy import Policy

ONLY = ("problems", "equations")

_LINES = 26  # of the tree, so that it fits a screen with all else
_NOT_IN_FP8 = "not in fp8: "  # how the reason of such a product begins


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """What mixed precision does to a function, and why. Made by `flax_amp.explain`.

    It prints as a report, and shows itself as a page in a notebook.
    """

    compute_dtype: str  #: the dtype of low-precision values
    equations: tuple[Equation, ...]  #: those of the function, as they are emitted
    problems: tuple[Problem, ...]  #: what a person has to act on, most important first
    stored: dict[str, int] | None  #: bytes for the backward pass, by dtype, if known
    loss_reads: tuple[str, ...]  #: half-precision results that the loss is made from
    notes: tuple[str, ...] = ()  #: what limits these figures

    @property
    def flops(self) -> int:
        """The operations of all matmuls and convolutions."""
        return sum(row.flops for row in self.equations)

    @property
    def low_share(self) -> float | None:
        """The share of these that run in half precision; `None` if there are none."""
        return low_share(self.equations)

    def report(self, *, only: str | None = None) -> str:
        """Returns the report as text.

        Args:
          only: `"problems"` to leave out the modules; `"equations"` for a list of all
            equations, with what each computes in and what becomes of its result.

        Raises:
          ValueError: if `only` is something else.
        """
        return as_text(self._parts(only))

    def to_html(self) -> str:
        """Returns one page that needs nothing else, in which modules can be folded."""
        return _page(self)

    _repr_html_ = to_html

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        if only not in (None, *ONLY):
            expected = f"{' or '.join(map(repr, ONLY))}, or None"
            raise ValueError(f"report: got only={only!r}; expected {expected}.")
        if only == "equations":
            yield _equations(self)
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(self.name), f"in {self.compute_dtype}", style="bold")
        for label, text in _totals(self):
            grid.add_row(label, Text(text))
        yield grid
        count = len(self.problems)
        headline = plural(count, "problem") if count else "No problems found."
        yield Text(f"\n{headline}", "bold red" if count else "green")
        for problem in self.problems:
            title = problem.title(self.flops)
            yield Padding(Text(f"{title}: {problem.message}", "yellow"), (0, 0, 0, 2))
            yield Padding(Text(problem.where), (0, 0, 0, 4))
        if only is None:
            yield ""
            yield _tree(self)
        yield from (Text(f"Note: {note}.") for note in self.notes)


@functools.partial(tool, runs=False)
def explain(call: Call, *, backward: bool = True) -> Explanation:
    """Tells what `amp` does to a function: which equation runs in which dtype, and why.

    Nothing is compiled or run, so abstract arguments do (`jax.ShapeDtypeStruct`, or
    what `jax.eval_shape` and `nnx.eval_shape` return). Modules of Linen and of NNX are
    found by themselves. Figures are those of the forward pass; each matmul has two more
    of its size in the backward pass.

    It is called as `explain(fun)(*args)`, where `fun` is the function before `amp`; as
    `explain(state, loss_fn, batch, *args)` for the state and the loss of
    `make_train_step`; or as `explain((model, optimizer), loss_fn, batch, *args)` for
    those of `make_nnx_train_step`.

    Args:
      fun: a float32 function, or an `AmpTrainState`, or a pair `(model, optimizer)`.
      *step: the loss function and what the step takes after its batch, unless `fun` is
        a function.
      backward: whether to count what the backward pass stores, for the gradient with
        respect to the first argument. It takes a trace of the gradient.
      **options: `precision`, `compute_dtype`, `matmul_dtype`, `amp_policy` and
        `recompute` of `flax_amp.amp`; by default those of the state or the optimizer.

    Returns:
      An `Explanation`, or a function that returns one. Print it, or see its methods
      `report`, `to_dict` and `to_html`.

    Raises:
      TypeError: if an argument is of a wrong kind.
      RuntimeError: if an array among the arguments was deleted by a step.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.mean((x @ w) ** 2)
      >>> struct = jax.ShapeDtypeStruct
      >>> found = flax_amp.explain(loss)(
      ...     struct((64, 8), jnp.float32), struct((4, 64), jnp.float32))
      >>> matmul = found.equations[0]
      >>> print(matmul.path, matmul.primitive, matmul.before, "=>", matmul.after)
      head dot_general f32 -> f32 => bf16 -> bf16
      >>> matmul.reason, matmul.result, found.low_share
      ('primitive dot_general', 'half precision', 1.0)
    """
    asked, recorder = call.asked, Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # those of the user's code, which a run gives
        warnings.simplefilter("always", PolicyWarning)
        traced = trace_call(call, Policy(asked.entries), asked.dtype)
    messages = [str(warning.message) for warning in caught]

    def emitted(*arrays: Any) -> Any:
        return traced.emit(arrays, asked.recompute, recorder)

    closed = jax.make_jaxpr(emitted)(*call.arrays)
    # The gradient emits rules of derivatives again.
    known, visits = recorder.equations, tuple(recorder.visits)
    stored, notes = None, []
    if backward:
        try:
            stored = stored_bytes(closed, call.arrays, call.trained())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            text = f"what the backward pass stores is not known: {text}"
            notes = [text.rstrip(":. ")]
    return Explanation(
        name=asked.name,
        compute_dtype=asked.dtype.name,
        equations=tuple(visit.row for visit in known),
        problems=tuple(find_problems(known, messages, asked.dtype)),
        stored=stored,
        loss_reads=loss_reads(visits, closed),
        notes=tuple(notes),
    )


# --- text ----------------------------------------------------------------------------


def _totals(found: Explanation) -> Iterator[tuple[str, str]]:
    """Yields the figures of the whole function as words, with what they are about."""
    share = f"forward, {percent(found.low_share or 0, 1)} in half precision"
    yield "matmuls", f"{amount(found.flops, 'FLOP')} {share}" if found.flops else "none"
    reasons = [row.reason for row in found.equations if row.flops]
    others = Counter(x.removeprefix(_NOT_IN_FP8) for x in reasons if _NOT_IN_FP8 in x)
    in_fp8 = sum(row.flops for row in found.equations if row.is_in_fp8)
    if in_fp8 or others:
        why = "; ".join(f"{reason} ({n})" for reason, n in others.most_common())
        share = f"{in_fp8 / found.flops:.0%} of them"
        yield "in fp8", f"{share}, not: {why}" if why else share
    if found.loss_reads:
        rounded = first_of(found.loss_reads, 2, "; ")
        yield "the loss", f"reads {short(found.compute_dtype)}: {rounded}"
    if found.stored is not None:
        sizes = [f"{amount(n, 'B')} {short(x)}" for x, n in found.stored.items()]
        text = " + ".join(sizes) or "nothing"
        yield "stored", f"{text}, for the gradient of the first argument"


def _equations(found: Explanation) -> Table:
    """Returns what each equation computes in and gives, module by module."""
    modules: dict[str, list[list[str]]] = {}
    for row in found.equations:
        dtype = "fp8" if row.is_in_fp8 else short(row.computes_in)
        cells = [f"  {row.primitive}", dtype, row.result]
        modules.setdefault(row.path or found.name, []).append(cells)
    rows = [x for path, cells in modules.items() for x in ([path, "", ""], *cells)]
    return table(["equation", "computes in", "result"], rows, (1, 2))


def _modules(found: Explanation) -> dict[tuple[str, ...], list[Equation]]:
    """Returns the rows inside of each module, by its path without numbers of layers.

    Twelve layers are one, `GPT/Block_*`. A module comes before those in it.
    """
    modules: dict[tuple[str, ...], list[Equation]] = {(): []}
    for row in found.equations:
        path = tuple(filter(None, without_numbers(row.path).split("/")))
        for end in range(len(path) + 1):
            modules.setdefault(path[:end], []).append(row)
    place = {path: i for i, path in enumerate(modules)}
    order = sorted(modules, key=lambda p: [place[p[:i]] for i in range(len(p) + 1)])
    return {path: modules[path] for path in order}


def _tree(found: Explanation) -> Table:
    """Returns the modules, as many levels of them as fit a screen."""
    modules = _modules(found)
    levels = range(1, 1 + max(map(len, modules)))
    fit = (n for n in levels if sum(len(path) <= n for path in modules) <= _LINES)
    depth = max(fit, default=1)
    shown = (item for item in modules.items() if len(item[0]) <= depth)
    cells = (_cells(found, path, rows) for path, rows in shown)
    return table(["module", "FLOP", "in half", "stays in float32"], cells, (3,))


def _cells(
    found: Explanation, path: tuple[str, ...], rows: list[Equation]
) -> list[str]:
    stays = Counter(row.primitive for row in rows if row.stays_by_rule)
    copies: dict[tuple[str, ...], list[Equation]] = defaultdict(list)
    for row in rows:
        copies[tuple(row.path.split("/")[: len(path)])].append(row)
    name = found.name
    if path:
        names = {copy[-1] for copy in copies}
        name = names.pop() if len(names) == 1 else path[-1]
        name += f"  x{len(copies)}" if len(copies) > 1 else ""
    known = (low_share(of_copy) for of_copy in copies.values())
    shares = sorted({share for share in known if share is not None})
    return [
        "  " * len(path) + name,
        amount(sum(row.flops for row in rows), ""),
        " to ".join(percent(share, 1) for share in (*shares[:1], *shares[1:][-1:])),
        " ".join(name for name, _ in stays.most_common(5)),
    ]


# --- the page ------------------------------------------------------------------------

_PAGE = """<!doctype html><meta charset=utf-8><title>{title}</title><style>
.amp {{ color-scheme: light dark; font: 14px/1.6 system-ui, sans-serif }}
.amp * {{ overflow-wrap: anywhere; white-space: pre-wrap }}
</style><div class=amp><pre>{head}</pre>{modules}</div>
"""
_MODULE = """<details style="margin-left:{depth}em"><summary>{name}</summary><ul>{items}
</ul></details>"""


def _page(found: Explanation) -> str:
    """Returns the page: the problems as text, and the equations of each module."""
    modules = []
    for path, rows in _modules(found).items():
        name, flops, half, _ = _cells(found, path, rows)
        summary = f"{name.strip()}: {flops}FLOP, {half} in half" if flops else name
        own = [row for row in rows if without_numbers(row.path) == "/".join(path)]
        items = "".join(map(_item, own))
        modules.append(
            _MODULE.format(depth=len(path), name=escape(summary.strip()), items=items)
        )
    title = escape(f"{found.name} in {found.compute_dtype}")
    head = escape(found.report(only="problems"))
    return _PAGE.format(title=title, head=head, modules="".join(modules))


def _item(row: Equation) -> str:
    dtypes = dict.fromkeys((str(row.before), str(row.after)))
    size, what = amount(row.flops, "FLOP"), f"{row.primitive} {row.shape}"
    facts = (what, size, " => ".join(dtypes), row.reason, row.result, row.source)
    return f"<li>{escape(' · '.join(filter(None, facts)))}</li>"
