"""Opens calls: the equations of a small call stand in its place.

Most functions of `jax.numpy` and `jax.nn` are jitted. What they compute belongs to the
arithmetic around them, and `jnp.where(mask, x, 0)` is a move like any other:

    y = jit[name=_where { select_n a b c }] m x z      becomes      y = select_n m x z

It also finds what the rules of custom derivatives close over. JAX traces the rule of a
`custom_vjp` or `custom_jvp` when it is needed. By then the trace of the function around
it is over, and what the rule closes over is a dead tracer. The tracer still names its
variable. In

    h = x @ w
    f = jax.custom_vjp(...)        # its backward rule reads h
    y = f(x)

the jaxpr is `h = dot x w; y = custom_vjp_call[bwd=...] x`, and `bwd` holds the tracer
of `h`. The call gets `h` as one more operand, and the operand takes the place of the
dead tracer among the constants of the rule when that is traced. `jaxopt` differentiates
its solvers in this way.
"""

import dataclasses
import gc
import types
from collections import deque
from collections.abc import Callable, Container, Sequence

import jax
import numpy as np
from jax.extend.core import Literal, Var

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr
from flax_amp._rewriter.primitives import is_matmul
from flax_amp._rewriter.roles import why_as_written

# A larger call is not opened: calls of calls would be copied again and again.
_LARGEST = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr with its constants, in which small calls are open."""

    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]
    consts: dict[Var, Array]


def flatten(closed: Jaxpr, opened: Callable[[Eqn], Program | None]) -> Program:
    """Returns a jaxpr with the equations of calls in their place.

    `opened` returns the body of a call that may be opened, `None` for all else.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    eqns: list[Eqn] = []
    renamed: dict[Var, Atom] = {}  # what a variable is called now
    made = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        body = opened(eqn)
        if body is not None and len(body.eqns) <= _LARGEST:
            copy = _copy(body, eqn, _current(eqn.invars, renamed))
            eqns += copy.eqns
            known |= copy.consts
            renamed |= zip(eqn.outvars, copy.outvars, strict=True)
        else:
            eqns.append(_with_names(_with_captures(eqn, made), renamed))
        made.update(eqn.outvars)
    return Program(jaxpr.invars, _current(jaxpr.outvars, renamed), eqns, known)


def _current(atoms: Sequence[Atom], renamed: dict[Var, Atom]) -> list[Atom]:
    return [x if isinstance(x, Literal) else renamed.get(x, x) for x in atoms]


def _with_names(eqn: Eqn, renamed: dict[Var, Atom]) -> Eqn:
    if not any(v in renamed for v in _compat.variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=_current(eqn.invars, renamed))


def _copy(body: Program, call: Eqn, operands: Sequence[Atom]) -> Program:
    """Returns the body of a call with variables of its own."""
    renamed: dict[Var, Atom] = dict(zip(body.invars, operands, strict=True))
    consts = {}
    for v, const in body.consts.items():
        consts[renamed.setdefault(v, Var(v.aval))] = const
    eqns = []
    for eqn in body.eqns:
        invars = _current(eqn.invars, renamed)
        outvars = [renamed.setdefault(v, Var(v.aval)) for v in eqn.outvars]
        eqn = eqn.replace(invars=invars, outvars=outvars)
        # The frames of a matmul tell whether JAX has chosen its precision.
        eqns.append(_compat.opened(eqn, call, keeps_line=is_matmul(eqn)))
    return Program(body.invars, _current(body.outvars, renamed), eqns, consts)


# --- what rules close over -----------------------------------------------------------

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


def _with_captures(eqn: Eqn, made: set[Var]) -> Eqn:
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
        atom = _compat.atom_of(item)
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
