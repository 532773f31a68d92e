"""Calls of the precision functions that users write, with their error messages."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp.policy import Decision

_SIGNATURE = "(compute_dtype, original_dtypes, *invars, **bind_params)"
_REMEDY = f"Write `def f{_SIGNATURE}: return invars, bind_params`."


def call_precision_function(
    eqn: Eqn, decision: Decision, compute_dtype: DType, operands: Arrays
) -> list[Array]:
    """Binds an equation to the operands and parameters that a user's function gives.

    Raises:
      TypeError: if the function cannot be called like one, or does not return operands
        and parameters that the equation can be bound with.
    """
    function = decision.function
    name = getattr(function, "__qualname__", None) or repr(function)
    what = f"amp_policy: the precision function {name} of key {decision.key!r}"
    where = f"for {eqn.primitive.name}"
    dtypes = [v.aval.dtype for v in eqn.invars]
    args = (compute_dtype, dtypes, *operands)
    # By the signature, not by trying: the function may raise a TypeError of its own.
    if not _takes(function, args, eqn.params):
        raise TypeError(
            f"{what} cannot be called {where} with {len(operands)} operands and the "
            f"parameters {sorted(eqn.params)}; expected the signature {_SIGNATURE}. "
            f"{_REMEDY}"
        )
    result = function(*args, **eqn.params)
    fault = _fault(result, operands)
    if fault:
        raise TypeError(
            f"{what} returned {fault} {where}; expected (invars, bind_params): the "
            f"{len(operands)} operands, cast but of the same shapes, and the dict of "
            f"parameters. {_REMEDY}"
        )
    try:
        outs = _compat.bind(eqn, *result)
    except (TypeError, ValueError) as error:
        # The usual mistake: it returns those that it has changed, and no others.
        if missing := sorted(eqn.params.keys() - result[1].keys()):
            raise TypeError(
                f"{what} returned a bind_params {where} that lacks the parameters "
                f"{missing}; expected all that it was given. Return operands, "
                "bind_params."
            ) from error
        given = ", ".join(str(jnp.result_type(x)) for x in result[0])
        names = sorted(map(str, result[1]))
        raise TypeError(
            f"{what} returned operands of dtypes ({given}) and the parameters {names} "
            f"{where}, which cannot be computed with these: {error}. {_REMEDY}"
        ) from error
    # An equation with other shapes may well be bound. It would fail at the next one,
    # which the message of JAX would blame.
    shapes = [np.shape(out) for out in outs]
    expected = [v.aval.shape for v in eqn.outvars]
    if shapes != expected:
        raise TypeError(
            f"{what} returned parameters {where} that give results of shapes {shapes}; "
            f"expected {expected}. Change dtypes only."
        )
    return outs


def _takes(function: Any, args: Sequence[Any], params: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return True
    try:
        signature.bind(*args, **params)
    except TypeError:
        return False
    return True


def _fault(result: Any, operands: Arrays) -> str | None:
    """Says what is wrong with the result of a precision function, if anything is."""
    if not isinstance(result, tuple | list):
        return f"a {type(result).__name__}"
    if len(result) != 2:
        return f"a {type(result).__name__} of {len(result)}"
    invars, params = result
    if not isinstance(params, Mapping):
        return f"a {type(params).__name__} as bind_params"
    if not isinstance(invars, tuple | list):
        return f"a {type(invars).__name__} as invars"
    if len(invars) != len(operands):
        return f"{len(invars)} operands"
    for i, (new, old) in enumerate(zip(invars, operands, strict=True)):
        # A literal of the jaxpr is a Python number.
        if not hasattr(new, "dtype") and not isinstance(new, int | float):
            return f"a {type(new).__name__} as operand {i}"
        if np.shape(new) != np.shape(old):
            return f"operand {i} of shape {np.shape(new)} for {np.shape(old)}"
    return None
