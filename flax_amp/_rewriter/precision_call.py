"""Calls of the precision functions that users write, with their error message."""

from typing import Any

import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp.policy import Decision


def call_precision_function(
    eqn: Eqn, decision: Decision, compute_dtype: DType, operands: Arrays
) -> list[Array]:
    """Binds an equation to the operands and parameters that a user's function gives.

    Raises:
      TypeError: if the function fails, or if it does not return operands and parameters
        that give results of the same shapes.
    """
    function: Any = decision.function
    dtypes = [v.aval.dtype for v in eqn.invars]
    try:
        invars, params = function(compute_dtype, dtypes, *operands, **eqn.params)
        outs = _compat.bind(eqn, invars, params)
        shapes, expected = [x.shape for x in outs], [v.aval.shape for v in eqn.outvars]
        # The message of JAX would blame the next equation.
        if shapes != expected:
            raise ValueError(f"results of shapes {shapes}; expected {expected}")
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"amp_policy: the precision function {name} of key {decision.key!r} fails "
            f"for {eqn.primitive.name} with {len(operands)} operands of shapes "
            f"{[np.shape(x) for x in operands]} and the parameters "
            f"{sorted(eqn.params)}: {error}. Expected `def f(compute_dtype, "
            "original_dtypes, *invars, **bind_params): return invars, bind_params`, "
            "which returns all operands, cast but of the same shapes, and all "
            "parameters."
        ) from error
    return outs
