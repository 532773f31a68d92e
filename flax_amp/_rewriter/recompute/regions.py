"""Groups the equations of a plan into the regions that are recomputed together.

A region is emitted under `jax.checkpoint`, and `residuals.py` chooses what the backward
pass stores of it. Equations with a costly body of their own (a loop, a jitted product,
a user's checkpoint or custom derivative) stand between regions. In

    a = add x b;  c = custom_vjp_call a;  d = mul c x;  e = tanh b

`a` and `e` are one region, `custom_vjp_call` follows, and `d` is the second region.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from flax_amp._compat import Array, DType, Eqn, Var
from flax_amp._jaxpr.traits import is_matrix_product
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.plan import (
    BodyKind,
    Paint,
    Plan,
    has_paint,
    moves_of_inputs,
)
from flax_amp._rewriter.recompute.residuals import (
    LowCopy,
    Node,
    Residuals,
    choose,
    is_light,
    is_low_product,
    read_by_ill_conditioned,
)
from flax_amp._rewriter.recompute.stored import (
    EVERYWHERE,
    NOWHERE,
    ON_GPU,
    ON_GPU_AND_TPU,
    mark_stored,
)

_SMALL_STEP = 4 << 20  # bytes that a step of a recurrence has to save

# The platforms with barriers. In a loop the passes are two loops, which XLA cannot
# merge anyway. On a TPU, barriers pay in merged layers (six layers of ViT-S/16 on v5e:
# 15.1 ms, 12.7 with them), but not in all straight code (EfficientNet: 15.4 ms, 17.9).
_BARRIERS = {
    BodyKind.STRAIGHT: ON_GPU,
    BodyKind.REPEATED_LAYER: ON_GPU_AND_TPU,
}

# How much the backward pass computes again instead of storing it. "auto" recomputes all
# that is cheap inside loops and, in straight code, what fuses where there are barriers.
Recompute = Literal["auto", "always", "never"]


def check_recompute(recompute: Any) -> Recompute:
    """Returns `recompute`.

    Raises:
      ValueError: if it is none of the three values.
    """
    modes = ("never", "auto", "always")
    if recompute not in modes:
        expected = ", ".join(map(repr, modes))
        raise ValueError(f"recompute: got {recompute!r}; expected one of {expected}.")
    return recompute


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that are recomputed together.

    Attributes:
      indices: their indices in the plan.
      ins: the variables that they read.
      outs: those of their results that other equations read.
      stored: what the backward pass stores: variables, or the `LowCopy` of one if it
        stores the copy that matrix products read.
      operands: those that only matrix products read, and that have no barriers: nothing
        is computed again from them, and a barrier keeps XLA from sharing what it makes
        of one, such as the padded operand of a convolution, between the passes.
      rounded: those of `stored` that the forward pass rounds, too (see
        `read_by_ill_conditioned`).
      barriers: the platforms with barriers at what else is stored.
      barriers_until: from this index in the plan on there are none.
    """

    indices: Sequence[int]
    ins: Sequence[Var]
    outs: Sequence[Var]
    stored: frozenset[Node]
    operands: frozenset[Node]
    rounded: frozenset[Node]
    barriers: Sequence[str]
    barriers_until: int

    def mark(self, key: Node, x: Array, index: int) -> Array:
        """Returns the array of a node, marked if the backward pass stores it.

        The equation at `index` of the plan reads or makes it.
        """
        if key not in self.stored:
            return x
        has_barrier = key not in self.operands and index < self.barriers_until
        barriers = self.barriers if has_barrier else NOWHERE
        return mark_stored(x, barriers, is_rounded=key in self.rounded)


def group_into_regions(
    plan: Plan,
    recompute: Recompute,
    compute_dtype: DType,
    has_user_rule: Callable[[Eqn], bool],
) -> list[Region | int]:
    """Returns the regions and the indices of all other equations, in order."""
    if (
        recompute == "never"
        or plan.body_kind is BodyKind.OPAQUE
        or not _sizes_are_known(plan)
    ):
        return list(range(len(plan.steps)))
    return _Grouping(plan, recompute, compute_dtype, has_user_rule).order()


def _sizes_are_known(plan: Plan) -> bool:
    """Whether sizes can be compared: under `jax.export`, dimensions may be symbols."""
    inputs = (*plan.jaxpr.invars, *plan.jaxpr.constvars)
    results = (v for eqn in plan.jaxpr.eqns for v in eqn.outvars)
    return all(
        isinstance(dimension, int)
        for v in itertools.chain(inputs, results)
        for dimension in getattr(v.aval, "shape", ())
    )


def _levels(
    plan: Plan, moves: Collection[int], has_user_rule: Callable[[Eqn], bool]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Sorts light and heavy equations by level.

    The level of an equation is the largest number of heavy equations on a path to it:

        a = add x b                0, light
        c = custom_vjp_call a      0, heavy
        d = mul c x                1, light: behind one heavy equation
        e = tanh b                 0, light

    No path between two light equations of one level leads through a heavy one, so they
    can run together, however far apart they stand. The equations in `moves` run before
    all others, and have no level.
    """
    level_of: dict[Var, int] = defaultdict(int)
    light: dict[int, list[int]] = defaultdict(list)
    heavy: dict[int, list[int]] = defaultdict(list)
    floor = 0  # for effects, which must stay in order
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if i in moves:
            continue
        level = max((level_of[v] for v in variables(eqn.invars)), default=0)
        if is_light(eqn, has_user_rule):
            light[level].append(i)
        else:
            if eqn.effects:
                level = floor = max(level, floor)
            heavy[level].append(i)
            level += 1
        level_of.update(dict.fromkeys(eqn.outvars, level))
    return light, heavy


def _readers(plan: Plan, light: dict[int, list[int]]) -> dict[Var, set[int | None]]:
    """Returns the levels whose regions read each variable.

    `None` stands for heavy equations and for the results of the plan.
    """
    level_at = {i: level for level, indices in light.items() for i in indices}
    readers: dict[Var, set[int | None]] = defaultdict(set)
    for i, eqn in enumerate(plan.jaxpr.eqns):
        for v in variables(eqn.invars):
            readers[v].add(level_at.get(i))
    for v in variables(plan.jaxpr.outvars):
        readers[v].add(None)
    return readers


def _read_by_others(plan: Plan) -> set[Var]:
    """Returns what equations read that are no products in the compute dtype."""
    return {
        v
        for eqn, step in plan.pairs()
        if not is_low_product(eqn, step)
        for v in variables(eqn.invars)
    }


class _Grouping:
    """The grouping of a plan's equations; arguments as in `group_into_regions`."""

    def __init__(
        self,
        plan: Plan,
        recompute: Recompute,
        compute_dtype: DType,
        has_user_rule: Callable[[Eqn], bool],
    ):
        self._plan = plan
        self._has_user_rule = has_user_rule
        self._compute_dtype = compute_dtype
        self._values = plan.values()
        self._read_by_others = _read_by_others(plan)
        self._barriers = _BARRIERS.get(plan.body_kind, NOWHERE)
        in_straight_code = self._barriers is not NOWHERE
        self._stores_operands = in_straight_code and recompute == "auto"
        if in_straight_code and recompute == "always":
            self._barriers = EVERYWHERE

    def order(self) -> list[Region | int]:
        """Returns the regions and the indices of all other equations, in order."""
        plan = self._plan
        moves = moves_of_inputs(plan, self._values)
        light, heavy = _levels(plan, moves, self._has_user_rule)
        readers = _readers(plan, light)
        order: list[Region | int] = [*moves]
        levels = sorted({*light, *heavy})
        for level in levels:
            # A heavy equation may read light ones of its own level; no light one reads
            # a heavy one of it.
            if light[level]:
                # The head of a model is in the last region, with no loop behind it.
                is_last = level == levels[-1] and not heavy[level]
                made = [v for i in light[level] for v in plan.jaxpr.eqns[i].outvars]
                # What only the region itself reads does not leave it.
                outs = [v for v in made if readers[v] - {level}]
                region = self._region(light[level], outs, is_last)
                order += light[level] if region is None else [region]
            order += heavy[level]
        return order

    def _region(
        self, indices: list[int], outs: list[Var], is_last: bool
    ) -> Region | None:
        """Returns the region of some light equations, if recomputing saves enough."""
        plan = self._plan
        eqns = [plan.jaxpr.eqns[i] for i in indices]
        steps = [plan.steps[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        # In the order in which they are read: it is the same in every process.
        reads = [v for eqn in eqns for v in variables(eqn.invars)]
        ins = list(dict.fromkeys(v for v in reads if v not in made))
        residuals = choose(
            eqns,
            steps,
            ins,
            self._values,
            self._compute_dtype,
            stores_operands=self._stores_operands,
        )
        if not self._is_worth_it(residuals):
            return None
        has_head = is_last and plan.body_kind is BodyKind.STRAIGHT
        end = _start_of_head(plan, indices) if has_head else len(plan.steps)
        stored = residuals.stored
        operands = frozenset(filter(self._is_operand, stored))
        rounded = stored & read_by_ill_conditioned(eqns, outs)
        return Region(
            indices, ins, outs, stored, operands, rounded, self._barriers, end
        )

    def _is_operand(self, node: Node) -> bool:
        """Whether only matrix products read what is stored, as it is stored."""
        if isinstance(node, LowCopy):
            return True
        is_low = has_paint(self._values[node], Paint.LOW)
        return is_low and node not in self._read_by_others

    def _is_worth_it(self, residuals: Residuals) -> bool:
        if self._stores_operands:
            # Where little is saved, barriers only force XLA to store what it need not.
            # Other arithmetic than functions, such as BatchNorm and relu, XLA computes
            # again by itself.
            stored = residuals.stored_bytes
            has_functions = residuals.function_bytes > stored / 16
            return has_functions and residuals.recomputed_bytes > stored / 2
        saved = residuals.recomputed_bytes + residuals.called_bytes
        # The steps of an RNN are small and wait for one another: there time counts.
        is_recurrent = self._plan.body_kind is BodyKind.RECURRENT_SCAN
        return saved > (_SMALL_STEP if is_recurrent else 0)


def _start_of_head(plan: Plan, indices: Sequence[int]) -> int:
    """Returns where the head of a model begins: behind its last product but one.

    The backward pass of the head comes right after its forward pass. Nothing is stored
    for long there, and barriers only get in the way of fusions.
    """
    products = [i for i in indices if is_matrix_product(plan.jaxpr.eqns[i])]
    return products[-2] + 1 if len(products) > 1 else 0
