"""Runs a program equation by equation, and follows each inf and NaN from its origin.

An equation that makes an inf or a NaN from numbers is a *cause*. What later reads such
a value inherits the cause, and only those causes count that reach a result of the
program. So a mask of `-inf`, or an inf that a `where` drops, is no false alarm:

    a = log x       -inf where x is 0: cause 1
    b = select p a 0        finite: cause 1 is forgotten
    c = exp y       inf: cause 2
    d = sub c c     NaN: it inherits cause 2
    e = add b d     it inherits cause 2

What an operand has to do with a result is found by running the equation again, with
numbers in the place of what is not finite in its operands.

Calls and branches are followed inside. A loop, a `shard_map` and each iteration run as
a whole first, and once more equation by equation only if a result is not finite.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.traits import Kind, bodies, kind_of
from flax_amp._tree import split_list
from flax_amp.debug._model import is_half
from flax_amp.debug._nonfinite_arrays import as_text, is_finite, kinds, operand
from flax_amp.debug._nonfinite_devices import Devices, compiled
from flax_amp.debug._nonfinite_model import Finding
from flax_amp.debug._place import Place
from flax_amp.policy import with_result_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """Where an inf or a NaN comes from.

    Attributes:
      order: causes come in this order. Arguments at fault are before equations, these
        before constants of the program, and these before other arguments.
      finding: what is known of the equation or the constant, if it is one.
      arguments: the numbers of the arguments that hold it, or have led to it.
    """

    order: tuple[int, int]
    finding: Finding | None = None
    arguments: frozenset[int] = frozenset()

    @property
    def is_fault(self) -> bool:
        """Whether an equation made it, or an argument that is at fault."""
        return self.order[0] <= 0


def first_of(causes: Iterable[Cause | None]) -> Cause | None:
    """Returns the first one of some causes."""
    return min(filter(None, causes), key=lambda cause: cause.order, default=None)


class Value(NamedTuple):
    """An array, and the cause of what is not finite in it."""

    array: Array
    cause: Cause | None = None


def _value(x: Array, cause: Cause | None) -> Value:
    return Value(x, None if cause is None or is_finite(x) else cause)


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs a program on arrays.

    Args:
      functions: what runs of the same program have compiled.
      backward: what is said of the equations: whether they matter for gradients only.
      examples: returns the examples that are marked in an array of bools.
    """

    functions: dict[Any, Any]
    backward: bool
    examples: Callable[[Any], tuple[int, ...]]

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def start(
        self, closed: Jaxpr, arrays: Sequence[Array], faults: Container[int]
    ) -> list[Value]:
        """Runs a program, and returns its results.

        Args:
          closed: the program.
          arrays: its arguments.
          faults: the numbers of those that should have been finite.
        """
        values = [
            _value(x, Cause((-1 if i in faults else 2, i), arguments=frozenset({i})))
            for i, x in enumerate(arrays)
        ]
        return self._run(closed, values, Place())

    def _run(self, closed: Jaxpr, values: Sequence[Value], place: Place) -> list[Value]:
        """Runs a jaxpr equation by equation."""

        def run(eqn: Eqn, operands: Sequence[Any]) -> list[Value]:
            at = place.of(eqn)
            return self._equation(eqn, self._lifted(eqn.invars, operands, at), at)

        outs = evaluate(closed, values, run)
        return self._lifted(_compat.open_jaxpr(closed)[0].outvars, outs, place)

    def _lifted(
        self, atoms: Sequence[Atom], values: Sequence[Any], place: Place
    ) -> list[Value]:
        """Returns values, also for literals and constants, which have no cause yet."""
        return [
            x if isinstance(x, Value) else self._constant(x, atom, place)
            for atom, x in zip(atoms, values, strict=True)
        ]

    # A constant is looked at where it is read: only there it can do harm.
    def _constant(self, x: Any, atom: Atom, place: Place) -> Value:
        if isinstance(atom, Literal):
            x = np.asarray(x, getattr(atom.aval, "dtype", None))
        value = x if place.devices is None else place.devices.lift(x)
        if is_finite(x):
            return Value(value)
        finding = self._finding(place, primitive="constant", kind=kinds(x))
        return Value(value, Cause((1, next(self._numbers)), finding))

    def _equation(self, eqn: Eqn, values: Sequence[Value], place: Place) -> list[Value]:
        body = _called(eqn)
        if body is not None:
            return self._run(body, values, place)
        arrays = [value.array for value in values]
        if eqn.primitive.name == "cond":
            index = place.devices.common(arrays[0]) if place.devices else arrays[0]
            if index is not None:
                branches = eqn.params["branches"]
                chosen = min(max(int(index), 0), len(branches) - 1)
                at = place.noted(f"branch {chosen} of {len(branches)}")
                return self._run(branches[chosen], values[1:], at)
        outs = self._bind(eqn, arrays, place)
        if all(map(is_finite, outs)):
            return list(map(Value, outs))
        causes = self._causes_inside(eqn, values, place) or [None] * len(outs)
        return [
            Value(x)
            if is_finite(x)
            else Value(x, cause or self._cause(eqn, values, x, i, place))
            for i, (x, cause) in enumerate(zip(outs, causes, strict=True))
        ]

    def _bind(self, eqn: Eqn, arrays: Sequence[Array], place: Place) -> list[Array]:
        """Runs an equation as a whole."""
        run = functools.partial(_compat.bind_in_context, eqn)
        if place.devices is None and not any(jaxprs_in_params(eqn.params)):
            return list(run(arrays))  # JAX caches it
        return self._compiled(lambda *arrays: run(arrays), eqn, arrays, place)

    def _body(self, body: Jaxpr, values: Sequence[Value], place: Place) -> list[Value]:
        """Runs one iteration, equation by equation if it is not finite."""
        outs = self._whole(body, values, place)
        if all(map(is_finite, outs)):
            return list(map(Value, outs))
        return self._run(body, values, place)

    def _whole(self, body: Jaxpr, values: Sequence[Value], place: Place) -> list[Array]:
        def run(*arrays: Array) -> Sequence[Array]:
            return evaluate(body, arrays)

        jaxpr, _ = _compat.open_jaxpr(body)
        return self._compiled(run, jaxpr, [value.array for value in values], place)

    def _compiled(
        self, run: Any, key: Any, arrays: Sequence[Array], place: Place
    ) -> list[Array]:
        """Runs a function, compiled once for a key, which is compared by identity."""
        ids = place.devices, id(key)
        if ids not in self.functions:
            # With the key, so that no other object gets its id.
            self.functions[ids] = key, compiled(run, key, place.devices)
        return list(self.functions[ids][1](*arrays))

    # --- loops and devices: the causes of their results ------------------------------

    def _causes_inside(
        self, eqn: Eqn, values: Sequence[Value], place: Place
    ) -> list[Cause | None] | None:
        name = eqn.primitive.name
        if name == "scan":
            return self._in_scan(eqn, values, place)
        # Within a `shard_map`, devices may need other numbers of iterations.
        if name == "while" and place.devices is None:
            return self._in_while(eqn, values, place)
        if name == "shard_map" and place.devices is None:
            devices = Devices.of(eqn)
            parts = devices.enter(eqn, [value.array for value in values])
            inner = [_value(x, v.cause) for x, v in zip(parts, values, strict=True)]
            at = dataclasses.replace(place, devices=devices)
            return [v.cause for v in self._run(eqn.params["jaxpr"], inner, at)]
        return None

    def _in_scan(
        self, eqn: Eqn, values: Sequence[Value], place: Place
    ) -> list[Cause | None]:
        counts = _compat.scan_counts(eqn)
        consts, carry, xs = split_list(values, *counts)
        length = eqn.params["length"]
        causes: list[Cause | None] = [None] * (len(eqn.outvars) - counts[1])
        order, note = range(length), ""
        if eqn.params["reverse"]:
            order, note = order[::-1], " (reverse)"
        for count, i in enumerate(order, 1):  # as it runs
            rows = [_value(_row(x.array, i, _lead(place)), x.cause) for x in xs]
            at = place.noted(f"scan iteration {count} of {length}{note}")
            outs = self._body(eqn.params["jaxpr"], [*consts, *carry, *rows], at)
            carry, ys = split_list(outs, counts[1])
            causes = [first_of((c, y.cause)) for c, y in zip(causes, ys, strict=True)]
        return [*(value.cause for value in carry), *causes]

    def _in_while(
        self, eqn: Eqn, values: Sequence[Value], place: Place
    ) -> list[Cause | None]:
        params = eqn.params
        counts = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, consts, carry = split_list(values, *counts)
        i = 0
        while bool(self._whole(params["cond_jaxpr"], [*cond_consts, *carry], place)[0]):
            i += 1
            at = place.noted(f"while iteration {i}")
            carry = tuple(self._body(params["body_jaxpr"], [*consts, *carry], at))
        return [value.cause for value in carry]

    # --- the cause of a result of one equation ---------------------------------------

    def _cause(
        self, eqn: Eqn, values: Sequence[Value], x: Array, result: int, place: Place
    ) -> Cause:
        carried, fresh = self._origins(eqn, values, x, result, place)
        first = first_of(carried)
        if first and first.is_fault:
            return first
        arguments: frozenset[int] = frozenset()
        if first and not fresh.any():
            # A NaN that comes from a mask of -inf is new; another -inf is not.
            fresh = np.isnan(np.asarray(x))
            given = (np.asarray(v.array) for v in values if v.cause)
            if not fresh.any() or any(np.isnan(a).any() for a in given):
                return first
            arguments = arguments.union(*(cause.arguments for cause in carried))
        finding = self._describe(eqn, values, x, fresh, place)
        return Cause((0, next(self._numbers)), finding, arguments)

    def _origins(
        self, eqn: Eqn, values: Sequence[Value], x: Array, result: int, place: Place
    ) -> tuple[list[Cause], Any]:
        """Returns the causes that a result inherits, and which elements are new."""
        bad = ~np.isfinite(np.asarray(x))

        def bad_from(kept: Value | None) -> Any:
            """Returns what is still bad with numbers in all operands but one."""
            arrays = [v.array if v is kept else _numbers_only(v) for v in values]
            again = np.asarray(self._bind(eqn, arrays, place)[result])
            # An inf that would be made anyway does not explain a NaN.
            is_other = kept is None and np.isnan(x) & ~np.isnan(again)
            return bad & ~np.isfinite(again) & ~np.asarray(is_other)

        suspects = [value for value in values if value.cause]
        fresh = bad_from(None) if suspects else bad
        carried = [v.cause for v in suspects if (bad_from(v) & ~fresh).any()]
        if not carried and not fresh.any():
            carried = [v.cause for v in suspects]  # as max(-inf, -inf)
        return list(filter(None, carried)), fresh

    def _finding(self, place: Place, **known: Any) -> Finding:
        known.setdefault("inside", place.inside)
        return Finding(place.path, place.source, self.backward, **known)

    def _describe(
        self, eqn: Eqn, values: Sequence[Value], x: Array, fresh: Any, place: Place
    ) -> Finding:
        arrays = [value.array for value in values]
        known: dict[str, Any] = {}
        if place.devices is None:
            known["examples"] = self.examples(fresh)
            known["text"] = as_text(eqn.primitive.name, arrays, x, fresh)
        else:
            found = np.flatnonzero(fresh.reshape(len(fresh), -1).any(axis=1))
            known["inside"] = (*place.inside, place.devices.names(found.tolist(), x))
        return self._finding(
            place,
            primitive=eqn.primitive.name,
            kind=kinds(np.asarray(x)[fresh]),
            operands=tuple(operand(a, _lead(place)) for a in arrays),
            result=operand(x, _lead(place)),
            bad=int(fresh.sum()),
            size=int(fresh.size),
            finite_in_float32=self._finite_in_float32(eqn, arrays, place),
            **known,
        )

    def _finite_in_float32(
        self, eqn: Eqn, arrays: Sequence[Array], place: Place
    ) -> bool | None:
        """Whether it is finite in float32 for the same operands, if that is known."""
        wide = [a.astype(jnp.float32) if is_half(str(a.dtype)) else a for a in arrays]
        params = with_result_dtype(eqn.params, jnp.float32)
        if "new_dtype" in params:
            params["new_dtype"] = jnp.dtype(jnp.float32)
        if any(jaxprs_in_params(params)):
            return None
        try:
            outs = self._bind(eqn.replace(params=params), wide, place)
        except Exception:  # a primitive for which other dtypes are not possible
            return None
        return all(map(is_finite, outs))


def _called(eqn: Eqn) -> Jaxpr | None:
    """Returns the body of an equation that is a call."""
    if kind_of(eqn) is not Kind.CALL or eqn.primitive.name == "shard_map":
        return None
    (body,) = bodies(eqn)
    return body


def _lead(place: Place) -> int:
    """Returns the number of axes that stand before those of the program."""
    return int(place.devices is not None)


def _numbers_only(value: Value) -> Array:
    """Returns an array with a number at which most functions are finite."""
    x = value.array
    return x if value.cause is None else jnp.where(jnp.isfinite(x), x, 0.5)


def _row(x: Array, i: int, axis: int) -> Array:
    # A static index would be compiled for each iteration.
    return jax.lax.dynamic_index_in_dim(x, np.int32(i), axis, keepdims=False)
