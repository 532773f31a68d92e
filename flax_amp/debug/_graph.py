"""The graph of a rewritten program: the makers and the readers of each value.

A value is a variable at a place: a function that is called twice has its variables
twice. The graph goes through calls, branches and loops. Where the plan of `amp` is
known, each step of the graph has the row and the plan of its equation. In

    h = dot x w                              a step, in half precision
    s, ys = scan[c' = add c h; y = sin c']   `s` is `c'` of the body; `c` is `c'`, too
    l = reduce_sum s                         a step, which does not depend on `sin`

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

# For each equation around, outermost first: its `id`, and the number of its body.
Place = tuple[Any, ...]

# Calls within calls may make millions of equations. Beyond this number of steps, an
# equation with bodies is a single step. The exact number does not matter: on a CPU
# under full load, a step takes 0.1 ms (2.3 s for a graph of 24,006 steps).
_MOST_STEPS = 200_000
_CALLS = CALLS | {"shard_map"}


class Value(NamedTuple):
    """A variable of one of the jaxprs of a program."""

    place: Place
    v: Var

    @property
    def is_float(self) -> bool:
        """Whether the value has numbers that can be rounded."""
        return jnp.issubdtype(getattr(self.v.aval, "dtype", jnp.int32), jnp.inexact)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation without bodies, or an equation that runs as a whole."""

    eqn: Eqn
    place: Place
    visit: Visit | None  # with the plan of the equation; `None` if `amp` planned none

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    def values(self, atoms: Iterable[Atom]) -> list[Value]:
        """Returns the values of operands or results, without literals."""
        return [Value(self.place, v) for v in variables(atoms)]

    @property
    def operands(self) -> list[Value]:
        """The values that the equation reads, without literals."""
        return self.values(self.eqn.invars)

    @property
    def results(self) -> list[Value]:
        """The results of the equation."""
        return self.values(self.eqn.outvars)


Follow = Callable[[Step], Iterable[Value]]


class Graph:
    """The graph of a program, made of the visits that the emitter has recorded."""

    def __init__(self, visits: Sequence[Visit]):
        self.steps: list[Step] = []  # in the order of the program
        self.maker: dict[Value, Step] = {}
        # For a value, the values with the same numbers that the value comes from, such
        # as the operand of a call for the input of its body.
        self.same_as: dict[Value, list[Value]] = defaultdict(list)
        # For a condition or an index, the results of the loop or of the branches.
        self._decides: dict[Value, list[Value]] = defaultdict(list)
        self._visits: dict[tuple[int, ...], list[Visit]] = defaultdict(list)
        for visit in visits:
            if visit.whole is None:
                self._visits[tuple(map(id, visit.around))].append(visit)
        self.inputs: list[Value] = []
        self.results: list[Value | None] = []  # `None` for a literal
        # The arrays of constants.
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
        """Yields the steps behind values: their makers, and the makers of operands.

        `follow` chooses the operands of a step that are followed.
        """
        seen: set[Value] = set()
        left = list(values)
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            left += self.same_as.get(value, ())
            step = self.maker.get(value)
            if step is not None:
                yield step
                left += follow(step)

    def sources(self, value: Value) -> list[Value]:
        """Returns the origins of a value: results of steps, inputs and constants."""
        found = []
        seen = {value}
        left = [value]
        while left:
            value = left.pop()
            also = self.same_as.get(value, ())
            if not also:
                found.append(value)
            new = [x for x in also if x not in seen]
            seen.update(new)
            left += new
        return found

    def ahead(self, values: Iterable[Value]) -> set[Value]:
        """Returns all values that depend on some values, by number or by decision."""
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
        found = []
        seen = {value}
        left = [value]
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
        for value, also in self.same_as.items():
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

    # --- construction ----------------------------------------------------------------

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
        """Adds the bodies of a call, a branch or a loop.

        Returns whether the equation is entered: if not, the equation is a step.
        """
        if len(self.steps) > _MOST_STEPS:
            return False
        name = eqn.primitive.name
        params = eqn.params
        operands = list(eqn.invars)
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
            self._carry_over(inputs[start : start + count], results, places[0])
            self._record_same(outs, place, results, places[0])
        elif name == "while":
            of_cond = params["cond_nconsts"]
            of_body = params["body_nconsts"]
            carries = operands[of_cond + of_body :]
            inputs, results = enter(params["body_jaxpr"], operands[of_cond:])
            self._carry_over(inputs[of_body:], results, places[0])
            self._record_same(outs, place, results, places[0])
            # A loop may run no iteration.
            self._record_same(outs, place, carries, place)
            tested, (is_next,) = enter(
                params["cond_jaxpr"], [*operands[:of_cond], *carries]
            )
            for v, value in zip(tested[of_cond:], results, strict=True):
                self._record_same([v], places[1], [value], places[0])
            self._decide([is_next], places[1], outs, place)
        elif name == "cond":
            index, *rest = operands
            for branch in params["branches"]:
                _, results = enter(branch, rest)
                self._record_same(outs, place, results, places[-1])
            self._decide([index], place, outs, place)
        elif name in _CALLS and bodies(eqn):
            (body,) = bodies(eqn)
            jaxpr, _ = open_jaxpr(body)
            # The first operands are the values that the rule of a custom derivative
            # closes over. The body does not have them as inputs.
            offset = len(operands) - len(jaxpr.invars)
            if offset < 0 or len(jaxpr.outvars) != len(outs):
                return False
            _, results = enter(body, operands[offset:])
            self._record_same(outs, place, results, places[0])
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
        """Adds a body, planned or as written; returns its inputs and results."""
        jaxpr, consts = open_jaxpr(body)
        self._record_same(jaxpr.invars, place, operands, outer)

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

    def _record_same(
        self, atoms: Sequence[Atom], place: Place, others: Sequence[Atom], other: Place
    ) -> None:
        """Records that each variable has the numbers of a variable at another place."""
        for v, x in zip(atoms, others, strict=True):
            if not isinstance(v, Literal) and not isinstance(x, Literal):
                self.same_as[Value(place, v)].append(Value(other, x))

    def _carry_over(
        self, carries: Sequence[Var], results: Sequence[Atom], at: Place
    ) -> None:
        """Records that carries are results of the iteration before."""
        self._record_same(carries, at, results[: len(carries)], at)

    def _decide(
        self, conditions: Sequence[Atom], at: Place, outs: Sequence[Atom], place: Place
    ) -> None:
        """Records that the results depend on conditions, as on an index."""
        for v in variables(conditions):
            values = [Value(place, x) for x in variables(outs)]
            self._decides[Value(at, v)] += values
