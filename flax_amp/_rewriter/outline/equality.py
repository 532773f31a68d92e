"""Which equations of a program are equal, however different their variables are.

Two equations are equal if every part of them was compared and is equal. Jaxprs are
compared equation by equation, numbers and small arrays by their bits, functions (rules
of custom derivatives and callbacks among them) by their code and by what they close
over. Every other object equals only itself. In

    a = mul x 2.0;  b = mul y 2.0;  c = mul y 3.0
    d = jit[jaxpr=f] a;  e = jit[jaxpr=g] b

`a` equals `b` if `x` and `y` have one type and one paint, neither equals `c`, and `d`
equals `e` if the jaxprs `f` and `g` have equal equations with the same flow of data.

Nothing is traced for the comparison: a rule that calls itself, such as that of relu,
would never be traced to its end, and the text of a jaxpr does not show callbacks.
"""

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr, Var
from flax_amp._rewriter.plan import Mode, Plan, Step, Value, value_of

Key = Hashable  # equal for equal parts

_SMALL = 4096  # elements of the largest array that is compared by its contents
_PLAIN = frozenset((type(None), bool, int, str, bytes))
# Packages whose dataclasses are equal if their fields are.
_KNOWN = ("jax", "jaxlib", "flax_amp")


def plans_in(detail: Any) -> list[Plan]:
    """Returns the plans in the detail of a step."""
    found: list[Plan] = []

    def collect(plan: Plan) -> Plan:
        found.append(plan)
        return plan

    map_plans(detail, collect)
    return found


def map_plans(detail: Any, function: Callable[[Plan], Any]) -> Any:
    """Returns the detail of a step, with a function applied to each plan in it."""
    if isinstance(detail, Plan):
        return function(detail)
    if type(detail) in (tuple, list):  # not a NamedTuple, such as `Value`
        return tuple(map_plans(item, function) for item in detail)
    if dataclasses.is_dataclass(detail) and not isinstance(detail, type):
        names = [field.name for field in dataclasses.fields(detail) if field.init]
        fields = {name: getattr(detail, name) for name in names}
        new = {name: map_plans(value, function) for name, value in fields.items()}
        changed = {name: x for name, x in new.items() if x is not fields[name]}
        return dataclasses.replace(detail, **changed) if changed else detail
    return detail


def bits(literal: Literal) -> Any:
    """Returns the key of a literal: its type and its bits."""
    return literal.aval, np.asarray(literal.val).tobytes()


class _Identity:
    """The key of an object that equals only itself.

    It holds the object, because an `id` may be used again for another one.
    """

    __slots__ = ("_object",)

    def __init__(self, x: Any):
        self._object = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


class EquationIds:
    """Small numbers for equations, the same for equal ones.

    Each part of an equation has a key: a hashable object that is equal for equal parts.
    Keys are numbered, so that the key of a whole stays small.

    Args:
      has_user_rule: tells equations with a rule of a user, which equal only themselves.
    """

    def __init__(self, has_user_rule: Callable[[Eqn], bool]) -> None:
        self._has_user_rule = has_user_rule
        self._number_of_key: dict[Key, int] = {}
        # Objects with their numbers, by `id`, which is unique while this holds them.
        self._number_of_object: dict[int, tuple[Any, Key]] = {}

    def id_of(self, eqn: Eqn, step: Step, values: Mapping[Var, Value | None]) -> int:
        """Returns the number of an equation, whatever integer literals it has.

        The number that a dropout key is folded with differs from layer to layer. It
        becomes an operand of the call.
        """
        return self._number(self._planned_key(eqn, step, values, strict=False))

    def id_of_rules(self, eqn: Eqn, step: Step) -> int:
        """Returns the number of what the rules of a custom derivative are planned from.

        Equations with one number may share the plans of their rules. The number is kept
        for the step, which belongs to one equation.
        """

        # The scopes in the function are compared, too: the rule may call it.
        def key_of(step: Step) -> Key:
            plans = self._part_key(map_plans(step.detail, self._plan_key))
            return self._equation_key(eqn), plans

        return self._number_once(step, key_of)

    def _planned_key(
        self, eqn: Eqn, step: Step, values: Mapping[Var, Value | None], strict: bool
    ) -> Any:
        """Returns the key of an equation with its step."""
        # A body with a plan is compared by the plan, which has more in it (the paints)
        # and less (the scopes, in which equal layers differ).
        plans = plans_in(step.detail) if step.mode is Mode.RULE else ()
        return (
            self._equation_key(eqn, strict, {id(plan.jaxpr) for plan in plans}),
            tuple(value_of(atom, values) for atom in eqn.invars),
            step.mode,
            tuple(step.outs),
            tuple(step.reads),
            step.reads_unrounded,
            step.unrounded is None,
            self._part_key(map_plans(step.detail, self._plan_key)),
        )

    def _equation_key(
        self, eqn: Eqn, strict: bool = True, planned: Iterable[int] = ()
    ) -> Any:
        """Returns the key of an equation without its step.

        Args:
          eqn: the equation.
          strict: whether literals of integer type have to be equal.
          planned: the ids of jaxprs that are compared by their plans instead.
        """
        # An effect happens as often as it stands in the program, and in its order; so
        # does what the rules of a user do while they are traced.
        if eqn.effects or self._has_user_rule(eqn):
            return _Identity(eqn)
        return (
            _Identity(eqn.primitive),
            tuple(_operand_key(atom, strict) for atom in eqn.invars),
            tuple(v.aval for v in eqn.outvars),
            tuple(
                (name, self._part_key(value))
                for name, value in eqn.params.items()
                if not _is_covered(value, planned)
            ),
            _Identity(eqn.ctx),  # the settings of JAX around it
        )

    def _part_key(self, value: Any) -> Any:
        """Returns the key of any part of an equation.

        The key of `2.0` has its bits, that of `(0, x)` the keys of its items. A jaxpr,
        or `partial(f, 1)`, has a number: the same one for what has equal parts. The key
        of any other object is the object itself.
        """
        kind = type(value)
        if kind is tuple:
            return self._part_keys(value)
        if isinstance(value, type):  # it has the attributes of its instances
            return _Identity(value)
        if kind is frozenset:
            return kind, frozenset(map(self._part_key, value))
        if _compat.is_jaxpr(value):
            return self._number_once(value, self._jaxpr_key)
        if (parts := _parts_of(value)) is not None:
            return self._number_once(value, lambda _: (kind, self._part_keys(parts)))
        if kind is types.FunctionType:
            return self._number_once(value, self._function_key)
        if hasattr(kind, "_fields") and not hasattr(value, "__dict__"):
            return kind, self._part_keys(value)
        return _key_of_one(value)

    def _part_keys(self, values: Iterable[Any]) -> tuple[Key, ...]:
        return tuple(map(self._part_key, values))

    def _function_key(self, function: types.FunctionType) -> Any:
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that has no value yet
            return _Identity(function)
        # JAX does not change the lists that its functions hold; others may.
        if _is_in_package(str(function.__globals__.get("__name__")), "jax"):
            cells = [tuple(x) if type(x) is list else x for x in cells]
        # Two functions of one `def` differ in closures and defaults only.
        return (
            _Identity(function.__code__),
            _Identity(function.__globals__),
            self._part_key(function.__defaults__),
            self._part_keys((function.__kwdefaults__ or {}).items()),
            self._part_keys(cells),
            self._part_keys(vars(function).items()),
        )

    def _jaxpr_key(self, closed: Jaxpr) -> Any:
        # A body without a plan keeps the scopes that it has, so they must be equal.
        jaxpr, consts = _compat.open_jaxpr(closed)
        eqns = [
            (self._equation_key(eqn), self._part_key(_compat.scopes(eqn)))
            for eqn in jaxpr.eqns
        ]
        return self._part_keys(consts), self._dataflow_key(jaxpr, eqns)

    def _plan_key(self, plan: Plan) -> Any:
        """Returns the key of a plan, whatever the scopes in it."""
        return self._number_once(plan, self._new_plan_key)

    def _new_plan_key(self, plan: Plan) -> Any:
        jaxpr, values = plan.jaxpr, plan.values()
        eqns = [
            self._planned_key(eqn, step, values, strict=True)
            for eqn, step in plan.pairs()
        ]
        return (
            plan.body_kind,
            (*plan.ins, *plan.const_ins),
            self._part_keys(plan.consts),
            self._dataflow_key(jaxpr, eqns),
        )

    def _dataflow_key(self, jaxpr: Jaxpr, eqns: Sequence[Key]) -> Any:
        """Returns the key of a jaxpr whose equations have the keys `eqns`.

        Variables are numbered in the order in which they appear. So these are equal,
        and one that returned `b` in the place of `c` would not be:

            lambda a b. c = mul a b; return c      0 1; (mul, 0 1, 2); 2
            lambda x y. z = mul x y; return z      0 1; (mul, 0 1, 2); 2
        """
        number_of: dict[Var, int] = {}

        def numbers(atoms: Sequence[Atom]) -> tuple[Key, ...]:
            return tuple(
                bits(atom)
                if isinstance(atom, Literal)
                else (number_of.setdefault(atom, len(number_of)), atom.aval)
                for atom in atoms
            )

        return (
            numbers(jaxpr.constvars),
            numbers(jaxpr.invars),
            tuple(
                (self._number(key), numbers(eqn.invars), numbers(eqn.outvars))
                for key, eqn in zip(eqns, jaxpr.eqns, strict=True)
            ),
            numbers(jaxpr.outvars),
        )

    def _number_once(self, value: Any, compare: Callable[[Any], Key]) -> Any:
        """Returns the number of an object that may stand in several places.

        Until it is known, the object stands for itself: a function may reach itself
        through its closure.
        """
        known = self._number_of_object
        if id(value) not in known:
            known[id(value)] = value, _Identity(value)
            known[id(value)] = value, self._number(compare(value))
        return known[id(value)][1]

    def _number(self, key: Key) -> int:
        """Returns the number of a key, a new one at its first sight."""
        return self._number_of_key.setdefault(key, len(self._number_of_key))


def _operand_key(atom: Atom, strict: bool) -> Any:
    is_literal = isinstance(atom, Literal)
    if is_literal and (strict or not jnp.issubdtype(atom.aval.dtype, jnp.integer)):
        return bits(atom)
    return atom.aval, is_literal


def _key_of_one(value: Any) -> Any:
    """Returns the key of an object that is not compared part by part."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _Identity(value)
    # By bits: `0.0 == -0.0`, and `nan != nan`.
    if kind in (float, complex):
        return kind, np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_key(value)
    is_plain = kind in _PLAIN or isinstance(value, np.dtype)
    return (kind, value) if is_plain or _is_comparable(value) else _Identity(value)


def _array_key(x: Array) -> Key:
    # Larger arrays are compared by identity: to read them may wait for a device.
    if isinstance(x, jax.core.Tracer) or np.size(x) > _SMALL:
        return _Identity(x)
    placement: tuple[Key, ...] = ()
    if isinstance(x, jax.Array):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        if is_key or x.is_deleted() or not x.is_fully_addressable:
            return _Identity(x)
        placement = (jax.typeof(x), x.sharding, x.committed)
    array = np.asarray(x)
    if array.dtype.hasobject:
        return _Identity(x)
    return type(x), placement, array.dtype, array.shape, array.tobytes()


def _is_covered(value: Any, planned: Iterable[int]) -> bool:
    """Whether a parameter consists of jaxprs that have plans."""
    items = value if isinstance(value, tuple | list) else (value,)
    return all(
        _compat.is_jaxpr(item) and id(_compat.open_jaxpr(item)[0]) in planned
        for item in items
    )


def _parts_of(value: Any) -> Sequence[Any] | None:
    """Returns what decides how an object behaves, `None` if that is not known."""
    kind = type(value)
    if kind in (functools.partial, jax.tree_util.Partial) and not vars(value):
        return (value.func, value.args, *value.keywords.items())
    if kind is types.MethodType:
        return value.__func__, value.__self__
    if dataclasses.is_dataclass(value) and _is_in_package(kind.__module__, *_KNOWN):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return _compat.parts(value)


def _is_comparable(value: Any) -> bool:
    """Whether a value has a class of JAX whose `==` means that both behave alike."""
    kind = type(value)
    # Callables are compared by their parts, or equal only themselves.
    is_plain = not callable(value) or isinstance(value, jax.sharding.Mesh)
    if not is_plain or not _is_in_package(kind.__module__, "jax", "jaxlib"):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    # Without an `__eq__` of its own it equals itself only, and is held by `_Identity`.
    return any("__eq__" in vars(base) for base in kind.__mro__[:-1])


def _is_in_package(module: str, *packages: str) -> bool:
    """Whether a module belongs to one of these packages."""
    return module.partition(".")[0] in packages
