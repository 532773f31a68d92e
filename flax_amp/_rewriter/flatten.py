"""Opens calls: the equations of a small call stand in its place.

Most functions of `jax.numpy` and `jax.nn` are jitted. Their equations belong to the
arithmetic around the call, and `jnp.where(mask, x, 0)` is a move, as a reshape is:

    y = jit[name=_where { select_n a b c }] m x z      becomes      y = select_n m x z
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend.core import Literal, Var

from flax_amp import _compat, _jaxprs, _source
from flax_amp._compat import Array, Atom, Eqn, Jaxpr
from flax_amp._rewriter.closures import with_captures
from flax_amp._rewriter.primitives import is_matmul

# A call with more equations is not opened, and is arithmetic as a whole: calls of calls
# of calls may make millions of equations. In the models of the benchmarks, the largest
# call that is opened has 8 equations. `amp` traces calls of calls with 98,303 equations
# in 3.0 s on a CPU, in 1.7 s with half the limit, and in 5.9 s with twice the limit.
_LARGEST = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr with its constants, in which small calls are open."""

    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]
    consts: dict[Var, Array]


def flatten(closed: Jaxpr, opened: Callable[[Eqn], Program | None]) -> Program:
    """Returns a jaxpr with the equations of calls in their place.

    `opened` returns the body of a call that may be opened, and `None` for every other
    equation.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    eqns: list[Eqn] = []
    # The atom of the program that replaces a result of an opened call.
    renamed: dict[Var, Atom] = {}
    made = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        body = opened(eqn)
        if body is not None and len(body.eqns) <= _LARGEST:
            copy = _copy(body, eqn, _current(eqn.invars, renamed))
            eqns += copy.eqns
            known |= copy.consts
            renamed |= zip(eqn.outvars, copy.outvars, strict=True)
        else:
            eqns.append(_with_names(with_captures(eqn, made), renamed))
        made.update(eqn.outvars)
    return Program(jaxpr.invars, _current(jaxpr.outvars, renamed), eqns, known)


def _current(atoms: Sequence[Atom], renamed: dict[Var, Atom]) -> list[Atom]:
    return [x if isinstance(x, Literal) else renamed.get(x, x) for x in atoms]


def _with_names(eqn: Eqn, renamed: dict[Var, Atom]) -> Eqn:
    if not any(v in renamed for v in _jaxprs.variables(eqn.invars)):
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
        eqns.append(_source.opened(eqn, call, keeps_line=is_matmul(eqn)))
    return Program(body.invars, _current(body.outvars, renamed), eqns, consts)
