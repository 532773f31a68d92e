"""Finds the parameters in half precision that no step changes.

The base of a LoRA, a frozen tower or a table may be stored in half precision
(`flax_amp.half_params`). The loss reads such a parameter without a cast. The parameter
has no gradient and no float32 copy, and the new state holds the array of the old state.
Only the optimizer knows whether a step changes a parameter, and an optimizer is a pair
of functions, also with `optax.set_to_zero` in an `optax.multi_transform`. So an update
is traced, and the new parameter has to be the old parameter plus zeros:

    u = broadcast_in_dim 0.0     zeros
    n = add p u                  `p`, unchanged

A parameter that is not found to be unchanged counts as trained.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat, _tree
from flax_amp._compat import Atom, DType, Eqn, Jaxpr
from flax_amp._rewriter.primitives import bodies
from flax_amp._training import PyTree
from flax_amp._training.dependence import CALLS, takes_operands
from flax_amp.optim._small_state import rounds_parameters

# The value of a variable: zeros, a parameter (its dtype and its number), or `None` for
# anything else.
_ZEROS = "zeros"
_Parameter = tuple[DType, int]
_Value = str | _Parameter | None

# Primitives whose result is zeros if all operands are; sums and products are below.
_KEEPS_ZEROS = frozenset(
    """abs broadcast_in_dim concatenate convert_element_type copy neg pvary reduce_sum
    reshape sharding_constraint slice squeeze transpose""".split()
)
# Primitives whose result is their operand; a cast is below.
_KEEPS_PARAMETER = frozenset("copy pvary sharding_constraint".split())


def unchanged_flags(state: Any) -> PyTree:
    """Returns a tree of flags: True for half-precision parameters that no step changes.

    `state` is an `AmpTrainState`. Nothing is traced if no parameter is in half
    precision.
    """
    leaves, treedef = jax.tree.flatten(state.params)
    # Under `small_state` all bfloat16 parameters train: updates are rounded at random.
    rounds = rounds_parameters(state.opt_state)
    flags = [
        _tree.is_half(leaf) and not (rounds and leaf.dtype == jnp.bfloat16)
        for leaf in leaves
    ]
    # A bare model, which is evaluated, has no optimizer.
    if any(flags) and state.opt_state is not None:
        unchanged = _unchanged_by_update(state)
        flags = list(map(operator.and_, flags, unchanged))
    else:
        flags = [False] * len(leaves)
    return jax.tree.unflatten(treedef, flags)


def params_of_loss(params: PyTree, unchanged: PyTree) -> PyTree:
    """Returns the parameters that a loss sees: parameters that train are float32.

    `unchanged` is the result of `unchanged_flags`.
    """

    def seen(leaf: Any, is_unchanged: bool) -> Any:
        return leaf if is_unchanged else _tree.float32_if_bfloat16(leaf)

    return jax.tree.map(seen, params, unchanged)


def _unchanged_by_update(state: Any) -> list[bool]:
    """Returns a flag for each parameter: True if no update changes the parameter."""
    number = jax.ShapeDtypeStruct((), jnp.float32)

    # The whole state is an argument: a learning rate in it that is 0 now, as at the
    # begin of a warm-up, would be a constant, and all updates zeros.
    def update(params: PyTree, state: Any, grads: PyTree, loss: Any) -> list[Any]:
        new = state.replace(params=params).apply_gradients(
            grads=grads,
            variables=state.variables,
            finite=True,
            extra_args=dict(value=loss, loss=loss, grad_norm=loss),
        )
        return jax.tree.leaves(new.params)

    rest = state.replace(params=None)
    closed = jax.make_jaxpr(update)(state.params, rest, state.params, number)
    dtypes = [leaf.dtype for leaf in closed.in_avals[: len(closed.out_avals)]]
    params: list[_Value] = list(zip(dtypes, range(len(dtypes)), strict=True))
    others: list[_Value] = [None] * (len(closed.in_avals) - len(params))
    found = _results(closed, params + others)
    return list(map(operator.eq, found, params))


def _results(closed: Jaxpr, operands: Sequence[_Value]) -> list[_Value]:
    jaxpr, _ = _compat.open_jaxpr(closed)
    known: dict[Any, _Value] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> _Value:
        if isinstance(atom, Literal):
            return None if np.any(atom.val) else _ZEROS
        return known.get(atom)

    for eqn in jaxpr.eqns:
        outs = _equation(eqn, list(map(read, eqn.invars)))
        known |= zip(eqn.outvars, outs, strict=True)
    return list(map(read, jaxpr.outvars))


def _equation(eqn: Eqn, operands: list[_Value]) -> list[_Value]:
    name = eqn.primitive.name
    if name == "cond":
        branches = [_results(x, operands[1:]) for x in eqn.params["branches"]]
        return list(map(_common, zip(*branches, strict=True)))
    if name in CALLS and takes_operands(eqn):
        return _results(bodies(eqn)[0], operands)
    if len(eqn.outvars) > 1 or not operands:
        return [None] * len(eqn.outvars)
    return [_result(name, operands, eqn.outvars[0].aval)]


def _result(name: str, operands: list[_Value], aval: Any) -> _Value:
    """Returns the value of the only result of an equation."""
    first = operands[0]
    last = operands[-1]
    if name == "select_n":
        return _common(operands[1:])
    if name == "mul" and _ZEROS in operands:
        return _ZEROS
    if name == "div" and first == _ZEROS:
        return _ZEROS
    if name in ("add", "add_any", "sub") and last == _ZEROS:
        return first
    if name in ("add", "add_any") and first == _ZEROS:
        return last
    if name in _KEEPS_ZEROS and set(operands) == {_ZEROS}:
        return _ZEROS
    if isinstance(first, tuple):
        dtype, _ = first
        # To float32, and back to its own dtype, no value changes.
        is_exact = jnp.promote_types(dtype, aval.dtype) == aval.dtype
        is_cast = name == "convert_element_type" and is_exact
        return first if is_cast or name in _KEEPS_PARAMETER else None
    return None


def _common(values: Sequence[_Value]) -> _Value:
    """Returns the value that all variables share, or `None` if their values differ."""
    first, *others = values
    return first if all(x == first for x in others) else None
