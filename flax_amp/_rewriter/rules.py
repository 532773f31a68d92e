"""Structured primitives: one class each, its paint and its emit side by side.

The paint flows through the border of a sub-jaxpr as if it were not there; nothing is
cast back to float32 at it. Each rule changes only what it has to (the sub-jaxpr, the
dtypes at its border) and keeps everything else: names, shardings, donation, policies,
unrolling, custom derivatives.

A structured primitive without a rule here runs untouched in its original dtypes.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._rewriter.captures import with_captured
from flax_amp._rewriter.custom_derivatives import (
    CustomJvp,
    CustomVjp,
    Inner,
    split,
    with_own_captures,
)
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.heuristics import is_indexed
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    CARRIED,
    FULL,
    LEAF,
    Context,
    Mode,
    Paint,
    Plan,
    Rule,
    Site,
    Step,
    Use,
    Uses,
    Value,
    Values,
    has_paint,
    is_painted,
    join,
    like,
    out_avals,
)


def _retrace(emitter: Emitter, plan: Plan, operands: Sequence[Any]) -> Any:
    """Returns the rewritten closed jaxpr of a plan for operands of given types."""
    key = (plan, emitter.recompute, tuple(jax.typeof(x) for x in operands))
    if key not in emitter.bodies:
        emitter.bodies[key] = jax.make_jaxpr(lambda *xs: emitter.emit(plan, xs))(
            *operands
        )
    return emitter.bodies[key]


class _Jit(Inner):
    """A jit stays a jit: same name, shardings, layouts, donation."""

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> list[Any]:
        body = _retrace(emitter, step.detail, operands)
        return _compat.bind(eqn, operands, {**eqn.params, self.param: body})


class _Checkpoint(Inner):
    """A checkpoint keeps its policy and `prevent_cse`."""

    site = Site.CLOSED

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> list[Any]:
        closed = _retrace(emitter, step.detail, operands)
        body, consts = _compat.hoist_consts(closed)
        params = {**eqn.params, self.param: body}
        return _compat.bind(eqn, [*consts, *operands], params)


class _Call(Inner):
    """A plain call is evaluated in place."""

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> list[Any]:
        return emitter.emit(step.detail, operands)


class _ShardMap(Inner):
    """A shard_map keeps its mesh, specs, manual axes and checks."""

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        params = eqn.params
        return jax.shard_map(
            lambda *xs: tuple(emitter.emit(step.detail, xs)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(params["newly_manual_axes"]),
        )(*operands)


# --- loops and branches --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _LoopPlan:
    body: Plan
    carry: Values
    condition: Plan | None = None


def _enter_carry(value: Value | None, is_stack: bool) -> Value | None:
    """Returns the first guess for the value of a carry.

    A carry that starts as a constant is an accumulator or a recurrent state, and one
    that the same weights are applied to again and again is an iterate: small terms add
    up in both, and both stay in float32. The stream through a stack of layers goes as
    the layers send it on.
    """
    if value is None:
        return None
    if value.constant is not None or not is_stack:
        return FULL
    return LEAF if value.paint is Paint.FULL else value


def _enter_const(value: Value | None, jaxpr: Any, position: int) -> Value | None:
    """Returns the value of what each iteration reads.

    If an iteration reads slices of it, all iterations add to one cotangent. It is
    therefore treated like a weight: float32, cast at each use.
    """
    is_low = has_paint(value, Paint.LOW)
    return LEAF if is_low and is_indexed(jaxpr, position) else value


def _value_after_loop(value: Value | None, init: Value | None) -> Value | None:
    # What was the state of an outer loop before this one is so behind it, too.
    outer = init is not None and init.carried
    return _value_in_body(value) if outer else value


def _value_in_body(value: Value | None) -> Value | None:
    # Seen from the body, a float32 carry is no statistic of something, but data.
    return CARRIED if value is not None and value.paint is Paint.FULL else value


def _plan_loop(
    painter: Painter,
    jaxpr: Any,
    consts: Values,
    carry: Values,
    xs: Values,
    context: Context,
) -> tuple[Plan, Values]:
    """Plans a loop body with the carry values that one iteration gives back.

    A carry only ever moves from LEAF to LOW to FULL, so the search ends.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    _, states, inputs = split(body.invars, len(consts), len(carry))
    # Layers come with weights of their own: a matrix for each step.
    is_stack = any(
        x is not None and x.paint is Paint.LEAF and v.aval.ndim >= 2
        for x, v in zip(xs, inputs, strict=True)
    )
    carry = tuple(
        # What the body hands on untouched, such as weights, is what it was.
        (value and value.settled()) if out is state else _enter_carry(value, is_stack)
        for value, state, out in zip(carry, states, body.outvars, strict=False)
    )
    while True:
        ins = (*consts, *map(_value_in_body, carry), *xs)
        plan = painter.plan(jaxpr, ins, None, context)
        joined = map(join, zip(carry, plan.outs[: len(carry)], strict=True))
        again = tuple(v and v.settled() for v in joined)
        if again == carry:
            return plan, carry
        carry = again


def _strong(x: Any) -> Any:
    """Ends a weak type: the body's results must have the types of its inputs."""
    aval = jax.typeof(x)
    weak = getattr(aval, "weak_type", False)
    return jax.lax.convert_element_type(x, aval.dtype) if weak else x


def _site(init: Values) -> Site:
    """A state that starts as a constant is that of an RNN, not the stream of layers."""
    starts = any(value is not None and value.constant is not None for value in init)
    return Site.STEPS if starts else Site.LAYERS


class _Scan:
    """A scan casts its weights inside the body, at each use."""

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        consts, init, xs = split(ins, *_compat.scan_counts(eqn))
        consts = tuple(
            _enter_const(value, eqn.params["jaxpr"], i)
            for i, value in enumerate(consts)
        )
        plan, carry = _plan_loop(
            painter, eqn.params["jaxpr"], consts, init, xs, context.of(_site(init))
        )
        ys = tuple(v and v.settled() for v in plan.outs[len(carry) :])
        return Step(
            Mode.RULE,
            (*map(_value_after_loop, carry, init), *ys),
            "inside scan",
            uses=(Use.LOW,) * len(ins),
            detail=_LoopPlan(plan, carry),
        )

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> list[Any]:
        counts = _compat.scan_counts(eqn)
        consts, init, xs = split(operands, *counts)
        _, init_values, _ = split(values, *counts)
        consts = tuple(emitter.land(consts, step.detail.body.ins[: len(consts)]))
        body_plan, carry = step.detail.body, step.detail.carry

        def body(carry_in: Any, x: Any) -> Any:
            outs = emitter.emit(body_plan, (*consts, *carry_in, *x))
            outs = emitter.land(outs, step.outs, body_plan.outs)
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        carry_out, ys = jax.lax.scan(
            body,
            tuple(emitter.land(init, carry, init_values)),
            tuple(xs),
            **_compat.scan_options(eqn),
        )
        return [*carry_out, *ys]


class _While:
    """A while loop; its condition sees the carry in the body's dtypes."""

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        of_cond, of_body, init = split(ins, *self._counts(eqn))
        context = context.of(Site.CLOSED)  # there is no backward pass
        body, carry = _plan_loop(
            painter, eqn.params["body_jaxpr"], of_body, init, (), context
        )
        condition = painter.plan(
            eqn.params["cond_jaxpr"], (*of_cond, *carry), None, context
        )
        return Step(
            Mode.RULE,
            tuple(map(_value_after_loop, carry, init)),
            "inside while",
            uses=(Use.LOW,) * len(ins),
            detail=_LoopPlan(body, carry, condition),
        )

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        loop = step.detail
        of_cond, of_body, init = split(operands, *self._counts(eqn))
        _, _, init_values = split(values, *self._counts(eqn))

        def land(carry: Any, origins: Values) -> list[Any]:
            return [_strong(x) for x in emitter.land(carry, loop.carry, origins)]

        def body(*xs: Any) -> list[Any]:
            return land(emitter.emit(loop.body, xs), loop.body.outs)

        # Bound, not called: under vmap the condition is one per example, which
        # jax.lax.while_loop does not take.
        start = land(init, init_values)
        params = {
            **eqn.params,
            "cond_jaxpr": _retrace(emitter, loop.condition, (*of_cond, *start)),
            "body_jaxpr": jax.make_jaxpr(body)(*of_body, *start),
        }
        return _compat.bind(eqn, [*of_cond, *of_body, *start], params)

    def _counts(self, eqn: Any) -> tuple[int, int]:
        return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


class _Cond:
    """Branches agree on the dtype of each result."""

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        plans = [
            painter.plan(branch, ins[1:], uses, context)
            for branch in eqn.params["branches"]
        ]
        outs = tuple(map(join, zip(*(plan.outs for plan in plans), strict=True)))
        reads = zip(*(plan.uses for plan in plans), strict=True)
        together = [functools.reduce(operator.or_, read) for read in reads]
        return Step(
            Mode.RULE, outs, "inside cond", uses=(Use.NONE, *together), detail=plans
        )

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        def branch(plan: Plan, *xs: Any) -> Any:
            return tuple(emitter.land(emitter.emit(plan, xs), step.outs, plan.outs))

        index, *xs = operands
        branches = [functools.partial(branch, plan) for plan in step.detail]
        platforms = eqn.params.get("branches_platforms")
        if not platforms:
            return jax.lax.switch(index, branches, *xs)
        # The backend chooses when it compiles; it must not see the other branches.
        named = {
            name: chosen
            for names, chosen in zip(platforms, branches, strict=True)
            for name in names or ("default",)
        }
        return jax.lax.platform_dependent(*xs, **named)


# --- solvers and batching rules ------------------------------------------------------


class _LinearSolve:
    """The functions of a linear solve are rewritten; its vectors stay float32.

    A solver applies the same map again and again: its state is that of a loop. Within
    the map and the solver, products run low like everywhere else.
    """

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
        *consts, vectors = split(ins, *lengths)
        state = tuple(map(_value_in_body, self._state(eqn, vectors)))
        inner = context.of(Site.CLOSED)  # its own derivative decides what is stored
        plans = tuple(
            jaxpr and painter.plan(jaxpr, (*values, *state), None, inner)
            for jaxpr, values in zip(jaxprs, consts, strict=True)
        )
        return Step(
            Mode.RULE,
            like(out_avals(eqn), FULL),
            "inside custom_linear_solve",
            uses=(*(Use.LOW,) * sum(lengths), *(Use.FULL,) * len(vectors)),
            detail=plans,
        )

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        jaxprs = eqn.params["jaxprs"]
        *consts, vectors = split(operands, *eqn.params["const_lengths"])
        state = emitter.land(vectors, self._state(eqn, vectors))

        def function(plan: Plan, *xs: Any) -> list[Any]:
            outs = like([v.aval for v in plan.jaxpr.outvars], FULL)
            return [_strong(x) for x in emitter.land(emitter.emit(plan, xs), outs)]

        rewritten = [
            plan and jax.make_jaxpr(functools.partial(function, plan))(*arrays, *state)
            for plan, arrays in zip(step.detail, consts, strict=True)
        ]
        params = {**eqn.params, "jaxprs": type(jaxprs)(*rewritten)}
        flat = [x for arrays in consts for x in arrays]
        return _compat.bind(eqn, [*flat, *state], params)

    def _state(self, eqn: Any, vectors: Sequence[Any]) -> Values:
        """Returns the values of the vectors, which are the last operands."""
        places = eqn.invars[len(eqn.invars) - len(vectors) :]
        return like([v.aval for v in places], FULL)


class _CustomVmap(Inner):
    """The function is rewritten, and so is the user's batching rule when it is used."""

    site = Site.CLOSED

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        step = super().paint(painter, eqn, ins, uses, context)
        return dataclasses.replace(step, detail=(step.detail, context.of(self.site)))

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        plan, context = step.detail
        emitter = with_own_captures(emitter, eqn)

        @jax.custom_batching.custom_vmap
        def rebuilt(*xs: Any) -> list[Any]:
            return emitter.emit(plan, xs)

        @rebuilt.def_vmap
        def batched(axis_size: int, in_batched: Any, *xs: Any) -> Any:
            out_batched: list[bool] = []

            def rule(*xs: Any) -> list[Any]:
                outs, out_batched[:] = _compat.call_vmap_rule(
                    eqn, axis_size, in_batched, xs
                )
                return outs

            structs = [
                _compat.struct_of(jax.typeof(x), v.aval.dtype)
                for x, v in zip(xs, eqn.invars, strict=True)
            ]
            with _compat.own_lines():
                made = jax.make_jaxpr(rule)(*structs)
            closed = with_captured(made, emitter.captured)
            rule_plan = emitter.painter.plan(closed, plan.ins, None, context)
            outs = emitter.land(emitter.emit(rule_plan, xs), plan.outs)
            return outs, out_batched

        return rebuilt(*operands)


# --- casts ---------------------------------------------------------------------------


class _ConvertElementType:
    """The user's own casts are commands; only float32 to float32 is mere movement."""

    def paint(
        self, painter: Painter, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step:
        operand = eqn.invars[0].aval
        if is_painted(operand) and is_painted(eqn.outvars[0].aval):
            return Step(Mode.RULE, ins, "weak type only", uses=uses)
        if operand.dtype == jnp.bool_:  # a mask: exact in any dtype
            return Step(Mode.FULL, like(out_avals(eqn), LEAF), "mask")
        return Step(Mode.FULL, like(out_avals(eqn), FULL), "explicit cast")

    def emit(
        self, emitter: Emitter, eqn: Any, step: Step, operands: Any, values: Values
    ) -> Sequence[Any]:
        (x,) = operands
        # Not bound: there is nothing to convert, and the dtype parameter would undo
        # the paint. A weak type ends here, as it does in the original.
        return [jnp.asarray(x, dtype=x.dtype)]


RULES: dict[str, Rule] = {
    "jit": _Jit("jaxpr"),
    "remat2": _Checkpoint("jaxpr"),
    "shard_map": _ShardMap("jaxpr"),
    "closed_call": _Call("call_jaxpr"),
    "core_call": _Call("call_jaxpr"),
    "scan": _Scan(),
    "while": _While(),
    "cond": _Cond(),
    "custom_jvp_call": CustomJvp("call_jaxpr"),
    "custom_vjp_call": CustomVjp("call_jaxpr"),
    "custom_linear_solve": _LinearSolve(),
    "custom_vmap_call": _CustomVmap("call"),
    "convert_element_type": _ConvertElementType(),
}
