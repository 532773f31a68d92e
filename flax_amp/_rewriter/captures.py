"""What the rules of custom derivatives close over.

JAX traces the rule of a `custom_vjp`, `custom_jvp` or `custom_vmap` when somebody asks
for it. By then the trace of the enclosing function is over. What the rule closes over
is a dead tracer, which still names its variable. This module finds these variables, so
that their arrays can replace the dead tracers.
"""

import dataclasses
import gc
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat

# Parameters of equations that hold functions which JAX calls later.
_RULES = ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "rule")
_LIMIT = 100_000  # objects behind one rule: a rule may close over a whole program
# The search does not enter these. It enters functions, but not their globals.
_OPAQUE = (
    *(jax.Array, np.ndarray, np.dtype, str, bytes, int, float),
    *(type, types.ModuleType, types.CodeType),
    *(jax.core.AbstractValue, jax.sharding.Sharding, jax.tree_util.PyTreeDef),
    type(jax.tree_util.default_registry),
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A closed jaxpr with other constants or more results than JAX gave it."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    constvars: Sequence[Any]
    consts: Sequence[Any]


def captured_by(eqn: Any) -> tuple[Any, ...]:
    """Returns the variables that the rules of an equation close over."""
    rules = [eqn.params[name] for name in _RULES if name in eqn.params]
    return tuple(dict.fromkeys(_variables_behind(rules))) if rules else ()


def with_captured_outputs(closed: Any) -> tuple[Any, frozenset[Any]]:
    """Returns a jaxpr that also outputs the variables that its rules close over.

    Returns:
      The jaxpr, and these variables.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    wanted = {v for eqn in _equations(jaxpr) for v in captured_by(eqn)}
    if not wanted:
        return closed, frozenset()
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    exports = [v for v in (*jaxpr.invars, *jaxpr.constvars, *made) if v in wanted]
    outvars = [*jaxpr.outvars, *exports]
    traced = Traced(jaxpr.invars, outvars, jaxpr.eqns, jaxpr.constvars, consts)
    return traced, frozenset(exports)


def with_captured(closed: Any, arrays: Mapping[Any, Any]) -> Any:
    """Puts arrays into the places of the dead tracers among the consts of a jaxpr."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    variables = [_compat.variable_of(x) for x in consts]
    if not any(v in arrays for v in variables):
        return closed
    pairs = zip(variables, consts, strict=True)
    consts = [arrays.get(v, x) for v, x in pairs]
    return Traced(jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.constvars, consts)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all jaxprs inside, each once."""
    seen: set[int] = set()
    left = [jaxpr]
    while left:
        jaxpr = left.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            yield eqn
            left += jaxprs_in_params(eqn.params)


def _variables_behind(objects: Sequence[Any]) -> Iterator[Any]:
    """Yields the variables of the tracers that can be reached from some objects."""
    seen: set[int] = set()
    left = list(objects)
    while left and len(seen) < _LIMIT:
        item = left.pop()
        variable = _compat.variable_of(item)
        if variable is not None:
            yield variable
            continue
        if isinstance(item, _OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            held = (item.__closure__, item.__defaults__, item.__kwdefaults__)
            left += [x for x in (*held, item.__dict__) if x]
        elif not _compat.is_of_trace(item):
            left += gc.get_referents(item)
