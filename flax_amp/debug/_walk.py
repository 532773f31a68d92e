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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Var
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
from flax_amp._tree import split_list
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.policy import CASTABLE_OPS, LOW_OPS

# Their own dtypes say nothing that those of the equations inside do not say.
_CALLS = frozenset(
    """jit closed_call core_call remat2 shard_map custom_jvp_call custom_vjp_call
    custom_vmap_call flax_amp_repeat""".split()
)
_CONVERT = "convert_element_type"
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (flax, optax)
)


class Visit(NamedTuple):
    """An equation of the walk, with what the plan knows of it."""

    row: Equation
    eqn: Eqn
    step: Step
    values: Values
    scopes: tuple[str, ...]


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
    _prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def plan(self, plan: Plan, place: Place) -> None:
        """Walks a plan and all that it calls."""
        plan, values, regions = self._prepare(plan, place.recompute)
        around = _Environment(values), place
        pieces = dict.fromkeys(range(len(plan.steps)), around)
        for region in regions:
            inner = dataclasses.replace(place, recompute="never")
            pieces |= dict.fromkeys(region.indices, (_Environment(values), inner))
        # In the order of the program, which is easier to read than that of emission.
        for i, (env, where) in pieces.items():
            self._equation(plan.jaxpr.eqns[i], plan.steps[i], env, where)

    def _prepare(self, plan: Plan, recompute: Recompute) -> Any:
        """Returns a plan with calls for repeated layers, its values and regions."""
        key = (plan, recompute)
        if key not in self._prepared:
            plan = outline(plan) if self.merge_layers else plan
            order = group_into_regions(plan, recompute, self.painter.compute_dtype)
            regions = [item for item in order if isinstance(item, Region)]
            self._prepared[key] = plan, plan.values(), regions
        return self._prepared[key]

    def results(self, outs: Values, targets: Values) -> None:
        """Notes the results of the whole function, which get their dtypes back."""
        casts = list(map(_cast, outs, targets)).count(1)
        if casts and self.painter.compute_dtype != jnp.float32:
            low, full = (self.painter.compute_dtype.name,), ("float32",)
            row = Equation(
                "",
                "return",
                before=Dtypes(full, full),
                after=Dtypes(low, full),
                reason="results keep their dtypes",
                casts_up=casts,
            )
            self.rows.append(row)

    def _equation(self, eqn: Eqn, step: Step, env: _Environment, place: Place) -> None:
        values = tuple(value_of(v, env.values) for v in eqn.invars)
        if step.mode is Mode.CALL:
            self._note_call(eqn, step, values, place)
            return
        casts = Counter(_operand_casts(eqn, step, values, env))
        if step.mode in (Mode.FULL, Mode.EXP):
            casts[-1] += sum(has_paint(v, Paint.LOW) for v in step.outs)
        if step.mode in (Mode.RULE, Mode.REPEAT):
            for plan in plans_in(step.detail):
                self.plan(plan, place.within(eqn))
            border = _BORDERS.get(eqn.primitive.name, lambda *_: ())
            for count, origins, targets in border(eqn, step, values):
                for cast in map(_cast, origins, targets):
                    casts[cast] += count
        elif _has_untouched_bodies(eqn):
            self._untouched(eqn, step, place)
        # A cast from float32 to float32 moves data only.
        is_noop = step.mode is Mode.RULE and eqn.primitive.name == _CONVERT
        if eqn.primitive.name not in _CALLS and not is_noop:
            operands = [_operand_value(value, step) for value in values]
            after = (
                self._dtypes(eqn.invars, operands),
                self._dtypes(eqn.outvars, step.outs),
            )
            self._note(eqn, step, values, place, Dtypes(*after), casts)

    def _untouched(self, around: Eqn, step: Step, place: Place) -> None:
        """Walks the bodies of an equation that runs in its original dtypes."""
        place = place.within(around)
        inside = f"inside {place.inside[-1]}: " if place.inside else ""
        reason = inside + step.reason.removeprefix(inside)
        for body in jaxprs_in_params(around.params):
            for eqn in _compat.open_jaxpr(body)[0].eqns:
                full = like([v.aval for v in eqn.invars], FULL)
                outs = like([v.aval for v in eqn.outvars], FULL)
                own = Step(Mode.FULL, outs, reason)
                if eqn.primitive.name not in _CALLS:
                    self._note(eqn, own, full, place, _original(eqn), Counter())
                if _has_untouched_bodies(eqn):
                    self._untouched(eqn, step, place)

    # --- rows --------------------------------------------------------------------

    def _dtypes(
        self, atoms: Sequence[Atom], values: Sequence[Value | None]
    ) -> tuple[str, ...]:
        dtype_of = self.painter.dtype_of
        pairs = zip(atoms, values, strict=True)
        return tuple(str(dtype_of(v, atom.aval) or "") for atom, v in pairs)

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
        own = [e for e in traced if e.primitive is eqn.primitive]
        after = _original(own[-1] if own else eqn)
        casts = Counter(_direction(*side) for e in traced for side in _sides(e))
        planned = self._dtypes(eqn.outvars, step.outs)
        casts.update(map(_direction, after.results, planned))
        self._note(eqn, step, values, place, after, casts)

    def _note(
        self,
        eqn: Eqn,
        step: Step,
        values: Values,
        place: Place,
        after: Dtypes,
        casts: Counter[int],
    ) -> None:
        if self.painter.compute_dtype == jnp.float32:
            casts = Counter()  # all paints are the same dtype
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars] or [()]
        scopes = place.scopes + _compat.scope_names(eqn)
        row = Equation(
            path=module_path(scopes),
            primitive=eqn.primitive.name,
            before=_original(eqn),
            after=after,
            reason=step.reason,
            shape="x".join(map(str, shapes[0])),
            times=place.times,
            casts_down=casts[-1] * place.times,
            casts_up=casts[1] * place.times,
            flops=flops(eqn) * place.times,
            source=source_line(eqn),
            inside=place.inside,
        )
        self.rows.append(row)
        self.visits.append(Visit(row, eqn, step, values, scopes))


def _has_untouched_bodies(eqn: Eqn) -> bool:
    """Whether an equation has bodies that a reader takes for a part of the program."""
    name = eqn.primitive.name
    return name in RULES or not (name in CASTABLE_OPS or name == "pallas_call")


def _operand_value(value: Value | None, step: Step) -> Value | None:
    """Returns the value of an operand as the equation reads it."""
    if value is None or step.mode in (Mode.FULL, Mode.EXP):
        return None
    return LOW if step.mode is Mode.LOW else value


def _operand_casts(
    eqn: Eqn, step: Step, values: Values, env: _Environment
) -> Iterator[int]:
    """Yields -1 for each operand that is cast down, 1 for each that is cast up."""
    for atom, value in zip(eqn.invars, values, strict=True):
        if step.mode in (Mode.FULL, Mode.EXP):
            if has_paint(value, Paint.LOW) and env.needs_cast(atom, Paint.FULL):
                yield 1
        elif step.mode is Mode.LOW:
            # Readers share one cast of what was computed. Each casts a leaf itself.
            is_leaf = not has_paint(value, Paint.FULL)
            if is_leaf or env.needs_cast(atom, Paint.LOW):
                yield _cast(value, LOW)


def _cast(origin: Value | None, target: Value | None) -> int:
    """Returns -1 if a value is cast down to become another one, 1 if up, or 0."""
    if origin is None or target is None:
        return 0
    if target.paint is Paint.LOW and origin.paint is not Paint.LOW:
        return 0 if origin.bits else -1  # a constant is made in the compute dtype
    return int(origin.paint is Paint.LOW and target.paint is not Paint.LOW)


# --- the borders of loops and branches: how often, from which values, to which -------


def _scan_border(eqn: Eqn, step: Step, values: Values) -> Iterator[Any]:
    consts, init, _ = split_list(values, *_compat.scan_counts(eqn))
    body, carry = step.detail.body, step.detail.carry
    yield 1, (*consts, *init), (*body.ins[: len(consts)], *carry)
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


_BORDERS: dict[str, Callable[[Eqn, Step, Values], Iterable[Any]]] = {
    "scan": _scan_border,
    "while": _while_border,
    "cond": _cond_border,
    "custom_linear_solve": _solve_border,
}

# --- single equations ----------------------------------------------------------------


def _original(eqn: Eqn) -> Dtypes:
    operands, results = (
        tuple(str(getattr(v.aval, "dtype", "")) for v in atoms)
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Dtypes(operands, results)


def _sides(eqn: Eqn) -> list[tuple[str, str]]:
    """Returns the dtypes before and after, if an equation is a cast."""
    dtypes = _original(eqn)
    is_cast = eqn.primitive.name == _CONVERT
    return [(dtypes.operands[0], dtypes.results[0])] if is_cast else []


def _direction(before: str, after: str) -> int:
    """Returns -1 for a cast to a narrower float, 1 for one to a wider, or 0."""
    if before == after or "float" not in before or "float" not in after:
        return 0
    return 1 if jnp.dtype(after).itemsize > jnp.dtype(before).itemsize else -1


def flops(eqn: Eqn) -> int:
    """Returns the operations of a product or a convolution of floats, else 0."""
    name, params = eqn.primitive.name, eqn.params
    if name not in LOW_OPS:
        return 0
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in (left, right)):
        return 0
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
    was_method = False
    for segment in "/".join(scopes).split("/"):
        name, method = split_method(segment)
        if "->" in segment:  # `jnp.einsum` opens a scope with its formula
            continue
        # A method that calls another one of its own module, as Flax's RNN does.
        if not ((method or was_method) and names and names[-1] == name):
            names.append(name)
        was_method = bool(method)
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
