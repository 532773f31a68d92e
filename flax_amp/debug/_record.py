"""Rows: what the emitter records of each equation, and what stands in its program.

The emitter calls a `Recorder` with each equation of the user's program, the arrays that
it was bound to, and why. Casts, and what the backward pass stores, are read from the
program that comes out: each of its equations has the scopes and the line of the user's
equation that it belongs to.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr, evaluate
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    bodies,
    has,
    is_matrix_product,
    kind_of,
)
from flax_amp._rewriter.roles import Role
from flax_amp._rewriter.stored import stored_p
from flax_amp._tree import fill, pick
from flax_amp.debug._place import Location, places
from flax_amp.debug._report import is_half, short

# What they run is all that there is to tell about them.
CALLS = frozenset(
    """jit remat2 shard_map closed_call eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vmap_call""".split()
)
# Their reason tells why they stay in float32.
_IN_OWN_DTYPES = (Role.ORIGINAL, Role.CALLED, Role.PRECISE)


class Dtypes(NamedTuple):
    """The dtypes of an equation's operands and of its results."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        # Equal ones are written once: `bf16 -> f32`.
        sides = (dict.fromkeys(map(short, side)) for side in self)
        return " -> ".join(",".join(side) or "()" for side in sides)


@dataclasses.dataclass
class Equation:
    """One equation of the user's function, or casts, or an array that is stored.

    All numbers are those of one call of the function: what stands in a loop is
    multiplied by the length of the loop.
    """

    path: str  # the module, or the scope, that it stands in
    primitive: str
    before: Dtypes  # as the user wrote it
    after: Dtypes  # under `amp`
    reason: str  # the rule or the policy key that decided what it computes in
    result: str = ""  # what became of its result: `rounded: a matmul reads it later`
    shape: str = ""  # of its first result, such as `8x1024x768`
    times: int = 1  # how often it runs; the body of a `while` counts once
    flops: int = 0  # of a matmul or a convolution
    source: str = ""  # the line of the user's code, `file:line`
    inside: tuple[str, ...] = ()  # loops and the like around it, outermost first
    casts_down: int = 0  # of casts, how many are to a narrower float
    casts_up: int = 0  # of casts, how many are to a wider float
    stored: Counter[str] = dataclasses.field(default_factory=Counter)  # bytes by dtype

    @property
    def computes_in(self) -> str:
        """The dtype that it computes in: that of its floats, as it reads them."""
        operands, results = self.after
        floats = [dtype for dtype in (*operands, *results) if "float" in dtype]
        return next(iter((*floats, *results, *operands)), "")

    @property
    def is_low(self) -> bool:
        """Whether an operand arrives in half precision; of a product, all factors."""
        if kind_of(self.primitive) is Kind.PRODUCT:
            factors = float_factors(self.after.operands)
            return bool(factors) and all(map(is_half, factors))
        return any(map(is_half, self.after.operands))

    @property
    def is_in_fp8(self) -> bool:
        """Whether it is a product whose factors are rounded to 8-bit floats."""
        return self.reason.startswith("in fp8")

    @property
    def stays_by_rule(self) -> bool:
        """Whether a rule keeps its result in float32: it is a sum, or a key says so."""
        is_sum = kind_of(self.primitive) is Kind.SUM
        is_key = self.result == f"float32: {self.reason}"
        return is_key or (is_sum and self.result.startswith("float32"))

    @property
    def low_flops(self) -> int:
        """Its operations, if they run in half precision."""
        return self.flops if self.is_low else 0


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over rows; the attributes are those of `Equation`."""

    flops: int
    low_flops: int
    casts_down: int
    casts_up: int
    stored: Counter[str]

    @classmethod
    def of(cls, rows: Iterable[Equation]) -> "Totals":
        """Returns the sums over rows."""
        rows = list(rows)
        names = ("flops", "low_flops", "casts_down", "casts_up")
        sums = {name: sum(getattr(row, name) for row in rows) for name in names}
        return cls(**sums, stored=sum((row.stored for row in rows), Counter()))

    @property
    def low_share(self) -> float | None:
        """The share of products in half precision; `None` if there are none."""
        return self.low_flops / self.flops if self.flops else None


# --- the user's equations ------------------------------------------------------------


class Visit(NamedTuple):
    """A row, with what else is known of its equation."""

    row: Equation
    eqn: Eqn  # as the user wrote it
    why: Any  # the emitter's `Why`
    whole: Eqn = None  # the equation around it if that runs as a whole, and has the why


class Recorder:
    """Collects the rows of what an emitter tells; an instance is its `record`."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []  # in the order in which they were emitted
        self._entered: dict[int, Eqn] = {}  # by `id`, which others have if it is gone

    def __call__(
        self, eqn: Eqn, place: Any, operands: Any, results: Any, why: Any
    ) -> None:
        after = Dtypes(_dtypes(eqn.invars, operands), _dtypes(eqn.outvars, results))
        start = functools.reduce(Location.within, place.around, Location())
        self._entered |= {id(outer): outer for outer in place.around}
        if eqn.primitive.name not in CALLS:
            self.visits.append(Visit(_row(start.of(eqn), after, why), eqn, why))
        if id(eqn) not in self._entered and _may_enter(eqn):
            self.visits += _inside(eqn, start.within(eqn), after, why)


def _may_enter(eqn: Eqn) -> bool:
    """Whether an equation has bodies that a reader takes for a part of the program."""
    castable = Kind.PRODUCT, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM
    return kind_of(eqn) not in castable and eqn.primitive.name != "pallas_call"


def _inside(eqn: Eqn, start: Location, after: Dtypes, why: Any) -> list[Visit]:
    """Returns the rows of the bodies of an equation that runs as a whole."""
    # Its bodies are called with halves if it is, as a `relu` on the way to a product.
    pairs = zip(dtypes_of(eqn).operands, after.operands, strict=True)
    float_ = next((y for x, y in pairs if x == "float32" and is_half(y)), "float32")
    found = []
    for body in jaxprs_in_params(eqn.params):
        for inner in places(body, start, _may_enter):
            if inner.eqn.primitive.name in CALLS:
                continue
            sides = dtypes_of(inner.eqn)
            own = (tuple(float_ if x == "float32" else x for x in xs) for xs in sides)
            row = _row(inner, Dtypes(*own), why)
            if why.role is Role.STRUCTURED:  # no key decided
                row.reason = kind_of(inner.eqn).value
            row.result = ""
            found.append(Visit(row, inner.eqn, why, eqn))
    if found:
        found[-1].row.result = why.result
    return found


def _row(at: Location, after: Dtypes, why: Any) -> Equation:
    eqn, result = at.eqn, why.result
    if why.role in _IN_OWN_DTYPES and result.startswith("float32"):
        result = f"float32: {why.reason}"
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars] or [()]
    return Equation(
        path=at.path,
        primitive=eqn.primitive.name,
        before=dtypes_of(eqn),
        after=after,
        reason=why.reason,
        result=result,
        shape="x".join(map(str, shapes[0])),
        times=at.times,
        flops=flops(eqn) * at.times,
        source=at.source,
        inside=at.inside,
    )


def dtypes_of(eqn: Eqn) -> Dtypes:
    """Returns the dtypes of an equation as it stands in its program."""
    return Dtypes(_dtypes(eqn.invars), _dtypes(eqn.outvars))


def _dtypes(atoms: Sequence[Any], arrays: Sequence[Any] = ()) -> tuple[str, ...]:
    """Returns the dtypes of arrays; a number has that of its atom."""
    pairs = zip(atoms, arrays or atoms, strict=True)
    return tuple(
        str(getattr(x, "dtype", getattr(v.aval, "dtype", ""))) for v, x in pairs
    )


def float_factors(dtypes: Sequence[str]) -> list[str]:
    """Returns those of the two factors of a product that are real or complex floats."""
    return [x for x in dtypes[:2] if "float" in x or "complex" in x]


def flops(eqn: Eqn) -> int:
    """Returns the operations of a matmul or a convolution of floats, else 0."""
    factors = float_factors(dtypes_of(eqn).operands)
    if not is_matrix_product(eqn) or not factors:
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


# --- the emitted program -------------------------------------------------------------


def casts(closed: Jaxpr, visits: Sequence[Visit]) -> list[Equation]:
    """Returns rows for the casts of an emitted program, without the user's own."""
    counts: Counter[tuple[str, str, Dtypes]] = Counter()
    called = [visit.row for visit in visits if visit.why.role is Role.CALLED]
    for at in places(closed):
        name = at.eqn.primitive.name
        # What a user's precision function has made of operands is read here, too.
        for row in called:
            if (row.primitive, row.path, row.source) == (name, at.path, at.source):
                row.after = dtypes_of(at.eqn)
        if name == "convert_element_type":
            counts[at.path, at.source, dtypes_of(at.eqn)] += at.times
    for row in (visit.row for visit in visits):
        if row.primitive == "convert_element_type":
            counts[row.path, row.source, row.before] -= row.times
    found = []
    for (path, source, dtypes), count in counts.items():
        (before, *_), (after, *_) = dtypes
        if count > 0 and before != after and "float" in before and "float" in after:
            is_down = jnp.dtype(after).itemsize <= jnp.dtype(before).itemsize
            row = Equation(path, "cast", dtypes, dtypes, "a cast by amp", source=source)
            row.casts_down, row.casts_up = count * is_down, count * (not is_down)
            found.append(row)
    return found


def stored(
    closed: Jaxpr, arrays: Sequence[Any], trained: Sequence[bool]
) -> list[Equation]:
    """Returns rows for the arrays that the backward pass of a program stores.

    JAX itself decides that: the gradient is traced, and what its forward pass hands to
    its backward pass is counted. What the function was given is in memory anyway, and
    is not counted, nor is what only moves its data, such as a transposed weight. The
    first result is the loss, if that is a scalar.
    """

    def residuals(*arrays: Any) -> list[Any]:
        def loss(*chosen: Any) -> Any:
            outs = evaluate(closed, fill(chosen, trained, arrays))
            outs = [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
            return outs[:1] if outs and outs[0].ndim == 0 else outs

        outs, pullback = jax.vjp(jax.jit(loss), *pick(arrays, trained))
        # Only its use tells whether there is one: a `while` has none.
        pullback(jax.tree.map(jnp.ones_like, outs))
        return [x for x in jax.tree.leaves(pullback) if isinstance(x, jax.Array)]

    traced = jax.make_jaxpr(residuals)(*arrays)
    found: dict[Any, Equation] = {}
    outs = _compat.open_jaxpr(traced)[0].outvars
    for atom, origin in zip(outs, _origins(traced, arrays, Location()), strict=True):
        if isinstance(origin, _Origin):
            at, aval = origin.at, atom.aval
            dtypes = Dtypes((), (str(aval.dtype),))
            row = Equation(at.path, at.eqn.primitive.name, dtypes, dtypes, "stored")
            row.shape, row.source = "x".join(map(str, aval.shape)), at.source
            row.stored[str(aval.dtype)] = aval.size * aval.dtype.itemsize
            found[origin, aval.shape] = row
    return list(found.values())


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """Where an array is made. Two of them are different arrays."""

    at: Location


def _origins(jaxpr: Jaxpr, operands: Sequence[Any], start: Location) -> list[Any]:
    """Returns the origin of each result, or something else for what was given."""

    def run(eqn: Eqn, given: Sequence[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if eqn.primitive is stored_p:
            return [given[0]] * len(eqn.outvars)
        if (called := bodies(eqn)) and name not in ("while", "custom_linear_solve"):
            body, at = called[0], start.within(eqn)
            inputs = _compat.open_jaxpr(body)[0].invars
            operands = list(given[len(given) - len(inputs) :])  # behind a predicate
            if name == "scan":
                # What an iteration gets from the one before was made there, and is
                # another array than what it makes itself.
                first, count = _compat.scan_counts(eqn)
                operands[first : first + count] = _origins(body, operands, at)[:count]
            return _origins(body, operands, at)
        if has(eqn, Trait.LAYOUT) and not any(isinstance(x, _Origin) for x in given):
            return [None] * len(eqn.outvars)
        return [_Origin(start.of(eqn)) for _ in eqn.outvars]

    return list(evaluate(jaxpr, operands, run))
