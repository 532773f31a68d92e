"""`explain`: how mixed precision changes each equation of a function, and why."""

import dataclasses
import functools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flax_amp import _jaxprs, _source
from flax_amp._checks import first_of
from flax_amp._compat import DType
from flax_amp._rewriter.policy_warnings import PolicyWarning
from flax_amp._rewriter.primitives import Kind, is_matmul, kind_of
from flax_amp._rewriter.roles import asked_precision
from flax_amp._rewriter.transform import trace_call
from flax_amp.debug import _rounded
from flax_amp.debug._call import Call, tool
from flax_amp.debug._graph import Graph
from flax_amp.debug._parameters import Parameter, parameters_of
from flax_amp.debug._record import (
    Equation,
    Recorder,
    Visit,
    float_factors,
    is_derivative,
    low_share,
    stored_bytes,
)
from flax_amp.debug._report import (
    Block,
    Report,
    amount,
    is_half,
    percent,
    plural,
    short,
    table,
)
from flax_amp.debug._rounded import Remark
from flax_amp.policy import KeyKind, Policy

ONLY = ("problems", "equations", "parameters")

_MAX_LINES = 26  # of the tree, so that the whole report fits a screen
_NOT_IN_FP8 = "not in fp8: "  # begins the reason of such a matmul
_NOTE = "note"  # the kind of a finding that is no problem
_NOT_STORED = "what the backward pass stores is not known"
_SECOND = (
    "belongs to a gradient that your function takes, as for forces. The loss "
    "differentiates it again, which makes its roundings larger: see what "
    "flax_amp.compare_precision tells, or put flax_amp.amp_stop around it."
)
_COMPLEX = (
    "has factors in {0}: no half precision has complex numbers. Multiply real and "
    "imaginary parts apart to run it in {1}."
)
_OWN = (
    "has factors in {0} without amp: its author set a dtype. Leave out dtype= or the "
    "cast to let the policy decide."
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that a person has to act on, or to know."""

    kind: str  #: a short name, such as `float32 matmul`
    message: str  #: the problem, and advice
    #: The modules; of more than three, with `*` for numbers.
    paths: tuple[str, ...] = ()
    source: str = ""  #: the line of the first equation
    times: int = 0  #: how often the equations with this problem run
    flops: int = 0  #: of the matmuls among these equations


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """How mixed precision changes a function, and why. Made by `flax_amp.explain`."""

    compute_dtype: str  #: the dtype of low-precision values
    equations: tuple[Equation, ...]  #: the equations of the function, in emitted order
    problems: tuple[Problem, ...]  #: problems to act on, the most important first
    stored: dict[str, int] | None  #: bytes for the backward pass, by dtype, if known
    loss_reads: tuple[str, ...]  #: the matmuls whose rounded results the loss reads
    #: the float32 arrays of the first argument, if the user asked for the parameters
    parameters: tuple[Parameter, ...] | None = None

    @property
    def flops(self) -> int:
        """The operations of all matmuls and convolutions."""
        return sum(row.flops for row in self.equations)

    @property
    def low_share(self) -> float | None:
        """The share of `flops` in half precision or fp8; `None` without matmuls."""
        return low_share(self.equations)

    def report(self, *, only: str | None = None) -> str:
        """Returns the report as text.

        Args:
          only: `"problems"` to leave out the modules; `"equations"` for a list of all
            equations, with the dtype that each equation computes in and the use of its
            result; `"parameters"` for a list of the parameters, if `explain` got
            `parameters=True`.

        Raises:
          ValueError: if `only` is another value, or the parameters are not known.
        """
        return self._text(only)

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        if only not in (None, *ONLY):
            raise ValueError(f"report: got {only=}; expected None, or one of {ONLY}.")
        if only == "equations":
            yield _equations(self)
            return
        if only == "parameters":
            if self.parameters is None:
                raise ValueError(
                    f"report: got {only=}, and the parameters are not known; expected "
                    "explain(..., parameters=True), which takes two more traces."
                )
            yield _parameters(self.parameters, short(self.compute_dtype))
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(self.name), f"in {self.compute_dtype}", style="bold")
        for label, text in _summary(self):
            grid.add_row(label, Text(text))
        yield grid
        if self.problems:
            yield Text(f"\n{plural(len(self.problems), 'problem')}", "bold red")
        else:
            yield Text("\nNo problems found.", "green")
        for problem in self.problems:
            yield from _problem_text(problem, self.flops)
        if only is None:
            yield ""
            yield _tree(self)


@functools.partial(tool, runs=False)
def explain(
    call: Call, *, backward: bool = True, parameters: bool = False
) -> Explanation:
    """Explains how `amp` changes a function: the dtype of each equation, and why.

    Nothing is compiled or run, so arguments may be abstract: `jax.ShapeDtypeStruct`, or
    a result of `jax.eval_shape` or `nnx.eval_shape`. Modules of Linen and of NNX are
    found without further options. Figures are for the forward pass; the backward pass
    has two more matmuls of the same size for each matmul.

    Args:
      fun: the function before `amp`, as `explain(fun)(*args)`; or the state of
        `make_train_step`, as `explain(state, loss_fn, batch, *args)`; or the pair of
        `make_nnx_train_step`, `explain((model, optimizer), loss_fn, batch, *args)`.
      *step: the loss function, the batch and the further arguments of the loss; not
        with a function.
      backward: whether to count the bytes that are stored for the backward pass, for
        the gradient with respect to the first argument. The count takes a trace of the
        gradient.
      parameters: whether to find which float32 arrays of the first argument can be
        stored in half precision without a change of any bit of the forward pass, as
        `flax_amp.half_params` does, and why the remaining arrays cannot. The search
        takes two more traces of the function.
      **options: `precision`, `compute_dtype`, `matmul_dtype`, `amp_policy`,
        `recompute` and `reduce_in_float32` of `flax_amp.amp`. The default precision is
        the precision of the state or the optimizer.

    Returns:
      An `Explanation`, or a function that returns an `Explanation`. Print the
      explanation, or see its methods `report` and `to_dict`.

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
    request = call.request
    with warnings.catch_warnings(record=True) as caught:
        # Warnings of the user's code appear in a run. Here, only warnings about the
        # policy are kept.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PolicyWarning)
        traced = trace_call(call, Policy(request.entries), request.dtype)
    messages = [str(warning.message).removeprefix("amp_policy: ") for warning in caught]

    recorder = Recorder(traced.choose)
    emit = functools.partial(
        traced.emit,
        recompute=request.recompute,
        record=recorder,
        reduce_in_float32=request.reduce_in_float32,
    )
    closed = jax.make_jaxpr(emit)(call.arrays)
    # The rows are copied before the gradient is traced, because the gradient emits the
    # rules of custom derivatives again, which adds rows to the recorder.
    rows = tuple(recorder.rows)
    visits = tuple(recorder.visits)
    graph = Graph(visits) if request.dtype != jnp.float32 else None
    remarks = list(_remarks(visits, graph, call, request.dtype))
    problems = sorted(_problems(remarks), key=lambda x: (-x.flops, -x.times))
    notes = list(dict.fromkeys(x.message for x in remarks if x.kind == _NOTE))
    stored = None
    if backward:
        try:
            stored = stored_bytes(closed, call.arrays, call.trained())
        except Exception as error:
            text = f"{_NOT_STORED}: {type(error).__name__}: {error}"
            notes.append(text.partition("\n")[0].rstrip(":. "))
    return Explanation(
        name=request.name,
        compute_dtype=request.dtype.name,
        equations=rows,
        problems=(*(Problem("policy", x) for x in messages), *problems),
        stored=stored,
        loss_reads=_rounded.loss_reads(graph) if graph else (),
        parameters=parameters_of(call) if parameters else None,
        notes=tuple(notes),
    )


# --- text ----------------------------------------------------------------------------


def _summary(found: Explanation) -> Iterator[tuple[str, str]]:
    """Yields the figures of the whole function as words, each with a label."""
    matmuls = [row for row in found.equations if row.flops]
    if matmuls:
        share = f"forward, {percent(found.low_share)} in half precision"
        yield "matmuls", f"{amount(found.flops, 'FLOP')} {share}"
    else:
        yield "matmuls", "none"
    if any(row.is_in_fp8 is not None for row in matmuls):
        yield "in fp8", _fp8_text(matmuls)
    if found.loss_reads:
        rounded = first_of(found.loss_reads, 2, "; ")
        yield "the loss", f"reads {short(found.compute_dtype)}: {rounded}"
    if found.stored is not None:
        sizes = [f"{amount(n, 'B')} {short(x)}" for x, n in found.stored.items()]
        text = " + ".join(sizes) or "nothing"
        yield "stored", f"{text}, for the gradient of the first argument"
    if found.parameters:
        half = short(found.compute_dtype)
        yield "parameters", _parameters_text(found.parameters, half)


def _fp8_text(matmuls: Sequence[Equation]) -> str:
    """Returns the share of matmuls in fp8, and why further matmuls are not in fp8."""
    in_fp8 = sum(row.flops for row in matmuls if row.is_in_fp8)
    share = f"{in_fp8 / sum(row.flops for row in matmuls):.0%} of them"
    others = Counter(row.reason for row in matmuls if not row.is_in_fp8)
    if not others:
        return share
    why = [f"{x.removeprefix(_NOT_IN_FP8)} ({n})" for x, n in others.most_common()]
    return f"{share}, not: {'; '.join(why)}"


def _parameters_text(parameters: Sequence[Parameter], half: str) -> str:
    """Returns the share of bytes that parameters take if they are stored in half."""
    halves = [x for x in parameters if x.is_half]
    saved = sum(x.nbytes for x in halves) / 2
    total = sum(x.nbytes for x in parameters)
    count = f"{len(halves)} of {len(parameters)}"
    how = f"of their bytes if {count} are stored in {half}"
    return f"{percent(1 - saved / max(total, 1))} {how} (flax_amp.half_params)"


def _problem_text(problem: Problem, flops: int) -> Iterator[Padding]:
    """Yields the text of a problem: its message, how often, share of FLOPs, place."""
    times = f" x{problem.times}" if problem.times else ""
    share = f", {problem.flops / flops:.0%} of FLOPs" if problem.flops else ""
    text = f"{problem.kind}{times}{share}: {problem.message}"
    yield Padding(Text(text, "yellow"), (0, 0, 0, 2))
    modules = first_of([*filter(None, problem.paths)])
    where = filter(None, (modules and f"in {modules}", problem.source))
    yield Padding(Text(", ".join(where)), (0, 0, 0, 4))


def _equations(found: Explanation) -> Table:
    """Returns the dtype and the use of the result of each equation, by module."""
    modules: dict[str, list[list[str]]] = {}
    for row in found.equations:
        dtype = "fp8" if row.is_in_fp8 else short(row.computes_in)
        if kind_of(row.primitive) is Kind.STRUCTURED:
            dtype = ""  # the rows of the bodies tell the dtypes
        cells = [f"  {row.primitive}", dtype, row.result]
        modules.setdefault(row.path or found.name, []).append(cells)
    rows = [x for path, cells in modules.items() for x in ([path, "", ""], *cells)]
    return table(["equation", "computes in", "result"], rows, (1, 2))


def _parameters(parameters: Sequence[Parameter], half: str) -> Table:
    """Returns in which dtype each parameter can be stored, and why.

    The parameters of twelve layers are a single row, unless their reasons differ.
    """
    rows: dict[tuple[str, ...], list[Parameter]] = defaultdict(list)
    for x in parameters:
        key = _without_numbers(x.path), str(x.is_half), _without_numbers(x.reason)
        rows[key].append(x)
    cells = []
    for same in rows.values():
        first = same[0]
        path = first.path
        if len(same) > 1:
            path = f"{_without_numbers(path)}  x{len(same)}"
        dtype = half if first.is_half else "f32"
        nbytes = amount(sum(x.nbytes for x in same), "B")
        cells.append([dtype, nbytes, path, first.reason])
    return table(["stored", "in float32", "parameter", "why"], cells, (2, 3))


def _tree(found: Explanation) -> Table:
    """Returns the modules, as many levels of them as fit a screen.

    Twelve layers are a single row, `GPT/Block_*`, unless a layer computes in different
    dtypes. A module comes before the modules in it.
    """
    rows = [(tuple(filter(None, row.path.split("/"))), row) for row in found.equations]
    dtypes = _dtypes_of_modules(rows)
    modules: dict[tuple[Any, ...], list[Equation]] = defaultdict(list, {(): []})
    for names, row in rows:
        path = tuple(
            (_without_numbers(name), *sorted(dtypes[names[:size]]))
            for size, name in enumerate(names, 1)
        )
        for size in range(len(path) + 1):
            modules[path[:size]].append(row)
    order = {path: i for i, path in enumerate(modules)}
    paths = sorted(modules, key=lambda x: [order[x[:i]] for i in range(len(x) + 1)])
    fit = (n for n in map(len, paths) if sum(len(x) <= n for x in paths) <= _MAX_LINES)
    depth = max(1, *fit)
    cells = (_cells(found, path, modules[path]) for path in paths if len(path) <= depth)
    return table(["module", "FLOP", "in half", "stays in float32"], cells, (3,))


def _dtypes_of_modules(
    rows: Sequence[tuple[tuple[str, ...], Equation]],
) -> dict[tuple[str, ...], set[str]]:
    """Returns the dtypes of each module's matmuls and equations that stay float32.

    A layer as written is not equal to a layer that `amp` changes.
    """
    dtypes: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for names, row in rows:
        if row.flops or row.stays_by_rule:
            as_written = " as written" if row.is_as_written else ""
            for size in range(len(names) + 1):
                dtypes[names[:size]].add(row.computes_in + as_written)
    return dtypes


def _cells(
    found: Explanation, path: tuple[Any, ...], rows: Sequence[Equation]
) -> list[str]:
    stays = Counter(row.primitive for row in rows if row.stays_by_rule)
    copies = {tuple(row.path.split("/")[: len(path)]) for row in rows}
    name = found.name
    if path:
        names = {copy[-1] for copy in copies}
        name = names.pop() if len(names) == 1 else path[-1][0]
    if len(copies) > 1:
        name += f"  x{len(copies)}"
    return [
        "  " * len(path) + name,
        amount(sum(row.flops for row in rows), ""),
        _share_text(rows),
        " ".join(name for name, _ in stays.most_common(5)),
    ]


def _share_text(rows: Sequence[Equation]) -> str:
    """Returns the share of matmuls in half, or that no matmul is changed by `amp`."""
    matmuls = [row for row in rows if row.flops]
    if matmuls and all(row.is_as_written for row in matmuls):
        return "as written"
    return percent(low_share(rows))


# --- problems ------------------------------------------------------------------------


def _without_numbers(path: str) -> str:
    """Returns a path without the numbers of layers: `GPT/Block_*`."""
    return re.sub(r"\d+", "*", path)


def _problems(remarks: Sequence[Remark]) -> Iterator[Problem]:
    """Yields the problems that a person has to act on.

    Findings with the same message are a single problem: twelve layers whose matmuls ask
    for `precision=HIGHEST` make a single line of the report, not twelve.
    """
    found: dict[tuple[str, str], list[Equation]] = defaultdict(list)
    for kind, message, row in remarks:
        if kind == _NOTE:
            continue
        rows = found[kind, message]
        if not any(row is x for x in rows):
            rows.append(row)
    for (kind, message), rows in found.items():
        paths = dict.fromkeys(row.path for row in rows)
        if len(paths) > 3:
            paths = dict.fromkeys(map(_without_numbers, paths))
        times = sum(row.times for row in rows)
        flops = sum(row.flops for row in rows)
        yield Problem(kind, message, tuple(paths), rows[0].source, times, flops)


def _remarks(
    visits: Sequence[Visit], graph: Graph | None, call: Call, half: DType
) -> Iterator[Remark]:
    """Yields the remarks about equations, and about the readers of their results."""
    if graph is None:
        return
    for visit in visits:
        for kind, message in _of_matmul(visit, half.name):
            yield Remark(kind, message, visit.row)
    yield from _rounded.ranks(graph)
    try:
        are_data = [not is_trained for is_trained in call.trained()]
    except TypeError:  # the first argument has no array that is trained
        are_data = [True] * len(call.arrays)
    yield from _rounded.positions(graph, are_data, half)


def _of_matmul(visit: Visit, half: str) -> Iterator[tuple[str, str]]:
    """Yields the kind and the message of each problem of a matmul."""
    row = visit.row
    multiplies = is_matmul(visit.eqn)
    floats = list(dict.fromkeys(float_factors(row.before.operands)))
    names = " and ".join(map(short, floats))
    if multiplies and row.is_low and is_derivative(visit.eqn):
        yield "second derivative", _SECOND
    if kind_of(visit.eqn) is not Kind.MATMUL:
        return
    if multiplies and any("complex" in dtype for dtype in floats):
        yield "complex matmul", _COMPLEX.format(names, half)
    elif any(map(is_half, floats)):
        yield "own dtype", _OWN.format(names)
    elif multiplies and floats and not row.is_low and (why := _why(visit, half)):
        yield "float32 matmul", f"stays in {floats[0]}: {why}"


def _why(visit: Visit, half: str) -> str:
    """Says why a matmul stays in float32, unless the user or JAX has chosen that."""
    row = visit.row
    decision = visit.why.decision
    if asked := asked_precision(visit.eqn):
        if _source.is_numerics_of_jax(visit.eqn):
            return ""
        return f"it asks for precision={asked}. Leave that out to run it in {half}."
    # The keys of `default_amp_policy` let all matmuls run in half precision. If no key
    # decides, the user's own policy lacks a key, which is no choice.
    is_default = decision.key_kind is KeyKind.DEFAULT and decision.key != "amp_stop"
    if row.is_in_fp8 or visit.why.is_by_key and not is_default:
        return ""
    if visit.whole is not None:
        name = _jaxprs.hi_name(visit.whole) or visit.whole.primitive.name
        return f"it stands inside of {name}, which runs as a whole."
    if is_default:
        return f"no key of the policy names {row.primitive}."
    return row.reason
