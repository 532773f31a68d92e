"""What single equations mean for precision; the rules of `paint.py` ask here."""

import enum
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, DType, Eqn, Jaxpr, Var
from flax_amp._rewriter.casts import cast_constant
from flax_amp._rewriter.plan import (
    Paint,
    Plan,
    Value,
    has_paint,
    is_painted,
    variables,
)
from flax_amp.policy import (
    LOW_OPS,
    MOVE_OPS,
)

_INDEXES = frozenset(("gather", "dynamic_slice"))  # their first operand


def is_exact(constant: float, compute_dtype: DType) -> bool:
    """Whether the compute dtype has this very number."""
    return float(cast_constant(constant, compute_dtype)) == constant


class ProductKind(enum.Enum):
    """What a product is for precision; `dot_general` is of all three kinds."""

    MATRIX = "a matrix product or a convolution"  # what half precision speeds up
    MULTIPLICATION = "a multiplication"
    SUM = "a sum of products"


def product_kind(eqn: Eqn) -> ProductKind | None:
    """Returns the kind of a product or a convolution; `None` for other equations.

    A product that adds nothing up is a multiplication. A product that leaves no axes
    but those of a batch is a sum:

        einsum("i,j->ij", positions, frequencies)     a multiplication
        positions[:, None] @ frequencies[None]        the same: it adds one term
        vdot(losses, mask)                            a sum
        einsum("bi,bi->b", x, y)                      a sum for each `b`

    An axis of length one that is left counts as any other: it may be a batch of one.
    """
    name = eqn.primitive.name
    if name != "dot_general":
        return ProductKind.MATRIX if name in LOW_OPS else None
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    if all(shapes[0][axis] == 1 for axis in contracted):
        return ProductKind.MULTIPLICATION
    shared = len(contracted) + len(batch)
    is_sum = all(len(shape) == shared for shape in shapes)
    return ProductKind.SUM if is_sum else ProductKind.MATRIX


def is_matrix_product(eqn: Eqn) -> bool:
    """Whether an equation is a matrix product or a convolution."""
    return product_kind(eqn) is ProductKind.MATRIX


def may_read_twice(eqn: Eqn) -> bool:
    """Whether an equation may read an element of its operand more than once.

    The derivative with respect to that element is then a sum with one term for each
    read. The lookup of a token in an embedding is the common case.
    """
    if eqn.primitive.name != "gather" or eqn.params["unique_indices"]:
        return False
    batch = eqn.params["dimension_numbers"].start_indices_batching_dims
    *sizes, _ = eqn.invars[1].aval.shape
    reads = [n for i, n in enumerate(sizes) if i not in batch]
    # A symbolic size (`jax.export`) may be larger than one.
    return not all(isinstance(n, int) for n in reads) or math.prod(reads) > 1


def only_looked_up(jaxpr: Jaxpr) -> frozenset[Var]:
    """Returns the variables that a single equation reads, once: a gather or a call."""
    reads = Counter(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        reads.update(variables(eqn.invars))
    readers = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("gather", "jit"))
    return frozenset(
        v for eqn in readers for v in variables(eqn.invars) if reads[v] == 1
    )


def is_indexed(jaxpr: Jaxpr, position: int) -> bool:
    """Whether a jaxpr reads parts of an input, at indices that it computes."""
    return _is_read(jaxpr, position, _INDEXES, 1)


def is_multiplied(jaxpr: Jaxpr, position: int) -> bool:
    """Whether a matrix product of a jaxpr reads an input."""
    return _is_read(jaxpr, position, LOW_OPS, 2)


def _is_read(jaxpr: Jaxpr, position: int, names: Collection[str], count: int) -> bool:
    """Whether primitives read an input among their first `count` operands."""
    jaxpr = _compat.open_jaxpr(jaxpr)[0]
    moved = {jaxpr.invars[position]}  # the input, and what only moves its data
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        positions = [
            i
            for i, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and v in moved
        ]
        if not positions:
            continue
        if name in names and positions[0] < count:
            return True
        for body in jaxprs_in_params(eqn.params):
            # The operands of the call that come before its own are a predicate (`cond`)
            # or constants (`custom_linear_solve`).
            first = len(eqn.invars) - len(body.invars)
            if any(
                _is_read(body, i - first, names, count) for i in positions if i >= first
            ):
                return True
        if name in MOVE_OPS:
            moved.update(eqn.outvars)
    return False


def numbers_cast_inside(
    jaxpr: Jaxpr, operands: Sequence[Atom]
) -> tuple[tuple[Var, int], ...]:
    """Returns the integers among a call's operands that its body casts to float32.

    They are constants like the other numbers of a program, but they are no float32
    values until then: `jnp.where(mask, x, 0)` is such a call.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    cast = {
        v
        for eqn in body.eqns
        if eqn.primitive.name == "convert_element_type"
        and is_painted(eqn.outvars[0].aval)
        for v in variables(eqn.invars)
    }
    return tuple(
        (v, int(x.val))
        for v, x in zip(body.invars, operands, strict=True)
        if v in cast
        and isinstance(x, Literal)
        and np.issubdtype(np.asarray(x.val).dtype, np.integer)
    )


def moves_of_inputs(plan: Plan, values: Mapping[Var, Value | None]) -> dict[int, None]:
    """Returns the equations that only move the data of parameters and other inputs.

    They can run before all others, and that is better: JAX hoists what is the same at
    each step out of a loop, and the layers that read the results become equal. In

        w0 = slice w; y0 = dot x w0; w1 = slice w; y1 = dot y0 w1

    the two products are next to each other once the slices have gone ahead. Their
    indices are returned in order, as keys.
    """
    inputs = {*plan.jaxpr.invars, *plan.jaxpr.constvars}
    moves: dict[int, None] = {}  # an ordered set
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if eqn.primitive.name in MOVE_OPS and all(
            v in inputs and has_paint(values[v], Paint.LEAF)
            for v in variables(eqn.invars)
        ):
            moves[i] = None
            inputs.update(eqn.outvars)
    return moves
