"""Rows: what the emitter records of each equation, and what the backward pass stores.

The emitter calls a `Recorder` with each equation of the user's program, the arrays that
it was bound to, and why.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp._compat import Eqn, Jaxpr, evaluate, open_jaxpr
from flax_amp._rewriter.primitives import Kind, is_matrix_product, kind_of
from flax_amp._tree import fill, pick
from flax_amp.debug._place import Location, places
from flax_amp.debug._report import is_half, short

# What they run is all that there is to tell about them.
CALLS = frozenset(
    """jit remat2 shard_map closed_call eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vmap_call""".split()
)
# Their reason tells why they stay in float32.
_IN_OWN_DTYPES = (Kind.ORIGINAL, Kind.CALLED)


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
    shape: str  #: of its first result, such as `8x1024x768`
    times: int  #: how often it runs; the body of a `while` counts once
    flops: int  #: of a matmul or a convolution
    source: str  #: the line of the user's code, with its file
    inside: tuple[str, ...]  #: loops and the like around it, outermost first

    @property
    def computes_in(self) -> str:
        """The dtype that it computes in, that of its floats as it reads them."""
        operands, results = self.after.operands, self.after.results
        floats = [dtype for dtype in (*operands, *results) if "float" in dtype]
        return next(iter((*floats, *results, *operands)), "")

    @property
    def is_low(self) -> bool:
        """Whether an operand arrives in half precision; of a matmul, both factors."""
        if kind_of(self.primitive) is Kind.PRODUCT:
            factors = float_factors(self.after.operands)
            return bool(factors) and all(map(is_half, factors))
        return any(map(is_half, self.after.operands))

    @property
    def is_in_fp8(self) -> bool:
        """Whether it is a matmul whose factors are rounded to 8-bit floats."""
        return self.reason.startswith("in fp8")

    @property
    def low_flops(self) -> int:
        """Its operations, if they run in half precision or in fp8."""
        return self.flops if self.is_low or self.is_in_fp8 else 0

    @property
    def stays_by_rule(self) -> bool:
        """Whether its result is float32 as that of a sum, or because a key says so."""
        is_sum = kind_of(self.primitive) is Kind.SUM
        is_key = self.result == f"float32: {self.reason}"
        return is_key or (is_sum and self.result.startswith("float32"))


def low_share(rows: Sequence[Equation]) -> float | None:
    """Returns the share of matmuls in half precision; `None` if there are none."""
    flops = sum(row.flops for row in rows)
    return sum(row.low_flops for row in rows) / flops if flops else None


# --- the user's equations ------------------------------------------------------------


class Visit(NamedTuple):
    """A row, with what else is known of its equation."""

    row: Equation
    eqn: Eqn  # as the user wrote it
    why: Any  # the emitter's `Choice`
    whole: Eqn | None = None  # what runs as a whole around it, with this why


class Recorder:
    """Collects the rows of what an emitter tells; an instance is its `record`."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []  # in the order in which they were emitted
        self._entered: dict[int, Eqn] = {}  # by `id`, which others have if it is gone

    def __call__(
        self, eqn: Eqn, around: Any, operands: Any, results: Any, why: Any
    ) -> None:
        after = Dtypes(_dtypes(eqn.invars, operands), _dtypes(eqn.outvars, results))
        start = functools.reduce(Location.within, around, Location())
        self._entered |= {id(outer): outer for outer in around}
        is_own = why.role in _IN_OWN_DTYPES and why.result.startswith("float32")
        result = f"float32: {why.reason}" if is_own else why.result
        row = _row(start.of(eqn), after, why.reason, result)
        self.visits.append(Visit(row, eqn, why))
        if id(eqn) not in self._entered and _may_enter(eqn):
            self.visits += _inside(eqn, start.within(eqn), after, why)

    @property
    def equations(self) -> list[Visit]:
        """All but calls, of which the equations inside tell all."""
        return [visit for visit in self.visits if visit.row.primitive not in CALLS]

    @property
    def rows(self) -> list[Equation]:
        """The rows of `equations`."""
        return [visit.row for visit in self.equations]


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
    inside = list(jaxprs_in_params(eqn.params))
    firsts = [x for body in inside for x in open_jaxpr(body)[0].outvars[:1]]
    walks = (places(body, start, _may_enter) for body in inside)
    for inner in itertools.chain.from_iterable(walks):
        if inner.eqn.primitive.name in CALLS:
            continue
        # No key decided about what is inside of a loop.
        is_loop = why.role is Kind.STRUCTURED
        reason = kind_of(inner.eqn).value if is_loop else why.reason
        before = dtypes_of(inner.eqn)
        sides = (before.operands, before.results)
        own = (tuple(float_ if x == "float32" else x for x in xs) for xs in sides)
        # What is told of a result is told of the first one.
        is_first = any(v is x for v in inner.eqn.outvars for x in firsts)
        row = _row(inner, Dtypes(*own), reason, why.result if is_first else "")
        found.append(Visit(row, inner.eqn, why, eqn))
    return found


def _row(at: Location, after: Dtypes, reason: str, result: str) -> Equation:
    eqn = at.eqn
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars] or [()]
    return Equation(
        path=at.path,
        primitive=eqn.primitive.name,
        before=dtypes_of(eqn),
        after=after,
        reason=reason,
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
