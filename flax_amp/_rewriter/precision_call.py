"""Calls of the precision functions that users write."""

from typing import Any

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp.policy import Decision


def call_precision_function(
    eqn: Eqn, decision: Decision, compute_dtype: DType, operands: Arrays
) -> tuple[Arrays, list[Array]]:
    """Binds an equation to what a user's function gives; an error says which one.

    It returns what the equation is bound to, and its results.
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
    except Exception as error:
        error.add_note(
            f"amp_policy: in the precision function of key {decision.key!r}, called "
            f"for {eqn.primitive.name}. Expected `def f(compute_dtype, "
            "original_dtypes, *invars, **bind_params): return invars, bind_params`, "
            "with operands of the same shapes."
        )
        raise
    return invars, outs
