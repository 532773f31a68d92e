"""The equations of a program: one iterator, and what a body reads of its inputs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._compat import variables as variables
from flax_amp._jaxpr.traits import Kind, Trait, has, kind_of


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

    def inside(
        jaxpr: Jaxpr, outer: tuple[str, ...], around: tuple[Eqn, ...]
    ) -> Iterator[Visit]:
        open_jaxpr = _compat.open_jaxpr(jaxpr)[0]
        if not every_call and (id(open_jaxpr), outer) in seen:
            return
        seen.add((id(open_jaxpr), outer))
        for eqn in open_jaxpr.eqns:
            scopes = outer + _compat.scope_names(eqn)
            yield Visit(eqn, scopes, around)
            for body in jaxprs_in_params(eqn.params) if enter(eqn) else ():
                yield from inside(body, scopes, (*around, eqn))

    return inside(jaxpr, scopes, ())


# --- what a body reads of its inputs -------------------------------------------------


def only_looked_up(jaxpr: Jaxpr) -> frozenset[Var]:
    """Returns the variables that a single equation reads, once: a gather or a call."""
    # A result of the jaxpr is read by the caller, whatever that does with it.
    reads = Counter(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        reads.update(variables(eqn.invars))
    readers = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("gather", "jit"))
    return frozenset(
        v for eqn in readers for v in variables(eqn.invars) if reads[v] == 1
    )


def is_indexed(jaxpr: Jaxpr, position: int) -> bool:
    """Whether a jaxpr reads parts of an input, at indices that it computes."""

    def indexes(eqn: Eqn, operand: int) -> bool:
        return operand == 0 and eqn.primitive.name in ("gather", "dynamic_slice")

    return _is_read(jaxpr, position, indexes)


def is_multiplied(jaxpr: Jaxpr, position: int) -> bool:
    """Whether a product of a jaxpr reads an input."""
    return _is_read(
        jaxpr, position, lambda eqn, i: i < 2 and kind_of(eqn) is Kind.PRODUCT
    )


def _is_read(jaxpr: Jaxpr, position: int, reads: Callable[[Eqn, int], bool]) -> bool:
    """Whether equations of a kind read an input, or what only moves its data.

    Args:
      jaxpr: the jaxpr.
      position: the index of the input.
      reads: whether an equation is of that kind, for the index of an operand.
    """
    jaxpr = _compat.open_jaxpr(jaxpr)[0]
    moved = {jaxpr.invars[position]}
    for eqn in jaxpr.eqns:
        positions = [
            i
            for i, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and v in moved
        ]
        if not positions:
            continue
        if reads(eqn, positions[0]):
            return True
        for body in jaxprs_in_params(eqn.params):
            # The operands of the call that come before its own are a predicate (`cond`)
            # or constants (`custom_linear_solve`).
            first = len(eqn.invars) - len(body.invars)
            if any(_is_read(body, i - first, reads) for i in positions if i >= first):
                return True
        if has(eqn, Trait.LAYOUT):  # a transposed weight is still the weight
            moved.update(eqn.outvars)
    return False


def integers_cast_inside(
    jaxpr: Jaxpr, operands: Sequence[Atom]
) -> tuple[tuple[Var, int], ...]:
    """Returns the integers among a call's operands that its body casts to float32.

    They are constants like the other numbers of a program, but they are no float32
    values until then: `jnp.where(mask, x, 0)` is such a call.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    cast = {
        v
        for eqn in body.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == np.float32
        for v in variables(eqn.invars)
    }
    return tuple(
        (v, int(x.val))
        for v, x in zip(body.invars, operands, strict=True)
        if v in cast
        and isinstance(x, Literal)
        and np.issubdtype(np.asarray(x.val).dtype, np.integer)
    )
