"""Whether the result of an equation is kept, and which rule decided, in words."""

from typing import NamedTuple

from flax_amp._compat import Eqn
from flax_amp._jaxpr.traits import is_matrix_product
from flax_amp._rewriter.plan import (
    Mode,
    Need,
    Paint,
    Reason,
    ReasonKind,
    Step,
    has_paint,
    is_painted,
)

CROSSES = "crosses a border"
# In this order, if there are several reasons.
_READERS = {
    Need.PRODUCT: "a product reads it",
    Need.BEHIND: "read on the other side of a product",
    Need.SHARED: "a sum or a sigmoid shares it",
    Need.BORDER: CROSSES,
    Need.CAST: "the program casts it",
}
GIVEN = "a product gives it"
LEADS_NOWHERE = "leads to no product"
IN_PASSING = "arithmetic alone reads it"
COMPARED = "a maximum and something else read it"
CHOICE = "a sort, an argmax or a top_k reads it"
MOVED = "moves a float32 value"

# The rules that leave it to the readers of a result whether it is kept.
_PASSES_THROUGH = (ReasonKind.ARITHMETIC, ReasonKind.MULTIPLICATION, ReasonKind.MOVES)


class Kept(NamedTuple):
    """What becomes of a result: whether it is kept, and the rule that decided."""

    is_kept: bool
    rule: str


def kept(eqn: Eqn, step: Step) -> Kept | None:
    """Says what becomes of the first float32 result; `None` if there is none."""
    painted = [i for i, v in enumerate(eqn.outvars) if is_painted(v.aval)]
    if not painted:
        return None
    value = step.outs[painted[0]]
    need = step.needs[painted[0]] if step.needs else Need.NONE
    if has_paint(value, Paint.LOW):
        return Kept(True, _rule_of_half(eqn, step, need))
    if has_paint(value, Paint.LEAF) and step.reason.kind is ReasonKind.MOVES:
        return Kept(True, str(ReasonKind.LEAVES_ONLY))
    if step.mode is Mode.RULE and eqn.primitive.name in ("scan", "while"):
        return Kept(True, str(ReasonKind.STATE_OF_LOOP))
    return _kept_in_float32(step.reason, need)


def _rule_of_half(eqn: Eqn, step: Step, need: Need) -> str:
    if step.mode is Mode.LOW and is_matrix_product(eqn):
        return GIVEN
    if step.reason.decision is None and need.is_kept:
        return next(rule for bit, rule in _READERS.items() if bit in need)
    if Need.COMPARED in need:
        return COMPARED
    return CROSSES if step.mode is Mode.RULE else str(step.reason)


def _kept_in_float32(reason: Reason, need: Need) -> Kept:
    if reason.inside or reason.kind not in _PASSES_THROUGH:
        return Kept(True, str(reason))  # a rule of what is never rounded
    if Need.RANKED in need:
        return Kept(True, CHOICE)
    if Need.LATER not in need:
        return Kept(True, LEADS_NOWHERE)
    return Kept(True, MOVED) if need.is_kept else Kept(False, IN_PASSING)
