"""Runs a program equation by equation, and follows each inf and NaN from its origin.

An equation that makes an inf or a NaN from numbers is a *cause*. What later reads such
a value inherits the cause, and only those causes count that reach a result of the
program. So a mask of `-inf`, or an inf that a `where` drops, is no false alarm:

    a = log x       -inf where x is 0: cause 1
    b = select p a 0        finite: cause 1 is forgotten
    c = exp y       inf: cause 2
    d = sub c c     NaN: it inherits cause 2

Elementwise arithmetic is followed element by element: an overflow beside a mask is new.
All else inherits what is bad in its operands. A loop and each of its iterations run as
a whole first, and equation by equation only if a result is not finite. A `shard_map`
runs as a whole, and so does what is not known.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Atom, Eqn, Jaxpr, evaluate
from flax_amp._rewriter.primitives import Kind, Trait, bodies, has, kind_of
from flax_amp._tree import split_list
from flax_amp.debug._place import Location
from flax_amp.debug._record import CALLS
from flax_amp.debug._report import plural, short

# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
_OPTIONS = {"xla_allow_excess_precision": False}
_CASTS = ("convert_element_type", "flax_amp_spread")
_ELEMENTWISE_MOVES = "select_n max min clamp neg abs copy stop_gradient".split()


@dataclasses.dataclass(frozen=True)
class Finding:
    """The equation that made an inf or a NaN."""

    path: str  #: the module, or the scope, that it stands in
    source: str  #: the line of the user's code, with its file
    backward: bool  #: whether it makes only gradients not finite
    inside: tuple[str, ...]  #: the loops and branches around it, outermost first
    primitive: str  #: its name, or `constant` for one of the program
    what: str  #: in words, such as `the cast to float16 of batch/image`
    kind: str  #: what it made, `inf`, `-inf` or `NaN`
    dtype: str = ""  #: of its result
    operands: tuple[str, ...] = ()  #: and its result, as `f16[4,8] up to 57820`
    bad: int = 0  #: how many elements of the result it made so
    size: int = 0  #: how many there are
    text: str = ""  #: what elementwise arithmetic did, such as `log(0) = -inf`


class Cause(NamedTuple):
    """Where an inf or a NaN comes from.

    Causes come in an order: arguments at fault are before equations, these before
    constants of the program, and these before other arguments.
    """

    order: tuple[int, int]
    finding: Finding | None = None  # the equation or the constant, if it is one
    arguments: frozenset[int] = frozenset()  # that hold it, or have led to it
    examples: tuple[int, ...] = ()  # those of the batch that an equation made so
    reached: tuple[str, ...] = ()  # the results that are not finite

    @property
    def is_backward(self) -> bool:
        """Whether an equation of the backward pass is at fault."""
        return self.finding is not None and self.finding.backward


class Value(NamedTuple):
    """An array, the cause of what is not finite in it, and what it is called."""

    array: Array
    cause: Cause | None = None
    name: str = "a constant"


def earliest(causes: Sequence[Cause | None]) -> Cause | None:
    """Returns the one that counts of some causes."""
    return min(filter(None, causes), key=lambda cause: cause.order, default=None)


def _value(x: Array, cause: Cause | None, name: str) -> Value:
    return Value(x, None if cause is None or is_finite(x) else cause, name)


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs a program on arrays."""

    closed: Jaxpr
    backward: bool  # whether its equations matter for gradients only
    examples: Callable[[Any], tuple[int, ...]]  # those marked in an array of bools
    # What held a number beyond the range of half that a cast has made finite.
    limited: dict[str, None] = dataclasses.field(default_factory=dict)
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    numbers: Any = dataclasses.field(default_factory=itertools.count)

    def __call__(
        self, arrays: Sequence[Any], names: Any, faults: Container[int]
    ) -> list[Value]:
        """Returns the results; `faults` are arguments that should have been finite."""
        values = [
            _value(x, Cause((-1 if i in faults else 2, i), None, frozenset({i})), name)
            for i, (x, name) in enumerate(zip(arrays, names, strict=True))
        ]
        return self._run(self.closed, values, Location())

    def _run(
        self, closed: Jaxpr, values: Sequence[Any], start: Location
    ) -> list[Value]:
        """Runs a jaxpr equation by equation."""

        # A constant is looked at where it is read: only there it can do harm.
        def lifted(atoms: Sequence[Atom], given: Any, at: Location) -> list[Value]:
            pairs = zip(given, atoms, strict=True)
            return [
                x if isinstance(x, Value) else self._constant(x, atom, at)
                for x, atom in pairs
            ]

        def run(eqn: Eqn, operands: Sequence[Any]) -> list[Value]:
            at = start.of(eqn)
            return self._equation(eqn, lifted(eqn.invars, operands, at), at)

        outs = evaluate(closed, values, run)
        return lifted(_compat.open_jaxpr(closed)[0].outvars, outs, start)

    def _constant(self, x: Any, atom: Atom, at: Location) -> Value:
        if isinstance(atom, Literal):
            x = np.asarray(x, getattr(atom.aval, "dtype", None))
        if is_finite(x):
            return Value(x)
        place = at.path, at.source, self.backward, at.inside
        finding = Finding(*place, "constant", "a constant of the program", kinds(x))
        return Value(x, Cause((1, next(self.numbers)), finding))

    def _equation(self, eqn: Eqn, values: Sequence[Value], at: Location) -> list[Value]:
        name = eqn.primitive.name
        if name in CALLS and name != "shard_map":
            return self._run(bodies(eqn)[0], values, at)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = min(max(int(values[0].array), 0), len(branches) - 1)
            inside = at.noted(f"branch {chosen} of {len(branches)}")
            return self._run(branches[chosen], values[1:], inside)
        outs = self._whole(eqn, functools.partial(_compat.bind_in_context, eqn), values)
        if name == "flax_amp_spread" and is_finite(outs[0]):
            self._note_limited(values[0], outs[0], at)
        causes = self._causes(eqn, values, outs, at)
        is_moved = has(eqn, Trait.LAYOUT) and len(values) == 1
        made = values[0].name if is_moved else f"the result of {name}"
        return [Value(x, cause, made) for x, cause in zip(outs, causes, strict=True)]

    def _note_limited(self, value: Value, result: Array, at: Location) -> None:
        most = float(jnp.finfo(result.dtype).max)
        if float(jnp.abs(value.array).max(initial=0)) > most:
            self.limited[f"{value.name} ({at.path or at.source})"] = None

    def _causes(
        self, eqn: Eqn, values: Sequence[Value], outs: Sequence[Array], at: Location
    ) -> list[Cause | None]:
        """Returns the cause of each result that is not finite."""
        causes: list[Cause | None] = [None] * len(outs)
        loops = {"scan": self._in_scan, "while": self._in_while}
        if all(map(is_finite, outs)):
            return causes
        if eqn.primitive.name in loops:
            causes = loops[eqn.primitive.name](eqn, values, at)
        return [
            None if is_finite(x) else cause or self._cause(eqn, values, x, at)
            for x, cause in zip(outs, causes, strict=True)
        ]

    def _whole(self, key: Any, run: Any, values: Sequence[Value]) -> list[Array]:
        """Runs an equation or a body as a whole; bodies are compiled once for a key."""
        arrays = [value.array for value in values]
        if not any(jaxprs_in_params(getattr(key, "params", {"body": key}))):
            return list(run(arrays))  # JAX caches it
        if id(key) not in self.compiled:
            made = jax.jit(lambda *arrays: run(arrays), compiler_options=_OPTIONS)
            self.compiled[id(key)] = key, made  # the key, so that its id stays its own
        return list(self.compiled[id(key)][1](*arrays))

    # --- loops -----------------------------------------------------------------------

    def _iteration(
        self, body: Jaxpr, values: Sequence[Value], at: Location
    ) -> list[Value]:
        """Runs one iteration, equation by equation if it is not finite."""
        run = functools.partial(evaluate, body)
        outs = self._whole(_compat.open_jaxpr(body)[0], run, values)
        if all(map(is_finite, outs)):
            return [Value(x, None, "a result of the loop") for x in outs]
        return self._run(body, values, at)

    def _in_scan(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        counts, length = _compat.scan_counts(eqn), eqn.params["length"]
        consts, carry, xs = split_list(values, *counts)
        causes: list[Cause | None] = [None] * (len(eqn.outvars) - counts[1])
        order, note = range(length), ""
        if eqn.params["reverse"]:
            order, note = order[::-1], " (reverse)"
        for count, i in enumerate(order, 1):  # as it runs
            rows = [_value(_row(x.array, i), x.cause, x.name) for x in xs]
            place = at.noted(f"scan iteration {count} of {length}{note}")
            outs = self._iteration(eqn.params["jaxpr"], [*consts, *carry, *rows], place)
            carry, ys = split_list(outs, counts[1])
            causes = [earliest((c, y.cause)) for c, y in zip(causes, ys, strict=True)]
        return [*(value.cause for value in carry), *causes]

    def _in_while(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        params = eqn.params
        counts = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, consts, carry = split_list(values, *counts)
        test, count = params["cond_jaxpr"], itertools.count(1)
        run = functools.partial(evaluate, test)
        while self._whole(_compat.open_jaxpr(test)[0], run, [*cond_consts, *carry])[0]:
            place = at.noted(f"while iteration {next(count)}")
            carry = tuple(
                self._iteration(params["body_jaxpr"], [*consts, *carry], place)
            )
        return [value.cause for value in carry]

    # --- the cause of a result of one equation ---------------------------------------

    def _cause(
        self, eqn: Eqn, values: Sequence[Value], x: Array, at: Location
    ) -> Cause:
        x = np.asarray(x)
        bad, suspects = ~np.isfinite(x), [value for value in values if value.cause]
        fresh = bad & (not suspects)
        if suspects and _is_elementwise(eqn, values, x):
            given = [~np.isfinite(np.asarray(v.array)) for v in suspects]
            fresh = bad & ~functools.reduce(np.logical_or, given)
            pairs = zip(suspects, given, strict=True)
            suspects = [value for value, own in pairs if (own & bad).any()]
        first = earliest([value.cause for value in suspects])
        if first and first.order[0] <= 0:  # an equation, or an argument at fault
            return first
        arguments: frozenset[int] = frozenset()
        if first and not fresh.any():
            # A NaN that comes from a mask of -inf is new; another -inf is not.
            fresh = np.isnan(x)
            if not fresh.any() or any(np.isnan(v.array).any() for v in suspects):
                return first
            arguments = arguments.union(
                *(v.cause.arguments for v in suspects if v.cause)
            )
        finding = self._describe(eqn, values, x, fresh, at)
        order = (0, next(self.numbers))
        return Cause(order, finding, arguments, self.examples(fresh))

    def _describe(
        self, eqn: Eqn, values: Sequence[Value], x: Any, fresh: Any, at: Location
    ) -> Finding:
        name, inside = eqn.primitive.name, at.inside
        if name == "shard_map":
            devices = plural(eqn.params["mesh"].size, "device")
            inside = (*inside, f"one of {devices}")
        what, text = name, ""
        if name in _CASTS:
            what = f"the cast to {x.dtype} of {values[0].name}"
        elif kind_of(eqn) is Kind.ARITHMETIC and _is_elementwise(eqn, values, x):
            # As Python numbers, because a bfloat16 has no format.
            arrays = (np.broadcast_to(v.array, x.shape)[fresh][0] for v in values)
            numbers = ", ".join(f"{number.item():.6g}" for number in arrays)
            text = f"{name}({numbers}) = {x[fresh][0].item():.6g}"
        return Finding(
            *(at.path, at.source, self.backward, inside, name, what),
            kind=kinds(x[fresh]),
            dtype=str(x.dtype),
            operands=tuple(map(_type, (*(value.array for value in values), x))),
            bad=int(fresh.sum()),
            size=x.size,
            text=text,
        )


def _is_elementwise(eqn: Eqn, values: Sequence[Value], x: Array) -> bool:
    """Whether each element of a result is computed from the same ones of operands."""
    name, shapes = eqn.primitive.name, [np.shape(value.array) for value in values]
    is_known = kind_of(eqn) is Kind.ARITHMETIC or name in _ELEMENTWISE_MOVES
    if not is_known or name.startswith(("scatter", "select_and", "flax_amp")):
        return False
    # An axis of length one is as good as the whole axis.
    return all(
        len(shape) in (0, x.ndim)
        and all(n in (1, size) for n, size in zip(shape, x.shape, strict=False))
        for shape in shapes
    )


def _row(x: Array, i: int) -> Array:
    # A static index would be compiled for each iteration.
    return jax.lax.dynamic_index_in_dim(x, np.int32(i), keepdims=False)


# --- arrays --------------------------------------------------------------------------

_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def is_finite(x: Array) -> bool:
    """Whether an array holds neither inf nor NaN."""
    return not _tree.is_inexact_array(x) or bool(_all_finite(x))


def kinds(x: Array) -> str:
    """Returns which of inf, -inf and NaN an array holds."""
    x = np.asarray(x)
    x = np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x
    found = {"inf": x == np.inf, "-inf": x == -np.inf, "NaN": np.isnan(x)}
    return " and ".join(name for name, bad in found.items() if bad.any())


def _type(x: Array) -> str:
    """Returns a type as JAX writes it, with the largest finite magnitude."""
    text = f"{short(str(x.dtype))}[{','.join(map(str, x.shape))}]"
    host = np.abs(np.asarray(x)) if _tree.is_inexact_array(x) else np.zeros(0)
    finite = host[np.isfinite(host)]
    return f"{text} up to {float(finite.max()):.4g}" if finite.size else text
