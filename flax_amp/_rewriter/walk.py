"""The equations of a program, one after the other."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._compat import variables as variables


class Visit(NamedTuple):
    """An equation of a walk.

    Attributes:
      eqn: the equation.
      scopes: the names of the scopes around it, outermost first.
      around: the equations in whose bodies it stands, outermost first.
    """

    eqn: Eqn
    scopes: tuple[str, ...]
    around: tuple[Eqn, ...]


def walk(
    jaxpr: Jaxpr,
    scopes: tuple[str, ...] = (),
    *,
    every_call: bool = False,
    enter: Callable[[Eqn], bool] = lambda eqn: True,
) -> Iterator[Visit]:
    """Yields the equations of a jaxpr, each before those of its bodies.

    Args:
      jaxpr: an open or closed jaxpr.
      scopes: the scopes around it.
      every_call: whether a body that is called again in the same scopes is walked
        again. A few calls within calls may make millions of equations.
      enter: whether the bodies of an equation are walked.
    """
    # By the open jaxpr: before JAX 0.11, several closed ones may share one.
    seen: set[tuple[int, tuple[str, ...]]] = set()
    # A stack instead of recursion: calls may be nested deeply.
    stack = [iter([(jaxpr, scopes, ())])]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
        elif isinstance(item, Visit):
            yield item
            if enter(item.eqn):
                around = (*item.around, item.eqn)
                inner = jaxprs_in_params(item.eqn.params)
                stack.append(iter([(body, item.scopes, around) for body in inner]))
        else:
            body, outer, around = item
            open_jaxpr = _compat.open_jaxpr(body)[0]
            if not every_call and (id(open_jaxpr), outer) in seen:
                continue
            seen.add((id(open_jaxpr), outer))
            visits = [
                Visit(eqn, outer + _compat.scope_names(eqn), around)
                for eqn in open_jaxpr.eqns
            ]
            stack.append(iter(visits))
