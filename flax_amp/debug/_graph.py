"""The graph of a rewritten program: what makes a value, and what reads it.

A value is a variable at a place: a function that is called twice has its variables
twice. The graph goes through calls, branches and loops. Where the plan of `amp` is
known, each step of the graph has the row and the plan of its equation. In

    h = dot x w                              a step, in half precision
    s, ys = scan[c' = add c h; y = sin c']   `s` is `c'` of the body; `c` is `c'`, too
    l = reduce_sum s                         a step; `sin` is none that it depends on

`behind(l)` yields `reduce_sum`, `add` and `dot`.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var, open_jaxpr
from flax_amp._jaxprs import variables
from flax_amp._rewriter.primitives import bodies
from flax_amp._training.dependence import CALLS
from flax_amp.debug._record import Visit

Place = tuple[Any, ...]  # the `id` of each equation around, and which body it is

# Calls of calls of calls may make millions of equations: what is left is as a whole.
_MOST_STEPS, _DEEPEST = 200_000, 60
_CALLS = CALLS | {"shard_map"}


class Value(NamedTuple):
    """A variable of one of the jaxprs of a program."""

    place: Place
    v: Var

    @property
    def is_float(self) -> bool:
        """Whether it has numbers that can be rounded."""
        return jnp.issubdtype(getattr(self.v.aval, "dtype", jnp.int32), jnp.inexact)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation without bodies, or one that runs as a whole."""

    eqn: Eqn
    place: Place
    visit: Visit | None  # with its plan, where `amp` has planned it

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    def values(self, atoms: Iterable[Atom]) -> list[Value]:
        """Returns operands or results that are no literals."""
        return [Value(self.place, v) for v in variables(atoms)]

    @property
    def operands(self) -> list[Value]:
        """What it reads, without literals."""
        return self.values(self.eqn.invars)

    @property
    def results(self) -> list[Value]:
        """What it gives."""
        return self.values(self.eqn.outvars)


Follow = Callable[[Step], Iterable[Value]]


class Graph:
    """The graph of a program, made of what the emitter has told."""

    def __init__(self, visits: Sequence[Visit]):
        self.steps: list[Step] = []  # in the order of the program
        self.maker: dict[Value, Step] = {}
        # What a value is under other names, such as in a body.
        self.is_also: dict[Value, list[Value]] = defaultdict(list)
        self._decides: dict[Value, list[Value]] = defaultdict(list)  # as an index does
        self._visits: dict[tuple[int, ...], list[Visit]] = defaultdict(list)
        for visit in visits:
            if visit.whole is None:
                self._visits[tuple(map(id, visit.around))].append(visit)
        self.inputs: list[Value] = []
        self.results: list[Value | None] = []  # `None` for a literal
        # What is known of constants.
        self.consts: dict[Value, Any] = {}
        if self._visits[()]:
            program = self._visits[()][0].why.plan.flow.program
            self.inputs = [Value((), v) for v in program.invars]
            self.results = [
                None if isinstance(v, Literal) else Value((), v)
                for v in program.outvars
            ]
            self._enter((), (), self._visits[()])

    # --- walks -----------------------------------------------------------------------

    def behind(self, values: Iterable[Value], follow: Follow) -> Iterator[Step]:
        """Yields what makes values, and what makes those operands that are followed."""
        seen: set[Value] = set()
        left = list(values)
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            left += self.is_also.get(value, ())
            step = self.maker.get(value)
            if step is not None:
                yield step
                left += follow(step)

    def sources(self, value: Value) -> list[Value]:
        """Returns what a value is: results of steps, inputs and constants."""
        found, seen, left = [], {value}, [value]
        while left:
            value = left.pop()
            also = self.is_also.get(value, ())
            if not also:
                found.append(value)
            new = [x for x in also if x not in seen]
            seen.update(new)
            left += new
        return found

    def ahead(self, values: Iterable[Value]) -> set[Value]:
        """Returns all that depends on some values, by number or by decision."""
        seen: set[Value] = set()
        left = list(values)
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                left += self._next[value]
        return seen

    def readers(self, value: Value) -> list[Step]:
        """Returns the steps that read a value under any of its names."""
        found, seen, left = [], {value}, [value]
        while left:
            value = left.pop()
            found += self._readers[value]
            new = [x for x in self._aliases[value] if x not in seen]
            seen.update(new)
            left += new
        return found

    @functools.cached_property
    def _aliases(self) -> dict[Value, list[Value]]:
        found: dict[Value, list[Value]] = defaultdict(list)
        for value, also in self.is_also.items():
            for source in also:
                found[source].append(value)
        return found

    @functools.cached_property
    def _readers(self) -> dict[Value, list[Step]]:
        found: dict[Value, list[Step]] = defaultdict(list)
        for step in self.steps:
            for value in step.operands:
                found[value].append(step)
        return found

    @functools.cached_property
    def _next(self) -> dict[Value, list[Value]]:
        found: dict[Value, list[Value]] = defaultdict(list)
        for some in (self._aliases, self._decides):
            for value, values in some.items():
                found[value] += values
        for step in self.steps:
            for value in step.operands:
                found[value] += step.results
        return found

    # --- how it is made --------------------------------------------------------------

    def _enter(
        self, place: Place, around: tuple[int, ...], visits: Sequence[Visit]
    ) -> None:
        """Adds the equations of a planned program."""
        program = visits[0].why.plan.flow.program
        self.consts |= {Value(place, v): x for v, x in program.consts.items()}
        for visit in visits:
            self._add(visit.eqn, place, around, visit)

    def _add(
        self, eqn: Eqn, place: Place, around: tuple[int, ...], visit: Visit | None
    ) -> None:
        """Adds an equation, or the bodies that it runs."""
        if not self._add_bodies(eqn, place, around):
            step = Step(eqn, place, visit)
            self.steps.append(step)
            self.maker |= dict.fromkeys(step.results, step)

    def _add_bodies(self, eqn: Eqn, place: Place, around: tuple[int, ...]) -> bool:
        """Adds the bodies of a call, a branch or a loop; says whether it is one."""
        if len(self.steps) > _MOST_STEPS or len(around) > _DEEPEST:
            return False
        name, params, operands = eqn.primitive.name, eqn.params, list(eqn.invars)
        around = (*around, id(eqn))
        outs: list[Atom] = list(eqn.outvars)

        def enter(body: Jaxpr, operands: Sequence[Atom]) -> tuple[Any, ...]:
            number = len(places)
            places.append((*place, id(eqn), number))
            return self._body(body, place, operands, places[-1], around)

        places: list[Place] = []
        if name == "scan":
            start, count = _compat.scan_counts(eqn)
            inputs, results = enter(params["jaxpr"], operands)
            self._again(inputs[start : start + count], results, places[0])
            self._same(outs, place, results, places[0])
        elif name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            carries = operands[first + second :]
            inputs, results = enter(params["body_jaxpr"], operands[first:])
            self._again(inputs[second:], results, places[0])
            self._same(outs, place, results, places[0])
            self._same(outs, place, carries, place)  # it may run no step
            asked, (is_next,) = enter(
                params["cond_jaxpr"], [*operands[:first], *carries]
            )
            for v, value in zip(asked[first:], results, strict=True):
                self._same([v], places[1], [value], places[0])
            self._decide([is_next], places[1], outs, place)
        elif name == "cond":
            index, *rest = operands
            for branch in params["branches"]:
                _, results = enter(branch, rest)
                self._same(outs, place, results, places[-1])
            self._decide([index], place, outs, place)
        elif name in _CALLS and bodies(eqn):
            (body,) = bodies(eqn)
            jaxpr, _ = open_jaxpr(body)
            # What the rule of a custom derivative closes over comes first.
            offset = len(operands) - len(jaxpr.invars)
            if offset < 0 or len(jaxpr.outvars) != len(outs):
                return False
            _, results = enter(body, operands[offset:])
            self._same(outs, place, results, places[0])
        else:
            return False
        return True

    def _body(
        self,
        body: Jaxpr,
        outer: Place,
        operands: Sequence[Atom],
        place: Place,
        around: tuple[int, ...],
    ) -> tuple[Sequence[Var], Sequence[Atom]]:
        """Adds a body, planned or as it was written; returns inputs and results."""
        jaxpr, consts = open_jaxpr(body)
        self._same(jaxpr.invars, place, operands, outer)

        def is_of_body(visit: Visit) -> bool:
            invars = visit.why.plan.flow.program.invars
            return len(invars) == len(jaxpr.invars) and all(
                x is y for x, y in zip(invars, jaxpr.invars, strict=True)
            )

        visits = list(filter(is_of_body, self._visits.get(around, ())))
        if visits:
            self._enter(place, around, visits)
            return jaxpr.invars, visits[0].why.plan.flow.program.outvars
        pairs = zip(jaxpr.constvars, consts, strict=True)
        self.consts |= {Value(place, v): x for v, x in pairs}
        for eqn in jaxpr.eqns:
            self._add(eqn, place, around, None)
        return jaxpr.invars, jaxpr.outvars

    def _same(
        self, atoms: Sequence[Atom], place: Place, others: Sequence[Atom], other: Place
    ) -> None:
        """Says of each variable that it is another one as well."""
        for v, x in zip(atoms, others, strict=True):
            if not isinstance(v, Literal) and not isinstance(x, Literal):
                self.is_also[Value(place, v)].append(Value(other, x))

    def _again(
        self, carries: Sequence[Var], results: Sequence[Atom], at: Place
    ) -> None:
        """Says that carries are what the step before has given."""
        self._same(carries, at, results[: len(carries)], at)

    def _decide(
        self, conditions: Sequence[Atom], at: Place, outs: Sequence[Atom], place: Place
    ) -> None:
        """Says that conditions decide what the results are."""
        for v in variables(conditions):
            values = [Value(place, x) for x in variables(outs)]
            self._decides[Value(at, v)] += values
