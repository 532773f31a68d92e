"""Whether the result of an equation is kept, and which rule decided, in words."""

from typing import NamedTuple

from flax_amp._compat import Eqn
from flax_amp._rewriter.heuristics import is_matrix_product
from flax_amp._rewriter.plan import (
    ARITHMETIC,
    LEAVES_ONLY,
    MOVES,
    MULTIPLICATION,
    STATE_OF_LOOP,
    Mode,
    Need,
    Paint,
    Step,
    is_painted,
)

CROSSES = "crosses a border"
# In this order, if there are several reasons.
_READERS = {
    Need.PRODUCT: "a product reads it",
    Need.BEHIND: "read on the other side of a product",
    Need.SHARED: "a sum and something else read it",
    Need.BORDER: CROSSES,
    Need.CAST: "the program casts it",
}
GIVEN = "a product gives it"
LEADS_NOWHERE = "leads to no product"
IN_PASSING = "arithmetic alone reads it"
COMPARED = "a maximum and something else read it"
CHOICE = "a sort, an argmax or a top_k reads it"
MOVED = "moves a float32 value"


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
    reason = step.reason
    if value is not None and value.paint is Paint.LOW:
        if step.mode is Mode.LOW and is_matrix_product(eqn):
            return Kept(True, GIVEN)
        if reason.decision is None and need.is_kept:
            return Kept(True, next(_READERS[bit] for bit in _READERS if bit in need))
        if Need.COMPARED in need:
            return Kept(True, COMPARED)
        is_border = step.mode is Mode.RULE
        return Kept(True, CROSSES if is_border else str(reason))
    if value is not None and value.paint is Paint.LEAF and reason == MOVES:
        return Kept(True, str(LEAVES_ONLY))
    if step.mode is Mode.RULE and eqn.primitive.name in ("scan", "while"):
        return Kept(True, str(STATE_OF_LOOP))
    if reason not in (ARITHMETIC, MULTIPLICATION, MOVES):
        return Kept(True, str(reason))  # a rule of what is never rounded
    if Need.CHOICE in need:
        return Kept(True, CHOICE)
    if Need.LATER not in need:
        return Kept(True, LEADS_NOWHERE)
    return Kept(True, MOVED) if need.is_kept else Kept(False, IN_PASSING)
