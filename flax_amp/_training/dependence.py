"""Finds how the numbers of a traced loss depend on parameters and examples.

A step that averages over parts of a batch asks two questions about a loss. Is the loss
divided by a total that differs from part to part? And does the weight that the loss
returns have a derivative? A single pass over the equations answers both questions. For
a mean over tokens:

    n = reduce_sum mask       a total: a single number, summed over the part's examples
    m = max n 1.0             still that total
    s = reduce_sum losses     depends on the parameters, with a derivative
    q = div s m               divided by a total
    l = add q penalty         a sum with a term that is divided by a total

A division inside of a nonlinear function (the root of a mean) is no division of the
loss. A division in the body of a loop does not count either, because the denominator
differs from iteration to iteration.
"""

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr
from flax_amp._rewriter.primitives import Trait, bodies, has
from flax_amp._training.source_lines import SourceLine, line_of
from flax_amp._tree import split_list


class OnParameters(enum.IntEnum):
    """How a number depends on the parameters; of several ways, the largest counts."""

    NOT = 0
    BY_VALUE = 1  # the derivative is zero, as in a comparison
    BY_DERIVATIVE = 2


class Dependence(NamedTuple):
    """The dependence of a variable of a traced loss on parameters and examples."""

    on_parameters: OnParameters = OnParameters.NOT
    # Whether the variable differs from part to part, because of examples or of random
    # numbers.
    varies: bool = False
    # Whether the variable is a single number, perhaps repeated, that is a sum of
    # numbers that vary.
    is_total: bool = False
    # The line where the variable, or a term of the variable, was divided by a total.
    division: SourceLine | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the variable is the same for all parts and for all parameters."""
        return not self.varies and self.on_parameters is OnParameters.NOT


CONSTANT = Dependence()
PARAMETER = Dependence(OnParameters.BY_DERIVATIVE)
EXAMPLE = Dependence(varies=True)

# Calls whose body runs once, with the operands of the call.
CALLS = frozenset(
    "jit remat2 closed_call eval_jaxpr custom_jvp_call custom_vjp_call".split()
)
# A `shard_map` runs its body once, too, on each device with a part of the operands.
_CALLS_ON_PARTS = CALLS | {"shard_map"}
# Primitives whose derivative is zero everywhere.
_ZERO_DERIVATIVE = frozenset(
    "stop_gradient sign floor ceil round argmax argmin".split()
)
_SUMS = frozenset("reduce_sum dot_general".split())
# Primitives that return a total for totals and constants. Primitives that only change
# the layout do so, too (`Trait.LAYOUT`).
_KEEPS_TOTAL = frozenset(
    """add sub max min clamp select_n convert_element_type reduce_precision psum
    psum_invariant""".split()
)
# Layout primitives that return no total: a stack of totals is not a single number.
_STACKS = frozenset("concatenate stack".split())
# Primitives that divide their result if their operands are divided. The primitives that
# only change the layout do so, too (`Trait.LAYOUT`).
_LINEAR = frozenset(
    """add sub add_any neg select_n reduce_sum cumsum convert_element_type
    reduce_precision psum psum_invariant gather dynamic_slice dot_general
    mul""".split()
)
# In a product, a single factor that is divided by a total is enough.
_PRODUCTS = frozenset("mul dot_general".split())
_RANDOM = ("random_", "threefry", "rng_")
# Primitives whose first operand has the numbers; the remaining operands are indices.
_INDEXED = frozenset("gather dynamic_slice".split())
_OVER_DEVICES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant".split()
)


class Analysis:
    """Finds the dependences of a traced loss.

    `same_on` are the mapped axes whose devices together hold all the parts. A result
    that is summed over these axes is the same for each part.
    """

    def __init__(self, same_on: Sequence[Any] = ()):
        self._same_on = set(same_on)
        # A cache: models of many equal layers call the same body many times.
        self._known: dict[Any, list[Dependence]] = {}
        self._held: list[Jaxpr] = []  # so that no later body has the same `id`

    def results(
        self,
        closed: Jaxpr,
        operands: Sequence[Dependence],
        call: SourceLine | None = None,
    ) -> list[Dependence]:
        """Returns the dependences of the results of a jaxpr.

        `call` is the line of the call around the jaxpr. An equation of a function of
        JAX has no line of the user, so the line of the call stands for the equation.
        """
        jaxpr, _ = _compat.open_jaxpr(closed)
        key = id(jaxpr), tuple(operands), call
        if key not in self._known:
            self._held.append(jaxpr)
            self._known[key] = self._run(jaxpr, operands, call)
        return self._known[key]

    def _run(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Dependence],
        call: SourceLine | None,
    ) -> list[Dependence]:
        env: dict[Any, Dependence] = dict(zip(jaxpr.invars, operands, strict=True))

        def read(atoms: Sequence[Atom]) -> list[Dependence]:
            found = (None if isinstance(x, Literal) else env.get(x) for x in atoms)
            return [x or CONSTANT for x in found]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, read(eqn.invars), call)
            env |= zip(eqn.outvars, outs, strict=True)
        return read(jaxpr.outvars)

    def _equation(
        self,
        eqn: Eqn,
        operands: Sequence[Dependence],
        call: SourceLine | None,
    ) -> list[Dependence]:
        name = eqn.primitive.name
        if name == "cond":
            return self._cond(eqn, operands, line_of(eqn) or call)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name in _CALLS_ON_PARTS and takes_operands(eqn):
            outs = self.results(bodies(eqn)[0], operands, line_of(eqn) or call)
            # A `shard_map` may return the totals of its devices in an array, which is
            # no total.
            are_numbers = (not v.aval.shape for v in eqn.outvars)
            return [
                x._replace(is_total=x.is_total and (is_number or name in CALLS))
                for x, is_number in zip(outs, are_numbers, strict=True)
            ]
        return [self._result(eqn, v, operands, call) for v in eqn.outvars]

    def _result(
        self,
        eqn: Eqn,
        result: Atom,
        operands: Sequence[Dependence],
        call: SourceLine | None,
    ) -> Dependence:
        """Returns the dependence of a result of an equation without bodies."""
        name = eqn.primitive.name
        ways = [x.on_parameters for x in operands]
        on_parameters = max(ways, default=OnParameters.NOT)
        if _compares_with_itself(eqn):
            # `jnp.nanmean` counts its numbers by this comparison. The numbers of a
            # finite loss are never NaN, so their count depends on no parameter.
            on_parameters = OnParameters.NOT
        elif name in _ZERO_DERIVATIVE or not _is_inexact(result):
            on_parameters = min(on_parameters, OnParameters.BY_VALUE)
        varies = any(x.varies for x in operands) or name.startswith(_RANDOM)
        if name in _OVER_DEVICES and self._same_on:
            varies &= not self._same_on.issubset(_axes_of(eqn))
        may_be_total = varies and on_parameters is OnParameters.NOT
        is_total = may_be_total and _is_total(eqn, result, operands)
        division = _inherited_division(eqn, result, operands)
        if _divides(eqn, operands):
            division = line_of(eqn) or call or SourceLine("", 0)
        return Dependence(on_parameters, varies, is_total, division)

    # --- branches and loops ----------------------------------------------------------

    def _cond(
        self,
        eqn: Eqn,
        operands: Sequence[Dependence],
        line: SourceLine | None,
    ) -> list[Dependence]:
        index, *rest = operands
        found = [self.results(branch, rest, line) for branch in eqn.params["branches"]]
        by_index = Dependence(
            min(index.on_parameters, OnParameters.BY_VALUE), index.varies
        )
        joined = [functools.reduce(_either, outs) for outs in zip(*found, strict=True)]
        return [
            x._replace(
                on_parameters=max(x.on_parameters, by_index.on_parameters),
                varies=x.varies or by_index.varies,
            )
            for x in joined
        ]

    def _scan(self, eqn: Eqn, operands: Sequence[Dependence]) -> list[Dependence]:
        counts = _compat.scan_counts(eqn)
        consts, init, xs = split_list(operands, *counts)
        body = eqn.params["jaxpr"]

        def step(carry: Sequence[Dependence]) -> list[Dependence]:
            return self.results(body, [*consts, *carry, *xs])

        carry = _fixed_point(lambda x: step(x)[: counts[1]], init)
        ys = [_of_iterations(y) for y in step(carry)[counts[1] :]]
        return [*carry, *ys]

    def _while(self, eqn: Eqn, operands: Sequence[Dependence]) -> list[Dependence]:
        sizes = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        _, consts, init = split_list(operands, *sizes)
        body = eqn.params["body_jaxpr"]

        def step(carry: Sequence[Dependence]) -> list[Dependence]:
            return self.results(body, [*consts, *carry])

        return _fixed_point(step, init)


def _axes_of(eqn: Eqn) -> set[Any]:
    """Returns the mapped axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return set(axes if isinstance(axes, tuple) else (axes,))


def takes_operands(eqn: Eqn) -> bool:
    """Whether the body of a call has as many inputs as the call has operands."""
    return len(_compat.open_jaxpr(bodies(eqn)[0])[0].invars) == len(eqn.invars)


def _fixed_point(step: Any, init: Sequence[Dependence]) -> list[Dependence]:
    """Returns dependences of a carry that are the same after another iteration."""
    carry = [_of_iterations(x, keeps_total=True) for x in init]
    # The loop ends, because a dependence moves in a single direction: from a constant
    # to a total and then to neither of them, and from no dependence on the parameters
    # to a derivative.
    while True:
        after = [_of_iterations(x, keeps_total=True) for x in step(carry)]
        joined = [_either(x, y) for x, y in zip(carry, after, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _of_iterations(x: Dependence, keeps_total: bool = False) -> Dependence:
    """Returns the dependence of a result of the iterations of a loop.

    `keeps_total` is for a carry. The stacked results of all iterations are no total.
    """
    return x._replace(division=None, is_total=x.is_total and keeps_total)


def _either(x: Dependence, y: Dependence) -> Dependence:
    """Returns the dependence of a number that is either `x` or `y`."""
    return Dependence(
        max(x.on_parameters, y.on_parameters),
        x.varies or y.varies,
        (x.is_total or x.is_constant)
        and (y.is_total or y.is_constant)
        and (x.is_total or y.is_total),
        x.division or y.division,
    )


def _compares_with_itself(eqn: Eqn) -> bool:
    """Whether an equation asks which numbers are NaN, as `x != x` does."""
    if eqn.primitive.name not in ("eq", "ne"):
        return False
    first, second = eqn.invars
    return first is second


def _is_inexact(v: Atom) -> bool:
    return jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact)


def _is_total(eqn: Eqn, result: Atom, operands: Sequence[Dependence]) -> bool:
    """Whether a result is a total, if it varies and does not depend on parameters."""
    name = eqn.primitive.name
    if name in _SUMS and not result.aval.shape:
        return True
    if not operands:  # such as the result of a random number generator
        return False
    first, *others = operands
    if name == "mul":
        return any(x.is_total for x in operands) and any(
            x.is_constant for x in operands
        )
    if name == "div":
        return first.is_total and others[0].is_constant
    operands = _with_numbers(name, operands)
    is_layout = has(eqn, Trait.LAYOUT) and name not in _STACKS
    if name not in _KEEPS_TOTAL and not is_layout:
        return False
    return functools.reduce(_either, operands).is_total


def _with_numbers(name: str, operands: Sequence[Dependence]) -> Sequence[Dependence]:
    """Returns the operands that hold numbers: no condition of a select, no index."""
    if name == "select_n":
        return operands[1:]
    if name in _INDEXED:
        return operands[:1]
    return operands


def _divides(eqn: Eqn, operands: Sequence[Dependence]) -> bool:
    """Whether an equation divides by a total."""
    if eqn.primitive.name == "div":
        return operands[1].is_total
    is_power = eqn.primitive.name == "integer_pow"
    return is_power and eqn.params["y"] < 0 and operands[0].is_total


def _inherited_division(
    eqn: Eqn, result: Atom, operands: Sequence[Dependence]
) -> SourceLine | None:
    """Returns the line where an operand was divided, if the result counts as divided.

    A sum of a quotient and another term counts as a quotient only if the sum is a
    scalar, such as a loss with a penalty. So `logits - logsumexp(logits)` is no
    quotient, even if the logits come from a model with a masked mean.
    """
    name = eqn.primitive.name
    if name == "div":
        return operands[0].division
    if name not in _LINEAR and not has(eqn, Trait.LAYOUT):
        return None
    operands = _with_numbers(name, operands)
    one_is_enough = name in _PRODUCTS or not result.aval.shape
    if not one_is_enough and not all(x.division or x.is_constant for x in operands):
        return None
    return next((x.division for x in operands if x.division), None)
