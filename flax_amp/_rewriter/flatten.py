"""Opens calls: the equations of a small call without a matmul stand in its place.

Most functions of `jax.numpy` and `jax.nn` are jitted. What they compute belongs to the
arithmetic around them, and `jnp.where(mask, x, 0)` is a move like any other:

    y = jit[name=_where { select_n a b c }] m x z      becomes      y = select_n m x z
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend.core import Literal, Var

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr
from flax_amp._rewriter.captures import captured_by
from flax_amp._rewriter.roles import untraceable

# A larger call is not opened: calls of calls would be copied again and again.
_LARGEST = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr with its constants, in which small calls are open.

    Attributes:
      invars: its inputs.
      outvars: its results.
      eqns: its equations.
      consts: the variables that are constants, and their arrays.
    """

    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]
    consts: dict[Var, Array]


def flatten(closed: Jaxpr, opened: Callable[[Eqn], Program | None]) -> Program:
    """Returns a jaxpr with the equations of calls in their place.

    Args:
      closed: the jaxpr.
      opened: returns the body of a call that may be opened, `None` for all else.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    eqns: list[Eqn] = []
    renamed: dict[Var, Atom] = {}  # what a variable is called now
    made = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        body = opened(eqn)
        if body is not None and len(body.eqns) <= _LARGEST:
            copy = _copy(body, eqn, _now(eqn.invars, renamed))
            eqns += copy.eqns
            known |= copy.consts
            renamed |= zip(eqn.outvars, copy.outvars, strict=True)
        else:
            eqns.append(_renamed(_with_captures(eqn, made), renamed))
        made.update(eqn.outvars)
    return Program(jaxpr.invars, _now(jaxpr.outvars, renamed), eqns, known)


def _now(atoms: Sequence[Atom], renamed: dict[Var, Atom]) -> list[Atom]:
    return [x if isinstance(x, Literal) else renamed.get(x, x) for x in atoms]


def _with_captures(eqn: Eqn, made: set[Var]) -> Eqn:
    """Returns a custom derivative that takes what its rules close over as operands.

    They come first, and the parameter `captured` says whose tracers they are.
    """
    if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return eqn
    if untraceable(eqn):
        return eqn
    found = captured_by(eqn, made)
    if found is None:
        return eqn
    params = eqn.params | {"captured": found}
    return eqn.replace(invars=[*found, *eqn.invars], params=params)


def _renamed(eqn: Eqn, renamed: dict[Var, Atom]) -> Eqn:
    if not any(v in renamed for v in _compat.variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=_now(eqn.invars, renamed))


def _copy(body: Program, call: Eqn, operands: Sequence[Atom]) -> Program:
    """Returns the body of a call with variables of its own."""
    renamed: dict[Var, Atom] = dict(zip(body.invars, operands, strict=True))
    consts = {}
    for v, const in body.consts.items():
        consts[renamed.setdefault(v, Var(v.aval))] = const
    outer = _compat.scopes(call)
    eqns = []
    for eqn in body.eqns:
        invars = _now(eqn.invars, renamed)
        outvars = [renamed.setdefault(v, Var(v.aval)) for v in eqn.outvars]
        eqn = eqn.replace(invars=invars, outvars=outvars)
        inner = _compat.scopes(eqn)
        eqns.append(_compat.with_scopes(eqn, (*outer, *inner)) if outer else eqn)
    return Program(body.invars, _now(body.outvars, renamed), eqns, consts)
