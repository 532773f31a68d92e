"""What the backward pass stores, and what it computes again from that.

Elementwise arithmetic, casts and data movement are computed again: they fuse into
whatever reads them, whereas a stored float32 intermediate is written once, read once,
and takes memory in between. Matrix products, long reductions, random numbers and every
primitive that is not known here are never computed again.

Which values to store is a minimum cut. The nodes of the graph are the values of a piece
of a program. Paths lead from values that can only be stored, not computed again, to the
values that derivatives read. Every path must be cut, and to cut it at a value costs the
bytes of the value in its precision. In the inside of a norm,

    f:f32 = convert x:bf16
    s:f32 = sub f m             m, r: one number for each row
    o:f32 = mul s r

the derivative of `mul` reads `s` and `r`. JAX would store both, with four bytes for
each element of `s`. The paths to `s` come from `x`, which has two bytes, and from `m`.
So the cut stores `x`, `m` and `r`, and the backward pass computes `f` and `s` again.

The method is that of PyTorch's AOTAutograd ("Min-cut optimal recomputation with
AOTAutograd", 2022), here with precisions.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Aval, DType, Eqn, Var
from flax_amp._jaxpr.traits import (
    Kind,
    Reads,
    Trait,
    bodies,
    has,
    is_matrix_product,
    kind_of,
    traits_of,
)
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.plan import LOW, Mode, Paint, Step, Value, has_paint
from flax_amp._rewriter.recompute.mincut import min_cut
from flax_amp._rewriter.recompute.stored import stored_p

# From this length on, the result of a reduction is small beside its operand: it is
# stored. Then all that is computed again is elementwise, and fuses.
_LONG = 8

_STORABLE = frozenset(
    map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
)


def is_stored(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy of `jax.checkpoint`: whether a result is stored if it is needed."""
    if primitive is stored_p:
        return True
    return not _is_cheap(primitive, avals, params)


def is_cheap(eqn: Eqn) -> bool:
    """Whether an equation without effects may be computed again."""
    avals = [v.aval for v in eqn.invars]
    return _is_cheap(eqn.primitive, avals, eqn.params) and all(
        map(is_cheap, _called(eqn))
    )


def is_light(eqn: Eqn, has_user_rule: Callable[[Eqn], bool]) -> bool:
    """Whether an equation may stand in a region (see `regions.py`).

    It may not if it has a costly body of its own, if `jax.checkpoint` cannot store one
    of its operands or results, or if a rule of it may read what is computed in the
    region: it is traced when the region is over.
    """
    has_body = kind_of(eqn) in (Kind.CALL, Kind.STRUCTURED)
    if eqn.effects or has_user_rule(eqn) or (has_body and not has(eqn, Trait.CHEAP)):
        return False
    if not all(_can_be_stored(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return False
    return all(
        is_light(inner, has_user_rule) and kind_of(inner) is not Kind.PRODUCT
        for inner in _called(eqn)
    )


def _can_be_stored(aval: Aval) -> bool:
    """Whether `jax.checkpoint` stores a value as it is.

    It sends floats through `reduce_precision`, which refuses complex numbers and, on a
    CPU, turns the largest float8 into NaN.
    """
    return not _is_inexact(aval) or aval.dtype in _STORABLE


def _computes(trait: Trait, eqn: Eqn) -> bool:
    """Whether an equation, or one in what it calls, has a trait."""
    name = eqn.primitive.name
    if name == "integer_pow" and eqn.params["y"] == 2:
        name = "square"  # which norms and losses sum
    return has(name, trait) or any(_computes(trait, inner) for inner in _called(eqn))


def _is_cheap_call(eqn: Eqn) -> bool:
    """Whether an equation is a call that is cheap if what it calls is."""
    return kind_of(eqn) is Kind.CALL and has(eqn, Trait.CHEAP)


def _called(eqn: Eqn) -> Sequence[Eqn]:
    """Returns the equations that such a call runs."""
    body = bodies(eqn) if _is_cheap_call(eqn) else ()
    return [inner for jaxpr in body for inner in _compat.open_jaxpr(jaxpr)[0].eqns]


def _is_cheap(primitive: Any, avals: Sequence[Aval], params: Mapping[str, Any]) -> bool:
    if has(primitive, Trait.REDUCTION):
        length = math.prod(avals[0].shape[axis] for axis in params["axes"])
        return isinstance(length, int) and length < _LONG  # a symbol may be long
    return has(primitive, Trait.CHEAP)


@dataclasses.dataclass(frozen=True)
class LowCopy:
    """The low-precision copy of a full value that matrix products read.

    It has half the bytes of the value:

        y:f32 = mul s r
        z:bf16 = dot y w           reads LowCopy(y)
        a:f32 = add y t            reads y
    """

    variable: Var


Node = Var | LowCopy  # of the graph that is cut


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass of a piece of a program stores.

    Attributes:
      stored: the variables to store, and the `LowCopy` of variables.
      stored_bytes: their size.
      recomputed_bytes: the size of what derivatives read that is computed again.
      function_bytes: the size of the results of functions (`Trait.FUNCTION`) that are
        computed again.
      called_bytes: the size of the results of cheap calls. What is inside of them is
        computed again, too, but it is not known what they would store.
    """

    stored: frozenset[Node]
    stored_bytes: int
    recomputed_bytes: int
    function_bytes: int
    called_bytes: int


def choose(
    eqns: Sequence[Eqn],
    steps: Sequence[Step],
    ins: Collection[Var],
    values: Mapping[Var, Value | None],
    compute_dtype: DType,
    *,
    stores_operands: bool,
) -> Residuals:
    """Chooses what the backward pass of some equations stores.

    Args:
      eqns: the equations, in order; none has effects.
      steps: their steps.
      ins: the variables that they read from outside.
      values: what is known of each variable.
      compute_dtype: the dtype of low-precision values.
      stores_operands: whether the operands of matrix products are stored in any case.
        They lie in memory anyway, and to compute one again takes a kernel of its own
        where the product is a library call.
    """
    reads, products_read = _reads(eqns, steps, ins)
    # A product reads the low copy of a full value, and so does its derivative.
    operands: set[Node] = {
        LowCopy(v) if has_paint(values[v], Paint.FULL) else v for v in products_read
    }
    copies = [x for x in operands if isinstance(x, LowCopy)]
    read = reads | operands
    # Parameters, constants and integers from outside stay in memory anyway.
    free: set[Node] = {v for v in ins if not _is_computed(v, values)}
    stored: set[Node] = set()
    if stores_operands:
        stored = {x for x in operands if _is_computed(x, values)}
        # The cut may use them, and need not pay for them again.
        free |= operands
    sizes = _sizes(eqns, ins, copies, values, compute_dtype)
    costs = {x: 0 if x in free else size for x, size in sizes.items()}
    stored |= _cut(eqns, ins, copies, costs, read) - free
    return Residuals(
        frozenset(stored),
        stored_bytes=sum(sizes[v] for v in stored),
        recomputed_bytes=sum(sizes[v] for v in read - stored - free),
        function_bytes=sum(sizes[v] for v in _functions(eqns, stored)),
        called_bytes=sum(map(_called_bytes, eqns)),
    )


def _functions(eqns: Sequence[Eqn], stored: Collection[Node]) -> set[Var]:
    """Returns the results of functions, and of calls of them, if computed again."""
    return {
        v
        for eqn in eqns
        if is_cheap(eqn) and _computes(Trait.FUNCTION, eqn)
        for v in eqn.outvars
        # Inside of a call, such as silu, there is more than its result.
        if v not in stored or _is_cheap_call(eqn)
    }


def read_by_ill_conditioned(eqns: Sequence[Eqn], outs: Collection[Var]) -> set[Var]:
    """Returns the operands of ill-conditioned functions.

    What these operands are cheaply computed from is among them. The weights of a
    softmax add up to one only if both passes take the exponentials of the same numbers:

        x:bf16 = dot q k
        e:f32 = exp x
        s:f32 = reduce_sum e        stored
        p:f32 = div e s

    The backward pass computes `e` again from the stored `x`, so `s` must not come from
    an `x` with more digits. Nor must a maximum: its derivative goes to the operands
    that equal it, and no stored `x` would.

    The same holds for `x**4 / sum(x**4)`. Powers and sigmoids count if their results
    may be summed: the cube of a GELU does if a mean or a norm reads the GELU, and does
    not if only matrix products do. Exponentials count in any case: the sum may be that
    of other ones, which a loop has computed from `x`.

    Args:
      eqns: some equations, in order.
      outs: their results that are read outside of `eqns`, where they may be summed.
    """
    found: set[Var] = set()
    summed = set(outs)
    for eqn in reversed(eqns):
        operands = list(variables(eqn.invars))
        # What is not cheap is not computed again: its own result is stored.
        if is_cheap(eqn):
            may_be_summed = not summed.isdisjoint(eqn.outvars)
            leads_on = not found.isdisjoint(eqn.outvars)
        else:  # a sum, or a call that may have one inside
            may_be_summed = not is_matrix_product(eqn)
            leads_on = False
        if may_be_summed:
            summed.update(operands)
        if (
            leads_on
            or _computes(Trait.ILL_CONDITIONED, eqn)
            or (may_be_summed and _computes(Trait.ILL_CONDITIONED_IF_SUMMED, eqn))
        ):
            found.update(operands)
    return found


def _is_computed(node: Node, values: Mapping[Var, Value | None]) -> bool:
    """Whether a value takes memory only because it was computed."""
    return isinstance(node, LowCopy) or has_paint(values[node], Paint.LOW, Paint.FULL)


def _sizes(
    eqns: Sequence[Eqn],
    ins: Collection[Var],
    copies: Collection[LowCopy],
    values: Mapping[Var, Value | None],
    compute_dtype: DType,
) -> dict[Node, int]:
    """Returns the bytes of each value, in the precision in which it lives."""
    made = [v for eqn in eqns for v in eqn.outvars]
    sizes: dict[Node, int] = {
        v: _bytes(v.aval, values[v], compute_dtype) for v in (*ins, *made)
    }
    return sizes | {x: _bytes(x.variable.aval, LOW, compute_dtype) for x in copies}


def _cut(
    eqns: Sequence[Eqn],
    ins: Collection[Var],
    copies: Collection[LowCopy],
    costs: Mapping[Node, int],
    read: Collection[Node],
) -> set[Node]:
    """Returns the cheapest values from which all that is read can be computed."""
    # Paths begin here: these can be stored, but not computed again.
    costly = {v for eqn in eqns if not is_cheap(eqn) for v in eqn.outvars}
    sources = costly.union(ins)
    edges: list[tuple[Node, Node]] = [
        (v, out)
        for eqn in eqns
        for out in eqn.outvars
        if out not in sources
        for v in variables(eqn.invars)
    ]
    edges += [(copy.variable, copy) for copy in copies]
    return min_cut(costs, edges, sources, sinks=read)


def _called_bytes(eqn: Eqn) -> int:
    if not _is_cheap_call(eqn) or not is_cheap(eqn):
        return 0
    return sum(_bytes(v.aval, None, None) for v in eqn.outvars if _is_inexact(v.aval))


def is_low_product(eqn: Eqn, step: Step) -> bool:
    """Whether a product or a convolution runs in the compute dtype."""
    return kind_of(eqn) is Kind.PRODUCT and step.mode is Mode.LOW


def _reads(
    eqns: Sequence[Eqn], steps: Sequence[Step], inputs: Collection[Var]
) -> tuple[set[Var], set[Var]]:
    """Returns what derivatives read: first those of other equations, then of products.

    For example,

        z = dot y w          dy = dot dz w, dw = dot dz y     reads y and w
        e = exp z            dz = mul de e                    reads e, not z
        a = add e b          de = da, db = da                 reads nothing

    gives `{e}` and `{y, w}`.
    """
    # What a derivative may flow through: integers have none.
    active = {v for v in inputs if _is_inexact(v.aval)}
    reads: set[Var] = set()
    operands: set[Var] = set()
    for eqn, step in zip(eqns, steps, strict=True):
        name = eqn.primitive.name
        if name == "stop_gradient" or active.isdisjoint(variables(eqn.invars)):
            continue
        active.update(v for v in eqn.outvars if _is_inexact(v.aval))
        read = set(_read_by_derivative(eqn, step, active))
        (operands if is_low_product(eqn, step) else reads).update(read)
    return reads, operands


def _read_by_derivative(eqn: Eqn, step: Step, active: Collection[Var]) -> Iterator[Var]:
    """Yields what one derivative reads; too much where nothing is known of it."""
    reads = traits_of(eqn).reads
    if reads is Reads.NOTHING:
        return
    if reads is Reads.RESULT:
        yield from eqn.outvars
    elif reads is Reads.FACTORS and len(eqn.invars) == 2:
        # One factor is read for the derivative with respect to the other.
        for factor, other in (eqn.invars, eqn.invars[::-1]):
            if not isinstance(other, Literal) and other in active:
                yield from variables([factor])
    elif reads is Reads.PREDICATE:  # it says which case gets the cotangent
        yield from variables(eqn.invars[:1])
    else:
        yield from variables(eqn.invars)
        # The rewritten body of a call has residuals of its own.
        if step.mode is not Mode.RULE:
            yield from eqn.outvars


def _is_inexact(aval: Aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _bytes(aval: Aval, value: Value | None, compute_dtype: DType) -> int:
    dtype = (
        compute_dtype if has_paint(value, Paint.LOW) else getattr(aval, "dtype", None)
    )
    return math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 8)
