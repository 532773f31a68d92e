"""Finds the layers of unrolled code: runs of equal pieces, one behind the other.

A run is a tandem repeat in the sequence of equations: from its start on, each equation
equals the one a period later (`equality.py`), and the layers are connected alike. With
the numbers of equal equations beside them,

    a = dot x w0    1        c = dot b w1    1        e = dot d w2    1
    b = tanh a      2        d = tanh c      2        f = tanh e      2

is a run of period 2. Its layers could as well begin at the `tanh`. The offset is chosen
such that few values pass from layer to layer, and if possible such that all layers have
the same scopes below a prefix of their own (`Model/layers_0`, `Model/layers_1`).
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Var
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.outline.equality import EquationIds, plans_in
from flax_amp._rewriter.outline.scopes import LayerScopes, Scopes, layer_scopes
from flax_amp._rewriter.plan import Plan, Step, moves_of_inputs

_MIN_SAVED = 48  # equations that need not be rewritten; calls do not pay for fewer
# A few layers save little time, and XLA fuses otherwise where calls were. ResNet-50 has
# runs of 2 to 5 blocks: its estimated time on a TPU v5e is 3 % longer if all are calls,
# 0.2 % with the run of 5 alone. Of six layers, five are often equal: the first reads an
# embedding in float32.
_MIN_COPIES = 5
_MAX_PERIODS = 16  # that are tried
_MAX_OFFSETS = 8  # that are tried in each period

# Variables by themselves, literals by the equation and operand where they stand.
Key = Var | tuple[int, int]
Substitution = dict[Key, Atom]


class Run(NamedTuple):
    """Equal layers, one behind the other.

    Attributes:
      start: the index of the first equation of the first layer.
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


class EqualLayers(NamedTuple):
    """A run, and how its layers differ.

    Attributes:
      run: the run.
      substitutions: for each layer, what the variables of the first one are in it.
      scopes: the scopes of the layers.
    """

    run: Run
    substitutions: list[Substitution]
    scopes: LayerScopes


class _Stretch(NamedTuple):
    """Equations, each of which equals the one a period later, if there is one."""

    start: int
    stop: int
    period: int

    def run(self, offset: int = 0) -> Run:
        """Returns the run that begins at an offset, without a last layer cut short."""
        copies = (self.stop - self.start - offset) // self.period
        return Run(self.start + offset, self.period, copies)


class Program:
    """The equations of a plan, with what the search for layers asks again and again.

    Attributes:
      eqns: its equations; those that only move inputs come first.
      steps: their steps.
      values: the values of all variables.
      ids: numbers that are the same for equal equations.
      weights: how many equations each equation has inside, itself included.
      readers: the indices of the equations that read each variable. A result of the
        plan counts as read after the last equation.
    """

    def __init__(self, plan: Plan, has_user_rule: Callable[[Eqn], bool]):
        self.values = plan.values()
        first = moves_of_inputs(plan, self.values)
        order = [*first, *(i for i in range(len(plan.steps)) if i not in first)]
        self.eqns = [plan.jaxpr.eqns[i] for i in order]
        self.steps = [plan.steps[i] for i in order]
        pairs = list(zip(self.eqns, self.steps, strict=True))
        self.ids = self._ids(pairs, EquationIds(has_user_rule))
        self.weights = [_weight(eqn, step) for eqn, step in pairs]
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                self.readers[v].append(i)
        for v in variables(plan.jaxpr.outvars):
            self.readers[v].append(len(self.eqns))

    def _ids(
        self, pairs: Sequence[tuple[Eqn, Step]], equation_ids: EquationIds
    ) -> list[int]:
        """Returns a number for each equation, the same for equal ones."""
        may_repeat = _may_repeat([_kind(eqn) for eqn, _ in pairs])
        return [
            equation_ids.id_of(eqn, step, self.values)
            if i in may_repeat
            else -i - 1  # it is in no run: it may have a number of its own
            for i, (eqn, step) in enumerate(pairs)
        ]

    def scopes(self, start: int, run: Run) -> list[Scopes]:
        """Returns the scopes of a layer's equations, or those inside their bodies."""
        return [
            scopes
            for i in range(start, start + run.period)
            for scopes in _scopes(self.eqns[i], self.steps[i])
        ]

    def equations_saved(self, run: Run) -> int:
        """Returns how many equations need not be rewritten if the layers are calls."""
        layer = self.weights[run.start : run.start + run.period]
        return sum(layer) * (run.copies - 1)

    def is_worth_it(self, run: Run) -> bool:
        """Whether calls in place of the layers pay."""
        return run.copies >= _MIN_COPIES and self.equations_saved(run) >= _MIN_SAVED


def _kind(eqn: Eqn) -> Any:
    """Returns a part of the key of an equation that is quick to compare."""
    atoms = (*eqn.invars, *eqn.outvars)
    return eqn.primitive, *(getattr(atom.aval, "shape", ()) for atom in atoms)


def _may_repeat(kinds: Sequence[Any]) -> set[int]:
    """Returns the indices of all equations that may be in a run, judged by kinds alone.

    A kind that occurs less often than a run has copies is in no run. What stands
    between two equations of rare kinds is a piece of its own, and is searched again.
    """
    found: set[int] = set()
    pieces = [range(len(kinds))]
    while pieces:
        piece = pieces.pop()
        number_of = Counter(kinds[i] for i in piece)
        rare = [i for i in piece if number_of[kinds[i]] < _MIN_COPIES]
        if not rare:
            found.update(piece)
            continue
        ends = [piece.start - 1, *rare, piece.stop]
        pieces += [range(i + 1, j) for i, j in itertools.pairwise(ends) if j > i + 1]
    return found


def _weight(eqn: Eqn, step: Step) -> int:
    # A jitted block is rewritten once anyway.
    inside = () if eqn.primitive.name == "jit" else plans_in(step.detail)
    return 1 + sum(_weight(*pair) for plan in inside for pair in plan.pairs())


def find(program: Program) -> list[EqualLayers]:
    """Returns equal layers that are worth it and do not overlap, in order."""
    return list(_layers_between(program, 0, len(program.eqns)))


def _layers_between(program: Program, start: int, stop: int) -> Iterator[EqualLayers]:
    """Yields the best equal layers between two indices, and those on both sides."""
    for stretch in _stretches(program, start, stop):
        layers = _best_layers(program, stretch)
        if layers is not None:
            yield from _layers_between(program, start, layers.run.start)
            yield layers
            yield from _layers_between(program, layers.run.stop, stop)
            return


def _stretches(program: Program, start: int, stop: int) -> list[_Stretch]:
    """Returns the stretches that are worth it, the best first.

    In `1 2 3 1 2 3 1 2 3 4`, the equations 1, 2 and 3 come again after three others. So
    3 may be a period, and with it, the first nine equations are a stretch.
    """
    ids = program.ids
    # How far it is to the equation that was equal last, and for how many equations. A
    # scan counts with all that is inside of it.
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i in range(start, stop):
        if ids[i] in last:
            gaps[i - last[ids[i]]] += program.weights[i]
        last[ids[i]] = i
    found: list[_Stretch] = []
    for period, _ in gaps.most_common(_MAX_PERIODS):
        begin = start
        for i in range(start, stop - period + 1):
            if i + period < stop and ids[i] == ids[i + period]:
                continue
            # The period before the first difference still belongs to the stretch.
            if i + period - begin >= period * _MIN_COPIES:
                found.append(_Stretch(begin, i + period, period))
            begin = i + 1
    worth = [stretch for stretch in found if program.is_worth_it(stretch.run())]
    return sorted(worth, key=lambda stretch: -program.equations_saved(stretch.run()))


def _best_layers(program: Program, stretch: _Stretch) -> EqualLayers | None:
    """Returns the layers in a stretch that pass on the fewest values.

    Those that begin where modules do, so that their scopes are equal, come first.
    """
    start, _, period = stretch
    # In the second layer: what the first one reads may come from before the stretch.
    passing = _passing(program, start, start + 2 * period)[period:]
    offsets = sorted(range(period), key=lambda offset: passing[offset])
    found = None
    for offset in offsets[:_MAX_OFFSETS]:
        run = stretch.run(offset)
        layers = _equal_layers(program, run) if program.is_worth_it(run) else None
        if layers is not None and not layers.scopes.renamed:
            return layers
        found = found or layers
    return found


def _equal_layers(program: Program, run: Run) -> EqualLayers | None:
    """Returns how the layers of a run differ, `None` if they are not equal.

    They are if they are connected alike, and their scopes differ in numbers only.
    """
    scopes = layer_scopes([program.scopes(start, run) for start in run.starts])
    if scopes is None:
        return None
    found = [_substitution(program, run, start) for start in run.starts]
    if None in found:
        return None
    return EqualLayers(run, [one for one in found if one is not None], scopes)


def _passing(program: Program, start: int, stop: int) -> list[int]:
    """Returns, for each index, how many values computed before it are read later.

    Only values that are computed from `start` on count. In a transformer this is one in
    front of each block, the residual stream, and more within the blocks.
    """
    # What each equation adds and takes away; the sums of that are what is alive.
    changes = [0] * (stop - start + 1)
    for i in range(start, stop):
        for v in program.eqns[i].outvars:
            if readers := program.readers.get(v):
                changes[i + 1 - start] += 1
                if max(readers) < stop:
                    changes[max(readers) + 1 - start] -= 1
    return list(itertools.accumulate(changes))


def _substitution(program: Program, run: Run, start: int) -> Substitution | None:
    """Maps what the first layer reads and makes to its counterpart in another layer.

    The other layer begins at `start`. The result is `None` if the two are connected
    differently. With the layers of the example above,

        a = dot x w0;  b = tanh a      c = dot b w1;  d = tanh c

    it is `{x: b, w0: w1, a: c, b: d}`. If the second `tanh` read another value than the
    result of its own `dot`, or if the first layer read `w0` twice and the second one
    two weights, there would be none.
    """
    found: Substitution = {}
    made_here: set[Var] = set()
    made_in_first: set[Var] = set()
    for i in range(run.period):
        first, other = program.eqns[run.start + i], program.eqns[start + i]
        pairs = zip(first.invars, other.invars, strict=True)
        for k, (a, b) in enumerate(pairs):
            if isinstance(a, Literal):  # so is `b`: the equations are equal
                found[i, k] = b
            elif (a in made_in_first) != (b in made_here) or found.setdefault(
                a, b
            ) is not b:
                return None
        found |= zip(first.outvars, other.outvars, strict=True)
        made_in_first.update(first.outvars)
        made_here.update(other.outvars)
    return found


def _scopes(eqn: Eqn, step: Step) -> list[Scopes]:
    own = _compat.scopes(eqn)
    inside = [
        scopes
        for plan in plans_in(step.detail)
        for pair in plan.pairs()
        for scopes in _scopes(*pair)
    ]
    return [own + scopes for scopes in inside] or [own]
