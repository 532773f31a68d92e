"""What single equations mean for precision; the rules of `flax_amp.paint` ask here."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._rewriter.casts import cast_constant, finfo
from flax_amp._rewriter.plan import (
    Paint,
    Plan,
    Step,
    Uses,
    Value,
    Values,
    has_paint,
    variables,
)
from flax_amp.policy import (
    KEEP_OPS,
    LOW_OPS,
    MOVE_OPS,
    Decision,
    Origin,
    use_original_precision,
)

# Elementwise choice: exact in any dtype, so there is nothing to gain in float32.
_CHOOSE = frozenset((*KEEP_OPS, "max", "min", "clamp"))
_INDEXES = frozenset(("gather", "dynamic_slice"))  # their first operand
_MASK = 1e3  # from this size on, a constant among activations is a mask


def is_exact(constant: float, compute_dtype: Any) -> bool:
    """Whether the compute dtype has this very number."""
    return float(cast_constant(constant, compute_dtype)) == constant


def bears(eqn: Any, constant: float, compute_dtype: Any) -> bool:
    """Whether an equation still means the same with the constant cast down.

    An epsilon that the compute dtype rounds to zero no longer guards a division, a
    bound of `1 - 1e-7` that it rounds to one no longer guards a logarithm, and a
    large factor may not saturate. A large summand or bound may: it is a mask.
    """
    name, size = eqn.primitive.name, abs(constant)
    limits = finfo(compute_dtype)
    if not np.isfinite(size) or size == 0:
        return True
    if size > float(limits.max):
        return name not in ("mul", "div", "rem", "atan2")
    if name in ("max", "min", "clamp"):
        return is_exact(constant, compute_dtype)
    return size >= float(limits.smallest_normal)


def only_chooses(eqn: Any, operands: Sequence[Value], compute_dtype: Any) -> bool:
    """Whether every element of the result is one of an operand, none rounded.

    But for a large constant, a mask, of which the last digits mean nothing.
    """
    return eqn.primitive.name in _CHOOSE and all(
        v.paint is Paint.LOW
        or (
            v.constant is not None
            and (is_exact(v.constant, compute_dtype) or abs(v.constant) >= _MASK)
        )
        for v in operands
    )


def is_softmax_numerator(eqn: Any, ins: Values, uses: Uses, decision: Decision) -> bool:
    """Whether an equation is the exponential of `exp(x - max(x)) / sum(...)`.

    It is computed in float32, but what the quotient and the backward pass read of it is
    rounded: it lies between 0 and 1, and is by far the largest array of a transformer.
    """
    return (
        eqn.primitive.name == "exp"
        and decision.function is use_original_precision
        and decision.origin is Origin.PRIMITIVE
        and ins[0] is not None
        and ins[0].below_zero
        and uses[0].is_numerator
    )


def reads_again(eqn: Any) -> bool:
    """Whether an equation may read an element of its operand more than once.

    Then the derivative of that element is a sum, of as many terms as there are reads.
    """
    if eqn.primitive.name != "gather" or eqn.params["unique_indices"]:
        return False
    batch = eqn.params["dimension_numbers"].start_indices_batching_dims
    *sizes, _ = eqn.invars[1].aval.shape
    reads = [n for i, n in enumerate(sizes) if i not in batch]
    # A symbolic size, of an export, may be any.
    return not all(isinstance(n, int) for n in reads) or math.prod(reads) > 1


def is_indexed(jaxpr: Any, position: int) -> bool:
    """Whether a jaxpr reads parts of an input, at places that it computes.

    Args:
      jaxpr: an open or closed jaxpr.
      position: the place of the input.
    """
    return _is_read(jaxpr, position, _INDEXES, 1)


def is_multiplied(jaxpr: Any, position: int) -> bool:
    """Whether a matrix product of a jaxpr reads an input.

    Args:
      jaxpr: an open or closed jaxpr.
      position: the place of the input.
    """
    return _is_read(jaxpr, position, LOW_OPS, 2)


def _is_read(jaxpr: Any, position: int, names: Collection[str], count: int) -> bool:
    """Whether primitives read an input among their first `count` operands."""
    jaxpr = _compat.open_jaxpr(jaxpr)[0]
    moved = {jaxpr.invars[position]}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        places = [
            i
            for i, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and v in moved
        ]
        if not places:
            continue
        if name in names and places[0] < count:
            return True
        for body in jaxprs_in_params(eqn.params):
            # Its inputs are the last operands.
            first = len(eqn.invars) - len(body.invars)
            if any(
                _is_read(body, i - first, names, count) for i in places if i >= first
            ):
                return True
        if name in MOVE_OPS:
            moved.update(eqn.outvars)
    return False


def noted(eqn: Any, ins: Values, step: Step) -> Step:
    """Notes of the results of a step whether they are maxima, or below zero."""
    name = eqn.primitive.name
    maximum = name == "reduce_max" or (
        name == "max" and any(v is not None and v.maximum for v in ins)
    )
    below_zero = name == "sub" and ins[1] is not None and ins[1].maximum
    if not (maximum or below_zero):
        return step
    outs = tuple(
        v and v._replace(maximum=maximum, below_zero=below_zero) for v in step.outs
    )
    return dataclasses.replace(step, outs=outs)


def moves_of_inputs(plan: Plan, values: Mapping[Any, Value | None]) -> dict[int, None]:
    """Returns the equations that only move parameters and other inputs about.

    They can stand before all others, and better do: out of a loop, JAX hoists what is
    the same at every step, and the layers that read them become equal.

    Args:
      plan: a plan.
      values: what is known of its variables.

    Returns:
      Their places, in order, as keys.
    """
    known = {*plan.jaxpr.invars, *plan.jaxpr.constvars}
    loose: dict[int, None] = {}  # an ordered set
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if eqn.primitive.name in MOVE_OPS and all(
            v in known and has_paint(values[v], Paint.LEAF)
            for v in variables(eqn.invars)
        ):
            loose[i] = None
            known.update(eqn.outvars)
    return loose
