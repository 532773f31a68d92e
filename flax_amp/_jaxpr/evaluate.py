"""An interpreter: runs a jaxpr, with a function of one's own for each equation."""

from collections.abc import Callable

from flax_amp import _compat
from flax_amp._compat import Arrays, Eqn, Jaxpr


def evaluate(
    closed: Jaxpr,
    operands: Arrays,
    run: Callable[[Eqn, Arrays], Arrays] = _compat.bind_in_context,
) -> Arrays:
    """Runs a jaxpr equation by equation; returns its results.

    Args:
      closed: the jaxpr; if it is open, it must have no constants.
      operands: one for each input, arrays or anything that `run` takes.
      run: returns the results of an equation for its operands; by default those that
        JAX computes. Literals and constants reach it as they are.
    """
    # It stands in `_compat.py`, because to bind an equation may take to run its body.
    return _compat.evaluate(closed, operands, run)
