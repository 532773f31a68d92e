"""Which equations of a program are equal, however different their variables are."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp.plan import Mode, Plan, Step, Value, value_of

_RULE = "jvp_jaxpr_fun"  # the parameter of `custom_jvp_call` that holds the user's rule


def plans_in(detail: Any) -> list[Plan]:
    """Returns the plans in the detail of a step."""
    found: list[Plan] = []

    def note(plan: Plan) -> Plan:
        found.append(plan)
        return plan

    replaced(detail, note)
    return found


def replaced(detail: Any, function: Callable[[Plan], Any]) -> Any:
    """Returns the detail of a step with something else in the place of each plan."""
    if isinstance(detail, Plan):
        return function(detail)
    if isinstance(detail, tuple | list):
        return tuple(replaced(item, function) for item in detail)
    if dataclasses.is_dataclass(detail) and not isinstance(detail, type):
        names = [field.name for field in dataclasses.fields(detail) if field.init]
        fields = {name: getattr(detail, name) for name in names}
        new = {name: replaced(value, function) for name, value in fields.items()}
        changed = {name: x for name, x in new.items() if x is not fields[name]}
        return dataclasses.replace(detail, **changed) if changed else detail
    return detail


class Tokens:
    """Small numbers for equations and plans, the same for equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._plans: dict[Any, int] = {}

    def of(self, eqn: Any, step: Step, values: Mapping[Any, Value | None]) -> int:
        """Returns the token of an equation; integer literals may differ."""
        return self._number(self._key(eqn, step, values, strict=False))

    def _key(
        self, eqn: Any, step: Step, values: Mapping[Any, Value | None], strict: bool
    ) -> Any:
        if eqn.effects:
            return object()  # equal to nothing
        operands = []
        for atom in eqn.invars:
            is_free = not strict and jnp.issubdtype(atom.aval.dtype, jnp.integer)
            is_fixed = isinstance(atom, Literal) and not is_free
            number = bits(atom) if is_fixed else None
            operands.append((atom.aval, value_of(atom, values), number))
        is_rule = step.mode is Mode.RULE
        return (
            eqn.primitive,
            tuple(operands),
            tuple(v.aval for v in eqn.outvars),
            tuple(
                (name, _hashable(value))
                for name, value in eqn.params.items()
                # The plan of a rule says what is in its jaxprs.
                if not (is_rule and _holds_jaxprs(value)) and name != _RULE
            ),
            _derivative(eqn) if _RULE in eqn.params else None,
            eqn.ctx,
            step.mode,
            step.outs,
            _hashable(replaced(step.detail, self._plan)),
        )

    def _plan(self, plan: Plan) -> int:
        if plan in self._plans:
            return self._plans[plan]
        jaxpr = plan.jaxpr
        values = plan.values()
        number_of: dict[Any, int] = {}

        def numbers(atoms: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(
                bits(atom)
                if isinstance(atom, Literal)
                else number_of.setdefault(atom, len(number_of))
                for atom in atoms
            )

        key = [plan.site, plan.ins, plan.const_ins, tuple(map(id, plan.consts))]
        key += [numbers(jaxpr.invars), numbers(jaxpr.constvars)]
        for eqn, step in zip(jaxpr.eqns, plan.steps, strict=True):
            equation = self._number(self._key(eqn, step, values, strict=True))
            key.append((equation, numbers(eqn.invars), numbers(eqn.outvars)))
        key.append(numbers(jaxpr.outvars))
        self._plans[plan] = self._number(tuple(key))
        return self._plans[plan]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def bits(literal: Literal) -> Any:
    value = literal.val
    is_array = hasattr(value, "tobytes")
    return literal.aval, value.tobytes() if is_array else repr(value)


def _hashable(value: Any) -> Any:
    """Returns the value, or its identity if it cannot be compared."""
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value


def _holds_jaxprs(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(hasattr(getattr(item, "jaxpr", item), "eqns") for item in items)


def _derivative(eqn: Any) -> Any:
    """Returns what is equal for equal custom derivatives.

    The function that holds the rule is another object at each call. What it does is
    compared instead, in the text of its jaxpr.
    """
    structs = [_compat.struct_of(v.aval, v.aval.dtype) for v in eqn.invars]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in structs):
        return object()

    def call(*operands: Any) -> list[Any]:
        return _compat.bind(eqn, operands, eqn.params)

    try:
        closed = jax.make_jaxpr(lambda xs, ts: jax.jvp(call, xs, ts))(structs, structs)
    except Exception:  # a rule may refuse: that is for JAX to say, if it asks for it
        return object()
    jaxpr, consts = _compat.open_jaxpr(closed)
    return str(jaxpr), tuple(map(id, consts))
