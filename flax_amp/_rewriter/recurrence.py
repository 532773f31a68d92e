"""Finds the states of unrolled recurrences, to which each step adds a small term.

Tracing unrolls `for _ in range(30): y = y + dt * tanh(y @ w)`. In half precision its
small steps would be rounded away. The carry of a loop stays in float32 for this reason
(`flax_amp.rules`), and so does `y` here. The steps are recognized by what makes them
the steps of one recurrence: each applies the same weights.

A *weight* is a value that is computed from the inputs without a matrix product, a
matrix of data such as the adjacency of a graph included; equal computations give equal
weights. Its *application* is a product with it, or a scan whose
body multiplies with it. An equation computes a *state* if

- one operand *a* goes into an application of a weight (by no other product, and not by
  way of an earlier application of that weight),
- another operand *b* was computed from this very application,
- and the result goes into a later application of the same weight (by no other product).

A weight that is used once, in two branches side by side, or at both ends of a network
(a tied embedding) meets the first two conditions or the last one, never all three.
Calls are looked through; the bodies of loops are programs of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._rewriter.heuristics import is_multiplied
from flax_amp.policy import FOLLOW_OPS, LOW_OPS

# Calls of a function whose inputs are their operands: looked through.
_INLINED = frozenset(
    """jit remat2 shard_map closed_call core_call custom_jvp_call
    custom_vjp_call""".split()
)


# Equations of a program with its calls inlined; a few nested calls may make millions.
_LONGEST = 50_000


class _TooLongError(Exception):
    """Raised where a program is too long to be searched."""


class _Equation(NamedTuple):
    """An equation of the program without calls; values are small numbers.

    Attributes:
      name: the name of its primitive.
      ins: the values that it reads.
      outs: the values that it computes.
      outvar: the variable of its first result.
    """

    name: str
    ins: Sequence[int]
    outs: Sequence[int]
    outvar: Any


def find_states(jaxpr: Any) -> tuple[set[Any], list[Any]]:
    """Returns the variables that hold states, and the jaxprs that were looked at.

    Args:
      jaxpr: an open jaxpr.
    """
    flat = _Flat()
    try:
        flat.inline(jaxpr, [flat.weight() for _ in jaxpr.invars])
    except _TooLongError:
        return set(), flat.jaxprs
    return _states(flat), flat.jaxprs


class _Flat:
    """A program without calls, and the applications of weights in it."""

    def __init__(self) -> None:
        self.equations: list[_Equation] = []
        self.jaxprs: list[Any] = []
        # For each weight and way of applying it: the places of the applications in
        # `equations`, and the values that it is applied to.
        self.applications: dict[Any, list[tuple[int, Sequence[int]]]] = {}
        self._values = 0
        self._weights: dict[int, int] = {}  # the value that stands for all equal ones
        self._computed: dict[Any, Sequence[int]] = {}

    def value(self) -> int:
        """Returns a new value."""
        self._values += 1
        return self._values

    def weight(self) -> int:
        """Returns a new value that is a weight."""
        value = self.value()
        self._weights[value] = value
        return value

    def is_weight(self, value: int) -> bool:
        return value in self._weights

    def inline(self, jaxpr: Any, ins: Sequence[int]) -> list[int]:
        """Adds the equations of an open jaxpr; returns its results."""
        self.jaxprs.append(jaxpr)
        env = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: self.weight() for v in jaxpr.constvars}

        def read(atom: Any) -> int:
            return self._literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: Sequence[int]) -> Sequence[int]:
        name = eqn.primitive.name
        if len(self.equations) > _LONGEST:
            raise _TooLongError
        if name in _INLINED:
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.inline(_compat.open_jaxpr(body)[0], ins)
        if name == "cond":
            branches = [_compat.open_jaxpr(b)[0] for b in eqn.params["branches"]]
            results = [self.inline(branch, ins[1:]) for branch in branches]
            return [self._merge(outs) for outs in zip(*results, strict=True)]
        for key, data in self._applied(eqn, ins):
            application = len(self.equations), data
            self.applications.setdefault(key, []).append(application)
        outs = self._equal(eqn, ins)
        outvar = eqn.outvars[0] if eqn.outvars else None
        self.equations.append(_Equation(name, ins, outs, outvar))
        return outs

    def _merge(self, values: Sequence[int]) -> int:
        """Returns the value that is one of several, as branches give it."""
        out = self.value()
        self.equations.append(_Equation("cond", values, [out], None))
        return out

    def _equal(self, eqn: Any, ins: Sequence[int]) -> Sequence[int]:
        """Returns the results; those that are weights are equal for equal equations."""
        outs = [self.value() for _ in eqn.outvars]
        is_plain = eqn.primitive.name not in LOW_OPS and not eqn.effects
        if not (is_plain and all(map(self.is_weight, ins))):
            return outs
        weights = tuple(self._weights[value] for value in ins)
        try:
            key = eqn.primitive, tuple(eqn.params.items()), weights
            equal = self._computed.setdefault(key, outs)
        except TypeError:  # parameters that cannot be compared
            return outs
        self._weights.update(zip(outs, equal, strict=True))
        return outs

    def _literal(self, literal: Literal) -> int:
        bits = np.asarray(literal.val)
        key = literal.aval, bits.tobytes()
        if key not in self._computed:
            self._computed[key] = [self.weight()]
        return self._computed[key][0]

    def _applied(self, eqn: Any, ins: Sequence[int]) -> Iterable[tuple[Any, Any]]:
        """Yields the ways in which an equation applies a weight, and to what."""
        name = eqn.primitive.name
        if name in LOW_OPS:
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


def _states(flat: _Flat) -> set[Any]:
    """Returns the variables of the states of a flat program."""
    # Sets of applications are integers, a bit for each application. After
    # `y1 = y0 + f(y0 @ w)` and `y1 @ w`, with the bits 1 and 2 for the two products,
    # `y0` has bit 1 in `next_uses`, `f(...)` has it in `computed_from`, and `y1` has
    # bit 2 in `later_uses`: so `y1` is a state.
    bits_at: dict[int, int] = {}  # by the place of the equation
    readers_of: dict[int, int] = {}  # by the value
    group_of: dict[int, int] = {}  # by the bit: all applications of its weight
    for places in flat.applications.values():
        data = [value for _, values in places for value in values]
        if len(places) < 2 or all(map(flat.is_weight, data)):
            continue
        bits_of = [1 << len(group_of) + i for i in range(len(places))]
        group_of |= dict.fromkeys(bits_of, sum(bits_of))
        for bit, (place, values) in zip(bits_of, places, strict=True):
            bits_at[place] = bits_at.get(place, 0) | bit
            for value in values:
                readers_of[value] = readers_of.get(value, 0) | bit
    if not group_of:
        return set()

    def siblings(bits: int) -> int:
        """Returns all applications of the weights of some of them."""
        found = 0
        while bits & ~found:
            rest = bits & ~found
            found |= group_of[rest & -rest]
        return found

    computed_from: dict[int, int] = {}
    for place, eqn in enumerate(flat.equations):
        bits = bits_at.get(place, 0)
        for value in eqn.ins:
            bits |= computed_from.get(value, 0)
        computed_from |= dict.fromkeys(eqn.outs, bits)

    later_uses, next_uses = dict(readers_of), dict(readers_of)
    for eqn in reversed(flat.equations):
        if not _passes(eqn):
            continue
        for out in eqn.outs:
            for value in eqn.ins:
                new = computed_from[out] & ~computed_from.get(value, 0)
                near = next_uses.get(out, 0) & ~siblings(new)
                next_uses[value] = next_uses.get(value, 0) | near
                later_uses[value] = later_uses.get(value, 0) | later_uses.get(out, 0)

    def is_state(eqn: _Equation) -> bool:
        later = later_uses.get(eqn.outs[0], 0)
        return bool(later) and any(
            later & siblings(next_uses.get(a, 0) & computed_from.get(b, 0))
            for a in eqn.ins
            for b in eqn.ins
        )

    adds = (eqn for eqn in flat.equations if eqn.name in FOLLOW_OPS)
    return {eqn.outvar for eqn in adds if is_state(eqn)}


def _passes(eqn: _Equation) -> bool:
    """Whether an equation passes its operands on, without a product."""
    return eqn.name not in LOW_OPS and eqn.name not in ("scan", "while")
