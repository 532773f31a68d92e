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

Calls and branches are followed inside. A loop and each of its iterations run as a whole
first, and once more equation by equation only if a result is not finite. A `shard_map`
runs as a whole, and so does what is not known.
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

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Atom, Eqn, Jaxpr, evaluate
from flax_amp._rewriter.primitives import Kind, bodies, kind_of
from flax_amp._tree import split_list
from flax_amp.debug._model import is_half
from flax_amp.debug._nonfinite_report import Finding, Operand
from flax_amp.debug._place import Location
from flax_amp.debug._report import plural
from flax_amp.debug._rows import CALLS
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
    """Runs a program on arrays."""

    functions: dict[Any, Any]  # what runs of the same program have compiled
    backward: bool  # whether its equations matter for gradients only
    examples: Callable[[Any], tuple[int, ...]]  # those marked in an array of bools

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def start(
        self, closed: Jaxpr, arrays: Sequence[Array], faults: Container[int]
    ) -> list[Value]:
        """Returns the results; `faults` are arguments that should have been finite."""
        values = [
            _value(x, Cause((-1 if i in faults else 2, i), arguments=frozenset({i})))
            for i, x in enumerate(arrays)
        ]
        return self._run(closed, values, Location())

    def _run(
        self, closed: Jaxpr, values: Sequence[Value], start: Location
    ) -> list[Value]:
        """Runs a jaxpr equation by equation."""

        def run(eqn: Eqn, operands: Sequence[Any]) -> list[Value]:
            at = start.of(eqn)
            return self._equation(eqn, self._lifted(eqn.invars, operands, at), at)

        outs = evaluate(closed, values, run)
        return self._lifted(_compat.open_jaxpr(closed)[0].outvars, outs, start)

    def _lifted(
        self, atoms: Sequence[Atom], values: Sequence[Any], at: Location
    ) -> list[Value]:
        """Returns values, also for literals and constants, which have no cause yet."""
        return [
            x if isinstance(x, Value) else self._constant(x, atom, at)
            for atom, x in zip(atoms, values, strict=True)
        ]

    # A constant is looked at where it is read: only there it can do harm.
    def _constant(self, x: Any, atom: Atom, at: Location) -> Value:
        if isinstance(atom, Literal):
            x = np.asarray(x, getattr(atom.aval, "dtype", None))
        if is_finite(x):
            return Value(x)
        finding = self._finding(at, primitive="constant", kind=kinds(x))
        return Value(x, Cause((1, next(self._numbers)), finding))

    def _equation(self, eqn: Eqn, values: Sequence[Value], at: Location) -> list[Value]:
        name = eqn.primitive.name
        if name in CALLS and name != "shard_map":
            return self._run(bodies(eqn)[0], values, at)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = min(max(int(values[0].array), 0), len(branches) - 1)
            inside = at.noted(f"branch {chosen} of {len(branches)}")
            return self._run(branches[chosen], values[1:], inside)
        outs = self._bind(eqn, [value.array for value in values])
        if all(map(is_finite, outs)):
            return list(map(Value, outs))
        causes: list[Cause | None] = [None] * len(outs)
        if name == "scan":
            causes = self._in_scan(eqn, values, at)
        elif name == "while":
            causes = self._in_while(eqn, values, at)
        return [
            Value(x)
            if is_finite(x)
            else Value(x, cause or self._cause(eqn, values, x, i, at))
            for i, (x, cause) in enumerate(zip(outs, causes, strict=True))
        ]

    def _bind(self, eqn: Eqn, arrays: Sequence[Array]) -> list[Array]:
        """Runs an equation as a whole."""
        run = functools.partial(_compat.bind_in_context, eqn)
        if not any(jaxprs_in_params(eqn.params)):
            return list(run(arrays))  # JAX caches it
        return self._compiled(lambda *arrays: run(arrays), eqn, arrays)

    def _whole(self, body: Jaxpr, values: Sequence[Value]) -> list[Array]:
        """Runs one iteration as a whole."""
        key, arrays = _compat.open_jaxpr(body)[0], [value.array for value in values]
        return self._compiled(lambda *arrays: evaluate(body, arrays), key, arrays)

    def _compiled(self, run: Any, key: Any, arrays: Sequence[Array]) -> list[Array]:
        """Runs a function, compiled once for a key, which is compared by identity."""
        if id(key) not in self.functions:
            # With the key, so that no other object gets its id.
            self.functions[id(key)] = key, jax.jit(run, compiler_options=_OPTIONS)
        return list(self.functions[id(key)][1](*arrays))

    # --- loops -----------------------------------------------------------------------

    def _body(self, body: Jaxpr, values: Sequence[Value], at: Location) -> list[Value]:
        """Runs one iteration, equation by equation if it is not finite."""
        outs = self._whole(body, values)
        if all(map(is_finite, outs)):
            return list(map(Value, outs))
        return self._run(body, values, at)

    def _in_scan(
        self, eqn: Eqn, values: Sequence[Value], at: Location
    ) -> list[Cause | None]:
        counts = _compat.scan_counts(eqn)
        consts, carry, xs = split_list(values, *counts)
        length = eqn.params["length"]
        causes: list[Cause | None] = [None] * (len(eqn.outvars) - counts[1])
        order, note = range(length), ""
        if eqn.params["reverse"]:
            order, note = order[::-1], " (reverse)"
        for count, i in enumerate(order, 1):  # as it runs
            rows = [_value(_row(x.array, i), x.cause) for x in xs]
            inside = at.noted(f"scan iteration {count} of {length}{note}")
            outs = self._body(eqn.params["jaxpr"], [*consts, *carry, *rows], inside)
            carry, ys = split_list(outs, counts[1])
            causes = [first_of((c, y.cause)) for c, y in zip(causes, ys, strict=True)]
        return [*(value.cause for value in carry), *causes]

    def _in_while(
        self, eqn: Eqn, values: Sequence[Value], at: Location
    ) -> list[Cause | None]:
        params = eqn.params
        counts = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, consts, carry = split_list(values, *counts)
        i = 0
        while bool(self._whole(params["cond_jaxpr"], [*cond_consts, *carry])[0]):
            i += 1
            inside = at.noted(f"while iteration {i}")
            carry = tuple(self._body(params["body_jaxpr"], [*consts, *carry], inside))
        return [value.cause for value in carry]

    # --- the cause of a result of one equation ---------------------------------------

    def _cause(
        self, eqn: Eqn, values: Sequence[Value], x: Array, result: int, at: Location
    ) -> Cause:
        carried, fresh = self._origins(eqn, values, x, result)
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
        finding = self._describe(eqn, values, x, fresh, at)
        return Cause((0, next(self._numbers)), finding, arguments)

    def _origins(
        self, eqn: Eqn, values: Sequence[Value], x: Array, result: int
    ) -> tuple[list[Cause], Any]:
        """Returns the causes that a result inherits, and which elements are new."""
        bad = ~np.isfinite(np.asarray(x))

        def bad_from(kept: Value | None) -> Any:
            """Returns what is still bad with numbers in all operands but one."""
            arrays = [v.array if v is kept else _numbers_only(v) for v in values]
            again = np.asarray(self._bind(eqn, arrays)[result])
            # An inf that would be made anyway does not explain a NaN.
            is_other = kept is None and np.isnan(x) & ~np.isnan(again)
            return bad & ~np.isfinite(again) & ~np.asarray(is_other)

        suspects = [value for value in values if value.cause]
        fresh = bad_from(None) if suspects else bad
        carried = [v.cause for v in suspects if (bad_from(v) & ~fresh).any()]
        if not carried and not fresh.any():
            carried = [v.cause for v in suspects]  # as max(-inf, -inf)
        return list(filter(None, carried)), fresh

    def _finding(self, at: Location, **known: Any) -> Finding:
        known.setdefault("inside", at.inside)
        return Finding(at.path, at.source, self.backward, **known)

    def _describe(
        self, eqn: Eqn, values: Sequence[Value], x: Array, fresh: Any, at: Location
    ) -> Finding:
        arrays = [value.array for value in values]
        inside = at.inside
        if eqn.primitive.name == "shard_map":
            devices = plural(eqn.params["mesh"].size, "device")
            inside = (*inside, f"one of {devices}")
        return self._finding(
            at,
            primitive=eqn.primitive.name,
            kind=kinds(np.asarray(x)[fresh]),
            operands=tuple(map(_operand, arrays)),
            result=_operand(x),
            bad=int(fresh.sum()),
            size=int(fresh.size),
            finite_in_float32=self._finite_in_float32(eqn, arrays),
            examples=self.examples(fresh),
            text=_as_text(eqn, arrays, x, fresh),
            inside=inside,
        )

    def _finite_in_float32(self, eqn: Eqn, arrays: Sequence[Array]) -> bool | None:
        """Whether it is finite in float32 for the same operands, if that is known."""
        wide = [a.astype(jnp.float32) if is_half(str(a.dtype)) else a for a in arrays]
        params = with_result_dtype(eqn.params, jnp.float32)
        if "new_dtype" in params:
            params["new_dtype"] = jnp.dtype(jnp.float32)
        if any(jaxprs_in_params(params)):
            return None
        try:
            outs = self._bind(eqn.replace(params=params), wide)
        except Exception:  # a primitive for which other dtypes are not possible
            return None
        return all(map(is_finite, outs))


# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
_OPTIONS = {"xla_allow_excess_precision": False}


def _numbers_only(value: Value) -> Array:
    """Returns an array with a number at which most functions are finite."""
    x = value.array
    return x if value.cause is None else jnp.where(jnp.isfinite(x), x, 0.5)


def _row(x: Array, i: int) -> Array:
    # A static index would be compiled for each iteration.
    return jax.lax.dynamic_index_in_dim(x, np.int32(i), keepdims=False)


# --- arrays --------------------------------------------------------------------------


@jax.jit
def _is_finite(x: Array) -> Array:
    return jnp.isfinite(x).all()


def is_finite(x: Array) -> bool:
    """Whether an array holds neither inf nor NaN."""
    if not _tree.is_inexact_array(x):
        return True
    if isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu":
        return bool(_is_finite(x))
    return bool(np.isfinite(np.asarray(x)).all())


def kinds(x: Array) -> str:
    """Returns which of inf, -inf and NaN an array holds."""
    x = np.asarray(x)
    parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
    tests: dict[str, Callable[[Any], Any]] = {
        "inf": lambda x: x == np.inf,
        "-inf": lambda x: x == -np.inf,
        "NaN": np.isnan,
    }
    found = [name for name, test in tests.items() if any(test(p).any() for p in parts)]
    return " and ".join(found)


def _operand(x: Array) -> Operand:
    largest = None
    if _tree.is_inexact_array(x):
        host = np.abs(np.asarray(x))
        finite = host[np.isfinite(host)]
        largest = float(finite.max()) if finite.size else None
    return Operand(str(x.dtype), tuple(x.shape), largest)


def _as_text(eqn: Eqn, arrays: Sequence[Array], x: Array, fresh: Any) -> str:
    """Returns what elementwise arithmetic did first, such as `log(0) = -inf`."""
    name = eqn.primitive.name
    # An axis of length one is as good as the whole axis.
    fits = (
        n in (1, m) for a in arrays for n, m in zip(np.shape(a), x.shape, strict=False)
    )
    is_elementwise = all(np.ndim(a) in (0, x.ndim) for a in arrays) and all(fits)
    if kind_of(eqn) is not Kind.ARITHMETIC or not is_elementwise:
        return ""
    # As Python numbers, because a bfloat16 has no format.
    *numbers, made = (
        np.broadcast_to(a, x.shape)[fresh][0].item() for a in (*arrays, x)
    )
    if name == "convert_element_type":
        return f"{numbers[0]:.6g}"
    return f"{name}({', '.join(f'{n:.6g}' for n in numbers)}) = {made:.6g}"
