"""The backward sweep: how is each value read?

The paint of a value depends on its readers: a follow equation whose result is read in
full precision only runs in float32, too. The sweep goes through the equations that the
forward pass has painted (`paint.py`), from the last one to the first.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import Literal

from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._rewriter.plan import (
    Mode,
    Paint,
    Step,
    Use,
    Uses,
    Value,
    Values,
    has_paint,
)

# Primitives that take a statistic of their operand only where their result is summed.
SQUARES = ("square", "integer_pow")


class Forward(NamedTuple):
    """What the forward pass over one jaxpr found, equation by equation."""

    steps: list[Step]
    operands: list[Values]
    values: dict[Var, Value | None]

    def holds_for(self, i: int, ins: Values, uses: Uses) -> bool:
        """Whether painting an equation again would give the same step.

        This pass painted for low readers.
        """
        return self.operands[i] == ins and all(use is Use.LOW for use in uses)


def union(uses: Iterable[Use]) -> Use:
    """Returns how several readers read a value together."""
    return functools.reduce(operator.or_, uses, Use.NONE)


def are_low(uses: Iterable[Use]) -> bool:
    """Whether values are read in the compute dtype only, or not at all."""
    return union(uses) in (Use.NONE, Use.LOW)


def find_uses(
    jaxpr: Jaxpr,
    forward: Forward,
    out_uses: Uses,
    paint: Callable[[Eqn, Values, Uses], Step],
) -> dict[Var, Use]:
    """Returns how each variable is read.

    An equation that follows its operands reads them as its result is read:

        s = sub x m          x and m are read in float32, because s is
        e = exp s            s is read in float32

    Args:
      jaxpr: the original jaxpr.
      forward: how it was painted for readers that are all low ones.
      out_uses: how its results are read.
      paint: paints an equation for other readers.
    """
    uses: dict[Var, Use] = {}

    def use_of(atom: Atom) -> Use:
        return Use.NONE if isinstance(atom, Literal) else uses.get(atom, Use.NONE)

    def read(atoms: Sequence[Atom], atom_uses: Iterable[Use]) -> None:
        for atom, use in zip(atoms, atom_uses, strict=True):
            if not isinstance(atom, Literal):
                uses[atom] = use_of(atom) | use

    def without_norm(atom: Atom, use: Use) -> Use:
        # `x - mean(x)` reads the mean in float32, which asks for no more digits of `x`.
        # A `log(mean(x))` beside a norm of `x` is taken for a part of it.
        is_applied = Use.MEASURE in use and Use.APPLY in use_of(atom)
        return Use.MEASURE if is_applied else use

    read(jaxpr.outvars, out_uses)
    for eqn, step, ins in zip(
        reversed(jaxpr.eqns),
        reversed(forward.steps),
        reversed(forward.operands),
        strict=True,
    ):
        results = tuple(map(use_of, eqn.outvars))
        if step.mode is Mode.RULE:
            if not are_low(results):
                # The first forward pass painted the inside for low readers. For
                # others it reads its operands otherwise.
                step = paint(eqn, ins, results)
            read(eqn.invars, step.uses)
        else:
            reads: Iterable[Use] = _operand_uses(eqn, step, ins, results)
            if step.use is Use.MEASURE:
                reads = map(without_norm, eqn.invars, reads)
            read(eqn.invars, reads)
    return uses


def _operand_uses(eqn: Eqn, step: Step, ins: Values, results: Uses) -> list[Use]:
    """Returns how an equation reads each operand, from how its results are read.

    Arithmetic reads operands as its float32 results are read, so that the numerator of
    a softmax learns who reads the quotient. The indices of a `top_k` are no such
    result. A sum reads its operands in float32 if its result is read so, as in
    `log(sum(p * target))`.
    """
    pairs = zip(results, step.outs, strict=True)
    asked = union(result for result, out in pairs if out is not None)
    use = asked if step.use is None else step.use
    if step.use is Use.MEASURE:
        # The squares of a norm are summed. Others, as in a polynomial, are no
        # statistic.
        is_summed = Use.MEASURE in asked or eqn.primitive.name not in SQUARES
        use = Use.MEASURE | (asked & Use.FULL) if is_summed else Use.FULL
    of_full = asked if step.use is Use.APPLY else use
    return [of_full if has_paint(v, Paint.FULL) else use for v in ins]


def through_loop(uses: Iterable[Use]) -> Uses:
    """Returns which uses pass the border of a loop, in either direction.

    A loop stacks what passes its border, so a demand for float32 ends there: each
    reader counts as a low one, too. Beside `LOW`, `FULL` keeps two things in float32:
    the numerator of a softmax, and bounded functions such as a sigmoid. `UNKNOWN`
    passes, because a loop may hand on the rows of a table.
    """
    passing = Use.FULL | Use.UNKNOWN
    return tuple(Use.LOW | (use & passing) for use in uses)
