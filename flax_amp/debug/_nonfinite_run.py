"""Runs a program equation by equation, and follows each inf and NaN from its origin.

An equation whose results hold an inf or a NaN that its operands do not explain is a
*cause*. What later reads such a value inherits the cause, and only those causes count
that reach a result of the program. So a mask of `-inf`, or an inf that a `where` drops,
is no false alarm:

    a = log x       -inf where x is 0: cause 1
    b = select p a 0        clean: cause 1 is forgotten
    c = exp y       inf: cause 2
    d = sub c c     NaN: cause 3, which cause 2 has led to
    e = add b d     inherits cause 3

Calls are followed inside. A loop runs as a whole first. If its results need a cause, it
runs once more, iteration by iteration, and the iterations with a new cause equation by
equation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Atom, Eqn, Jaxpr, Var
from flax_amp._rewriter.plan import variables
from flax_amp._tree import split_list
from flax_amp.debug._model import Dtypes
from flax_amp.debug._nonfinite_devices import PLAIN, ArrayFunction, Context, Devices
from flax_amp.debug._nonfinite_model import MAX_EXAMPLES, Finding, Operand
from flax_amp.debug._walk import module_path, source_line
from flax_amp.policy import FOLLOW_OPS, RANGE_OPS, with_result_dtype

# Their results at a position depend on their operands at this position only.
_ELEMENTWISE = {*FOLLOW_OPS, *RANGE_OPS, "convert_element_type", "select_n"} - {
    "select_and_scatter_add",
    "select_and_gather_add",
}
_CALLS = frozenset(
    """jit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vmap_call""".split()
)
# JAX lists the scopes around one of these twice in a backward pass.
_REMATS = ("remat2", "checkpoint")
# Scopes that JAX opens around what a backward pass computes again.
_REMAT_SCOPES = ("checkpoint", "rematted_computation")
_TESTS = {"nan": np.isnan, "inf": np.isinf}


@dataclasses.dataclass(eq=False)
class Cause:
    """Where an inf or a NaN comes from.

    Attributes:
      order: causes come in this order. Equations are before constants of the program,
        and these before its arguments.
      finding: what is known of the equation, if one made it.
      argument: the number of the argument that holds it, if one does.
      before: the causes of the bad operands.
    """

    order: tuple[int, int]
    finding: Finding | None = None
    argument: int = -1
    before: tuple["Cause", ...] = ()

    @property
    def is_made(self) -> bool:
        """Whether an equation made it, from numbers or from another inf or NaN."""
        return self.order[0] == 0

    @property
    def root(self) -> "Cause":
        """The first of the equations that have led to it."""
        made = [cause for cause in self.before if cause.is_made]
        return _first(made).root if made else self  # type: ignore[union-attr]

    @property
    def arguments(self) -> set[int]:
        """The numbers of the arguments that have led to it."""
        found: set[int] = set()
        seen = {self}
        rest = [self]
        while rest:
            cause = rest.pop()
            found.add(cause.argument)
            rest += set(cause.before) - seen
            seen.update(cause.before)
        return found - {-1}


def _first(causes: Sequence[Cause | None]) -> Cause | None:
    return min(filter(None, causes), key=lambda cause: cause.order, default=None)


Marks = dict[str, Cause]  # the causes of the NaNs and of the infs of an array


class Value(NamedTuple):
    """An array and the causes of what is not finite in it."""

    array: Array
    marks: Marks = {}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a jaxpr stands.

    Attributes:
      scopes: the scopes around it.
      backward: whether it belongs to the backward pass.
      inside: the loops, branches and devices around it.
      source: the line of the equation that holds it.
      context: what runs its equations.
    """

    scopes: tuple[str, ...] = ()
    backward: bool = False
    inside: tuple[str, ...] = ()
    source: str = ""
    context: Context = PLAIN

    def of(self, eqn: Eqn, is_forward: bool = True) -> "Place":
        """Returns the place of an equation, which is that of its bodies too."""
        scopes, is_transposed = _scopes(eqn)
        return dataclasses.replace(
            self,
            scopes=self.scopes + scopes,
            backward=self.backward or is_transposed or not is_forward,
            source=source_line(eqn) or self.source,
        )

    def within(self, note: str) -> "Place":
        """Returns the place of one iteration of a loop, or of one branch."""
        return dataclasses.replace(self, inside=(*self.inside, note))


def _scopes(eqn: Eqn) -> tuple[tuple[str, ...], bool]:
    """Returns the scopes around an equation, and whether it is transposed.

    A scope that a transformation repeats is listed once.
    """
    scopes: list[str] = []
    group: list[str] = []
    is_transposed = False
    for entry in (*_compat.scopes(eqn), None):
        if type(entry).__name__ == "Scope":
            group += [entry.name] if entry.name not in _REMAT_SCOPES else []
            continue
        scopes = group if group[: len(scopes)] == scopes else scopes + group
        group = []
        is_transposed |= getattr(entry, "name", "") == "transpose"
    half = len(scopes) // 2
    if eqn.primitive.name in _REMATS and scopes[:half] == scopes[half:]:
        scopes = scopes[:half]
    return tuple(scopes), is_transposed


class Runner:
    """Runs programs on arrays.

    Args:
      compiled: what runs of the same program have compiled.
      looks: whether to look for causes. Without them a run only gives the results.
      batch_size: the number of examples, if it is known.
      not_examples: shapes of arrays that have no examples, whatever their sizes are.
    """

    def __init__(
        self,
        compiled: dict[Any, Any],
        looks: bool = True,
        batch_size: int | None = None,
        not_examples: frozenset[tuple[int, ...]] = frozenset(),
    ):
        self._compiled = compiled
        self._looks = looks
        self._batch_size = batch_size
        self._not_examples = not_examples
        self._count = 0

    def start(
        self, closed: Jaxpr, arrays: Sequence[Array], for_loss: Sequence[bool]
    ) -> list[Value]:
        """Runs a program; `for_loss` tells which results the forward pass makes."""
        values = []
        for i, x in enumerate(arrays):
            source = Cause((2, i), argument=i)
            kinds = kinds_in(x) if self._looks else []
            values.append(Value(x, dict.fromkeys(kinds, source)))
        return self.run(closed, values, Place(), for_loss)

    def run(
        self,
        closed: Jaxpr,
        values: Sequence[Value],
        place: Place,
        for_loss: Sequence[bool],
    ) -> list[Value]:
        """Runs a jaxpr equation by equation; drops each array after its last use."""
        jaxpr, consts = _compat.open_jaxpr(closed)
        env = dict(zip(jaxpr.invars, values, strict=True))
        for v, x in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self._constant(place.context.lift(x), place)

        def read(atom: Atom, place: Place) -> Value:
            if not isinstance(atom, Literal):
                return env[atom]
            dtype = getattr(atom.aval, "dtype", None)
            x = np.asarray(atom.val, dtype)  # may be a Python number
            return self._constant(place.context.lift(x), place)

        forward = _needed(jaxpr, for_loss)
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
        last |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
        for i, eqn in enumerate(jaxpr.eqns):
            is_forward = [v in forward for v in eqn.outvars]
            # An equation without results is an effect of the forward pass.
            at = place.of(eqn, any(is_forward) or not is_forward)
            operands = [read(v, at) for v in eqn.invars]
            outs = self._equation(eqn, operands, at, is_forward)
            env |= {v: x for v, x in zip(eqn.outvars, outs, strict=True) if v in last}
            for v in set(variables(eqn.invars)):
                if last[v] == i:
                    del env[v]
        return [read(v, place) for v in jaxpr.outvars]

    def _constant(self, x: Array, place: Place) -> Value:
        kinds = kinds_in(x) if self._looks else []
        if not kinds:
            return Value(x)
        finding = dataclasses.replace(
            _describe_place(place), primitive="constant", kind=_names(x)
        )
        return Value(x, dict.fromkeys(kinds, Cause((1, self._next()), finding)))

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _equation(
        self, eqn: Eqn, values: Sequence[Value], place: Place, is_forward: list[bool]
    ) -> list[Value]:
        name = eqn.primitive.name
        body = _called(eqn)
        if body is not None:
            return self.run(body, values, place, is_forward)
        if name == "cond":
            index = place.context.common(values[0].array)
            if index is not None:
                branches = eqn.params["branches"]
                index = min(max(int(index), 0), len(branches) - 1)
                at = place.within(f"branch {index} of {len(branches)}")
                return self.run(branches[index], values[1:], at, is_forward)
        outs = self._whole(eqn, [value.array for value in values], place.context)
        if not self._looks or not any(map(kinds_in, outs)):
            return list(map(Value, outs))
        descend = _DESCEND.get(name)
        if descend and not _is_explained(outs, values):
            found = descend(self, eqn, values, place, is_forward)
            if found is not None:
                return [
                    Value(x, self._complete(eqn, values, x, marks, place))
                    for x, marks in zip(outs, found, strict=True)
                ]
        return [Value(x, self._complete(eqn, values, x, {}, place)) for x in outs]

    def _whole(
        self, eqn: Eqn, arrays: Sequence[Array], context: Context
    ) -> list[Array]:
        if context is PLAIN and not any(jaxprs_in_params(eqn.params)):
            return list(_compat.bind_in_context(eqn, arrays))  # JAX caches it
        run = self.compile(_binding(eqn), context, eqn, (eqn.invars, eqn.outvars))
        return list(run(*arrays))

    def compile(
        self, function: ArrayFunction, context: Context, key: Any, atoms: Any
    ) -> ArrayFunction:
        """Returns what was compiled for a key, compared by identity, or compiles."""
        # The program keeps the key alive, so that no other object gets its id.
        ids = context, id(key)
        if ids not in self._compiled:
            ins, outs = ([v.aval for v in side] for side in atoms)
            self._compiled[ids] = context.compile(function, ins, outs)
        return self._compiled[ids]

    def _complete(
        self, eqn: Eqn, values: Sequence[Value], x: Array, marks: Marks, place: Place
    ) -> Marks:
        """Returns causes for everything in a result that is not finite."""
        inner = _first(list(marks.values()))
        return {
            kind: marks.get(kind) or inner or self._cause(eqn, values, x, kind, place)
            for kind in kinds_in(x)
        }

    def _cause(
        self, eqn: Eqn, values: Sequence[Value], x: Array, kind: str, place: Place
    ) -> Cause:
        bad = _TESTS[kind](_host(x))
        if eqn.primitive.name in _ELEMENTWISE:
            carried, fresh = _at_each_element(values, bad, kind)
        else:
            carried = [value.marks.get(kind) for value in values]
            fresh = bad & (_first(carried) is None)
        known = _first(carried)
        # A cause is described, which takes time, only where none is known.
        if known is not None and (known.is_made or not fresh.any()):
            return known
        order = 0, self._next()
        before = [c for value in values for c in value.marks.values()]
        if kind == "inf" and before and eqn.primitive.name in _ELEMENTWISE:
            before = []  # it is fresh only where all operands are finite
        finding = self._describe(eqn, values, x, fresh, place)
        return Cause(order, finding, before=tuple(before))

    def _describe(
        self, eqn: Eqn, values: Sequence[Value], x: Array, fresh: Any, place: Place
    ) -> Finding:
        arrays = [value.array for value in values]
        lead = place.context.lead
        inside = place.inside
        if lead:
            devices = np.flatnonzero(fresh.any(axis=tuple(range(1, fresh.ndim))))
            inside += (place.context.names(devices.tolist(), x),)
        own = fresh.any(axis=0) if lead else fresh
        return dataclasses.replace(
            _describe_place(place),
            primitive=eqn.primitive.name,
            inside=inside,
            kind=_names(_host(x)[fresh]),
            dtypes=Dtypes(tuple(str(a.dtype) for a in arrays), (str(x.dtype),)),
            operands=tuple(_operand(a, lead) for a in arrays),
            shape=tuple(x.shape[lead:]),
            bad=int(fresh.sum()),
            size=int(fresh.size),
            text=_as_text(eqn, arrays, x, fresh),
            finite_in_float32=_finite_in_float32(eqn, arrays, x, place.context),
            examples=() if lead else self._examples(own),
        )

    def _examples(self, fresh: Any) -> tuple[int, ...]:
        """Returns the examples that carry a cause, if an axis is that of the batch."""
        shape, size = fresh.shape, self._batch_size
        if size is None or size < 2 or shape in self._not_examples:
            return ()
        axes = [axis for axis, n in enumerate(shape) if n == size]
        if not axes or (len(axes) > 1 and axes[0]):
            return ()
        others = tuple(axis for axis in range(len(shape)) if axis != axes[0])
        found = np.flatnonzero(fresh.any(axis=others))
        return tuple(map(int, found[:MAX_EXAMPLES]))


# --- loops and devices: the causes of their results --------------------------------


def _in_scan(
    runner: Runner, eqn: Eqn, values: Sequence[Value], place: Place, forward: list[bool]
) -> list[Marks] | None:
    counts = _compat.scan_counts(eqn)
    consts, carry, xs = split_list(values, *counts)
    body, length, lead = eqn.params["jaxpr"], eqn.params["length"], place.context.lead
    step = _step(runner, body, place)
    marks: list[Marks] = [{} for _ in eqn.outvars[counts[1] :]]
    # What a carry gives to the loss may pass through all the other carries.
    needed = [any(forward[: counts[1]]) for _ in carry] + forward[counts[1] :]
    order = range(length)
    for i in reversed(order) if eqn.params["reverse"] else order:
        rows = [Value(_row(x.array, i, lead), x.marks) for x in xs]
        at = place.within(f"scan iteration {i + 1} of {length}")
        operands = [*consts, *carry, *rows]
        outs = _iterate(runner, body, step, operands, at, needed)
        carry, ys = split_list(outs, counts[1])
        marks = [_merge([old, y.marks]) for old, y in zip(marks, ys, strict=True)]
    return [*(value.marks for value in carry), *marks]


def _in_while(
    runner: Runner, eqn: Eqn, values: Sequence[Value], place: Place, forward: list[bool]
) -> list[Marks] | None:
    if place.context.lead:  # devices may need other numbers of iterations
        return None
    params = eqn.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, carry = split_list(values, *counts)
    test = _step(runner, params["cond_jaxpr"], place)
    step = _step(runner, params["body_jaxpr"], place)
    needed = [any(forward)] * len(carry)
    i = 0
    while bool(test(*(v.array for v in (*cond_consts, *carry)))[0]):
        i += 1
        at = place.within(f"while iteration {i}")
        operands = [*consts, *carry]
        carry = tuple(
            _iterate(runner, params["body_jaxpr"], step, operands, at, needed)
        )
    return [value.marks for value in carry]


def _step(runner: Runner, body: Jaxpr, place: Place) -> ArrayFunction:
    """Returns what runs a body as a whole."""
    jaxpr, _ = _compat.open_jaxpr(body)
    function = functools.partial(_evaluate, body)
    return runner.compile(function, place.context, jaxpr, (jaxpr.invars, jaxpr.outvars))


def _iterate(
    runner: Runner,
    body: Jaxpr,
    step: ArrayFunction,
    operands: Sequence[Value],
    place: Place,
    needed: Sequence[bool],
) -> list[Value]:
    """Runs one iteration, equation by equation if its results need a new cause."""
    operands = [_clean(value) for value in operands]
    outs = step(*(value.array for value in operands))
    if not _is_explained(outs, operands):
        return runner.run(body, operands, place, needed)
    known = _merge([value.marks for value in operands])
    return [Value(x, {kind: known[kind] for kind in kinds_in(x)}) for x in outs]


def _clean(value: Value) -> Value:
    """Returns a value without the causes of what it does not hold."""
    if not value.marks:
        return value
    kinds = kinds_in(value.array)
    return Value(value.array, {k: c for k, c in value.marks.items() if k in kinds})


def _on_devices(
    runner: Runner, eqn: Eqn, values: Sequence[Value], place: Place, forward: list[bool]
) -> list[Marks] | None:
    if place.context.lead:
        return None
    context = Devices.of(eqn)
    arrays = context.enter(eqn, [value.array for value in values])
    inner = [_clean(Value(x, v.marks)) for x, v in zip(arrays, values, strict=True)]
    at = dataclasses.replace(place, context=context)
    outs = runner.run(eqn.params["jaxpr"], inner, at, forward)
    return [value.marks for value in outs]


_DESCEND: dict[str, Callable[..., list[Marks] | None]] = {
    "scan": _in_scan,
    "while": _in_while,
    "shard_map": _on_devices,
}


def _row(x: Array, i: int, axis: int) -> Array:
    # A static index would be compiled for each iteration.
    return jax.lax.dynamic_index_in_dim(x, np.int32(i), axis, keepdims=False)


def _merge(marks: Sequence[Marks]) -> Marks:
    """Returns the first cause of each kind."""
    merged = {kind: _first([m.get(kind) for m in marks]) for kind in _TESTS}
    return {kind: cause for kind, cause in merged.items() if cause is not None}


def _is_explained(outs: Sequence[Array], values: Sequence[Value]) -> bool:
    """Whether equations before have made all kinds of what is not finite."""
    known = _merge([value.marks for value in values])
    kinds = {kind for x in outs for kind in kinds_in(x)}
    return all(kind in known and known[kind].is_made for kind in kinds)


# --- running -------------------------------------------------------------------------


def _called(eqn: Eqn) -> Jaxpr | None:
    """Returns the body of an equation that is a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    # With its constants, which `jaxprs_in_params` leaves out.
    found = [eqn.params.get(name) for name in ("jaxpr", "call_jaxpr", "call")]
    return next(filter(_compat.is_jaxpr, found), None)


def _binding(eqn: Eqn) -> ArrayFunction:
    """Returns an equation as a function."""
    return lambda *arrays: _compat.bind_in_context(eqn, arrays)


def _evaluate(body: Jaxpr, *arrays: Array) -> Sequence[Array]:
    return _compat.evaluate(body, arrays, _compat.bind_in_context)


def _needed(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Var]:
    """Returns the variables that some of the results depend on."""
    needed = set(variables(_tree.pick(jaxpr.outvars, wanted)))
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
    return needed


# --- looking at arrays ---------------------------------------------------------------


def _host(x: Array) -> Any:
    return np.asarray(x)


@jax.jit
def _flags(x: Array) -> tuple[Array, Array]:
    return jnp.isnan(x).any(), jnp.isinf(x).any()


def kinds_in(x: Array) -> list[str]:
    """Returns which of NaN and inf an array holds."""
    if not _tree.is_inexact_array(x):
        return []
    if isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu":
        flags = jax.device_get(_flags(x))
        return [kind for kind, flag in zip(_TESTS, flags, strict=True) if flag]
    x = _host(x)
    if np.isfinite(x).all():
        return []
    return [kind for kind, test in _TESTS.items() if test(x).any()]


def _names(x: Array) -> str:
    """Returns which of NaN, inf and -inf an array holds."""
    x = _host(x)
    parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
    tests: dict[str, Callable[[Any], Any]] = {
        "inf": lambda x: x == np.inf,
        "-inf": lambda x: x == -np.inf,
        "NaN": np.isnan,
    }
    found = [name for name, test in tests.items() if any(test(p).any() for p in parts)]
    return " and ".join(found)


def _at_each_element(
    values: Sequence[Value], bad: Any, kind: str
) -> tuple[list[Cause | None], Any]:
    """Returns the causes that an elementwise equation passes on, and what is new."""
    fresh = bad.copy()
    carried: list[Cause | None] = []
    for value in values:
        if value.marks:
            x = _host(value.array)
            x = x.reshape(x.shape + (1,) * (bad.ndim - x.ndim))
            same = bad & _TESTS[kind](x)
            carried.append(value.marks.get(kind) if same.any() else None)
            # A NaN that comes from an inf is new; an inf next to a NaN is not.
            fresh &= ~(same if kind == "nan" else bad & ~np.isfinite(x))
    return carried, fresh


def _operand(x: Array, lead: int) -> Operand:
    largest = None
    if _tree.is_inexact_array(x):
        host = np.abs(_host(x))
        finite = host[np.isfinite(host)]
        largest = float(finite.max()) if finite.size else None
    return Operand(str(x.dtype), tuple(x.shape[lead:]), largest)


def _describe_place(place: Place) -> Finding:
    return Finding(
        path=module_path(place.scopes),
        source=place.source,
        backward=place.backward,
        inside=place.inside,
    )


def _as_text(eqn: Eqn, arrays: Sequence[Array], x: Array, fresh: Any) -> str:
    """Returns what an elementwise equation did first, such as `log(0) = -inf`."""
    if eqn.primitive.name not in _ELEMENTWISE or not fresh.any():
        return ""
    position = np.unravel_index(int(np.argmax(fresh)), fresh.shape)
    numbers = []
    for a in arrays:
        a = _host(a)
        a = a.reshape(a.shape + (1,) * (fresh.ndim - a.ndim))
        clipped = tuple(min(i, n - 1) for i, n in zip(position, a.shape, strict=True))
        numbers.append(a[clipped].item())  # bfloat16 has no format
    texts = ", ".join(f"{number:.6g}" for number in numbers)
    return f"{eqn.primitive.name}({texts}) = {_host(x)[position].item():.6g}"


def _finite_in_float32(
    eqn: Eqn, arrays: Sequence[Array], x: Array, context: Context
) -> bool | None:
    """Whether an equation in float32 is finite for the same operands, if known."""
    halves = [_is_half(a) for a in arrays]
    if not any(halves) and not _is_half(x):
        return False  # it was in float32
    wide = [
        a.astype(jnp.float32) if half else a
        for a, half in zip(arrays, halves, strict=True)
    ]
    params = with_result_dtype(eqn.params, jnp.float32)
    if "new_dtype" in params:
        params["new_dtype"] = jnp.dtype(jnp.float32)
    if any(jaxprs_in_params(params)):
        return None
    try:
        run = _binding(eqn.replace(params=params))
        if context is not PLAIN:
            run = context.compile(
                run, *([v.aval for v in side] for side in (eqn.invars, eqn.outvars))
            )
        return not any(map(kinds_in, run(*wide)))
    except Exception:  # a primitive for which other dtypes are not possible
        return None


def _is_half(x: Array) -> bool:
    return _tree.is_inexact_array(x) and x.dtype.itemsize < 4


def bad_elements(x: Array) -> tuple[Any, str]:
    """Returns where an array is not finite, and what it holds there."""
    x = _host(x)
    return ~np.isfinite(x), _names(x)
