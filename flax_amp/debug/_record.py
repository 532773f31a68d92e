"""Rows: what the emitter records of each equation, and what the backward pass stores.

The scopes around an equation tell its module. Flax opens the scope `embed.attend` for
the method `attend` of the module `embed`: a name with one dot is that of a method, as
it is for the keys of a policy. A name with more dots, such as `eqx.nn.Linear`, is one
name.
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

# What they run is all that there is to tell about them.
TRANSPARENT = CALLS | {"shard_map", "custom_vmap_call"}
# They run in dtypes of their own, because a key or a fact says so.
_IN_OWN_DTYPES = (Kind.ORIGINAL, Kind.CALLED)
# Their bodies, such as the comparison of a sort, are no part of what a reader sees.
_CASTABLE = (Kind.MATMUL, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of an equation's operands and of its results."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        # Equal ones are written once: `bf16 -> f32`.
        sides = (dict.fromkeys(map(short, x)) for x in (self.operands, self.results))
        return " -> ".join(",".join(side) or "()" for side in sides)


@dataclasses.dataclass
class Equation:
    """One equation of the user's function.

    All numbers are those of one call of the function: what stands in a loop is
    multiplied by the length of the loop.
    """

    path: str  #: the module, or the scope, that it stands in
    primitive: str
    before: Dtypes  #: as the user wrote it
    after: Dtypes  #: under `amp`
    reason: str  #: the rule or the policy key that decided what it computes in
    result: str  #: what became of its result, such as that a matmul reads it rounded
    times: int  #: how often it runs; the body of a `while` counts once
    flops: int  #: of a matmul or a convolution
    source: str  #: the line of the user's code, with its file
    #: whether its result is float32 as that of a sum, or because a key says so
    stays_by_rule: bool = False
    #: whether its factors are rounded to 8-bit floats; `None` if no key asks for it
    is_in_fp8: bool | None = None

    @property
    def computes_in(self) -> str:
        """The dtype that it computes in, that of its floats as it reads them."""
        operands, results = self.after.operands, self.after.results
        floats = [dtype for dtype in (*operands, *results) if "float" in dtype]
        return next(iter((*floats, *results, *operands)), "")

    @property
    def is_low(self) -> bool:
        """Whether an operand arrives in half precision; of a matmul, both factors."""
        if kind_of(self.primitive) is Kind.MATMUL:
            factors = float_factors(self.after.operands)
            return bool(factors) and all(map(is_half, factors))
        return any(map(is_half, self.after.operands))


def low_share(rows: Sequence[Equation]) -> float | None:
    """Returns the share of matmuls in half or fp8; `None` if there are none."""
    flops = sum(row.flops for row in rows)
    low = sum(row.flops for row in rows if row.is_low or row.is_in_fp8)
    return low / flops if flops else None


# --- where an equation stands --------------------------------------------------------

# Scopes that JAX opens around what a backward pass computes again.
_OF_CHECKPOINTS = ("checkpoint", "rematted_computation")


def scopes_of(eqn: Eqn) -> tuple[str, ...]:
    """Returns the scopes around an equation in its jaxpr, for `module_path`.

    What stands inside of a transformation may repeat what is around it: it is listed
    once.
    """
    scopes: list[str] = []
    for kind, entries in itertools.groupby(_source.scopes(eqn), type):
        names = [entry.name for entry in entries if kind.__name__ == "Scope"]
        group = [name for name in names if name not in _OF_CHECKPOINTS]
        scopes = group if group[: len(scopes)] == scopes else scopes + group
    half = len(scopes) // 2
    if eqn.primitive.name == "remat2" and scopes[:half] == scopes[half:]:
        scopes = scopes[:half]  # what is computed again
    return tuple(scopes)


def is_derivative(eqn: Eqn) -> bool:
    """Whether an equation is one of a gradient that the user's own function takes."""
    entries = _source.scopes(eqn)  # of transformations, too
    named = (type(x).__name__ for x in entries if x.name == "transpose")
    return any(name != "Scope" for name in named)


def module_path(scopes: tuple[str, ...]) -> str:
    """Returns the path of modules that scopes mean, without the names of methods."""
    names: list[str] = []
    was_method = False
    for segment in "/".join(scopes).split("/"):
        if not segment or "->" in segment:  # `jnp.einsum` opens a scope of its formula
            continue
        name, method = split_method(segment)
        if split_method(name)[1]:  # `eqx.nn.Linear`
            name, method = segment, ""
        # A method that calls another one of its own module, as Flax's RNN does.
        if not ((method or was_method) and names and names[-1] == name):
            names.append(name)
        was_method = bool(method)
    return "/".join(names)


class Location(NamedTuple):
    """Where a jaxpr or an equation stands."""

    eqns: tuple[Eqn, ...] = ()  # those around it, and the equation, outermost first
    inside: tuple[str, ...] = ()  # loops and the like around it, outermost first

    @property
    def path(self) -> str:
        """The path of the module."""
        return module_path(sum(map(scopes_of, self.eqns), ()))

    @property
    def source(self) -> str:
        """The line of the user's code; if it is not known, that of what is around."""
        return next(filter(None, map(source_text, reversed(self.eqns))), "")

    def of(self, eqn: Eqn) -> "Location":
        """Returns the location of an equation in this jaxpr."""
        return self._replace(eqns=(*self.eqns, eqn))

    def noted(self, note: str) -> "Location":
        """Returns the location of one iteration of a loop, or of one branch."""
        return self._replace(inside=(*self.inside, note))


def source_text(eqn: Eqn) -> str:
    """Returns the file and the line of the user's code, or nothing."""
    line = line_of(eqn)
    return "" if line is None else str(line)


# --- the user's equations ------------------------------------------------------------


class Visit(NamedTuple):
    """A row, with what else is known of its equation."""

    row: Equation
    eqn: Eqn  # as the user wrote it
    why: Any  # the emitter's `Choice`
    around: tuple[Eqn, ...] = ()  # the equations around it, outermost first
    # The equation around it that runs as a whole; `why` is its choice then.
    whole: Eqn | None = None

    @property
    def is_planned_half(self) -> bool:
        """Whether others read its first result in half precision."""
        form = (
            self.why.plan.forms.get(self.eqn.outvars[0]) if self.eqn.outvars else None
        )
        return form is not None and form.is_half


class Recorder:
    """Collects rows of the user's equations; an instance is the emitter's `record`."""

    def __init__(self, choose: Any = None) -> None:
        self._choose = choose  # the `Chooser`, for the reasons of what is in loops
        self.visits: list[Visit] = []  # in the order in which they were emitted
        self._entered: dict[int, Eqn] = {}  # by `id`, which others have if it is gone

    @property
    def rows(self) -> list[Equation]:
        """The rows of all but calls, of which the equations inside tell all."""
        return [x.row for x in self.visits if x.row.primitive not in TRANSPARENT]

    def __call__(
        self, eqn: Eqn, around: Any, operands: Any, results: Any, why: Any
    ) -> None:
        after = dtypes_of(eqn, operands, results)
        at = Location((*around, eqn))
        self._entered |= {id(outer): outer for outer in around}
        row = _row(at, after, why.reason, why.result)
        row.is_in_fp8 = why.is_in_fp8
        row.stays_by_rule = _stays(row, eqn, why)
        self.visits.append(Visit(row, eqn, why, tuple(around)))
        if id(eqn) not in self._entered:
            # Bodies are called with halves if the equation is, as a `relu` on the way
            # to a matmul.
            pairs = zip(row.before.operands, after.operands, strict=True)
            lowered = (y for x, y in pairs if x == "float32" and is_half(y))
            told = why.result
            self._add_bodies(at, next(lowered, "float32"), told, self.visits[-1])

    def _add_bodies(self, at: Location, float_: str, result: str, whole: Visit) -> None:
        """Adds the rows of the bodies of an equation that runs as a whole.

        What is told of its result is told of what makes the first one.
        """
        outer, why = at.eqns[-1], whole.why
        if kind_of(outer) in _CASTABLE or outer.primitive.name == "pallas_call":
            return
        # In a loop without a matmul in half precision, each equation has its reason.
        is_loop = why.role is Kind.STRUCTURED and self._choose is not None
        for body, _ in map(open_jaxpr, inner_jaxprs(outer)):
            # Of a hi-primitive, a reader asks for the matmuls that it hides.
            if hi_name(outer) and not has_matmul(body):
                continue
            for eqn in body.eqns:
                before, inner = dtypes_of(eqn), at.of(eqn)
                sides = before.operands, before.results
                own = (tuple(float_ if x == "float32" else x for x in y) for y in sides)
                choice = self._choose(eqn, why.body_context) if is_loop else why
                choice = choice._replace(plan=why.plan)
                is_first = any(v is x for v in eqn.outvars for x in body.outvars[:1])
                told = result if is_first else ""
                row = _row(inner, Dtypes(*own), choice.reason, told)
                row.stays_by_rule = is_first and _stays(row, whole.eqn, choice)
                around = inner.eqns[:-1]
                self.visits.append(Visit(row, eqn, choice, around, whole.eqn))
                self._add_bodies(inner, float_, told, whole._replace(why=choice))


def _stays(row: Equation, planned: Eqn, why: Any) -> bool:
    """Whether a result is float32 as that of a sum, or because a key says so.

    The plan knows the first result of `planned`, the equation or the one around it.
    """
    form = why.plan.forms.get(planned.outvars[0]) if planned.outvars else None
    if form is None or form.is_half:
        return False
    is_by_key = why.role in _IN_OWN_DTYPES and row.computes_in == "float32"
    return is_by_key or kind_of(row.primitive) is Kind.SUM


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
    """Returns the dtypes of an equation in its program, or with the given arrays."""
    return Dtypes(_dtypes(eqn.invars, operands), _dtypes(eqn.outvars, results))


def _dtypes(atoms: Sequence[Any], arrays: Sequence[Any]) -> tuple[str, ...]:
    """Returns the dtypes of arrays; a number has that of its atom."""
    pairs = zip(arrays or atoms, atoms, strict=True)
    return tuple(
        str(getattr(x, "dtype", getattr(v.aval, "dtype", ""))) for x, v in pairs
    )


def float_factors(dtypes: Sequence[str]) -> list[str]:
    """Returns those of the two factors of a matmul that are real or complex floats."""
    return [x for x in dtypes[:2] if "float" in x or "complex" in x]


def flops(eqn: Eqn) -> int:
    """Returns the operations of a matmul or a convolution of floats, else 0."""
    factors = float_factors(dtypes_of(eqn).operands)
    if not is_matmul(eqn) or not factors:
        return 0
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "conv_general_dilated":
        others = {eqn.params["dimension_numbers"].rhs_spec[0]}
        size = out.size
    else:
        numbers = eqn.params.get("ragged_dot_dimension_numbers")
        groups = numbers.rhs_group_dimensions if numbers else ()
        dims = numbers.dot_dimension_numbers if numbers else None
        (_, contracting), (_, batch) = dims or eqn.params["dimension_numbers"]
        others, size = {*contracting, *batch, *groups}, left.size
    terms = [n for i, n in enumerate(right.shape) if i not in others]
    # A multiplication of complex numbers is four of real ones.
    each = 2 * 2 ** sum("complex" in dtype for dtype in factors)
    return each * size * math.prod(terms)


def stored_bytes(
    closed: Jaxpr, arrays: Sequence[Any], trained: Sequence[bool]
) -> dict[str, int]:
    """Returns the bytes that the backward pass of a program stores, by dtype.

    JAX itself decides that: what the forward pass of `jax.vjp` hands to the backward
    pass is counted, without arguments and constants, which are in memory anyway. The
    first result is the loss, if that is a scalar.
    """
    sizes: Counter[str] = Counter()

    def count(*arrays: Any) -> None:
        def loss(*chosen: Any) -> Any:
            outs = evaluate(closed, fill(chosen, trained, arrays))
            outs = [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
            return outs[:1] if outs and outs[0].ndim == 0 else outs

        outs, pullback = jax.vjp(jax.jit(loss), *pick(arrays, trained))
        # Only its use tells whether there is one: a `while` has none.
        pullback(jax.tree.map(jnp.ones_like, outs))
        leaves = {id(x): x for x in jax.tree.leaves(pullback)}
        for key in leaves.keys() - set(map(id, arrays)):
            if isinstance(x := leaves[key], jax.core.Tracer):
                sizes[str(x.dtype)] += x.size * x.dtype.itemsize

    jax.eval_shape(count, *arrays)
    return dict(sizes.most_common())
