"""Structured primitives: a class for each, with `needs`, `paint` and `emit`.

Paints flow into a sub-jaxpr and out of it: its border casts nothing, but what a call
without products reads, and arrays that the iterations of a loop index. Each rule
changes only what it has to (the sub-jaxpr and the dtypes at its border) and leaves
everything else as it is: names, shardings, donation, policies, unrolling, custom
derivatives.

A structured primitive without a rule here runs untouched in its original dtypes.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Eqn
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.traits import bodies, traits_of
from flax_amp._jaxpr.walk import integers_cast_inside
from flax_amp._rewriter.casts import rounded
from flax_amp._rewriter.custom_derivatives import (
    CustomJvp,
    CustomRule,
    CustomVjp,
    tangent_like,
)
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.fp8_dot import PolicyOfPlainProducts
from flax_amp._rewriter.loops import LinearSolve, Scan, While
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    LEAF,
    BodyKind,
    Context,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    Rule,
    Step,
    Values,
    at_border,
    has_paint,
    is_painted,
    join,
    like,
    out_avals,
)
from flax_amp._rewriter.single_body import SingleBodyRule, cast_outside, rewrite_body
from flax_amp._tree import split_list


class _Jit(SingleBodyRule):
    """A jit stays a jit: same name, shardings, layouts, donation."""

    has_border = False

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        # `jnp.where(mask, x, 0)` casts its 0 inside: a constant like any other.
        numbers = integers_cast_inside(bodies(eqn)[0], eqn.invars)
        context = dataclasses.replace(context, numbers=numbers)
        return super().paint(painter, eqn, ins, needs, context)

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        body = rewrite_body(emitter, step.detail, operands)
        return _compat.bind(eqn, operands, eqn.params | {traits_of(eqn).body: body})


class _Checkpoint(SingleBodyRule):
    """A checkpoint stays as it is: same policy and `prevent_cse`."""

    body_kind = BodyKind.OPAQUE

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        closed = rewrite_body(emitter, step.detail, operands)
        body, consts = _compat.hoist_consts(closed)
        params = eqn.params | {traits_of(eqn).body: body}
        if emitter.painter.has_fp8 and params["policy"] is not None:
            params["policy"] = PolicyOfPlainProducts(params["policy"])
        # The backward pass reads the operands from memory.
        operands = [
            rounded(x) if has_paint(value, Paint.LOW) else x
            for x, value in zip(operands, step.detail.ins, strict=True)
        ]
        return _compat.bind(eqn, [*consts, *operands], params)


class _Call(SingleBodyRule):
    """A plain call is evaluated in place."""

    has_border = False

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        return emitter.emit(step.detail, operands)


class _ShardMap(SingleBodyRule):
    """A shard_map stays as it is: same mesh, specs, manual axes and checks."""

    has_border = False

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        params = eqn.params
        return jax.shard_map(
            lambda *xs: tuple(emitter.emit(step.detail, xs)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(params["newly_manual_axes"]),
        )(*operands)


# --- branches ------------------------------------------------------------------------


class _Cond:
    """Branches agree on the dtype of each result."""

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        reads = [
            painter.needs(branch, at_border(needs), context)
            for branch in eqn.params["branches"]
        ]
        together = (
            functools.reduce(operator.or_, of) for of in zip(*reads, strict=True)
        )
        # The index, an integer, comes first. Each branch may be the one that is taken.
        return (Need.NONE, *at_border(together))

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        if not painter.has_product(eqn):
            ins = cast_outside(ins, self.needs(painter, eqn, needs, context))
        plans = [
            painter.plan(branch, ins[1:], at_border(needs), context)
            for branch in eqn.params["branches"]
        ]
        # A result has the precision of all branches: full if it is full in one of them.
        outs = tuple(map(join, zip(*(plan.outs for plan in plans), strict=True)))
        return Step(Mode.RULE, outs, Reason("inside cond"), reads=ins, detail=plans)

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        def branch(plan: Plan, *xs: Array) -> Any:
            return tuple(
                emitter.cast_to_plan(emitter.emit(plan, xs), step.outs, plan.outs)
            )

        index, *xs = operands
        branches = [functools.partial(branch, plan) for plan in step.detail]
        platforms = eqn.params.get("branches_platforms")
        if not platforms:
            return jax.lax.switch(index, branches, *xs)
        # The compiler for a platform must not see the branches of other platforms.
        named = {
            name: chosen
            for names, chosen in zip(platforms, branches, strict=True)
            for name in names or ("default",)
        }
        return jax.lax.platform_dependent(*xs, **named)


# --- linear calls and batching rules -------------------------------------------------


class _LinearCall(CustomRule):
    """The function and the user's transpose of it are rewritten."""

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        count = self._count_fixed(eqn)
        # A leaf is cast down by saturation, which is not linear.
        linear = map(tangent_like, ins[count:])
        return super().paint(painter, eqn, (*ins[:count], *linear), needs, context)

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        # The first operands are fixed: constants, and what the user calls residuals. In
        # the others, the call is linear.
        call, count = self.call(emitter, eqn, step), self._count_fixed(eqn)
        first = eqn.params["num_callee_consts"]  # the transpose does not take these

        def function(fixed: Arrays, linear: Arrays) -> list[Array]:
            return list(call(*fixed, *linear))

        def original(*xs: Array) -> Arrays:
            closed, consts = eqn.params["transpose_thunk"]()
            return evaluate(closed, [*consts, *xs])

        def transpose(fixed: Arrays, cotangents: Arrays) -> list[Array]:
            residuals = call.structs(operands)[first:count]
            structs = [_compat.struct_of(aval, aval.dtype) for aval in out_avals(eqn)]
            ins = (*call.plan.ins[first:count], *map(tangent_like, call.plan.outs))
            plan, _ = call.trace(original, [*residuals, *structs], ins)
            outs = call.emitter.emit(plan, [*fixed[first:], *cotangents])
            return call.emitter.cast_to_plan(outs, call.plan.ins[count:])

        fixed, linear = split_list(operands, count)
        arrays = list(fixed), list(linear)
        linear_call = jax.custom_derivatives.linear_call
        return _compat.call_or_locate_nan(
            lambda: linear_call(function, transpose, *arrays),
            lambda: function(*arrays),
        )

    def _count_fixed(self, eqn: Eqn) -> int:
        return eqn.params["num_callee_consts"] + eqn.params["num_res"]


class _CustomVmap(CustomRule):
    """The function is rewritten, and so is the user's batching rule when it is used."""

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        call = self.call(emitter, eqn, step)

        # The rule is the user's: it is traced, planned and emitted for each batch.
        @jax.custom_batching.custom_vmap
        def rebuilt(*xs: Array) -> list[Array]:
            return list(call(*xs))

        @rebuilt.def_vmap
        def batched(axis_size: int, in_batched: Any, *xs: Array) -> Any:
            out_batched: list[bool] = []

            def rule(*xs: Array) -> list[Array]:
                outs, out_batched[:] = _compat.call_vmap_rule(
                    eqn, axis_size, in_batched, xs
                )
                return outs

            plan, _ = call.trace(rule, call.structs(xs), call.plan.ins)
            outs = call.emitter.emit(plan, xs)
            return call.emitter.cast_to_plan(outs, call.plan.outs), out_batched

        return rebuilt(*operands)


# --- casts ---------------------------------------------------------------------------


class _ConvertElementType:
    """The user's own casts are obeyed; one from float32 to float32 moves data only."""

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        if is_painted(eqn.outvars[0].aval):
            return needs
        if Need.LATER not in needs[0]:
            return (Need.READ_IN_FLOAT32 | Need.UNROUNDED,)
        # The program rounds it: so it may be rounded where it is computed.
        is_rounded = eqn.outvars[0].aval.dtype == painter.compute_dtype
        kept = Need.LATER | Need.CAST | Need.READ_IN_HALF
        return (kept if is_rounded else Need.READ_IN_FLOAT32,)

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        operand = eqn.invars[0].aval
        if is_painted(operand) and is_painted(eqn.outvars[0].aval):
            return Step(Mode.RULE, ins, Reason("weak type only"))
        # Like an argument, it is float32 until something reads it in half precision.
        value = LEAF
        for variable, number in context.numbers:
            if variable is eqn.invars[0]:
                value = LEAF._replace(bits=np.float32(number).tobytes())
        return Step(Mode.FULL, like(out_avals(eqn), value), Reason("explicit cast"))

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        (x,) = operands
        # It is not bound, because its dtype parameter would undo the paint. Weak types
        # end here, and come back where the program returns them (`transform.py`).
        return [jnp.asarray(x, dtype=x.dtype)]


RULES: dict[str, Rule] = {
    "jit": _Jit(),
    "remat2": _Checkpoint(),
    "shard_map": _ShardMap(),
    "closed_call": _Call(),
    "eval_jaxpr": _Call(),
    "scan": Scan(),
    "while": While(),
    "cond": _Cond(),
    "custom_jvp_call": CustomJvp(),
    "custom_vjp_call": CustomVjp(),
    "custom_linear_solve": LinearSolve(),
    "custom_vmap_call": _CustomVmap(),
    "linear_call": _LinearCall(),
    "convert_element_type": _ConvertElementType(),
}
