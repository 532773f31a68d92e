"""What the rules of custom derivatives close over, and which of them users wrote.

JAX traces the rule of a `custom_vjp`, `custom_jvp` or `custom_vmap` when it is
needed. By then the trace of the function around it is over, and what the rule closes
over is a dead tracer. The tracer still names its variable. In

    h = x @ w
    f = jax.custom_vjp(...)        # its backward rule reads h
    y = f(x)

the jaxpr is `h = dot x w; y = custom_vjp_call[bwd=...] x; return y`, and `bwd` holds
the tracer of `h`. This module finds `h` and makes it one more result: `return y, h`.
While the jaxpr is emitted, its array is recorded, and it takes the place of the dead
tracer among the constants of the rule when that is traced.

The same search tells the rules of JAX, which are traced once for equal calls, from
those of users, which are traced for each.
"""

import gc
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Eqn, Jaxpr, Var
from flax_amp._jaxpr.walk import walk
from flax_amp._rewriter.plan import EditedJaxpr

# Parameters of equations that hold functions which JAX calls later.
_RULES = ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "rule", "transpose_thunk")
# A rule may close over a whole program. What lies behind this many objects is not
# found, and JAX then says that a tracer has leaked, as it does without this module.
_LIMIT = 100_000
# The search does not enter these. It enters functions, but not their globals.
_OPAQUE = (
    *(jax.Array, np.ndarray, np.dtype, str, bytes, int, float),
    *(type, types.ModuleType, types.CodeType),
    *(jax.core.AbstractValue, jax.sharding.Sharding, jax.tree_util.PyTreeDef),
    type(jax.tree_util.default_registry),
)


def captured_by(eqn: Eqn) -> tuple[Var, ...]:
    """Returns the variables that the rules of an equation close over."""
    variables = map(_compat.variable_of, _reachable(_rules(eqn)))
    return tuple(dict.fromkeys(v for v in variables if v is not None))


class HasUserRule:
    """Tells whether a rule of an equation may be a function that JAX does not define.

    Such a rule may read and change anything while it is traced, such as the counter
    that it folds into a key, so it is traced for each call. The rules of JAX, such as
    that of relu, give the same result whenever they are traced.

    An object of this class serves one program: it searches each rule once, and holds
    it, because an `id` may be used again for another object.
    """

    def __init__(self) -> None:
        self._searched: dict[int, tuple[Any, bool]] = {}

    def __call__(self, eqn: Eqn) -> bool:
        return any(map(self._is_of_user, _rules(eqn)))

    def _is_of_user(self, rule: Any) -> bool:
        if id(rule) not in self._searched:
            self._searched[id(rule)] = rule, _reaches_user_code(rule)
        return self._searched[id(rule)][1]


def _rules(eqn: Eqn) -> list[Any]:
    return [eqn.params[name] for name in _RULES if name in eqn.params]


def _reaches_user_code(rule: Any) -> bool:
    found = 0
    for item in _reachable([rule]):
        found += 1
        if _may_be_of_user(item):
            return True
    return found == _LIMIT  # more may lie behind


def _may_be_of_user(item: Any) -> bool:
    if isinstance(item, types.FunctionType):
        module = str(item.__globals__.get("__name__"))
    else:
        module = type(item).__module__
    # A method and a partial consist of parts that `_reachable` yields, too.
    is_known = module.partition(".")[0] in ("jax", "jaxlib", "functools")
    return callable(item) and not (is_known or isinstance(item, types.MethodType))


def with_captured_outputs(closed: Jaxpr) -> tuple[Jaxpr, frozenset[Var]]:
    """Returns a jaxpr that also outputs the variables that its rules close over.

    Returns:
      The jaxpr, and these variables.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    captured = {v for eqn, *_ in walk(jaxpr) for v in captured_by(eqn)}
    if not captured:
        return closed, frozenset()
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    exports = [v for v in (*jaxpr.invars, *jaxpr.constvars, *made) if v in captured]
    outvars = [*jaxpr.outvars, *exports]
    edited = EditedJaxpr(jaxpr.invars, outvars, jaxpr.eqns, jaxpr.constvars, consts)
    return edited, frozenset(exports)


def with_captured(closed: Jaxpr, arrays: Mapping[Var, Array]) -> Jaxpr:
    """Returns a jaxpr with arrays in place of the dead tracers among its constants.

    A number such as `jnp.float32(2)` has a tracer too, which names no variable.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    known = [_captured(x, arrays) for x in consts]
    if all(x is const for x, const in zip(known, consts, strict=True)):
        return closed
    return EditedJaxpr(jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.constvars, known)


def _captured(const: Any, arrays: Mapping[Var, Array]) -> Any:
    """Returns the number or the recorded array that a dead tracer stands for.

    Every other constant is returned as it is.
    """
    number = _compat.number_of(const)
    if number is not None:
        return number
    variable = _compat.variable_of(const)
    return const if variable is None else arrays.get(variable, const)


def _reachable(objects: Sequence[Any]) -> Iterator[Any]:
    """Yields some objects and those that are reachable from them, the nearest first."""
    seen: set[int] = set()
    remaining = deque(objects)
    while remaining and len(seen) < _LIMIT:
        item = remaining.popleft()
        if id(item) in seen:
            continue
        is_variable = _compat.variable_of(item) is not None
        if isinstance(item, _OPAQUE) and not is_variable:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, types.FunctionType):
            held = (item.__closure__, item.__defaults__, item.__kwdefaults__)
            remaining += [x for x in (*held, item.__dict__) if x]
        # A trace reaches every tracer that it made, whether the rule reads it or not.
        elif not (is_variable or _compat.is_of_trace(item)):
            remaining += gc.get_referents(item)
