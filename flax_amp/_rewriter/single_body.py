"""What the rules of primitives with a single body have in common."""

import dataclasses
from typing import Any, ClassVar

import jax

from flax_amp._compat import Arrays, Eqn, Jaxpr
from flax_amp._jaxpr.traits import bodies
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    FULL,
    BodyKind,
    Context,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    Step,
    Values,
    at_border,
    has_paint,
)


class SingleBodyRule:
    """A primitive whose one sub-jaxpr takes its operands as they are.

    What crosses its border lies in memory. Without a border, the body is planned as if
    it stood in the place of the call: what only arithmetic reads inside is cast up
    outside, where all readers share the cast (most of `jax.nn` and `jnp.linalg` are
    jitted functions). A body with products casts for itself, because its operands are
    stored for its backward pass.
    """

    body_kind: ClassVar[BodyKind | None] = None  # None: that of the surroundings
    has_border: ClassVar[bool] = True

    def needs(
        self, painter: Painter, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs:
        crossing: Any = at_border if self.has_border else tuple
        (body,) = bodies(eqn)
        return crossing(painter.needs(body, crossing(needs), context))

    def paint(
        self, painter: Painter, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step:
        # A border casts nothing, so a body behind one reads its operands as they come.
        is_open = not self.has_border and not painter.has_product(eqn)
        if is_open:
            ins = cast_outside(ins, self.needs(painter, eqn, needs, context))
        inside = context.inside(self.body_kind or context.body_kind)
        (body,) = bodies(eqn)
        reason = Reason("inside {}", eqn.primitive.name)

        # The plan of the body depends on what is needed of its results, so a call whose
        # results are read both rounded and not has two.
        def step(needs: Needs) -> Step:
            plan = painter.plan(body, ins, needs, inside)
            return Step(Mode.RULE, plan.outs, reason, reads=ins, detail=plan)

        own = tuple(need & ~Need.UNROUNDED for need in needs)
        rounded = step(at_border(needs) if self.has_border else own)
        if not is_open or not any(need.is_read_unrounded for need in needs):
            return rounded
        again = step((Need.READ_IN_FLOAT32,) * len(needs))
        if again.outs == rounded.outs:  # such as the gather of labels' logits
            return rounded
        again = dataclasses.replace(again, reads_unrounded=True)
        return dataclasses.replace(rounded, unrounded=again)


def cast_outside(ins: Values, needs: Needs) -> Values:
    """Returns the values as which a body reads its operands, if others cast them up.

    All readers of a value, inside and outside, then share one cast.
    """
    return tuple(
        FULL
        if has_paint(v, Paint.LOW) and not need & (Need.READ_IN_HALF | Need.BORDER)
        else v
        for v, need in zip(ins, needs, strict=True)
    )


def rewrite_body(emitter: Emitter, plan: Plan, operands: Arrays) -> Jaxpr:
    """Returns the rewritten closed jaxpr of a plan for operands of given types."""
    trace = jax.make_jaxpr(lambda *xs: emitter.emit(plan, xs))
    types = map(jax.typeof, operands)
    return emitter.cached("body", plan, lambda: trace(*operands), *types)
