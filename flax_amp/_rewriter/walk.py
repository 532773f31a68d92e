"""The equations of a program, with those of all bodies in it."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr


class Visit(NamedTuple):
    """An equation, the names of the scopes and the equations around it, outer first."""

    eqn: Eqn
    scopes: tuple[str, ...]
    around: tuple[Eqn, ...]


def walk(jaxpr: Jaxpr) -> Iterator[Visit]:
    """Yields the equations of an open or closed jaxpr, each before those of its bodies.

    Kernels are left out, because they have a precision of their own. A body that is
    called again in the same scopes is walked once: a few calls within calls may make
    millions of equations.
    """
    # By the open jaxpr: before JAX 0.11, several closed ones may share one.
    seen: set[tuple[int, tuple[str, ...]]] = set()
    # A stack instead of recursion: calls may be nested deeply.
    stack: list[tuple[Jaxpr, tuple[str, ...], tuple[Eqn, ...]]] = [(jaxpr, (), ())]
    while stack:
        body, outer, around = stack.pop()
        body = _compat.open_jaxpr(body)[0]
        if (id(body), outer) in seen:
            continue
        seen.add((id(body), outer))
        for eqn in body.eqns:
            scopes = outer + _compat.scope_names(eqn)
            yield Visit(eqn, scopes, around)
            if eqn.primitive.name != "pallas_call":
                inner = jaxprs_in_params(eqn.params)
                stack += [(x, scopes, (*around, eqn)) for x in inner]
