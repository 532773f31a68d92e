"""What the rules of custom derivatives close over becomes operands of their calls.

JAX traces the rule of a `custom_vjp` or `custom_jvp` when it is needed. By then the
trace of the function around it is over, and what the rule closes over is a dead tracer.
The tracer still names its variable. In

    h = x @ w
    f = jax.custom_vjp(...)        # its backward rule reads h
    y = f(x)

the jaxpr is `h = dot x w; y = custom_vjp_call[bwd=...] x`, and `bwd` holds the tracer
of `h`. The call gets `h` as one more operand, and the operand takes the place of the
dead tracer among the constants of the rule when that is traced. `jaxopt` differentiates
its solvers in this way.
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
# A rule may close over a whole program. What lies behind this many objects is not
# found, and JAX then says that a tracer has leaked.
_LIMIT = 100_000
# The search does not enter these. It enters functions, but not their globals.
_OPAQUE = (
    *(jax.Array, np.ndarray, np.dtype, str, bytes, int, float),
    *(type, types.ModuleType, types.CodeType),
    *(jax.core.AbstractValue, jax.sharding.Sharding, jax.tree_util.PyTreeDef),
    type(jax.tree_util.default_registry),
)


def with_captures(eqn: Eqn, made: set[Var]) -> Eqn:
    """Returns a custom derivative that takes what its rules close over as operands.

    They come first, and the parameter `captured` says whose tracers they are.
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
    """Returns those variables `made` so far that the rules of an equation close over.

    `None` if there is no dead tracer of the jaxpr; one of a number, such as
    `jnp.float32(2)`, names no variable. Tracers of a function around `amp` are alive,
    and JAX takes them as they are.
    """
    found: dict[Var, None] = {}
    has_number = False
    seen: set[int] = set()
    remaining = deque(eqn.params[name] for name in _RULES if name in eqn.params)
    while remaining and len(seen) < _LIMIT:
        item = remaining.popleft()
        atom = _jaxprs.atom_of(item)
        if isinstance(atom, Var):
            found |= {atom: None} if atom in made else {}
        elif atom is not None:
            has_number = True
        elif id(item) not in seen and not isinstance(item, _OPAQUE):
            seen.add(id(item))
            if isinstance(item, types.FunctionType):
                held = (item.__closure__, item.__defaults__, item.__kwdefaults__)
                remaining += [x for x in (*held, item.__dict__) if x]
            # A trace reaches every tracer that it made, whether a rule reads it or not.
            elif not _compat.is_of_trace(item):
                remaining += gc.get_referents(item)
    return tuple(found) if found or has_number else None
