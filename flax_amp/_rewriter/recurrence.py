"""Finds the states of unrolled recurrences, to which each step adds a small term.

Tracing unrolls `for _ in range(30): y = y + dt * tanh(y @ w)`. In half precision its
small steps would be rounded away. The carry of a loop stays in float32 for this reason
(`loops.py`), and so does `y` here. What makes equations the steps of one recurrence is
that each step applies the same weights.

A *weight* is a value that is computed from the inputs without a matrix product; a
matrix of data, such as the adjacency of a graph, counts as one. Equal computations give
equal weights. Its *application* is a product with it, or a scan whose body multiplies
with it. An equation computes a *state* if

- one operand *a* goes into an application of a weight (by no other product, and not by
  way of an earlier application of that weight),
- another operand *b* was computed from this very application,
- and the result goes into a later application of the same weight (by no other product).

Two steps of the loop above:

    p0 = dot y0 w;  f0 = tanh p0;  y1 = add y0 f0
    p1 = dot y1 w;  f1 = tanh p1;  y2 = add y1 f1

`y1` is a state: `y0` (a) goes into `p0`, `f0` (b) was computed from `p0`, and `y1` goes
into `p1`, with the same `w`. `y2` is a result, not a state: nothing comes after it.

A weight that is used once, in two branches side by side, or at both ends of a network
(a tied embedding) meets the first two conditions or the last one, never all three.
Calls are looked through; the bodies of loops are programs of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import Kind, Trait, bodies, has, kind_of
from flax_amp._jaxpr.walk import is_multiplied

# Equations with all calls inlined. A few calls within calls may make millions.
_MAX_EQUATIONS = 50_000


class _TooLongError(Exception):
    """Raised where a program is too long to be searched."""


class _Equation(NamedTuple):
    """An equation of the program without calls. Its values are numbered.

    Attributes:
      name: the name of its primitive.
      ins: the values that it reads.
      outs: the values that it computes.
      outvar: the variable of its first result.
    """

    name: str
    ins: Sequence[int]
    outs: Sequence[int]
    outvar: Var | None


def find_states(jaxpr: Jaxpr) -> tuple[set[Var], list[Jaxpr]]:
    """Returns the variables that hold states, and the jaxprs that were searched.

    These are the open jaxpr itself and all that it calls.
    """
    program = _InlinedProgram()
    try:
        program.inline(jaxpr, [program.new_weight() for _ in jaxpr.invars])
    except _TooLongError:
        return set(), program.jaxprs
    return _States(program).variables(), program.jaxprs


class _InlinedProgram:
    """A program without calls, and the applications of weights in it."""

    def __init__(self) -> None:
        self.equations: list[_Equation] = []
        self.jaxprs: list[Jaxpr] = []
        # For each weight and way of applying it: the indices of the applications in
        # `equations`, and the values that it is applied to.
        self.applications: dict[Any, list[tuple[int, Sequence[int]]]] = {}
        self._values = 0
        # Each weight, and the one that stands for all that are equal to it.
        self._weights: dict[int, int] = {}
        self._computed: dict[Any, Sequence[int]] = {}

    def new_value(self) -> int:
        self._values += 1
        return self._values

    def new_weight(self) -> int:
        value = self.new_value()
        self._weights[value] = value
        return value

    def is_weight(self, value: int) -> bool:
        return value in self._weights

    def inline(self, jaxpr: Jaxpr, ins: Sequence[int]) -> list[int]:
        """Adds the equations of an open jaxpr. Returns its results."""
        self.jaxprs.append(jaxpr)
        env = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: self.new_weight() for v in jaxpr.constvars}

        def read(atom: Any) -> int:
            return self._literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Eqn, ins: Sequence[int]) -> Sequence[int]:
        name = eqn.primitive.name
        if len(self.equations) > _MAX_EQUATIONS:
            raise _TooLongError
        inside = [_compat.open_jaxpr(body)[0] for body in bodies(eqn)]
        if kind_of(eqn) is Kind.CALL:
            return self.inline(inside[0], ins)
        if name == "cond":
            results = [self.inline(branch, ins[1:]) for branch in inside]
            return [self._merge(outs) for outs in zip(*results, strict=True)]
        for key, data in self._weights_applied(eqn, ins):
            application = len(self.equations), data
            self.applications.setdefault(key, []).append(application)
        outs = self._results(eqn, ins)
        outvar = eqn.outvars[0] if eqn.outvars else None
        self.equations.append(_Equation(name, ins, outs, outvar))
        return outs

    def _merge(self, values: Sequence[int]) -> int:
        """Returns one value for the results of several branches."""
        out = self.new_value()
        self.equations.append(_Equation("cond", values, [out], None))
        return out

    def _results(self, eqn: Eqn, ins: Sequence[int]) -> Sequence[int]:
        """Returns the results. Equal computations from weights give equal weights."""
        outs = [self.new_value() for _ in eqn.outvars]
        is_plain = kind_of(eqn) is not Kind.PRODUCT and not eqn.effects
        if not (is_plain and all(map(self.is_weight, ins))):
            return outs
        weights = tuple(self._weights[value] for value in ins)
        try:
            key = eqn.primitive, tuple(eqn.params.items()), weights
            equal = self._computed.setdefault(key, outs)
        except TypeError:  # parameters that cannot be hashed, such as of `custom_lin`
            return outs
        self._weights.update(zip(outs, equal, strict=True))
        return outs

    def _literal(self, literal: Literal) -> int:
        bits = np.asarray(literal.val)
        key = literal.aval, bits.tobytes()
        if key not in self._computed:
            self._computed[key] = [self.new_weight()]
        return self._computed[key][0]

    def _weights_applied(
        self, eqn: Eqn, ins: Sequence[int]
    ) -> Iterable[tuple[Any, Sequence[int]]]:
        """Yields the ways in which an equation applies a weight, and to what."""
        name = eqn.primitive.name
        if kind_of(eqn) is Kind.PRODUCT:
            # A product over another axis of the weight, as in a backward pass, is
            # another way.
            way = [str(v) for k, v in eqn.params.items() if "dimension_numbers" in k]
            for i in range(2):
                if self.is_weight(ins[i]):
                    yield (name, *way, i, self._weights[ins[i]]), [ins[1 - i]]
        elif name == "scan":
            data = [value for value in ins if not self.is_weight(value)]
            for i, value in enumerate(ins):
                if self.is_weight(value) and is_multiplied(eqn.params["jaxpr"], i):
                    yield (name, i, self._weights[value]), data


class _States:
    """The search for states in a program.

    Sets of applications are integers with one bit for each application. In the example
    above, let `p0` have bit 1 and `p1` bit 2. Then `y0` has bit 1 in `next_uses`, `f0`
    has it in `computed_from`, and `y1` has bit 2 in `later_uses`: so `y1` is a state.
    """

    def __init__(self, program: _InlinedProgram):
        self._equations = program.equations
        self._bits_at: dict[int, int] = {}  # by the index of the equation
        self._readers_of: dict[int, int] = {}  # by the value
        self._group_of: dict[int, int] = {}  # all applications of the weight, by bit
        for uses in program.applications.values():
            data = [value for _, values in uses for value in values]
            # Weights that are applied to weights only make another weight.
            if len(uses) > 1 and not all(map(program.is_weight, data)):
                self._number(uses)

    def _number(self, uses: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Gives each application of a weight a bit."""
        bits = [1 << len(self._group_of) + i for i in range(len(uses))]
        self._group_of |= dict.fromkeys(bits, sum(bits))
        for bit, (index, values) in zip(bits, uses, strict=True):
            self._bits_at[index] = self._bits_at.get(index, 0) | bit
            for value in values:
                self._readers_of[value] = self._readers_of.get(value, 0) | bit

    def variables(self) -> set[Var]:
        """Returns the variables that hold states."""
        if not self._group_of:
            return set()
        computed_from = self._computed_from()
        next_uses, later_uses = self._uses(computed_from)

        def is_state(eqn: _Equation) -> bool:
            later = later_uses.get(eqn.outs[0], 0)
            return bool(later) and any(
                later & self._same_weight(next_uses.get(a, 0) & computed_from.get(b, 0))
                for a in eqn.ins
                for b in eqn.ins
            )

        # A function of a state, such as its exponential, is another value.
        steps = (
            eqn
            for eqn in self._equations
            if has(eqn.name, Trait.ELEMENTWISE) and not has(eqn.name, Trait.WIDE_RANGE)
        )
        return {eqn.outvar for eqn in steps if is_state(eqn)}

    def _computed_from(self) -> dict[int, int]:
        """Returns the applications that each value was computed from."""
        computed_from: dict[int, int] = {}
        for index, eqn in enumerate(self._equations):
            bits = self._bits_at.get(index, 0)
            for value in eqn.ins:
                bits |= computed_from.get(value, 0)
            computed_from |= dict.fromkeys(eqn.outs, bits)
        return computed_from

    def _uses(self, computed_from: dict[int, int]) -> tuple[Any, Any]:
        """Returns the applications that each value goes into, by no other product.

        Returns:
          The next applications of each weight, and all of them.
        """
        later_uses, next_uses = dict(self._readers_of), dict(self._readers_of)
        for eqn in reversed(self._equations):
            if kind_of(eqn.name) is Kind.PRODUCT or eqn.name in ("scan", "while"):
                continue
            for out in eqn.outs:
                for value in eqn.ins:
                    # Where the equation brings in an application, the value has been
                    # used by then: what follows is not its next use of that weight.
                    new = computed_from[out] & ~computed_from.get(value, 0)
                    near = next_uses.get(out, 0) & ~self._same_weight(new)
                    next_uses[value] = next_uses.get(value, 0) | near
                    later = later_uses.get(out, 0)
                    later_uses[value] = later_uses.get(value, 0) | later
        return next_uses, later_uses

    def _same_weight(self, bits: int) -> int:
        """Returns all applications of the weights that some of them apply."""
        found = 0
        while rest := bits & ~found:
            found |= self._group_of[rest & -rest]  # the lowest bit of the rest
        return found
