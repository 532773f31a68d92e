"""Finds the layers of unrolled code: runs of equal pieces, one behind the other.

A run is a tandem repeat in the sequence of equations: from its start on, each equation
equals the one a period later (`flax_amp.equality`), and the pieces are wired alike.
Where in the period a layer begins is chosen such that the fewest values pass from layer
to layer, and such that all layers have the same scopes inside of a prefix of their own.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._rewriter.heuristics import moves_of_inputs
from flax_amp._rewriter.outline.equality import Tokens, plans_in
from flax_amp._rewriter.plan import Plan, Step, variables

_WORTH = 48  # equations that need not be rewritten: from there on calls pay
# Few copies save little time, and the calls are not free: XLA inlines them, but fuses
# otherwise (ResNet-50 with its runs of 2 to 5 on a TPU v5e: 3 % more estimated time).
_COPIES = 6
_PERIODS = 16  # tried at most
_STARTS = 8  # tried at most in each period

Scopes = tuple[Any, ...]


class Run(NamedTuple):
    """Layers that follow one another.

    Attributes:
      start: the place of the first equation of the first layer.
      period: the number of equations of a layer.
      copies: the number of layers.
    """

    start: int
    period: int
    copies: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.copies

    @property
    def starts(self) -> range:
        return range(self.start, self.stop, self.period)


class _Stretch(NamedTuple):
    """Equations of which each equals the one a period later, if there is one."""

    start: int
    stop: int
    period: int

    def run(self, offset: int = 0) -> Run:
        """Returns the run that begins at an offset, without a last layer cut short."""
        copies = (self.stop - self.start - offset) // self.period
        return Run(self.start + offset, self.period, copies)


class Code:
    """The equations of a plan, and what is asked of them again and again.

    Attributes:
      eqns: its equations, those that only move inputs about before all others.
      steps: of the equations.
      values: of all variables.
      tokens: equal for equal equations.
      weights: of each equation, how many it has inside.
      readers: the places where each variable is read; results count as the last place.
    """

    def __init__(self, plan: Plan):
        self.values = plan.values()
        first = moves_of_inputs(plan, self.values)
        order = [*first, *(i for i in range(len(plan.steps)) if i not in first)]
        self.eqns = [plan.jaxpr.eqns[i] for i in order]
        self.steps = [plan.steps[i] for i in order]
        tokens = Tokens()
        pairs = list(zip(self.eqns, self.steps, strict=True))
        self.tokens = [tokens.of(eqn, step, self.values) for eqn, step in pairs]
        self.weights = [_weight(eqn, step) for eqn, step in pairs]
        self.readers: dict[Any, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                self.readers[v].append(i)
        for v in variables(plan.jaxpr.outvars):
            self.readers[v].append(len(self.eqns))

    def scopes(self, start: int, run: Run) -> list[Scopes]:
        """Returns the scopes in a layer; of equations with a body, those inside."""
        return [
            scopes
            for i in range(start, start + run.period)
            for scopes in _scopes(self.eqns[i], self.steps[i])
        ]

    def saved(self, run: Run) -> int:
        """Returns how many equations need not be rewritten if layers are calls."""
        layer = self.weights[run.start : run.start + run.period]
        return sum(layer) * (run.copies - 1)

    def is_worth_it(self, run: Run) -> bool:
        """Whether calls in the place of the layers pay."""
        return run.copies >= _COPIES and self.saved(run) >= _WORTH


def _weight(eqn: Any, step: Step) -> int:
    # A jitted block is rewritten once as it is.
    inside = () if eqn.primitive.name == "jit" else plans_in(step.detail)
    return 1 + sum(
        _weight(*pair)
        for plan in inside
        for pair in zip(plan.jaxpr.eqns, plan.steps, strict=True)
    )


def find(code: Code) -> list[Run]:
    """Returns runs that are worth it and do not overlap, in order."""
    return list(_runs(code, 0, len(code.eqns)))


def _runs(code: Code, start: int, stop: int) -> Iterator[Run]:
    """Yields the best run between two places, and those before and behind it."""
    for stretch in _stretches(code, start, stop):
        run = _placed(code, stretch)
        if run is not None:
            yield from _runs(code, start, run.start)
            yield run
            yield from _runs(code, run.stop, stop)
            return


def _stretches(code: Code, start: int, stop: int) -> list[_Stretch]:
    """Returns the stretches that are worth it, the best first."""
    tokens = code.tokens
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i in range(start, stop):
        if tokens[i] in last:
            gaps[i - last[tokens[i]]] += code.weights[i]
        last[tokens[i]] = i
    found = []
    for period, _ in gaps.most_common(_PERIODS):
        begin = start
        for i in range(start, stop - period + 1):
            if i + period < stop and tokens[i] == tokens[i + period]:
                continue
            found.append(_Stretch(begin, i + period, period))
            begin = i + 1
    worth = [stretch for stretch in found if code.is_worth_it(stretch.run())]
    return sorted(worth, key=lambda stretch: -code.saved(stretch.run()))


def _placed(code: Code, stretch: _Stretch) -> Run | None:
    """Returns the run in a stretch of which the layers are best separated."""
    start, _, period = stretch
    passing = _passing(code, start, start + 2 * period)[period:]
    offsets = sorted(range(period), key=lambda offset: passing[offset])
    for offset in offsets[:_STARTS]:
        run = stretch.run(offset)
        if code.is_worth_it(run) and _is_sound(code, run):
            return run
    return None


def _passing(code: Code, start: int, stop: int) -> list[int]:
    """Returns how many of the values made between two places pass each of them."""
    changes = [0] * (stop - start + 1)
    for i in range(start, stop):
        for v in code.eqns[i].outvars:
            if readers := code.readers.get(v):
                changes[i + 1 - start] += 1
                if max(readers) < stop:
                    changes[max(readers) + 1 - start] -= 1
    return list(itertools.accumulate(changes))


def _is_sound(code: Code, run: Run) -> bool:
    """Whether all layers are wired alike and have the same scopes inside."""
    inside = []
    for start in run.starts:
        scopes = code.scopes(start, run)
        depth = len(common(scopes))
        inside.append([scope[depth:] for scope in scopes])
    if any(scopes != inside[0] for scopes in inside):
        return False
    return all(wiring(code, run, start) is not None for start in run.starts)


def wiring(code: Code, run: Run, start: int) -> dict[Any, Any] | None:
    """Returns what takes the place of each variable of the first layer in another.

    Integer literals that differ are in it by the place at which they stand.

    Returns:
      The variables by those of the first layer; `None` if the wiring is different.
    """
    found: dict[Any, Any] = {}
    own: set[Any] = set()  # made in this layer
    made: set[Any] = set()  # made in the first one
    for i in range(run.period):
        first, other = code.eqns[run.start + i], code.eqns[start + i]
        pairs = zip(first.invars, other.invars, strict=True)
        for k, (a, b) in enumerate(pairs):
            if isinstance(a, Literal) != isinstance(b, Literal):
                return None
            if isinstance(a, Literal):
                found[i, k] = b
            elif (a in made) != (b in own) or found.setdefault(a, b) is not b:
                return None
        found |= zip(first.outvars, other.outvars, strict=True)
        made.update(first.outvars)
        own.update(other.outvars)
    return found


def _scopes(eqn: Any, step: Step) -> list[Scopes]:
    own = _compat.scopes(eqn)
    inside = [
        scopes
        for plan in plans_in(step.detail)
        for pair in zip(plan.jaxpr.eqns, plan.steps, strict=True)
        for scopes in _scopes(*pair)
    ]
    return [own + scopes for scopes in inside] or [own]


def common(scopes: Sequence[Scopes]) -> Scopes:
    """Returns the longest common prefix."""
    return functools.reduce(_common_of_two, set(scopes))


def _common_of_two(scopes: Scopes, others: Scopes) -> Scopes:
    pairs = zip(scopes, others, strict=False)
    return tuple(
        a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    )
