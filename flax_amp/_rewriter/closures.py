"""Variables that rules of custom derivatives close over become operands of the calls.

JAX traces the rule of a `custom_vjp` or `custom_jvp` when the derivative is needed. By
then the trace of the function around the call is over, and a tracer that the rule
closes over is dead. The dead tracer still names its variable. In

    h = x @ w
    f = jax.custom_vjp(...)        # its backward rule reads h
    y = f(x)

the jaxpr is `h = dot x w; y = custom_vjp_call[bwd=...] x`, and `bwd` holds the tracer
of `h`. The call gets `h` as one more operand, and the operand takes the place of the
dead tracer among the constants of the rule when the rule is traced. `jaxopt`
differentiates its solvers in this way.
"""

import gc
import types
from collections import deque
from collections.abc import Container

import jax
import numpy as np
from jax.extend.core import Var

from flax_amp import _compat, _jaxprs
from flax_amp._compat import Eqn
from flax_amp._rewriter.roles import why_as_written

# Parameters of equations that hold functions which JAX calls later.
_RULES = ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun")
# A rule may close over a whole program, so the search ends after this many objects. A
# tracer behind them is not found, and JAX then says that a tracer has leaked. A limit
# of 10,000 was too low for a rule that closes over a dict of 20,000 keys.
_LIMIT = 100_000
# The search does not enter these types. Functions are entered, but not their globals.
_OPAQUE = (
    *(jax.Array, np.ndarray, np.dtype, str, bytes, int, float),
    *(type, types.ModuleType, types.CodeType),
    *(jax.core.AbstractValue, jax.sharding.Sharding, jax.tree_util.PyTreeDef),
    type(jax.tree_util.default_registry),
)


def with_captures(eqn: Eqn, made: set[Var]) -> Eqn:
    """Returns a custom derivative with the captured variables of its rules as operands.

    The captured variables are the first operands, and the parameter `captured` lists
    them.
    """
    is_custom = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    if not is_custom or why_as_written(eqn):
        return eqn
    found = _captured_by(eqn, made)
    if found is None:
        return eqn
    params = eqn.params | {"captured": found}
    return eqn.replace(invars=[*found, *eqn.invars], params=params)


def _captured_by(eqn: Eqn, made: Container[Var]) -> tuple[Var, ...] | None:
    """Returns the variables in `made` that the rules of an equation close over.

    The result is `None` if the rules close over no dead tracer of the jaxpr. The dead
    tracer of a number, such as `jnp.float32(2)`, names no variable: if there are only
    such tracers, the result is empty. Tracers of a function around `amp` are alive, and
    JAX takes them without help.
    """
    found: dict[Var, None] = {}
    has_number = False
    seen: set[int] = set()
    remaining = deque(eqn.params[name] for name in _RULES if name in eqn.params)
    while remaining and len(seen) < _LIMIT:
        item = remaining.popleft()
        atom = _jaxprs.atom_of(item)
        if isinstance(atom, Var):
            if atom in made:
                found[atom] = None
        elif atom is not None:
            has_number = True
        elif id(item) not in seen and not isinstance(item, _OPAQUE):
            seen.add(id(item))
            if isinstance(item, types.FunctionType):
                held = (item.__closure__, item.__defaults__, item.__kwdefaults__)
                remaining += [x for x in (*held, item.__dict__) if x]
            # A trace reaches every tracer that was made in the trace, also the tracers
            # that no rule reads.
            elif not _compat.is_of_trace(item):
                remaining += gc.get_referents(item)
    if not found and not has_number:
        return None
    return tuple(found)
