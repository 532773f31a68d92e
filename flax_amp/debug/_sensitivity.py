"""Finds the roundings that matter, with a program that has a switch for each rounding.

The gradient of the rewritten program has the roundings of both passes. Here the
gradient runs in float32, with each rounding behind a switch:

    x = where(switch of operands, round(x), x)
    y = dot_general x w                            in float32
    y = where(switch of results, round(y), y)

The switches of each part of the program are arguments. So the program is compiled once,
and each question (this module alone in half precision, all modules but these two) is a
run. On a CPU, twelve blocks of a transformer compile for 10 s and run for 0.1 s.

A derivative with respect to the switches would be a backward pass through the gradient:
a program of three times the size. That derivative is zero where a rounding changes a
choice (`argmin`), is NaN where a value overflows, and does not exist for a `while`.

A rounding belongs to the part without which it would not be there:

    y = dot_general x w      the result of a matmul: the part of the matmul
    z = add y bias           a sum that is half because `y` is half: the part of `y`
    a = convert t            a cast for a matmul that reads `a`: the part of that matmul
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Arrays, DType, Eqn, Jaxpr, Params, open_jaxpr
from flax_amp._jaxprs import bind_in_dtype, evaluate, inner_jaxprs
from flax_amp._rewriter.casts import to_float32
from flax_amp._rewriter.fp8 import power_of_two, quantize, scale_exponent
from flax_amp._rewriter.primitives import Kind, bodies, kind_by_shape
from flax_amp._source import equation_context
from flax_amp._training.dependence import CALLS
from flax_amp._tree import split_list
from flax_amp.debug._record import Location, is_computed_again, is_derivative
from flax_amp.debug._trial import Part, Trials, compiler_options

OPERAND, RESULT, BORDER, COTANGENT = range(4)
#: The kinds of rounded values: operands of matmuls in both passes, results of matmuls
#: in the forward pass, further values of the forward pass, and, as cotangents, further
#: values of the backward pass with the results of its matmuls.
KINDS = ("operand", "result", "border value", "cotangent")
ALL = (OPERAND, RESULT, BORDER, COTANGENT)
Kinds = Sequence[int]


# --- the search ----------------------------------------------------------------------

# A group of parts whose harm is at most this share of the error that is enough is not
# opened. The exact share does not matter: in eight programs with a fault in one or two
# of 3 or 24 parts, shares from 0 to 0.5 find the same parts with equally many runs.
# With a share of 1, two of the faults are not found.
_NEGLIGIBLE = 0.25


class Roundings:
    """The errors that the roundings of some parts of a program make."""

    def __init__(self, trials: Trials, parts: Sequence[Part], scale: float):
        closed, self._operands = trials.gradient_program(scale)
        self._numbers = {part: i for i, part in enumerate(parts)}
        self._exact = trials.exact.gradients
        half = jnp.dtype(trials.half)
        # The unit is the norm of all gradients. In this unit, no square is out of the
        # range of float32.
        norms = [np.linalg.norm(np.asarray(x, np.complex128)) for x in self._exact]
        self._unit = float(np.linalg.norm(norms))

        def run(switches: Array, operands: Arrays, exact: Arrays, unit: Array) -> Array:
            switched = _Switched(switches, self._numbers, half)
            found = switched.evaluate(closed, operands)
            loss, *gradients = (switched.in_float32(x) for x in found)
            return _distance(loss, gradients, exact, unit)

        # Without this option, XLA would leave out the roundings, not only on a CPU, for
        # which `compiler_options` has the option already.
        options = compiler_options() | {"xla_allow_excess_precision": False}
        self._run = jax.jit(run, compiler_options=options)

    def error(self, parts: Collection[Part], kinds: Kinds = ALL) -> float:
        """Returns the error of the gradients if these parts alone are rounded."""
        return self._error(parts, kinds, True)

    def error_without(self, parts: Collection[Part], kinds: Kinds = ALL) -> float:
        """Returns the error of the gradients if all but these parts are rounded."""
        return self._error(parts, kinds, False)

    def _error(self, parts: Collection[Part], kinds: Kinds, are_on: bool) -> float:
        switches = np.full((len(self._numbers) + 1, len(KINDS)), not are_on)
        for part in parts:
            switches[self._numbers[part], list(kinds)] = are_on
        given = self._operands, self._exact, np.float32(self._unit or 1)
        return float(self._run(switches, *given))

    def worst(self, enough: float, most: int) -> list[Part]:
        """Returns parts without whose roundings the error is small enough.

        The part that makes the largest error alone comes first. The list has more than
        `most` parts, or is empty, if `most` parts are not enough.
        """
        found = self._search(self.error, enough, most)
        if not found or len(found) > most:
            # Some roundings change a choice only together, and no part makes an error
            # alone. In a perceptron, four layers made an error of 0.0026 each and 0.043
            # together, and all layers but the first made 0.004.
            found = self._search(self._fall, enough, most) or found
        return sorted(found, key=lambda part: -self.error([part]))

    def _fall(self, parts: Collection[Part]) -> float:
        """Returns the fall of the error without the roundings of parts."""
        before = self.error_without(())
        after = self.error_without(parts)
        return 0.0 if after == math.inf else before - after

    def _search(
        self, harm: Callable[[Collection[Part]], float], enough: float, most: int
    ) -> list[Part]:
        """Returns the most harmful parts, as many as have to stay in float32.

        The list has `most + 1` parts if `most` parts are not enough. The list is empty
        if the harm of all remaining groups is negligible before the parts are enough.
        """
        # The parts are in the order of their names, so that the parts of a module are
        # in the same group: the fault is often in the parts of one module.
        every = sorted(self._numbers)
        groups = [(harm(every), every)]
        found: list[Part] = []
        while groups and len(found) <= most:
            groups.sort(key=lambda group: group[0])
            size, parts = groups.pop()
            if size <= _NEGLIGIBLE * enough:
                return []
            if len(parts) > 1:
                middle = len(parts) // 2
                halves = parts[:middle], parts[middle:]
                groups += [(harm(half), half) for half in halves]
                continue
            found += parts
            if self.error_without(found) <= enough:
                return self._needed(found, enough)
        return found

    def _needed(self, found: list[Part], enough: float) -> list[Part]:
        """Returns the parts of `found` without the parts that are not needed."""
        for part in found[:-1]:
            rest = [other for other in found if other is not part]
            if self.error_without(rest) <= enough:
                found = rest
        return found


def _distance(loss: Array, gradients: Arrays, exact: Arrays, unit: Array) -> Array:
    """Returns the L2 distance in a unit, infinite if a number is not finite."""
    pairs = zip(gradients, exact, strict=True)
    squares = [jnp.sum(jnp.abs((x - y) / unit) ** 2) for x, y in pairs]
    distance = jnp.sqrt(jnp.stack(squares).sum())
    is_finite = jnp.isfinite(loss) & jnp.isfinite(distance)
    return jnp.where(is_finite, distance, jnp.inf)


# --- the equations -------------------------------------------------------------------


class _Half(NamedTuple):
    """A value of half precision."""

    exact: Array  # the value in float32, before the rounding
    # Whether the value is rounded; `None` if `exact` holds the rounded value already.
    switch: Array | None
    # Whether the value is a cast from float32. Then the switch of a matmul that reads
    # the value decides in the place of `switch`.
    is_cast: bool = False


class _Switched(NamedTuple):
    """Runs equations of half precision in float32, with a switch for each rounding."""

    # bool[parts + 1, kinds]; the last row is for the code outside of all parts.
    switches: Array
    numbers: dict[Part, int]  # the rows of the parts
    half: DType
    around: tuple[Eqn, ...] = ()

    def evaluate(self, closed: Jaxpr, operands: Arrays) -> list[Any]:
        """Runs a jaxpr; values in half precision are of the class `_Half`."""
        return [self._read(x) for x in evaluate(closed, operands, self.run)]

    def run(self, eqn: Eqn, operands: Arrays) -> Sequence[Any]:
        """Returns the results of an equation."""
        if not eqn.outvars:
            return []  # a message that is printed, or a check
        with equation_context(eqn):
            if not self._has_half(eqn):
                return _compat.bind(eqn, operands, eqn.params)
            rule = _RULES.get(eqn.primitive.name, _run_by_kind)
            values = [self._read(x) for x in operands]
            return rule(self, eqn, values)

    def _read(self, x: Any) -> Any:
        """Returns a value, in half precision as a `_Half`.

        A constant or a literal in half precision is rounded already.
        """
        if getattr(x, "dtype", None) != self.half:
            return x
        return _Half(jnp.asarray(x, jnp.float32), None)

    def _has_half(self, eqn: Eqn) -> bool:
        avals = (v.aval for v in (*eqn.invars, *eqn.outvars))
        if any(getattr(aval, "dtype", None) == self.half for aval in avals):
            return True
        if eqn.params.get("half") == self.half:  # a matmul of `weight_matmuls.py`
            return True
        inner = (open_jaxpr(body)[0] for body in inner_jaxprs(eqn))
        return any(self._has_half(x) for body in inner for x in body.eqns)

    def inside(self, eqn: Eqn) -> "_Switched":
        """Returns the `_Switched` for the equations in the bodies of an equation."""
        return self._replace(around=(*self.around, eqn))

    # --- roundings ---

    def switch(self, eqn: Eqn, kind: int) -> Array:
        """Returns the switch of the roundings of an equation."""
        at = Location((*self.around, eqn))
        parts = Part(at.path), Part("", at.source)
        rows = [self.numbers[part] for part in parts if part in self.numbers]
        is_of_backward = any(map(is_derivative, at.eqns))
        is_forward_value = any(map(is_computed_again, at.eqns))
        if kind != OPERAND and is_of_backward and not is_forward_value:
            kind = COTANGENT
        row = rows[0] if rows else -1
        return self.switches[row, kind]

    def rounded(self, x: Array, switch: Array) -> Array:
        """Returns a float32 array, rounded if the switch says so."""
        if self.half == jnp.bfloat16:
            # bfloat16 has the exponents of float32, so one operation does the work of
            # two casts.
            digits = jnp.finfo(self.half)
            found = jax.lax.reduce_precision(x, digits.nexp, digits.nmant)
        else:
            found = x.astype(self.half).astype(jnp.float32)
        return jax.lax.select_n(switch, x, found)

    def in_float32(self, x: Any) -> Any:
        """Returns a value in float32, rounded by the switch of its own equation."""
        if not isinstance(x, _Half):
            return x
        if x.switch is None:
            return x.exact
        return self.rounded(x.exact, x.switch)

    def before_cast(self, x: Any) -> Any:
        """Returns an operand in float32, not yet cast for the matmul that reads it."""
        if isinstance(x, _Half) and x.is_cast:
            return x.exact
        return self.in_float32(x)

    def operand(self, x: Any, switch: Array) -> Any:
        """Returns an operand as a matmul reads it, with the switch of its operands."""
        if not isinstance(x, _Half):
            return x
        return self.rounded(self.before_cast(x), switch)

    def as_results(self, eqn: Eqn, results: Arrays, switch: Array | None) -> list[Any]:
        """Returns results; the switch rounds the results in half precision."""
        return [
            _Half(x, switch) if v.aval.dtype == self.half else x
            for x, v in zip(results, eqn.outvars, strict=True)
        ]

    def with_float32(self, params: Params) -> Params:
        """Returns parameters of an equation with float32 in the place of `half`."""
        wide = jnp.dtype(jnp.float32)
        is_dtype = np.dtype, type
        return {
            name: wide if isinstance(x, is_dtype) and x == self.half else x
            for name, x in params.items()
        }


_Rule = Callable[[_Switched, Eqn, Sequence[Any]], Sequence[Any]]


def _run_by_kind(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation without a rule of its own."""
    kind = kind_by_shape(eqn)
    if kind is Kind.MATMUL:
        return _run_matmul(run, eqn, values)
    if kind is Kind.MOVE:
        return _run_move(run, eqn, values)
    if kind in (Kind.ARITHMETIC, Kind.SUM):
        return _run_arithmetic(run, eqn, values)
    return _run_as_written(run, eqn, values)


def _run_matmul(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    switch = run.switch(eqn, OPERAND)
    factors = [run.operand(x, switch) for x in values]
    products = _compat.bind(eqn, factors, run.with_float32(eqn.params))
    return run.as_results(eqn, products, run.switch(eqn, RESULT))


def _run_move(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Moves numbers, or chooses among numbers."""
    params = run.with_float32(eqn.params)
    halves = [x for x in values if isinstance(x, _Half)]
    gives_halves = all(v.aval.dtype == run.half for v in eqn.outvars)
    if len(halves) == 1 and gives_halves:
        # A number may be moved before the rounding. A choice among numbers may not be
        # made before the rounding. An equation that chooses reads several arrays, or
        # gives integers as well.
        exact = [x.exact if isinstance(x, _Half) else x for x in values]
        moved = bind_in_dtype(eqn, exact, params)
        return [halves[0]._replace(exact=x) for x in moved]
    results = bind_in_dtype(eqn, [run.in_float32(x) for x in values], params)
    return run.as_results(eqn, results, None)


def _run_arithmetic(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs arithmetic or a sum; a result of rounded operands has their switches."""
    operands = [run.in_float32(x) for x in values]
    results = bind_in_dtype(eqn, operands, run.with_float32(eqn.params))
    halves = [x for x in values if isinstance(x, _Half)]
    terms = [x.switch for x in halves if not x.is_cast and x.switch is not None]
    if terms and all(v.aval.dtype == run.half for v in eqn.outvars):
        switch = functools.reduce(jnp.logical_and, terms)
        return run.as_results(eqn, [run.rounded(x, switch) for x in results], switch)
    found = run.as_results(eqn, results, run.switch(eqn, BORDER))
    is_cast = eqn.primitive.name == "convert_element_type"
    return [x._replace(is_cast=is_cast) if isinstance(x, _Half) else x for x in found]


def _run_as_written(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation in half precision and without a switch, such as a kernel."""
    operands = [
        run.in_float32(x).astype(run.half) if isinstance(x, _Half) else x
        for x in values
    ]
    outs = _compat.bind(eqn, operands, eqn.params)
    return run.as_results(eqn, [to_float32(x, run.half) for x in outs], None)


def _run_copies(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the first operand in the place of each result: all are copies."""
    return [values[0]] * len(eqn.outvars)


def _run_reduce_precision(
    run: _Switched, eqn: Eqn, values: Sequence[Any]
) -> Sequence[Any]:
    """Copies a value if the digits of the equation are the digits of half precision.

    JAX puts such a `reduce_precision` around values that are stored for the backward
    pass. Here the equation would round a value whose switch is off. With other digits,
    the equation is the user's, who rounds in float32 as well.
    """
    digits = jnp.finfo(run.half)
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    if bits == (digits.nexp, digits.nmant):
        return _run_copies(run, eqn, values)
    return _run_arithmetic(run, eqn, values)


def _run_spread(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Broadcasts float32 numbers, and limits numbers beyond the range of half.

    The limit is no rounding, so no switch turns the limit off.
    """
    (x,) = values
    wide = _compat.bind(eqn, [x], run.with_float32(eqn.params))[0]
    limited = to_float32(_compat.bind(eqn, [x], eqn.params)[0], run.half)
    is_limited = jnp.abs(wide) > float(jnp.finfo(run.half).max)
    exact = jnp.where(is_limited, limited, wide)
    return [_Half(exact, run.switch(eqn, BORDER), is_cast=True)]


def _run_weight_matmul(
    run: _Switched, eqn: Eqn, values: Sequence[Any]
) -> Sequence[Any]:
    """Runs a matmul that rounds its factors itself."""
    switch = run.switch(eqn, OPERAND)
    factors = [run.operand(x, switch) for x in values[:2]]
    own = ("of", "half", "dtype")
    params = {name: x for name, x in eqn.params.items() if name not in own}
    params["preferred_element_type"] = jnp.dtype(jnp.float32)
    y = eqn.params["of"].bind(*factors, *map(run.in_float32, values[2:]), **params)
    return run.as_results(eqn, [y], run.switch(eqn, RESULT))


def _run_fp8_dot(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs a matmul that rounds its factors to 8-bit floats."""
    numbers = eqn.params["dimension_numbers"]
    switch = run.switch(eqn, OPERAND)
    factors = []
    for value, format_, batch in zip(
        values, eqn.params["formats"], numbers[1], strict=True
    ):
        x = run.before_cast(value)
        axes = [axis for axis in range(x.ndim) if axis not in batch]
        e = scale_exponent(x, format_, axes)
        copy = quantize(x, e, format_).astype(jnp.float32) * power_of_two(e, x.dtype)
        factors.append(jnp.where(switch, copy, x))
    y = jax.lax.dot_general(factors[0], factors[1], numbers)
    return run.as_results(eqn, [y], run.switch(eqn, RESULT))


# --- equations with bodies -----------------------------------------------------------

# Values in half precision are rounded before a body that runs several times, or on
# several devices. Inside of the body they are `_Half` again.


def _run_call(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs the equations of a call in its place."""
    (body,) = bodies(eqn)
    count = len(open_jaxpr(body)[0].invars)
    return run.inside(eqn).evaluate(body, values[len(values) - count :])


def _run_body(run: _Switched, eqn: Eqn, body: Jaxpr, operands: Arrays) -> list[Array]:
    """Runs a body for float32 arrays, and returns float32 arrays with strong types."""
    inputs = open_jaxpr(body)[0].invars
    values = [
        _Half(x, None) if v.aval.dtype == run.half else x
        for x, v in zip(operands, inputs, strict=True)
    ]
    outs = run.inside(eqn).evaluate(body, values)
    return [_tree.with_weak_type(jnp.asarray(run.in_float32(x)), False) for x in outs]


def _run_scan(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    operands = [run.in_float32(x) for x in values]
    consts, init, xs = split_list(operands, *_compat.scan_counts(eqn))

    def step(carry: Arrays, slices: Arrays) -> Any:
        found = _run_body(run, eqn, eqn.params["jaxpr"], (*consts, *carry, *slices))
        after, ys = split_list(found, len(init))
        return tuple(after), tuple(ys)

    # The results of the body have strong types, so the first carry needs strong types.
    first = tuple(_tree.with_weak_type(jnp.asarray(x), False) for x in init)
    options = _compat.scan_options(eqn)
    carry, ys = jax.lax.scan(step, first, tuple(xs), **options)
    return run.as_results(eqn, [*carry, *ys], None)


def _run_cond(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    index, *operands = (run.in_float32(x) for x in values)
    branches = [
        lambda *xs, body=body: _run_body(run, eqn, body, xs) for body in bodies(eqn)
    ]
    return run.as_results(eqn, jax.lax.switch(index, branches, *operands), None)


def _run_while(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    params = eqn.params
    condition = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    if open_jaxpr(condition)[0].outvars[0].aval.shape:  # under `vmap`
        return _run_as_written(run, eqn, values)
    sizes = params["cond_nconsts"], params["body_nconsts"]
    operands = [run.in_float32(x) for x in values]
    for_condition, for_body, init = split_list(operands, *sizes)
    outs = jax.lax.while_loop(
        lambda state: _run_body(run, eqn, condition, (*for_condition, *state))[0],
        lambda state: _run_body(run, eqn, body, (*for_body, *state)),
        [_tree.with_weak_type(jnp.asarray(x), False) for x in init],
    )
    return run.as_results(eqn, outs, None)


def _run_shard_map(run: _Switched, eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    params = eqn.params

    def body(switches: Array, *xs: Array) -> tuple[Array, ...]:
        own = run._replace(switches=switches)
        return tuple(_run_body(own, eqn, params["jaxpr"], xs))

    outs = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(jax.P(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )(run.switches, *(run.in_float32(x) for x in values))
    return run.as_results(eqn, outs, None)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(CALLS, _run_call),
    "scan": _run_scan,
    "cond": _run_cond,
    "while": _run_while,
    "shard_map": _run_shard_map,
    "reduce_precision": _run_reduce_precision,
    "flax_amp_copies": _run_copies,
    "flax_amp_stored": _run_copies,
    "flax_amp_spread": _run_spread,
    "flax_amp_weight_matmul": _run_weight_matmul,
    "flax_amp_fp8_dot": _run_fp8_dot,
    "bitcast_convert_type": _run_as_written,
}
