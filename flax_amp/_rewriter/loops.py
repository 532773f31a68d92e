"""Loops: `scan`, `while`, and the linear solvers, which are loops of their own.

A loop stays a loop. Its carry has the same values before and after an iteration, which
is a fixed point. A carry that is a sum in progress or a recurrent state stays float32;
the stream through a stack of layers is kept in half precision (`_value_of_carry`).
"""

import dataclasses
import functools
import operator
from typing import Any

import jax

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, Eqn, Jaxpr
from flax_amp._jaxpr.walk import is_indexed
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    FULL,
    LEAF,
    LOW,
    STATE,
    BodyKind,
    Context,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    Step,
    Value,
    Values,
    at_border,
    has_paint,
    like,
    out_avals,
)
from flax_amp._rewriter.single_body import rewrite_body
from flax_amp._tree import split_list


@dataclasses.dataclass(frozen=True)
class _LoopPlan:
    """The plan of a loop.

    Attributes:
      body: the plan of its body.
      init: the values that the carry starts with.
      carry: its values before and after each iteration.
      condition: the plan of a `while`'s condition.
    """

    body: Plan
    init: Values
    carry: Values
    condition: Plan | None = None


def _value_of_carry(
    value: Value | None, need: Need, is_layer_stack: bool
) -> Value | None:
    """Returns the value of a carry that the body changes.

    A carry that starts as a constant is an accumulator or a recurrent state. A carry to
    which each step applies the same weights is an iterate. Small terms add up in both,
    and both stay in float32. The stream through a stack of layers is kept in half
    precision if a product reads it.
    """
    if value is None:
        return None
    is_state = value.constant is not None or not is_layer_stack
    return FULL if is_state or not need.is_kept else LOW


def _values_of_carry(
    body: Jaxpr, consts: Values, init: Values, xs: Values, needs: Needs
) -> Values:
    """Returns the values of a carry, as far as its readers decide.

    Args:
      body: the open jaxpr of the loop.
      consts: the values that each iteration reads.
      init: the values that the carry starts with.
      xs: the values of what the iterations go through.
      needs: what is needed of the carry.
    """
    _, states, inputs = split_list(body.invars, len(consts), len(init))
    # Each layer of a stack has a matrix of its own.
    is_layer_stack = any(
        has_paint(x, Paint.LEAF) and v.aval.ndim >= 2
        for x, v in zip(xs, inputs, strict=True)
    )
    return tuple(
        # What the body returns untouched, such as weights, is what it was.
        (value and value.after_loop())
        if out is state
        else _value_of_carry(value, need, is_layer_stack)
        for value, need, state, out in zip(
            init, needs, states, body.outvars[: len(init)], strict=True
        )
    )


def _value_of_const(value: Value | None, jaxpr: Jaxpr, position: int) -> Value | None:
    """Returns the value of an array that each iteration reads.

    If an iteration reads slices of it, all iterations add to one cotangent. The array
    is therefore treated like a weight: float32, and cast at each use.
    """
    is_low = has_paint(value, Paint.LOW)
    return LEAF if is_low and is_indexed(jaxpr, position) else value


def _stacked(value: Value | None, need: Need) -> Value | None:
    """Returns the value of what the iterations of a loop give, stacked."""
    is_half = value is not None and need.kept_for(Need.BORDER).is_kept
    return LOW if is_half else value and value.after_loop()


def _value_in_body(value: Value | None) -> Value | None:
    # In the body, a float32 carry is a state.
    return STATE if has_paint(value, Paint.FULL) else value


def _value_after_loop(value: Value | None, init: Value | None) -> Value | None:
    # A state of an outer loop is still one after the inner loop.
    is_outer_state = init is not None and init.is_state
    return _value_in_body(value) if is_outer_state else value


def _loop_needs(
    painter: Painter,
    jaxpr: Jaxpr,
    needs: Needs,
    count_consts: int,
    count_carry: int,
    context: Context,
) -> tuple[Needs, Needs]:
    """Returns what a loop needs of its operands, and what is needed of its carry.

    The next iteration is one more reader of the carry, so the search ends when the body
    needs nothing of it that was not known to be needed.
    """
    # Who reads the result of a loop does not read what it starts with.
    needs = tuple(need & ~Need.UNROUNDED for need in needs)
    carry, ys = at_border(needs[:count_carry]), needs[count_carry:]
    while True:
        # What crosses the border is rounded there, not inside.
        reads = painter.needs(jaxpr, tuple(map(_unkept, (*carry, *ys))), context)
        consts, again, xs = split_list(at_border(reads), count_consts, count_carry)
        new = tuple(map(operator.or_, carry, again))
        if new == carry:
            return (*consts, *carry, *xs), carry
        carry = new


def _unkept(need: Need) -> Need:
    """Returns the need inside of a loop, which rounds at its border."""
    return need & (Need.LATER | Need.READ_IN_FLOAT32 | Need.RANKED)


def _plan_loop(
    painter: Painter,
    jaxpr: Jaxpr,
    consts: Values,
    carry: Values,
    xs: Values,
    needs: Needs,
    context: Context,
) -> tuple[Plan, Values]:
    """Plans a loop body whose carry has the same values before and after an iteration.

    Returns:
      The plan, and the values of the carry.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    # Asked for again, with the needs from outside: the flow of the body is cached.
    sizes = len(consts), len(carry)
    _, of_carry = _loop_needs(painter, jaxpr, needs, *sizes, context)
    carry = _values_of_carry(body, consts, carry, xs, of_carry)
    out_needs = tuple(map(_unkept, (*of_carry, *needs[len(carry) :])))
    # A carry only ever goes from half to float32, so the search ends.
    while True:
        ins = (*consts, *map(_value_in_body, carry), *xs)
        plan = painter.plan(jaxpr, ins, out_needs, context)
        # What is a state in the body is one from iteration to iteration, too.
        count = len(carry)  # what is stacked follows the carry
        triples = zip(carry, plan.outs[:count], body.outvars[:count], strict=True)
        new = tuple(
            FULL if has_paint(value, Paint.LOW) and _stays_full(plan, out, v) else value
            for value, out, v in triples
        )
        if new == carry:
            return plan, carry
        carry = new


def _stays_full(plan: Plan, value: Value | None, result: Atom) -> bool:
    """Whether a result is a state, or float32 by a key of the user's policy."""
    if value is None or value.is_state:
        return value is not None
    for eqn, step in plan.pairs():
        if any(v is result for v in eqn.outvars):
            inside = step.detail
            if isinstance(inside, Plan):  # the equation that computes it is in a call
                index = eqn.outvars.index(result)
                return _stays_full(
                    inside, inside.outs[index], inside.jaxpr.outvars[index]
                )
            decision = step.reason.decision
            is_users = decision is not None and decision.is_chosen
            return is_users and step.mode.is_float32
    return False


def _strongly_typed(arrays: Arrays) -> list[Array]:
    # The results of a body must have the types of its inputs.
    return [_compat.with_weak_type(x, False) for x in arrays]


def _scan_kind(init: Values) -> BodyKind:
    """An RNN has a state that starts as a constant; a stack of layers has none."""
    starts = any(value is not None and value.constant is not None for value in init)
    return BodyKind.RECURRENT_SCAN if starts else BodyKind.LAYER_SCAN


class Scan:
    """A scan casts its weights inside the body, at each use."""

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        jaxpr, counts = eqn.params["jaxpr"], _compat.scan_counts(eqn)
        return _loop_needs(painter, jaxpr, needs, *counts, context)[0]

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        consts, init, xs = split_list(ins, *_compat.scan_counts(eqn))
        consts = tuple(
            _value_of_const(value, eqn.params["jaxpr"], i)
            for i, value in enumerate(consts)
        )
        context = context.inside(_scan_kind(init))
        plan, carry = _plan_loop(
            painter, eqn.params["jaxpr"], consts, init, xs, needs, context
        )
        ys = map(_stacked, plan.outs[len(carry) :], needs[len(carry) :])
        return Step(
            Mode.RULE,
            (*map(_value_after_loop, carry, init), *ys),
            Reason("inside scan"),
            detail=_LoopPlan(plan, init, carry),
        )

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        loop = step.detail
        consts, init, xs = split_list(operands, *_compat.scan_counts(eqn))
        consts = tuple(emitter.cast_to_plan(consts, loop.body.ins[: len(consts)]))
        start = tuple(emitter.cast_to_plan(init, loop.carry, loop.init))

        def body(carry: tuple[Array, ...], x: tuple[Array, ...]) -> Any:
            outs = emitter.emit(loop.body, (*consts, *carry, *x))
            outs = emitter.cast_to_plan(outs, step.outs, loop.body.outs)
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        options = _compat.scan_options(eqn)
        carry_out, ys = jax.lax.scan(body, start, tuple(xs), **options)
        return [*carry_out, *ys]


class While:
    """A while loop; its condition sees the carry in the body's dtypes."""

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        of_cond, of_body = self._counts(eqn)
        reads, carry = _loop_needs(
            painter, eqn.params["body_jaxpr"], needs, of_body, len(needs), context
        )
        # The condition leads to no product, so it says nothing of the carry.
        return (*(Need.READ_IN_FLOAT32,) * of_cond, *reads[:of_body], *carry)

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        of_cond, of_body, init = split_list(ins, *self._counts(eqn))
        context = context.inside(BodyKind.OPAQUE)  # it has no backward pass
        body, carry = _plan_loop(
            painter, eqn.params["body_jaxpr"], of_body, init, (), needs, context
        )
        condition = painter.plan(
            eqn.params["cond_jaxpr"], (*of_cond, *carry), (), context
        )
        return Step(
            Mode.RULE,
            tuple(map(_value_after_loop, carry, init)),
            Reason("inside while"),
            detail=_LoopPlan(body, init, carry, condition),
        )

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        loop = step.detail
        of_cond, of_body, init = split_list(operands, *self._counts(eqn))

        def as_carry(arrays: Arrays, origins: Values) -> list[Array]:
            cast = emitter.cast_to_plan(arrays, loop.carry, origins)
            return _strongly_typed(cast)

        def body(*xs: Array) -> list[Array]:
            return as_carry(emitter.emit(loop.body, xs), loop.body.outs)

        # The primitive is bound: under vmap there is a condition for each example,
        # which jax.lax.while_loop does not take.
        start = as_carry(init, loop.init)
        params = {
            **eqn.params,
            "cond_jaxpr": rewrite_body(emitter, loop.condition, (*of_cond, *start)),
            "body_jaxpr": jax.make_jaxpr(body)(*of_body, *start),
        }
        return _compat.bind(eqn, [*of_cond, *of_body, *start], params)

    def _counts(self, eqn: Eqn) -> tuple[int, int]:
        return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


class LinearSolve:
    """The functions of a linear solve are rewritten; its vectors stay float32.

    A solver applies the same map again and again, so its vectors are the state of a
    loop. Products in the map and in the solver run low like everywhere else.
    """

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
        reads: list[Need] = []
        for jaxpr, length in zip(jaxprs, lengths, strict=True):
            count = len(_compat.open_jaxpr(jaxpr)[0].outvars) if jaxpr else 0
            asked = (Need.READ_IN_FLOAT32,) * count
            of_all = painter.needs(jaxpr, asked, context) if jaxpr else ()
            reads += of_all[:length]
        vectors = len(eqn.invars) - len(reads)
        read = Need.READ_IN_FLOAT32 | Need.ROUNDED
        return (*at_border(reads), *(read,) * vectors)

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
        *consts, vectors = split_list(ins, *lengths)
        outs = like(out_avals(eqn), FULL)
        # The results are the vectors, in their types, and then those of `has_aux`.
        state = tuple(map(_value_in_body, outs[: len(vectors)]))
        # Its own derivative says what is stored.
        inner = context.inside(BodyKind.OPAQUE)
        # Two of the four are absent if the user gave no `transpose_solve`.
        plans = tuple(
            jaxpr and painter.plan(jaxpr, (*values, *state), (), inner)
            for jaxpr, values in zip(jaxprs, consts, strict=True)
        )
        return Step(Mode.RULE, outs, Reason("inside custom_linear_solve"), detail=plans)

    def emit(self, emitter: Emitter, eqn: Eqn, step: Step, operands: Arrays) -> Arrays:
        jaxprs = eqn.params["jaxprs"]
        *consts, vectors = split_list(operands, *eqn.params["const_lengths"])
        state = emitter.cast_to_plan(vectors, step.outs[: len(vectors)])

        def function(plan: Plan, *xs: Array) -> list[Array]:
            values = like([v.aval for v in plan.jaxpr.outvars], FULL)
            outs = emitter.cast_to_plan(emitter.emit(plan, xs), values)
            return _strongly_typed(outs)

        rewritten = [
            plan and jax.make_jaxpr(functools.partial(function, plan))(*arrays, *state)
            for plan, arrays in zip(step.detail, consts, strict=True)
        ]
        params = {**eqn.params, "jaxprs": type(jaxprs)(*rewritten)}
        flat = [x for arrays in consts for x in arrays]
        return _compat.bind(eqn, [*flat, *state], params)
