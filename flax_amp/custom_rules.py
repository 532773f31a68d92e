"""Custom derivatives: rebuilt around the rewritten function, never inlined.

The user's rule is traced through `jax.jvp` or `jax.vjp` of the original equation, and
what comes out is planned and emitted like everything else. Inlining the function
instead would silently drop the rule: a gradient that is clipped by a `custom_vjp` would
no longer be.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _compat
from flax_amp.emit import Emitter
from flax_amp.paint import Painter
from flax_amp.plan import (
    Context,
    Mode,
    Paint,
    Plan,
    Site,
    Step,
    Uses,
    Value,
    Values,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    """Paint of a primitive with one sub-jaxpr that takes its operands as they are."""

    param: str
    site: ClassVar[Site | None] = None  # None: that of the surroundings

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        context = context.of(self.site or context.site)
        plan = painter.plan(eqn.params[self.param], ins, uses, context)
        name = eqn.primitive.name
        return Step(Mode.RULE, plan.outs, f"inside {name}", uses=plan.uses, detail=plan)


def split(items: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
    """Splits a sequence into groups of the given sizes and the rest."""
    groups, start = [], 0
    for count in counts:
        groups.append(tuple(items[start : start + count]))
        start += count
    return [*groups, tuple(items[start:])]


def _tangent_like(value: Value | None) -> Value | None:
    """The value of a tangent or cotangent: it has the dtype of its primal.

    Never a leaf: a leaf is cast down by saturation, which is not linear.
    """
    if value is None or value.paint is Paint.LOW:
        return value
    return value.varied()._replace(paint=Paint.FULL)


def _is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _structs(avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    # Shapes, shardings and manual axes of the operands, dtypes of the original program.
    return [
        _compat.struct_of(jax.typeof(x), aval.dtype)
        for aval, x in zip(avals, operands, strict=True)
    ]


def _pick(items: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [item for item, keep in zip(items, mask, strict=True) if keep]


def _fill(items: Sequence[Any], mask: Sequence[bool], others: Sequence[Any]) -> list:
    rest, kept = iter(others), iter(items)
    return [next(kept) if keep else next(rest) for keep in mask]


# JAX shows functions in its debug information: a call must not spell out its plan.
@dataclasses.dataclass(frozen=True, repr=False)
class _CustomCall:
    """What the rebuilt call of a function with a custom derivative is made of."""

    emitter: Emitter
    eqn: Any
    plan: Plan
    context: Context

    @functools.cached_property
    def differentiable(self) -> list[bool]:
        return [_is_differentiable(v.aval) for v in self.eqn.invars]

    @functools.cached_property
    def out_differentiable(self) -> list[bool]:
        return [_is_differentiable(v.aval) for v in self.eqn.outvars]

    def original(self, operands: Sequence[Any]) -> Any:
        """Returns the original call as a function of its differentiable operands."""
        others = _pick(operands, [not d for d in self.differentiable])

        def call(*inexact: Any) -> list[Any]:
            full = _fill(inexact, self.differentiable, others)
            return _compat.bind(self.eqn, full, self.eqn.params)

        return call

    def structs(self, operands: Sequence[Any]) -> list[Any]:
        return _structs([v.aval for v in self.eqn.invars], operands)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self.emitter.emit(self.plan, operands))

    def replan(self, closed: Any, ins: Sequence[Value | None]) -> Plan:
        return self.emitter.painter.plan(closed, tuple(ins), None, self.context)

    def zero_tangents(self) -> list[Any]:
        """Returns the tangents of the results that have none, such as integers."""
        return [
            np.zeros(v.aval.shape, jax.dtypes.float0)
            for v in _pick(self.eqn.outvars, [not d for d in self.out_differentiable])
        ]


@dataclasses.dataclass(frozen=True)
class _Custom(Inner):
    """Paint of a call with a custom derivative: that of the function itself."""

    site = Site.CLOSED

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        step = super().paint(painter, eqn, ins, uses, context)
        context = context.of(self.site)
        return dataclasses.replace(step, detail=(step.detail, context))


class CustomJvp(_Custom):
    """The user's jvp rule is rewritten and attached again."""

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        call = _CustomCall(emitter, eqn, *step.detail)
        rebuilt = jax.custom_jvp(call)
        rebuilt.defjvp(functools.partial(_emit_jvp, call))
        return rebuilt(*operands)


def _emit_jvp(call: _CustomCall, primals: Any, tangents: Any) -> Any:
    mask, plan = call.differentiable, call.plan

    def rule(primals: Any, tangents: Any) -> Any:
        outs, tangents_out = jax.jvp(
            call.original(primals), _pick(primals, mask), tangents
        )
        return outs, _pick(tangents_out, call.out_differentiable)

    structs = call.structs(primals)
    closed = jax.make_jaxpr(rule)(structs, _pick(structs, mask))
    tangent_values = [_tangent_like(v) for v in _pick(plan.ins, mask)]
    jvp_plan = call.replan(closed, (*plan.ins, *tangent_values))
    # jax.jvp hands a Python number on as one.
    operands = [jnp.asarray(x) for x in (*primals, *_pick(tangents, mask))]
    outs = call.emitter.emit(jvp_plan, operands)
    primals_out, tangents_out = split(outs, len(plan.outs))
    out_values = [_tangent_like(v) for v in _pick(plan.outs, call.out_differentiable)]
    landed = call.emitter.land(tangents_out, tuple(out_values))
    return (
        tuple(call.emitter.land(primals_out, plan.outs)),
        tuple(_fill(landed, call.out_differentiable, call.zero_tangents())),
    )


class CustomVjp(_Custom):
    """The user's forward and backward functions are rewritten and attached again."""

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        call = _CustomCall(emitter, eqn, *step.detail)
        # Only differentiation needs the two rules: they are traced when it asks.
        rules = functools.cache(lambda: _trace_vjp(call, operands))
        rebuilt = jax.custom_vjp(call)
        rebuilt.defvjp(
            lambda *xs: _emit_forward(call, rules(), xs),
            lambda residuals, cotangents: _emit_backward(
                call, rules(), residuals, cotangents
            ),
        )
        return rebuilt(*operands)


@dataclasses.dataclass(frozen=True)
class _VjpPlans:
    forward: Plan
    backward: Plan


def _trace_vjp(call: _CustomCall, operands: Sequence[Any]) -> _VjpPlans:
    """Plans the user's forward and backward functions."""
    mask, out_mask = call.differentiable, call.out_differentiable
    treedef = None

    def forward(*xs: Any) -> Any:
        nonlocal treedef
        outs, vjp = jax.vjp(call.original(xs), *_pick(xs, mask))
        residuals, treedef = jax.tree.flatten(vjp)
        return outs, residuals

    def backward(residuals: Any, cotangents: Any) -> Any:
        vjp = jax.tree.unflatten(treedef, residuals)
        return vjp(_fill(cotangents, out_mask, call.zero_tangents()))

    closed, (outs, residuals) = jax.make_jaxpr(forward, return_shape=True)(
        *call.structs(operands)
    )
    forward_plan = call.replan(closed, call.plan.ins)
    closed = jax.make_jaxpr(backward)(residuals, _pick(outs, out_mask))
    _, residual_values = split(forward_plan.outs, len(outs))
    cotangent_values = [_tangent_like(v) for v in _pick(call.plan.outs, out_mask)]
    backward_plan = call.replan(closed, (*residual_values, *cotangent_values))
    return _VjpPlans(forward_plan, backward_plan)


def _emit_forward(call: _CustomCall, plans: _VjpPlans, operands: Any) -> Any:
    results = call.emitter.emit(plans.forward, operands)
    outs, residuals = split(results, len(call.plan.outs))
    return tuple(call.emitter.land(outs, call.plan.outs)), residuals


def _emit_backward(
    call: _CustomCall, plans: _VjpPlans, residuals: Any, cotangents: Any
) -> Any:
    mask = call.differentiable
    cotangents = _pick(cotangents, call.out_differentiable)
    grads = call.emitter.emit(plans.backward, (*residuals, *cotangents))
    values = tuple(_tangent_like(v) for v in _pick(call.plan.ins, mask))
    grads = call.emitter.land(grads, values)
    return tuple(_fill(grads, mask, [None] * (len(mask) - len(grads))))
