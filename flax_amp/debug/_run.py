"""Runs a program equation by equation, and follows each inf and NaN from its origin.

An equation that makes an inf or a NaN from finite numbers is a *cause*. An equation
that reads such a value inherits the cause. A cause counts only if a result of the
program inherits the cause. So a mask of `-inf`, or an inf that a `where` drops, is no
false alarm:

    a = log x               -inf where x is 0: cause 1
    b = select p a 0        finite: cause 1 is forgotten
    c = exp y               inf: cause 2
    d = sub c c             NaN: inherits cause 2

A loop, each of its iterations and a `shard_map` run as a whole first, and equation by
equation only if a result is not finite.
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
from flax_amp._compat import Array, Atom, Eqn, Jaxpr
from flax_amp._jaxprs import bind_in_context, evaluate, named_axes
from flax_amp._rewriter.primitives import Kind, Trait, bodies, has, kind_of
from flax_amp._rewriter.weight_matmuls import weight_matmul_p
from flax_amp._tree import split_list
from flax_amp.debug._devices import OPTIONS, Devices, Examples, NotAlone
from flax_amp.debug._record import TRANSPARENT, Location
from flax_amp.debug._report import plural, short

_CASTS = ("convert_element_type", "flax_amp_spread")
_NOT_ELEMENTWISE = ("scatter", "select_and", "flax_amp")  # among arithmetic
_KINDS: dict[str, Callable[[Any], Any]] = {
    "inf": lambda x: x == np.inf,
    "-inf": lambda x: x == -np.inf,
    "NaN": np.isnan,
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The equation that made an inf or a NaN."""

    path: str  #: the module, or the scope, around the equation
    source: str  #: the line of the user's code, with its file
    backward: bool  #: whether the equation makes only gradients not finite
    inside: tuple[str, ...]  #: loops, branches and devices around, outermost first
    primitive: str  #: the name of the primitive, or `constant` for a constant
    what: str  #: the equation in words, such as `the cast to float16 of batch/image`
    kind: str  #: which of `inf`, `-inf` and `NaN` the equation made
    dtype: str = ""  #: the dtype of the result
    #: the types of the operands, and of the result last, as `f16[4,8] up to 57820`
    operands: tuple[str, ...] = ()
    bad: int = 0  #: how many elements of the result the equation made not finite
    size: int = 0  #: how many elements the result has
    text: str = ""  #: an element of elementwise arithmetic, such as `log(0) = -inf`


class Cause(NamedTuple):
    """The origin of an inf or a NaN.

    The order of causes is: arguments at fault, equations, constants of the program, and
    other arguments.
    """

    order: tuple[int, int]  # the rank in this list, then a running number
    finding: Finding | None = None  # the equation or the constant that is the cause
    # The arguments that hold the inf or the NaN, or have led to it.
    arguments: frozenset[int] = frozenset()
    examples: tuple[int, ...] = ()  # the examples that the equation made not finite
    reached: tuple[str, ...] = ()  # the results that are not finite


class Value(NamedTuple):
    """An array, the cause if an element is not finite, and a name for messages."""

    array: Array
    cause: Cause | None = None
    name: str = "a constant"


def earliest(causes: Sequence[Cause | None]) -> Cause | None:
    """Returns the first cause in the order of causes, or `None` without a cause."""
    return min(filter(None, causes), key=lambda cause: cause.order, default=None)


class _DevicesDiverge(Exception):
    """Devices, or the examples of a `vmap`, go different ways in a loop or a branch."""


def _value(x: Array, cause: Cause | None, name: str) -> Value:
    if cause is not None and is_finite(x):
        cause = None
    return Value(x, cause, name)


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs a program on arrays."""

    closed: Jaxpr
    # Whether its faults are in the gradients alone, because the loss was finite.
    backward: bool
    examples: Examples
    # The names of the values with a number beyond the range of half precision, which a
    # cast has replaced by a finite number.
    limited_values: dict[str, None] = dataclasses.field(default_factory=dict)
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    numbers: Any = dataclasses.field(default_factory=itertools.count)
    # The devices of the `shard_map` around the equations. Then each array is a stack,
    # with one element for each device.
    devices: Devices | None = None

    def __call__(
        self, arrays: Sequence[Any], names: Any, faults: Container[int]
    ) -> list[Value]:
        """Returns the results; `faults` has the arguments that should be finite."""
        values = []
        for i, (x, name) in enumerate(zip(arrays, names, strict=True)):
            rank = -1 if i in faults else 2
            values.append(_value(x, Cause((rank, i), None, frozenset({i})), name))
        return self._jaxpr(self.closed, values, Location())

    def _jaxpr(
        self, closed: Jaxpr, values: Sequence[Any], start: Location
    ) -> list[Value]:
        """Runs a jaxpr equation by equation."""

        # A constant becomes a `Value` where an equation reads the constant: only there
        # can the constant do harm, and a message names the place of the reader.
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
        stack = self.devices.repeat(x) if self.devices else x
        if is_finite(x):
            return Value(stack)
        place = at.path, at.source, self.backward, at.inside
        finding = Finding(*place, "constant", "a constant of the program", kinds(x))
        return Value(stack, Cause((1, next(self.numbers)), finding))

    def _equation(self, eqn: Eqn, values: Sequence[Value], at: Location) -> list[Value]:
        name = eqn.primitive.name
        if name in TRANSPARENT and name != "shard_map":
            return self._jaxpr(bodies(eqn)[0], values, at)
        if name == "cond" and len(indices := np.unique(values[0].array)) == 1:
            branches = eqn.params["branches"]
            chosen = min(max(int(indices[0]), 0), len(branches) - 1)
            inside = at.noted(f"branch {chosen} of {len(branches)}")
            return self._jaxpr(branches[chosen], values[1:], inside)
        outs = self._whole(eqn, values)
        if name == "flax_amp_spread" and is_finite(outs[0]):
            most = float(jnp.abs(values[0].array).max(initial=0))
            if most > float(jnp.finfo(outs[0].dtype).max):
                self.limited_values[f"{values[0].name} ({at.path or at.source})"] = None
        causes = self._causes(eqn, values, outs, at)
        is_moved = has(eqn, Trait.LAYOUT) and len(values) == 1
        made = values[0].name if is_moved else f"the result of {name}"
        return [Value(x, cause, made) for x, cause in zip(outs, causes, strict=True)]

    def _causes(
        self, eqn: Eqn, values: Sequence[Value], outs: Sequence[Array], at: Location
    ) -> list[Cause | None]:
        """Returns the cause of each result that is not finite."""
        causes: list[Cause | None] = [None] * len(outs)
        enter = {
            "scan": self._in_scan,
            "while": self._in_while,
            "cond": self._in_cond,
            "shard_map": self._in_shard_map,
        }
        if eqn.primitive.name in enter and not all(map(is_finite, outs)):
            try:
                causes = enter[eqn.primitive.name](eqn, values, at)
            except _DevicesDiverge:
                causes = self._follow_one_device(eqn, values, outs, at) or causes
        found: list[Cause | None] = []
        for x, cause in zip(outs, causes, strict=True):
            if is_finite(x):
                found.append(None)
            else:
                found.append(cause or self._cause(eqn, values, x, at))
        return found

    def _whole(self, item: Eqn | Jaxpr, values: Sequence[Value]) -> list[Array]:
        """Runs an equation or a body as a whole.

        Bodies, and equations with bodies, are compiled once.
        """
        arrays = [value.array for value in values]
        if self.devices:
            return list(self.devices.run(item, arrays))
        if hasattr(item, "primitive"):
            run = functools.partial(bind_in_context, item)
            if not any(jaxprs_in_params(item.params)):
                return list(run(arrays))  # JAX caches the compiled primitive
        else:
            run = functools.partial(evaluate, item)
        if id(item) not in self.compiled:
            made = jax.jit(lambda *arrays: run(arrays), compiler_options=OPTIONS)
            # The dict holds `item`, so that no new object gets its `id`.
            self.compiled[id(item)] = item, made
        return list(self.compiled[id(item)][1](*arrays))

    # --- loops -----------------------------------------------------------------------

    def _iteration(
        self, body: Jaxpr, values: Sequence[Value], at: Location
    ) -> list[Value]:
        """Runs one iteration, equation by equation if a result is not finite."""
        outs = self._whole(body, values)
        if all(map(is_finite, outs)):
            return [Value(x, None, "a result of the loop") for x in outs]
        return self._jaxpr(body, values, at)

    def _in_scan(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        counts = _compat.scan_counts(eqn)
        length = eqn.params["length"]
        consts, carry, xs = split_list(values, *counts)
        causes: list[Cause | None] = [None] * (len(eqn.outvars) - counts[1])
        order = range(length)
        note = ""
        if eqn.params["reverse"]:
            order = order[::-1]
            note = " (reverse)"
        for count, i in enumerate(order, 1):  # `count` is in the order of the run
            # With a static index, JAX would compile the slice for each iteration.
            row = functools.partial(
                jax.lax.dynamic_index_in_dim,
                index=np.int32(i),
                axis=1 if self.devices else 0,
                keepdims=False,
            )
            rows = [_value(row(x.array), x.cause, x.name) for x in xs]
            place = at.noted(f"scan iteration {count} of {length}{note}")
            outs = self._iteration(eqn.params["jaxpr"], [*consts, *carry, *rows], place)
            carry, ys = split_list(outs, counts[1])
            causes = [earliest((c, y.cause)) for c, y in zip(causes, ys, strict=True)]
        return [*(value.cause for value in carry), *causes]

    def _in_while(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        params = eqn.params
        count = itertools.count(1)
        counts = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, consts, carry = split_list(values, *counts)
        while _common(self._whole(params["cond_jaxpr"], [*cond_consts, *carry])[0]):
            place = at.noted(f"while iteration {next(count)}")
            values = [*consts, *carry]
            carry = tuple(self._iteration(params["body_jaxpr"], values, place))
        return [value.cause for value in carry]

    def _in_cond(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        # `_equation` enters a `cond` if all devices take the same branch.
        raise _DevicesDiverge

    # --- devices ---------------------------------------------------------------------

    def _in_shard_map(self, eqn: Eqn, values: Sequence[Value], at: Location) -> Any:
        unknown = [None] * len(eqn.outvars)
        if self.devices:
            return unknown
        arrays = [value.array for value in values]
        devices = Devices.of(
            eqn,
            arrays,
            depth=len(at.inside),
            compiled=self.compiled,
            examples=self.examples,
        )
        try:
            inner = [
                _value(stack, value.cause, value.name)
                for stack, value in zip(devices.split(arrays), values, strict=True)
            ]
            outs = self._on(devices)._jaxpr(eqn.params["jaxpr"], inner, at)
        except NotAlone:
            return unknown
        return [value.cause for value in outs]

    def _on(self, devices: Devices) -> "Runner":
        return dataclasses.replace(self, devices=devices, examples=devices.examples)

    def _follow_one_device(
        self, eqn: Eqn, values: Sequence[Value], outs: Sequence[Array], at: Location
    ) -> list[Cause | None]:
        """Follows the first device that is not finite, where devices go apart.

        The list is empty if the equation needs the other devices, by an axis name.
        """
        devices = self.devices
        if not devices or devices.followed is not None or named_axes(eqn):
            return []
        bad = next(x for x in outs if not is_finite(x))
        number = devices.first(~np.isfinite(np.asarray(bad)))
        alone = [
            _value(devices.repeat(part), value.cause, value.name)
            for part, value in zip(_parts(values, number), values, strict=True)
        ]
        runner = self._on(devices.following(number))
        return [value.cause for value in runner._equation(eqn, alone, at)]

    # --- the cause of a result of one equation ---------------------------------------

    def _cause(
        self, eqn: Eqn, values: Sequence[Value], x: Array, at: Location
    ) -> Cause:
        x = np.asarray(x)
        suspects = [value for value in values if value.cause]
        first = earliest([value.cause for value in suspects])
        if first and first.order[0] <= 0:  # an equation, or an argument at fault
            return first
        fresh = _fresh(x, suspects)
        if first and not fresh.any():
            return first
        arguments: frozenset[int] = frozenset()
        if np.isnan(x[fresh]).any():
            causes = (value.cause for value in suspects)
            arguments = arguments.union(*(cause.arguments for cause in causes if cause))
        order = (0, next(self.numbers))
        examples = self.examples(fresh)
        if self.devices:  # a message describes the arrays of one device
            number = self.devices.first(fresh)
            around, inside = split_list(at.inside, self.devices.depth)
            at = at._replace(inside=(*around, self.devices.note(fresh), *inside))
            parts = zip(_parts(values, number), values, strict=True)
            values = [value._replace(array=part) for part, value in parts]
            x = x[number]
            fresh = fresh[number]
        finding = self._describe(eqn, values, x, fresh, at)
        return Cause(order, finding, arguments, examples)

    def _describe(
        self, eqn: Eqn, values: Sequence[Value], x: Any, fresh: Any, at: Location
    ) -> Finding:
        primitive = eqn.primitive
        if primitive is weight_matmul_p:  # users know the matmul that `amp` replaced
            primitive = eqn.params["of"]
        name = what = primitive.name
        text = ""
        if name == "shard_map":
            at = at.noted(f"one of {plural(eqn.params['mesh'].size, 'device')}")
        if name in _CASTS:
            what = f"the cast to {x.dtype} of {values[0].name}"
        elif kind_of(eqn) is Kind.ARITHMETIC and not name.startswith(_NOT_ELEMENTWISE):
            # As Python numbers, because a bfloat16 has no format.
            arrays = (np.broadcast_to(v.array, x.shape)[fresh][0] for v in values)
            numbers = ", ".join(f"{number.item():.6g}" for number in arrays)
            text = f"{name}({numbers}) = {x[fresh][0].item():.6g}"
        return Finding(
            *(at.path, at.source, self.backward, at.inside, name, what),
            kind=kinds(x[fresh]),
            dtype=str(x.dtype),
            operands=tuple(map(_type, (*(value.array for value in values), x))),
            bad=int(fresh.sum()),
            size=x.size,
            text=text,
        )


# --- arrays --------------------------------------------------------------------------

_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def is_finite(x: Array) -> bool:
    """Whether an array holds neither inf nor NaN."""
    return not _tree.is_inexact_array(x) or bool(_all_finite(x))


def _fresh(x: np.ndarray, suspects: Sequence[Value]) -> Any:
    """Returns which elements of a result are inf or NaN, and are new.

    An operand with a mask of -inf may give a result with -inf; an inf, or a NaN, is
    new. So a kind that an operand holds already is not new.
    """
    fresh = ~np.isfinite(x)
    for is_kind in _KINDS.values():
        if any(is_kind(np.asarray(value.array)).any() for value in suspects):
            fresh &= ~is_kind(x)
    return fresh


def _parts(values: Sequence[Value], number: int) -> list[Array]:
    """Returns the elements of some stacks that belong to a device."""
    return [jax.device_get(value.array)[number] for value in values]


def _common(flags: Array) -> bool:
    """Returns the value of equal flags; raises `_DevicesDiverge` if they differ."""
    if len(found := np.unique(flags)) > 1:
        raise _DevicesDiverge
    return bool(found[0])


def kinds(x: Array) -> str:
    """Returns which of inf, -inf and NaN an array holds."""
    x = np.asarray(x)
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag])
    found = (name for name, is_kind in _KINDS.items() if is_kind(x).any())
    return " and ".join(found)


def _type(x: Array) -> str:
    """Returns a type as JAX writes types, with the largest finite magnitude."""
    text = f"{short(str(x.dtype))}[{','.join(map(str, x.shape))}]"
    if not _tree.is_inexact_array(x):
        return text
    host = np.abs(np.asarray(x))
    finite = host[np.isfinite(host)]
    if not finite.size:
        return text
    return f"{text} up to {float(finite.max()):.4g}"
