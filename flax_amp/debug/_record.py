"""Rows about the emitted equations, and the bytes stored for the backward pass.

The scopes around an equation tell its module. Flax opens the scope `embed.attend` for
the method `attend` of the module `embed`. So a name with one dot names a module and a
method, as in the keys of a policy. A name with more dots, such as `eqx.nn.Linear`,
names a module alone.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _source
from flax_amp._compat import Eqn, Jaxpr, open_jaxpr
from flax_amp._jaxprs import evaluate, hi_name, inner_jaxprs
from flax_amp._rewriter.primitives import Kind, has_matmul, is_matmul, kind_of
from flax_amp._scope_paths import split_method
from flax_amp._training.dependence import CALLS
from flax_amp._training.source_lines import line_of
from flax_amp._tree import fill, pick
from flax_amp.debug._report import is_half, short
from flax_amp.policy import InDtype

# These primitives only run a body: the rows of the body tell everything about them.
TRANSPARENT = CALLS | {"shard_map", "custom_vmap_call"}
# Equations in these roles run in dtypes of their own, because of a key, or because of
# the program (`precision=`, half operands).
_IN_OWN_DTYPES = (Kind.ORIGINAL, Kind.CALLED)
# The bodies of these primitives, such as the comparison of a sort, get no rows.
_BODIES_NOT_SHOWN = (Kind.MATMUL, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of an equation's operands and of its results."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        # Equal dtypes are written once: `bf16 -> f32`.
        sides = (dict.fromkeys(map(short, x)) for x in (self.operands, self.results))
        return " -> ".join(",".join(side) or "()" for side in sides)


@dataclasses.dataclass
class Equation:
    """One equation of the user's function.

    All numbers are totals of one call of the function: the numbers of an equation in a
    loop are multiplied by the length of the loop.
    """

    path: str  #: the module, or the scope, around the equation
    primitive: str
    before: Dtypes  #: the dtypes in the user's program
    after: Dtypes  #: the dtypes under `amp`
    reason: str  #: the rule or the policy key that decided the dtypes
    result: str  #: the form of the result for its readers, such as rounded for a matmul
    times: int  #: how often the equation runs; the body of a `while` counts once
    flops: int  #: the operations of a matmul or a convolution
    source: str  #: the line of the user's code, with its file
    #: whether the result is float32 because the equation is a sum, or because a key
    #: says so
    stays_by_rule: bool = False
    #: whether the factors are rounded to 8-bit floats; `None` if no key asks for fp8
    is_in_fp8: bool | None = None
    #: whether the equation runs as in the user's program: by `amp_stop`, by
    #: `use_original_precision`, by `precision=`, or because its operands are half there
    is_as_written: bool = False

    @property
    def computes_in(self) -> str:
        """The dtype of the computation: the first float dtype, operands before results.

        Without floats, this is the dtype of the first result.
        """
        operands = self.after.operands
        results = self.after.results
        floats = [dtype for dtype in (*operands, *results) if "float" in dtype]
        return next(iter((*floats, *results, *operands)), "")

    @property
    def is_low(self) -> bool:
        """Whether an operand is in half precision; for a matmul, both factors."""
        if kind_of(self.primitive) is Kind.MATMUL:
            factors = float_factors(self.after.operands)
            return bool(factors) and all(map(is_half, factors))
        return any(map(is_half, self.after.operands))


def low_share(rows: Sequence[Equation]) -> float | None:
    """Returns the share of matmuls in half or fp8; `None` without matmuls of floats."""
    flops = sum(row.flops for row in rows)
    low = sum(row.flops for row in rows if row.is_low or row.is_in_fp8)
    if not flops:
        return None
    return low / flops


# --- the place of an equation --------------------------------------------------------

# Scopes that JAX opens around the equations that a backward pass computes again.
_COMPUTED_AGAIN = "rematted_computation"
_OF_CHECKPOINTS = ("checkpoint", _COMPUTED_AGAIN)


def scopes_of(eqn: Eqn) -> tuple[str, ...]:
    """Returns the scopes around an equation in its jaxpr, for `module_path`.

    The scopes inside of a transformation may repeat the scopes around it: repeated
    scopes are listed once.
    """
    scopes: list[str] = []
    for kind, entries in itertools.groupby(_source.scopes(eqn), type):
        names = [entry.name for entry in entries if kind.__name__ == "Scope"]
        group = [name for name in names if name not in _OF_CHECKPOINTS]
        is_repeated = group[: len(scopes)] == scopes
        scopes = group if is_repeated else scopes + group
    half = len(scopes) // 2
    if eqn.primitive.name == "remat2" and scopes[:half] == scopes[half:]:
        scopes = scopes[:half]  # a recomputation repeats the scopes
    return tuple(scopes)


def is_computed_again(eqn: Eqn) -> bool:
    """Whether the backward pass of a checkpoint computes a forward value again."""
    return any(entry.name == _COMPUTED_AGAIN for entry in _source.scopes(eqn))


def is_derivative(eqn: Eqn) -> bool:
    """Whether an equation belongs to a gradient that the user's own function takes."""
    entries = _source.scopes(eqn)  # including the entries of transformations
    # Reverse mode makes an entry `transpose` that is no scope. A user's scope may have
    # this name, too.
    named = (type(x).__name__ for x in entries if x.name == "transpose")
    return any(name != "Scope" for name in named)


def module_path(scopes: tuple[str, ...]) -> str:
    """Returns the path of modules that scopes name, without the names of methods."""
    names: list[str] = []
    was_method = False
    for segment in "/".join(scopes).split("/"):
        if not segment or "->" in segment:  # `jnp.einsum` opens a scope of its formula
            continue
        name, method = split_method(segment)
        if split_method(name)[1]:  # `eqx.nn.Linear`
            name = segment
            method = ""
        # A module is named once where a method calls another method of the same module,
        # as Flax's RNN does.
        if not ((method or was_method) and names and names[-1] == name):
            names.append(name)
        was_method = bool(method)
    return "/".join(names)


class Location(NamedTuple):
    """The place of a jaxpr or an equation in a program."""

    # The equations around the place and, for an equation, the equation itself last.
    eqns: tuple[Eqn, ...] = ()
    inside: tuple[str, ...] = ()  # loops, branches and devices around, outermost first

    @property
    def path(self) -> str:
        """The path of the module."""
        return module_path(sum(map(scopes_of, self.eqns), ()))

    @property
    def source(self) -> str:
        """The user's line; if unknown, the line of the next equation around."""
        return next(filter(None, map(source_text, reversed(self.eqns))), "")

    def of(self, eqn: Eqn) -> "Location":
        """Returns the location of an equation in this jaxpr."""
        return self._replace(eqns=(*self.eqns, eqn))

    def noted(self, note: str) -> "Location":
        """Returns this location inside of an iteration or a branch, named by `note`."""
        return self._replace(inside=(*self.inside, note))


def source_text(eqn: Eqn) -> str:
    """Returns the file and the line of the user's code; empty if unknown."""
    line = line_of(eqn)
    return "" if line is None else str(line)


# --- the user's equations ------------------------------------------------------------


class Visit(NamedTuple):
    """A row with its equation, and how and where the emitter ran that equation."""

    row: Equation
    eqn: Eqn  # the equation in the user's program
    why: Any  # the emitter's `Choice`
    around: tuple[Eqn, ...] = ()  # the equations around `eqn`, outermost first
    # The equation around `eqn` that runs as a whole. If `whole` is a loop, `why` has
    # the reason of `eqn` itself. If `whole` is another equation, `why` is the choice of
    # `whole`.
    whole: Eqn | None = None

    @property
    def is_planned_half(self) -> bool:
        """Whether the first result is in half precision for its readers."""
        form = _first_form(self.eqn, self.why)
        return form is not None and form.is_half


def _first_form(eqn: Eqn, why: Any) -> Any:
    """Returns the form of the first result in the plan of `why`, the `Choice`."""
    if not eqn.outvars:
        return None
    return why.plan.forms.get(eqn.outvars[0])


class Recorder:
    """Collects rows of the user's equations; an instance is the emitter's `record`."""

    def __init__(self, choose: Any = None) -> None:
        self._choose = choose  # the `Chooser`, for the reasons of equations in loops
        self.visits: list[Visit] = []  # in the order in which they were emitted
        # The equations whose bodies the emitter has entered, by `id`. The dict holds
        # the equations, because Python gives the `id` of a dead object to a new object.
        self._with_own_rows: dict[int, Eqn] = {}

    @property
    def rows(self) -> list[Equation]:
        """The rows of all equations but calls: the rows inside of a call tell all."""
        return [x.row for x in self.visits if x.row.primitive not in TRANSPARENT]

    def __call__(
        self, eqn: Eqn, around: Any, operands: Any, results: Any, why: Any
    ) -> None:
        after = dtypes_of(eqn, operands, results)
        at = Location((*around, eqn))
        self._with_own_rows |= {id(outer): outer for outer in around}
        row = _row(at, after, why.reason, why.result)
        row.is_in_fp8 = why.is_in_fp8
        row.stays_by_rule = _is_float32_by_rule(row, eqn, why)
        row.is_as_written = _is_as_written(row, why)
        self.visits.append(Visit(row, eqn, why, tuple(around)))
        if id(eqn) not in self._with_own_rows:
            # Bodies read halves if the equation reads halves, as a `relu` on the way to
            # a matmul does.
            pairs = zip(row.before.operands, after.operands, strict=True)
            lowered = (y for x, y in pairs if x == "float32" and is_half(y))
            float_ = next(lowered, "float32")
            # A result that is half already is not rounded where it leaves its region.
            is_half_already = is_half(float_) and self.visits[-1].is_planned_half
            result = "half precision" if is_half_already else why.result
            self._add_bodies(at, float_, result, self.visits[-1])

    def _add_bodies(self, at: Location, float_: str, result: str, whole: Visit) -> None:
        """Adds the rows of the bodies of an equation that runs as a whole.

        `result` goes to the row of the body's equation that makes the first result.
        """
        outer = at.eqns[-1]
        why = whole.why
        if kind_of(outer) in _BODIES_NOT_SHOWN or outer.primitive.name == "pallas_call":
            return
        # In a loop without a matmul in half precision, each equation has a reason of
        # its own.
        is_loop = why.role is Kind.STRUCTURED and self._choose is not None
        for body, _ in map(open_jaxpr, inner_jaxprs(outer)):
            # Of the bodies of a hi-primitive, only a body with a matmul is of interest.
            if hi_name(outer) and not has_matmul(body):
                continue
            for eqn in body.eqns:
                choice = why
                if is_loop:
                    choice = self._choose(eqn, why.body_context)
                    choice = choice._replace(plan=why.plan)
                inner = at.of(eqn)
                is_first = any(v is x for v in eqn.outvars for x in body.outvars[:1])
                own_result = result if is_first else ""
                dtypes = _replace_float32(dtypes_of(eqn), float_)
                row = _row(inner, dtypes, choice.reason, own_result)
                if is_first:
                    row.stays_by_rule = _is_float32_by_rule(row, whole.eqn, choice)
                row.is_as_written = _is_as_written(row, choice)
                self.visits.append(Visit(row, eqn, choice, inner.eqns[:-1], whole.eqn))
                self._add_bodies(inner, float_, own_result, whole._replace(why=choice))


def _replace_float32(dtypes: Dtypes, dtype: str) -> Dtypes:
    """Returns the dtypes of an equation with another dtype in the place of float32."""

    def replace(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dtype if name == "float32" else name for name in names)

    return Dtypes(replace(dtypes.operands), replace(dtypes.results))


def _is_float32_by_rule(row: Equation, planned: Eqn, why: Any) -> bool:
    """Whether a result is float32 because of a sum, or because a key says so.

    The plan knows the first result of `planned`, which is the equation of the row, or
    the equation around the row that runs as a whole.
    """
    form = _first_form(planned, why)
    if form is None or form.is_half:
        return False
    is_by_key = why.role in _IN_OWN_DTYPES and row.computes_in == "float32"
    return is_by_key or kind_of(row.primitive) is Kind.SUM


def _is_as_written(row: Equation, why: Any) -> bool:
    """Whether an equation runs as in the user's program, and not by a float32 key."""
    if row.before != row.after:
        return False
    decision = why.decision
    is_float32_key = decision.is_chosen and decision.function == InDtype(jnp.float32)
    is_left_alone = why.role is Kind.ORIGINAL and not is_float32_key
    return is_left_alone or any(map(is_half, float_factors(row.before.operands)))


def _row(at: Location, after: Dtypes, reason: str, result: str) -> Equation:
    *around, eqn = at.eqns
    scans = (x.params for x in around if x.primitive.name == "scan")
    times = math.prod(params["length"] for params in scans)
    return Equation(
        path=at.path,
        primitive=eqn.primitive.name,
        before=dtypes_of(eqn),
        after=after,
        reason=reason,
        result=result,
        times=times,
        flops=flops(eqn) * times,
        source=at.source,
    )


def dtypes_of(eqn: Eqn, operands: Any = (), results: Any = ()) -> Dtypes:
    """Returns the dtypes of an equation in its program, or of the given arrays."""
    return Dtypes(_dtypes(eqn.invars, operands), _dtypes(eqn.outvars, results))


def _dtypes(atoms: Sequence[Any], arrays: Sequence[Any]) -> tuple[str, ...]:
    """Returns the dtypes of arrays; a Python number has the dtype of its atom."""
    pairs = zip(arrays or atoms, atoms, strict=True)
    return tuple(
        str(getattr(x, "dtype", getattr(v.aval, "dtype", ""))) for x, v in pairs
    )


def float_factors(dtypes: Sequence[str]) -> list[str]:
    """Returns the dtypes of a matmul's two factors that are real or complex floats."""
    return [x for x in dtypes[:2] if "float" in x or "complex" in x]


def flops(eqn: Eqn) -> int:
    """Returns the operations of a matmul or a convolution of floats, else 0."""
    factors = float_factors(dtypes_of(eqn).operands)
    if not is_matmul(eqn) or not factors:
        return 0
    left, right = (v.aval for v in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        others = {eqn.params["dimension_numbers"].rhs_spec[0]}
        size = eqn.outvars[0].aval.size
    else:
        groups = ()
        dims = eqn.params.get("dimension_numbers")
        if ragged := eqn.params.get("ragged_dot_dimension_numbers"):
            groups = ragged.rhs_group_dimensions
            dims = ragged.dot_dimension_numbers
        (_, contracting), (_, batch) = dims
        others = {*contracting, *batch, *groups}
        size = left.size
    terms = [n for i, n in enumerate(right.shape) if i not in others]
    # A term is a multiplication and an addition: 2 operations. A multiplication of two
    # complex numbers is four multiplications of real numbers.
    each = 2 * 2 ** sum("complex" in dtype for dtype in factors)
    return each * size * math.prod(terms)


def stored_bytes(
    closed: Jaxpr, arrays: Sequence[Any], trained: Sequence[bool]
) -> dict[str, int]:
    """Returns the bytes that are stored for the backward pass of a program, by dtype.

    JAX itself decides which arrays to store: the arrays that the forward pass of
    `jax.vjp` hands to the backward pass are counted, without arguments and constants,
    which are in memory anyway. The first result is the loss, if that is a scalar.
    """
    sizes: Counter[str] = Counter()

    def count(*arrays: Any) -> None:
        def loss(*chosen: Any) -> Any:
            outs = evaluate(closed, fill(chosen, trained, arrays))
            outs = [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
            if outs and outs[0].ndim == 0:
                return outs[:1]
            return outs

        outs, pullback = jax.vjp(jax.jit(loss), *pick(arrays, trained))
        # The pullback is called because JAX raises the error of a `while`, which has no
        # reverse derivative, only then.
        pullback(jax.tree.map(jnp.ones_like, outs))
        leaves = {id(x): x for x in jax.tree.leaves(pullback)}
        for key in leaves.keys() - set(map(id, arrays)):
            if isinstance(x := leaves[key], jax.core.Tracer):
                sizes[str(x.dtype)] += x.size * x.dtype.itemsize

    jax.eval_shape(count, *arrays)
    return dict(sizes.most_common())
