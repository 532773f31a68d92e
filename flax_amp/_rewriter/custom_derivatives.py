"""Custom derivatives: rebuilt around the rewritten function, never inlined.

The user's rule is traced through `jax.jvp` or `jax.vjp` of the original equation, and
the traced rule is planned and emitted like everything else. To inline the function
instead would silently drop the rule: a gradient that a `custom_vjp` clips would not be
clipped any more.

    before                            after, in bfloat16
    y:f32 = custom_vjp_call[          y:bf16 = custom_vjp_call[
      call_jaxpr={f:f32 -> f32}         call_jaxpr={f:bf16 -> bf16}
      bwd=rule                          bwd=rule, traced for f32, planned, emitted
    ] x                               ] x:bf16

A rule sees what plain JAX shows it. JAX tells the rebuilt rule which operands are
perturbed and which cotangents are zero, and the original equation is differentiated
with respect to just these operands, for just these cotangents.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.interpreters import ad

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, Aval, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import Kind, kind_of
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.captures import captured_by, with_captured
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    FULL,
    STATE,
    BodyKind,
    Context,
    EditedJaxpr,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    Step,
    Value,
    Values,
    has_paint,
    is_painted,
    like,
    out_avals,
)
from flax_amp._rewriter.single_body import SingleBodyRule
from flax_amp._tree import fill, pick, split_list


def tangent_like(value: Value | None) -> Value | None:
    """Returns the value of a tangent or cotangent, which has the dtype of its primal.

    It is never a leaf: a leaf is cast down by saturation, which is not linear.
    """
    if value is None or value.paint is Paint.LOW:
        return value
    return STATE if value.is_state else FULL


Mask = tuple[bool, ...]
Structs = Sequence[jax.ShapeDtypeStruct]
_FLAX_FP8_FILE = os.path.join("flax", "linen", "fp8_ops.py")
_DEFAULT_PRECISION = (jax.lax.Precision.DEFAULT,) * 2


def _are_differentiable(variables: Sequence[Var]) -> Mask:
    return tuple(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in variables)


def _identity(*xs: Array) -> Arrays:
    return xs


def _is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero, or that of an integer."""
    dtype = getattr(tangent, "dtype", None)  # a Python number has none
    return isinstance(tangent, SymbolicZero) or dtype == jax.dtypes.float0


# No repr: JAX writes that of functions into its debug information.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CustomCall:
    """A call of a function with a user's rule: what it takes to rebuild it."""

    emitter: Emitter
    eqn: Eqn
    plan: Plan
    context: Context
    # The planned rules, by the operands that JAX differentiates and by their types.
    rules: dict[Any, Any]

    @property
    def differentiable(self) -> Mask:
        """Which operands have a derivative: floats and complex numbers."""
        return _are_differentiable(self.eqn.invars)

    @property
    def wants_symbolic_zeros(self) -> bool:
        """Whether the user's rule asks which operands are perturbed."""
        return self.eqn.params["symbolic_zeros"]

    def __call__(self, *operands: Array) -> tuple[Array, ...]:
        return tuple(self.emitter.emit(self.plan, operands))

    def original(self, operands: Arrays, mask: Mask) -> Callable[..., Arrays]:
        """Returns the original call as a function of those operands in a mask."""

        def call(*chosen: Array) -> tuple[Array, ...]:
            full = fill(chosen, mask, operands)
            return tuple(_compat.bind(self.eqn, full, self.eqn.params))

        return call

    def structs(self, operands: Arrays) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of operands, in the dtypes of the original program.

        They have the shardings and the manual axes that the operands have here.
        """
        return [
            _compat.struct_of(jax.typeof(x), v.aval.dtype)
            for x, v in zip(operands, self.eqn.invars, strict=True)
        ]

    def rule(self, make: Any, mask: Mask, operands: Arrays) -> Any:
        """Returns the rule for some operands, made when it is first asked for."""
        key = (mask, *map(jax.typeof, operands))
        if key not in self.rules:
            self.rules[key] = make(self, mask, self.structs(operands))
        return self.rules[key]

    def trace(
        self,
        function: Callable[..., Any],
        structs: Sequence[Any],
        ins: Values,
        outs: Callable[[], Values] = tuple,
    ) -> tuple[Plan, Any]:
        """Plans a function of the rule.

        Args:
          function: the function.
          structs: the shapes of its arguments.
          ins: the values of these.
          outs: returns the values that the caller expects of its first results. It is
            called after the function is traced: that may tell what has a derivative.

        Returns:
          The plan, and the shapes of the results.
        """
        # The lines of the user's rule, not the line where the function is called.
        with _compat.own_lines():
            made, shapes = jax.make_jaxpr(function, return_shape=True)(*structs)
        closed = with_captured(made, self.emitter.captured)
        if _is_flax_fp8_product(self.plan):
            closed = _with_default_precision(closed)
        # The results and their derivatives have the precision of the function. So have
        # its residuals, unless the rule reads them itself: then they are not rounded
        # before it does.
        first = [_need_of(v) for v in outs()]
        jaxpr = _compat.open_jaxpr(closed)[0]
        read_inside = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)}
        is_between_products = any(has_paint(v, Paint.LOW) for v in self.plan.outs)

        def need_of_residual(v: Atom) -> Need:
            if not is_between_products:
                return Need.READ_IN_FLOAT32
            is_read = bool(read_inside.intersection(variables([v])))
            return Need.LATER if is_read else Need.LATER | Need.BORDER

        rest = map(need_of_residual, jaxpr.outvars[len(first) :])
        painter = self.emitter.painter
        return painter.plan(closed, ins, (*first, *rest), self.context), shapes


def _need_of(value: Value | None) -> Need:
    return (
        Need.LATER | Need.BORDER
        if has_paint(value, Paint.LOW)
        else Need.READ_IN_FLOAT32
    )


def _is_flax_fp8_product(plan: Plan) -> bool:
    """Whether a function is the fp8 product of Flax, and runs low.

    Flax asks for the precision `DEFAULT` in its forward pass and for `HIGHEST` in its
    backward pass. There, `HIGHEST` selects how an fp8 product is accumulated; it does
    not ask for float32 factors, as it does elsewhere. Nothing else in the equations
    tells this product from a user's own `custom_vjp` with a precise backward pass, so
    the source file decides. If Flax moves it, its backward products run in float32.
    """
    return any(
        step.mode is Mode.LOW
        and kind_of(eqn) is Kind.PRODUCT
        and _compat.user_file(eqn).endswith(_FLAX_FP8_FILE)
        for eqn, step in plan.pairs()
    )


def _with_default_precision(closed: Jaxpr) -> EditedJaxpr:
    jaxpr, consts = _compat.open_jaxpr(closed)
    eqns = [
        eqn.replace(params={**eqn.params, "precision": _DEFAULT_PRECISION})
        if kind_of(eqn) is Kind.PRODUCT and all(is_painted(v.aval) for v in eqn.invars)
        else eqn
        for eqn in jaxpr.eqns
    ]
    return EditedJaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr.constvars, consts)


class CustomRule(SingleBodyRule):
    """The paint of a call with a user's rule: that of the function itself."""

    body_kind = BodyKind.OPAQUE

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        # A rule that takes a ref cannot be traced through `jax.jvp` or `jax.vjp`.
        if any(isinstance(v.aval, jax.ref.AbstractRef) for v in eqn.invars):
            outs = like(out_avals(eqn), FULL)
            return Step(Mode.FULL, outs, Reason("its rule takes a ref"))
        step = super().paint(painter, eqn, ins, needs, context)
        context = context.inside(BodyKind.OPAQUE)
        again = step.unrounded
        if again is not None:
            again = dataclasses.replace(again, detail=(again.detail, context))
        return dataclasses.replace(step, detail=(step.detail, context), unrounded=again)

    def call(self, emitter: Emitter, eqn: Eqn, step: Step) -> CustomCall:
        """Returns the call, with the arrays that its own rules close over and no more.

        The rules keep these arrays alive: the arrays of other calls would leak tracers.
        """
        known = emitter.captured
        own = {v: known[v] for v in captured_by(eqn) if v in known} if known else {}
        emitter = dataclasses.replace(emitter, captured=own)
        # A network calls the same activation of JAX again and again.
        is_shared = not emitter.painter.has_user_rule(eqn)
        rules = emitter.shared_rules(eqn, step) if is_shared else {}
        plan, context = step.detail
        return CustomCall(emitter, eqn, plan, context, rules)


# --- forward mode --------------------------------------------------------------------


class CustomJvp(CustomRule):
    """The user's jvp rule is rewritten and attached again."""

    has_border = False

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        if emitter.wide_gradients:
            # JAX transposes the rule, and `wide_grad.product` has no transpose.
            emitter = dataclasses.replace(emitter, wide_gradients=False, cache={})
        call = self.call(emitter, eqn, step)
        rebuilt = jax.custom_jvp(call)
        rebuilt.defjvp(functools.partial(_emit_jvp, call), symbolic_zeros=True)
        return rebuilt(*operands)


class _JvpRule:
    """The user's jvp rule for some perturbed operands.

    For `y = f x w`, of which only `x` is perturbed, JAX asks with a tangent of `x` and
    a symbolic zero for `w`. What is traced and planned is the function

        lambda x w dx. jvp(lambda x: f(x, w), x, dx)      -> y, dy

    The user's rule sees the zero for `w`, as it does without `amp`.

    Attributes:
      plan: the plan of this function.
      perturbed: which results have a tangent.
    """

    def __init__(self, call: CustomCall, mask: Mask, structs: Structs):
        self.perturbed = _are_differentiable(call.eqn.outvars)

        def rule(*xs: Array) -> Arrays:
            primals, tangents = split_list(xs, len(mask))
            original = call.original(primals, mask)
            # A rule that is given symbolic zeros may also return some.
            if call.wants_symbolic_zeros:
                original = self._recording(original)
            chosen = tuple(pick(primals, mask))
            outs, tangents_out = jax.jvp(original, chosen, tangents)
            return (*outs, *pick(tangents_out, self.perturbed))

        tangents = [tangent_like(v) for v in pick(call.plan.ins, mask)]
        ins = (*call.plan.ins, *tangents)
        structs = [*structs, *pick(structs, mask)]
        outs = call.plan.outs
        self.plan, _ = call.trace(
            rule, structs, ins, lambda: (*outs, *pick(outs, self.perturbed))
        )

    def _recording(self, function: Callable[..., Arrays]) -> Callable[..., Arrays]:
        """Returns a function whose derivative records which results have a tangent.

        It passes its results through an identity, and JAX tells the rule of that which
        of them have a tangent.
        """
        # JAX does not call `record` if no result has a tangent.
        self.perturbed = (False,) * len(self.perturbed)
        results = jax.custom_jvp(_identity)

        def record(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
            self.perturbed = tuple(not _is_zero(t) for t in tangents)
            return primals, tangents

        results.defjvp(record, symbolic_zeros=True)
        return lambda *xs: results(*function(*xs))


def _emit_jvp(call: CustomCall, primals: Arrays, tangents: Arrays) -> Any:
    primals = list(map(jnp.asarray, primals))  # some may be Python numbers
    # A zero tangent stays symbolic, so that the user's rule sees it as zero.
    mask = tuple(not _is_zero(t) for t in tangents)
    rule = call.rule(_JvpRule, mask, primals)
    given = [jnp.asarray(t) for t in pick(tangents, mask)]
    outs = call.emitter.emit(rule.plan, [*primals, *given])
    primals_out, tangents_out = split_list(outs, len(call.plan.outs))
    primals_out = tuple(call.emitter.cast_to_plan(primals_out, call.plan.outs))
    values = tuple(tangent_like(v) for v in pick(call.plan.outs, rule.perturbed))
    zeros = [zero_from_primal(x, symbolic_zeros=True) for x in primals_out]
    low_tangents = call.emitter.cast_to_plan(tangents_out, values)
    return primals_out, tuple(fill(low_tangents, rule.perturbed, zeros))


# --- reverse mode --------------------------------------------------------------------


class CustomVjp(CustomRule):
    """The user's forward and backward functions are rewritten and attached again."""

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        call = self.call(emitter, eqn, step)
        # With symbolic zeros, JAX says which operands are perturbed.
        symbolic = call.wants_symbolic_zeros or emitter.takes_symbolic_zeros
        rebuilt = jax.custom_vjp(call)
        rebuilt.defvjp(
            functools.partial(_emit_forward, call, symbolic),
            lambda residuals, cotangents: residuals(cotangents),
            symbolic_zeros=symbolic,
        )
        return rebuilt(*operands)


class _VjpRule:
    """The user's forward and backward functions for some perturbed operands.

    For `y = f x w`, of which only `x` is perturbed, the two functions that are traced
    and planned are

        forward:  lambda x w. vjp(lambda x: f(x, w), x)   -> y, residuals
        backward: lambda residuals dy. vjp function       -> dx

    The second one is planned when JAX asks for it, because only then it is known which
    cotangents are zero. It may be asked for several times.
    """

    def __init__(self, call: CustomCall, mask: Mask, structs: Structs):
        self._call, self._mask = call, mask
        self._backwards: dict[Any, Any] = {}
        self._has_cotangent: Mask = ()

        def forward(*xs: Array) -> tuple[Arrays, Arrays]:
            original = self._recording(call.original(xs, mask))
            # JAX calls a rule whose cotangents are all zero, unless those of the whole
            # function are zero, too. So it gets a result whose cotangent never is.
            (*outs, _), vjp = jax.vjp(
                lambda one, *chosen: (*original(*chosen), one),
                np.float32(1),
                *pick(xs, mask),
            )
            # The backward function that JAX returns is a pytree: its leaves are what
            # the backward pass reads, and travel from one plan to the other.
            residuals, self._treedef = jax.tree.flatten(vjp)
            return outs, residuals

        plan, (outs, residuals) = call.trace(
            forward, structs, call.plan.ins, lambda: call.plan.outs
        )
        self._forward, self._outs, self._residuals = plan, outs, residuals

    def _recording(self, function: Callable[..., Arrays]) -> Callable[..., Arrays]:
        """Returns a function whose derivative records which operands have a cotangent.

        It passes its operands through an identity, and JAX tells the rule of that which
        cotangents are zero. The rebuilt rule hands on just these as `None`.
        """
        arguments = jax.custom_vjp(_identity)

        def forward(*xs: Any) -> Any:
            return tuple(x.value for x in xs), None

        def record(_: None, cotangents: tuple[Array, ...]) -> tuple[Array, ...]:
            self._has_cotangent = tuple(not _is_zero(ct) for ct in cotangents)
            return cotangents

        arguments.defvjp(forward, record, symbolic_zeros=True)
        return lambda *xs: function(*arguments(*xs))

    def forward(self, operands: Arrays) -> Any:
        """Returns the results, and the backward function as a pytree of residuals."""
        call = self._call
        results = call.emitter.emit(self._forward, operands)
        outs, residuals = split_list(results, len(self._outs))
        cast = tuple(call.emitter.cast_to_plan(outs, call.plan.outs))
        return cast, jax.tree_util.Partial(self.backward, list(residuals))

    def backward(self, residuals: Arrays, cotangents: Arrays) -> Any:
        """Returns the cotangents of all operands; those that are zero are `None`."""
        call, mask = self._call, self._mask
        nonzero = tuple(not _is_zero(ct) for ct in cotangents)
        if nonzero not in self._backwards:
            self._backwards[nonzero] = self._plan_backward(nonzero, cotangents)
        plan, has_cotangent = self._backwards[nonzero]
        grads = call.emitter.emit(plan, [*residuals, *pick(cotangents, nonzero)])
        values = [tangent_like(v) for v in pick(call.plan.ins, mask)]
        cast = call.emitter.cast_to_plan(grads, tuple(pick(values, has_cotangent)))
        # Among the perturbed operands, then among all of them.
        grads = fill(cast, has_cotangent, [None] * len(has_cotangent))
        return tuple(fill(grads, mask, [None] * len(mask)))

    def _plan_backward(self, nonzero: Mask, cotangents: Arrays) -> Any:
        call = self._call
        # The user's rule is to see zeros where the rebuilt one does, in the dtypes of
        # the original program.
        zeros = [
            None if given else ad.Zero(_zero_aval(ct, v.aval))
            for ct, v, given in zip(cotangents, call.eqn.outvars, nonzero, strict=True)
        ]

        def backward(residuals: Arrays, cotangents: Arrays) -> Arrays:
            vjp = jax.tree.unflatten(self._treedef, residuals)
            self._has_cotangent = (False,) * sum(self._mask)  # if nothing reads them
            _, *grads = vjp((*fill(cotangents, nonzero, zeros), np.float32(1)))
            return pick(grads, self._has_cotangent)

        structs = (self._residuals, pick(self._outs, nonzero))
        values = [tangent_like(v) for v in pick(call.plan.outs, nonzero)]
        ins = (*self._forward.outs[len(self._outs) :], *values)
        plan, _ = call.trace(backward, structs, ins)
        return plan, self._has_cotangent


def _zero_aval(cotangent: Any, aval: Aval) -> Aval:
    """Returns the type of a symbolic zero in the original program."""
    is_symbolic = isinstance(cotangent, SymbolicZero)
    own: Any = cotangent.aval if is_symbolic else jax.typeof(cotangent)
    return own if own.dtype == jax.dtypes.float0 else own.update(dtype=aval.dtype)


def _mask_for_all(call: CustomCall, asked: Mask) -> Mask:
    """Returns the mask of all differentiable operands: one rule serves every call.

    The residuals of a rule without symbolic zeros do not depend on what is perturbed.
    """
    # The first operands are those that the function closes over. They have no
    # derivative: they are in the mask only if they are perturbed, and JAX complains.
    first = call.eqn.params["num_consts"]
    pairs = zip(call.differentiable, asked, strict=True)
    return tuple(d and (a or i >= first) for i, (d, a) in enumerate(pairs))


def _emit_forward(call: CustomCall, symbolic: bool, *operands: Any) -> Any:
    perturbed = [symbolic and x.perturbed for x in operands]
    operands = tuple(x.value for x in operands) if symbolic else operands
    pairs = zip(call.differentiable, perturbed, strict=True)
    asked = tuple(d and p for d, p in pairs)
    if call.wants_symbolic_zeros:
        return call.rule(_VjpRule, asked, operands).forward(operands)
    try:
        rule = call.rule(_VjpRule, _mask_for_all(call, asked), operands)
    except _compat.CustomVJPException:
        if not symbolic:
            raise
        # A rule inside closes over an operand, which must not be perturbed then.
        rule = call.rule(_VjpRule, asked, operands)
    return rule.forward(operands)
