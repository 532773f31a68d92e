"""What the backward pass stores, and what it computes again from that.

Elementwise arithmetic, casts and data movement are computed again: they fuse into
whatever reads them, whereas a stored float32 intermediate is written once and read once
and takes its memory in between. Matrix products, long reductions, random numbers and
every primitive that is not known here are never computed again.

Which values to store is a minimum cut. The graph has the values of a piece of a program
as nodes; paths lead from what can only be stored, not computed again, to what the
derivatives read; every path must be cut, and cutting a value costs its bytes in the
precision in which it lives. The float32 inside of a norm or a softmax is so never
stored if its low-precision input can be. The method is that of PyTorch's AOTAutograd
("Min-cut optimal recomputation with AOTAutograd", 2022), here with precisions.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._rewriter.plan import LOW, Mode, Paint, Step, Value, has_paint, variables
from flax_amp._rewriter.recompute.keep import keep_p
from flax_amp._rewriter.recompute.mincut import min_cut
from flax_amp.policy import FOLLOW_OPS, LOW_OPS, MOVE_OPS, RANGE_OPS

_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split()
)
# From this factor on, a reduction's result is small to store beside its operand.
_LONG = 8

_SELECTS = """
    dynamic_slice select_n stop_gradient convert_element_type bitcast_convert_type
    reduce_precision iota real imag pvary flax_amp_saturate
    eq ne lt le gt ge is_finite not and or xor shift_left shift_right_logical
    shift_right_arithmetic
""".split()
_CHEAP = (
    frozenset((*MOVE_OPS, *_SELECTS, *FOLLOW_OPS, *RANGE_OPS, *_REDUCTIONS))
    - frozenset("select_and_scatter_add select_and_gather_add".split())
    # Series and continued fractions: hundreds of operations per element.
    - frozenset(
        """lgamma digamma polygamma zeta igamma igammac igamma_grad_a bessel_i0e
        bessel_i1e regularized_incomplete_beta""".split()
    )
)
# Calls that are as cheap as what they call.
_CALLS = frozenset("jit closed_call core_call custom_jvp_call".split())
# Primitives with bodies that have regions, or rules, of their own.
_STRUCTURED = frozenset(
    "scan while cond remat2 shard_map custom_vjp_call flax_amp_repeat".split()
)

_STORED = frozenset(
    map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
)

# What the derivative of a primitive reads, where it is not all of its operands and
# results.
_READS_NOTHING = MOVE_OPS | frozenset(
    """add sub neg add_any reduce_sum convert_element_type reduce_precision real imag
    pvary psum cumsum""".split()
)
_READS_RESULT = frozenset("exp exp2 expm1 tanh logistic sqrt cbrt".split())
_READS_FACTORS = frozenset(("mul", *LOW_OPS))


def is_stored(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy of `jax.checkpoint`: whether a result is stored if it is needed."""
    if primitive is keep_p:
        return True
    return not _is_cheap(primitive.name, avals, params)


def is_cheap(eqn: Any) -> bool:
    """Whether an equation may be computed again."""
    if eqn.effects:
        return False
    if eqn.primitive.name in _CALLS:
        return all(is_cheap(inner) for inner in _body(eqn))
    avals = [v.aval for v in eqn.invars]
    return _is_cheap(eqn.primitive.name, avals, eqn.params)


def is_light(eqn: Any) -> bool:
    """Whether an equation may stand in a region.

    It may not if it has a costly body of its own, or if `jax.checkpoint` cannot store
    one of its operands or results.
    """
    name = eqn.primitive.name
    if eqn.effects or name in _STRUCTURED:
        return False
    if not all(_can_be_stored(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return False
    if name not in _CALLS:
        return True
    inner = _body(eqn)
    return all(is_light(e) and e.primitive.name not in LOW_OPS for e in inner)


def _can_be_stored(aval: Any) -> bool:
    """Whether `jax.checkpoint` stores a value as it is.

    It passes the floats that it stores through `reduce_precision`, which refuses
    complex numbers and, on a CPU, makes NaN of the largest float8.
    """
    return not _is_inexact(aval) or aval.dtype in _STORED


def _body(eqn: Any) -> Sequence[Any]:
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return _compat.open_jaxpr(body)[0].eqns


def _is_cheap(name: str, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    if name in _REDUCTIONS:
        length = math.prod(avals[0].shape[axis] for axis in params["axes"])
        return isinstance(length, int) and length < _LONG  # a symbol may be long
    return name in _CHEAP or name in _CALLS


@dataclasses.dataclass(frozen=True)
class LowCopy:
    """The low-precision copy of a full value that matrix products read."""

    variable: Any


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass of a piece of a program stores.

    Attributes:
      kept: the values to store: variables, and low copies of variables.
      stored_bytes: their size.
      saved_bytes: the size of what is computed again instead of being stored.
      called_bytes: the size of the results of cheap calls, whose inside is computed
        again, too, but of which it is not known what they would store.
    """

    kept: frozenset[Any]
    stored_bytes: int
    saved_bytes: int
    called_bytes: int


def choose(
    eqns: Sequence[Any],
    steps: Sequence[Step],
    ins: Collection[Any],
    values: Mapping[Any, Value | None],
    compute_dtype: Any,
    *,
    keeps_operands: bool,
) -> Residuals:
    """Chooses what the backward pass of some equations stores.

    Args:
      eqns: the equations, in order; none has effects.
      steps: their steps.
      ins: the variables that they read from outside.
      values: what is known of each variable.
      compute_dtype: the dtype of low-precision values.
      keeps_operands: whether the operands of matrix products are stored in any case.
        They lie in memory anyway, and to compute one again takes a kernel of its own
        where the product is a library call.
    """
    made = {v for eqn in eqns for v in eqn.outvars}
    inputs = set(ins)
    # Parameters, constants and integers of the outside are there as long as it needs.
    free = {v for v in inputs if not has_paint(values[v], Paint.LOW, Paint.FULL)}
    reads, operands = _reads(eqns, steps, inputs)
    copies = {LowCopy(v): v for v in operands if has_paint(values[v], Paint.FULL)}
    operands = (operands - set(copies.values())) | copies.keys()
    sizes = {v: _bytes(v.aval, values[v], compute_dtype) for v in (*inputs, *made)}
    sizes |= {copy: _bytes(v.aval, LOW, compute_dtype) for copy, v in copies.items()}
    if keeps_operands:
        free |= operands
    costs = {v: 0 if v in free else size for v, size in sizes.items()}
    fixed = inputs | {v for eqn in eqns if not is_cheap(eqn) for v in eqn.outvars}
    edges = [
        (v, out)
        for eqn in eqns
        for out in eqn.outvars
        if out not in fixed
        for v in variables(eqn.invars)
    ]
    edges += [(v, copy) for copy, v in copies.items()]
    kept = min_cut(costs, edges, fixed, reads | operands) - free
    if keeps_operands:
        kept |= {
            v
            for v in operands
            if v in copies or has_paint(values[v], Paint.LOW, Paint.FULL)
        }
    return Residuals(
        frozenset(kept),
        stored_bytes=sum(sizes[v] for v in kept),
        saved_bytes=sum(sizes[v] for v in (reads | operands) - kept - free),
        called_bytes=sum(_made_by_call(eqn) for eqn in eqns),
    )


def _made_by_call(eqn: Any) -> int:
    if eqn.primitive.name not in _CALLS or not is_cheap(eqn):
        return 0
    return sum(_bytes(v.aval, None, None) for v in eqn.outvars if _is_inexact(v.aval))


def _reads(
    eqns: Sequence[Any], steps: Sequence[Step], inputs: Collection[Any]
) -> tuple[set[Any], set[Any]]:
    """Returns what the derivatives read: all but, and only, operands of products."""
    active = {v for v in inputs if _is_inexact(v.aval)}
    reads: set[Any] = set()
    operands: set[Any] = set()
    for eqn, step in zip(eqns, steps, strict=True):
        name = eqn.primitive.name
        if name == "stop_gradient" or active.isdisjoint(variables(eqn.invars)):
            continue
        active.update(v for v in eqn.outvars if _is_inexact(v.aval))
        read = set(_read_by_derivative(eqn, step, active))
        (operands if name in LOW_OPS else reads).update(read)
    return reads, operands


def _read_by_derivative(eqn: Any, step: Step, active: Collection[Any]) -> Iterator[Any]:
    name = eqn.primitive.name
    if name in _READS_NOTHING:
        return
    if name in _READS_RESULT:
        yield from eqn.outvars
    elif name in _READS_FACTORS and len(eqn.invars) == 2:
        for factor, other in (eqn.invars, eqn.invars[::-1]):
            if not isinstance(other, Literal) and other in active:
                yield from variables([factor])
    elif name == "select_n":
        yield from variables(eqn.invars[:1])
    else:
        yield from variables(eqn.invars)
        if step.mode is not Mode.RULE:
            yield from eqn.outvars


def _is_inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _bytes(aval: Any, value: Value | None, compute_dtype: Any) -> int:
    dtype = (
        compute_dtype if has_paint(value, Paint.LOW) else getattr(aval, "dtype", None)
    )
    return math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 8)
