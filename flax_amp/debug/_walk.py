"""Walks a plan as `emit.py` would follow it, and notes each equation instead.

Nothing is traced here. The walk knows in which dtype each operand arrives, and so where
`emit.py` puts a cast: one cast up for each value and piece of code, one cast down for
each computed value, and one for each use of a leaf. A piece of code is a jaxpr, or a
region that is recomputed together. tests/debug/test_walk.py compares the casts, and the
dtypes of products, with those of the program that `amp` emits.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._rewriter.custom_derivatives import split_list
from flax_amp._rewriter.outline.equality import plans_in
from flax_amp._rewriter.outline.outline import outline
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    FULL,
    LOW,
    Mode,
    Paint,
    Plan,
    Step,
    Value,
    Values,
    has_paint,
    like,
    value_of,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.recompute.regions import (
    Recompute,
    Region,
    group_into_regions,
)
from flax_amp._rewriter.rules import RULES
from flax_amp._scope_paths import split_method
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.policy import CASTABLE_OPS, LOW_OPS

# Their own dtypes say nothing that those of the equations inside do not say.
_CALLS = frozenset(
    """jit closed_call core_call remat2 shard_map custom_jvp_call custom_vjp_call
    custom_vmap_call flax_amp_repeat""".split()
)
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (flax, optax)
)


class Visit(NamedTuple):
    """An equation of the walk, with what the plan knows of it."""

    row: Equation
    eqn: Eqn
    step: Step
    values: Values


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a jaxpr stands.

    Attributes:
      scopes: the scopes around it.
      inside: the structured primitives around it.
      times: how often it runs.
      recompute: how much of it the backward pass computes again.
    """

    scopes: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    times: int = 1
    recompute: Recompute = "auto"

    def within(self, eqn: Eqn) -> "Place":
        """Returns the place of the bodies of an equation."""
        name, times = eqn.primitive.name, self.times
        inside = self.inside
        if name == "scan":
            times *= _int(eqn.params["length"], 1)
            inside = (*inside, f"scan x{eqn.params['length']}")
        elif name not in ("jit", "flax_amp_repeat"):
            inside = (*inside, name)
        scopes = self.scopes + _compat.scope_names(eqn)
        return dataclasses.replace(self, scopes=scopes, inside=inside, times=times)


class _Environment:
    """The values of a piece of code, and those of which it has a cast copy."""

    def __init__(self, values: Mapping[Var, Value | None]):
        self.values = values
        self._copies: set[tuple[Paint, Var]] = set()

    def needs_cast(self, atom: Atom, paint: Paint) -> bool:
        """Whether a computed value has to be cast; asked again, it has been."""
        if isinstance(atom, Literal) or (paint, atom) in self._copies:
            return False
        self._copies.add((paint, atom))
        return True


@dataclasses.dataclass
class Walk:
    """Notes the equations of a plan.

    Args:
      painter: the painter that made the plan.
      merge_layers: whether equal layers become calls of one function.

    Attributes:
      visits: what was noted.
      rows: all equations, with one for the results of the function.
    """

    painter: Painter
    merge_layers: bool
    visits: list[Visit] = dataclasses.field(default_factory=list)
    rows: list[Equation] = dataclasses.field(default_factory=list)
    # By plan: it with calls for repeated layers, its values, its order of emission.
    _outlined: dict[Plan, Plan] = dataclasses.field(default_factory=dict)
    _values: dict[Plan, Any] = dataclasses.field(default_factory=dict)
    _orders: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def plan(self, plan: Plan, place: Place) -> None:
        """Walks a plan and all that it calls."""
        if plan not in self._outlined:
            self._outlined[plan] = outline(plan) if self.merge_layers else plan
        plan = self._outlined[plan]
        if plan not in self._values:
            self._values[plan] = plan.values()
        values = self._values[plan]
        around = _Environment(values), place
        pieces = dict.fromkeys(range(len(plan.steps)), around)
        for item in self._order(plan, place.recompute):
            if isinstance(item, Region):
                inner = dataclasses.replace(place, recompute="never")
                pieces |= dict.fromkeys(item.indices, (_Environment(values), inner))
        # In the order of the program, which is easier to read than that of emission.
        for i, piece in pieces.items():
            self._equation(plan, i, *piece)

    def results(self, outs: Values, targets: Values, avals: Sequence[Any]) -> None:
        """Notes the results of the whole function, which get their dtypes back."""
        pairs = list(zip(avals, outs, targets, strict=True))
        low = [aval for aval, out, target in pairs if _is_cast_up(out, target)]
        if low and self.painter.compute_dtype != jnp.float32:
            before, after = ("float32",) * len(low), (self.painter.compute_dtype.name,)
            self.rows.append(
                Equation(
                    "",
                    "return",
                    before=Dtypes(before, before),
                    after=Dtypes(after * len(low), before),
                    reason="results keep their dtypes",
                    casts_up=len(low),
                )
            )

    def _order(self, plan: Plan, recompute: Recompute) -> Sequence[Region | int]:
        key = (plan, recompute)
        if key not in self._orders:
            self._orders[key] = group_into_regions(
                plan, recompute, self.painter.compute_dtype
            )
        return self._orders[key]

    def _equation(
        self, plan: Plan, index: int, env: _Environment, place: Place
    ) -> None:
        eqn, step = plan.jaxpr.eqns[index], plan.steps[index]
        values = tuple(value_of(v, env.values) for v in eqn.invars)
        if step.mode is Mode.CALL:
            self._note_call(eqn, step, values, place)
            return
        down, up = self._casts_of_operands(eqn, step, values, env)
        if step.mode in (Mode.FULL, Mode.EXP):
            down += sum(has_paint(v, Paint.LOW) for v in step.outs)
        border_down, border_up = self._bodies(eqn, step, values, place)
        down, up = down + border_down, up + border_up
        is_noop = (
            eqn.primitive.name == "convert_element_type" and step.mode is Mode.RULE
        )
        if eqn.primitive.name not in _CALLS and not is_noop:
            after = Dtypes(
                tuple(
                    self._operand_dtype(v, s, step)
                    for v, s in zip(eqn.invars, values, strict=True)
                ),
                self._dtypes(eqn.outvars, step.outs),
            )
            self._note(eqn, step, values, place, after, down, up)
        if step.mode is not Mode.RULE and _has_untouched_bodies(eqn):
            for body in jaxprs_in_params(eqn.params):
                self._untouched(body, place.within(eqn), step)

    def _casts_of_operands(
        self, eqn: Eqn, step: Step, values: Values, env: _Environment
    ) -> tuple[int, int]:
        """Returns how many operands are cast down, and how many up."""
        down = up = 0
        for atom, value in zip(eqn.invars, values, strict=True):
            if step.mode in (Mode.FULL, Mode.EXP):
                up += has_paint(value, Paint.LOW) and env.needs_cast(atom, Paint.FULL)
            elif step.mode is Mode.LOW and has_paint(value, Paint.FULL):
                down += env.needs_cast(atom, Paint.LOW)
            elif step.mode is Mode.LOW:
                down += _is_cast_down(value, LOW)
        return down, up

    def _operand_dtype(self, atom: Atom, value: Value | None, step: Step) -> str:
        if value is not None and step.mode is Mode.LOW:
            return self.painter.compute_dtype.name
        if step.mode in (Mode.FULL, Mode.EXP):
            value = None
        return _name(self.painter.dtype_of(value, atom.aval))

    def _dtypes(self, atoms: Sequence[Atom], values: Values) -> tuple[str, ...]:
        dtype_of = self.painter.dtype_of
        pairs = zip(atoms, values, strict=True)
        return tuple(_name(dtype_of(value, atom.aval)) for atom, value in pairs)

    # --- structured primitives ---------------------------------------------------

    def _bodies(
        self, eqn: Eqn, step: Step, values: Values, place: Place
    ) -> tuple[int, int]:
        """Walks the bodies of an equation, and returns the casts at their borders."""
        if step.mode not in (Mode.RULE, Mode.REPEAT):
            return 0, 0
        inside = place.within(eqn)
        for plan in plans_in(step.detail):
            self.plan(plan, inside)
        border = _BORDERS.get(eqn.primitive.name)
        if border is None:
            return 0, 0
        down = up = 0
        for count, values_from, values_to in border(eqn, step, values):
            for a, b in zip(values_from, values_to, strict=False):
                down += count * _is_cast_down(a, b)
                up += count * _is_cast_up(a, b)
        return down, up

    def _untouched(self, jaxpr: Jaxpr, place: Place, step: Step) -> None:
        """Walks a body that runs in its original dtypes."""
        reason = f"inside {place.inside[-1]}: {step.reason}" if place.inside else ""
        for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
            outs = like([v.aval for v in eqn.outvars], FULL)
            values = like([v.aval for v in eqn.invars], FULL)
            own = Step(Mode.FULL, outs, reason or step.reason)
            if eqn.primitive.name not in _CALLS:
                self._note(eqn, own, values, place, _original(eqn), 0, 0)
            if _has_untouched_bodies(eqn):
                for body in jaxprs_in_params(eqn.params):
                    self._untouched(body, place.within(eqn), step)

    # --- rows --------------------------------------------------------------------

    def _note_call(self, eqn: Eqn, step: Step, values: Values, place: Place) -> None:
        """Notes an equation whose dtypes a user's function chooses."""
        compute_dtype = self.painter.compute_dtype

        def call(*arrays: Any) -> Any:
            rest = iter(arrays)
            operands = [
                v.val if isinstance(v, Literal) else next(rest) for v in eqn.invars
            ]
            return call_precision_function(eqn, step.detail, compute_dtype, operands)

        structs = [
            _compat.struct_of(v.aval, self.painter.dtype_of(value, v.aval))
            for v, value in zip(eqn.invars, values, strict=True)
            if not isinstance(v, Literal)
        ]
        traced = _compat.open_jaxpr(jax.make_jaxpr(call)(*structs))[0].eqns
        casts = [_cast_of(e) for e in traced]
        own = [e for e in traced if e.primitive is eqn.primitive]
        after = _original(own[-1] if own else eqn)
        planned = self._dtypes(eqn.outvars, step.outs)
        casts += map(_compare, after.results, planned)
        self._note(eqn, step, values, place, after, casts.count(-1), casts.count(1))

    def _note(
        self,
        eqn: Eqn,
        step: Step,
        values: Values,
        place: Place,
        after: Dtypes,
        down: int,
        up: int,
    ) -> None:
        if self.painter.compute_dtype == jnp.float32:
            down = up = 0  # all paints are the same dtype
        results = [v.aval for v in eqn.outvars]
        row = Equation(
            path=module_path(place.scopes + _compat.scope_names(eqn)),
            primitive=eqn.primitive.name,
            before=_original(eqn),
            after=after,
            reason=step.reason,
            shape="x".join(map(str, getattr(results[0], "shape", ())))
            if results
            else "",
            times=place.times,
            casts_down=down * place.times,
            casts_up=up * place.times,
            flops=flops(eqn) * place.times,
            source=source_line(eqn),
            inside=place.inside,
        )
        self.rows.append(row)
        self.visits.append(Visit(row, eqn, step, values))


def _has_untouched_bodies(eqn: Eqn) -> bool:
    """Whether an equation has bodies that a reader takes for a part of the program."""
    name = eqn.primitive.name
    return name in RULES or not (name in CASTABLE_OPS or name == "pallas_call")


def _is_cast_down(origin: Value | None, target: Value | None) -> bool:
    # A constant is made in the compute dtype.
    if not has_paint(target, Paint.LOW) or has_paint(origin, Paint.LOW):
        return False
    return origin is not None and origin.bits is None


def _is_cast_up(origin: Value | None, target: Value | None) -> bool:
    return has_paint(origin, Paint.LOW) and has_paint(target, Paint.LEAF, Paint.FULL)


# --- the borders of loops and branches: how often, from which values, to which -------


def _scan_border(eqn: Eqn, step: Step, values: Values) -> Iterator[Any]:
    consts, init, _ = split_list(values, *_compat.scan_counts(eqn))
    body, carry = step.detail.body, step.detail.carry
    yield 1, consts, body.ins[: len(consts)]
    yield 1, init, carry
    yield _int(eqn.params["length"], 1), body.outs, step.outs


def _while_border(eqn: Eqn, step: Step, values: Values) -> Iterator[Any]:
    counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = split_list(values, *counts)[2]
    yield 1, init, step.detail.carry
    yield 1, step.detail.body.outs, step.detail.carry


def _cond_border(eqn: Eqn, step: Step, values: Values) -> Iterator[Any]:
    for plan in step.detail:
        yield 1, plan.outs, step.outs


def _solve_border(eqn: Eqn, step: Step, values: Values) -> Iterator[Any]:
    *_, vectors = split_list(values, *eqn.params["const_lengths"])
    yield 1, vectors, (FULL,) * len(vectors)
    for plan in filter(None, step.detail):
        yield 1, plan.outs, (FULL,) * len(plan.outs)


_BORDERS: dict[str, Callable[[Eqn, Step, Values], Iterator[Any]]] = {
    "scan": _scan_border,
    "while": _while_border,
    "cond": _cond_border,
    "custom_linear_solve": _solve_border,
}

# --- single equations ----------------------------------------------------------------


def _name(dtype: Any) -> str:
    return "" if dtype is None else str(dtype)


def _original(eqn: Eqn) -> Dtypes:
    operands, results = (
        tuple(_name(getattr(v.aval, "dtype", None)) for v in atoms)
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Dtypes(operands, results)


def _cast_of(eqn: Eqn) -> int:
    """Returns -1 for a cast down, 1 for one up, 0 for every other equation."""
    if eqn.primitive.name not in ("convert_element_type", "flax_amp_saturate"):
        return 0
    (before,), (after,) = _original(eqn)
    return _compare(before, after)


def _compare(before: str, after: str) -> int:
    if before == after:
        return 0
    sizes = []
    for name in (before, after):
        if "float" not in name:
            return 0
        sizes.append(jnp.dtype(name).itemsize)
    return 1 if sizes[1] > sizes[0] else -1


def flops(eqn: Eqn) -> int:
    """Returns the operations of a product or a convolution, 0 for all others."""
    name, params = eqn.primitive.name, eqn.params
    if name not in LOW_OPS:
        return 0
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if name == "conv_general_dilated":
        features = right.shape[params["dimension_numbers"].rhs_spec[0]]
        return _int(2 * math.prod(out.shape) * (math.prod(right.shape) // features))
    if name == "dot_general":
        (_, contracting), (_, batch) = params["dimension_numbers"]
        shared = {*contracting, *batch}
    else:
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracting, *batch, *numbers.rhs_group_dimensions}
    free = [n for i, n in enumerate(right.shape) if i not in shared]
    return _int(2 * math.prod(left.shape) * math.prod(free))


def _int(number: Any, unknown: int = 0) -> int:
    """Returns a number, unless it is a symbol of `jax.export`."""
    return number if isinstance(number, int) else unknown


@functools.cache
def module_path(scopes: tuple[str, ...]) -> str:
    """Returns the path of modules that scopes mean, without the names of methods."""
    names: list[str] = []
    for segment in "/".join(scopes).split("/"):
        name, method = split_method(segment)
        if "->" in segment:  # `jnp.einsum` opens a scope with its formula
            continue
        if not (method and names and names[-1] == name):
            names.append(name)
    return "/".join(names)


def source_line(eqn: Eqn) -> str:
    """Returns the line of the user's code that an equation comes from."""
    frames = _compat.user_frames(eqn)
    first = None
    for file, line in frames:
        first = first or (file, line)
        if not file.startswith(_LIBRARIES):
            first = file, line
            break
    if first is None:
        return ""
    file, line = first
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line}"
