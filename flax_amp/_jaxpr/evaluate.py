"""An interpreter: runs a jaxpr, with a function of one's own for each equation."""

from collections.abc import Callable, Sequence

from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Arrays, Atom, Eqn, Jaxpr
from flax_amp._jaxpr.walk import variables


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
    jaxpr, consts = _compat.open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, operands, strict=True)

    def read(atoms: Sequence[Atom]) -> Arrays:
        return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
    last |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
    for i, eqn in enumerate(jaxpr.eqns):
        env |= zip(eqn.outvars, run(eqn, read(eqn.invars)), strict=True)
        # Outside of `jit` an array takes memory for as long as it is held.
        for v in {*variables(eqn.invars), *eqn.outvars}:
            if last.get(v, i) == i:
                del env[v]
    return read(jaxpr.outvars)
