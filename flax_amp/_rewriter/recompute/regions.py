"""Groups the equations of a plan into the regions that are recomputed as one.

A region is emitted under `jax.checkpoint`: of it the backward pass stores what
`flax_amp.residuals` chooses. What has a body with expensive equations of its own (a
loop, a jitted block, a user's checkpoint, a custom derivative) stands between regions.
"""

import dataclasses
import enum
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flax_amp._rewriter.heuristics import moves_of_inputs
from flax_amp._rewriter.plan import Plan, Site, Value, variables
from flax_amp._rewriter.recompute import keep
from flax_amp._rewriter.recompute.residuals import Residuals, choose, is_light
from flax_amp.policy import LOW_OPS

_SMALL_STEP = 4 << 20  # bytes


class Recompute(enum.Enum):
    """How much the backward pass computes again instead of storing it.

    `AUTO` is what pays on every backend: inside loops all that is cheap, in straight
    code what fuses, and that only on GPUs.
    """

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


def check_recompute(recompute: Any) -> Recompute:
    """Returns the `Recompute` of this value.

    Raises:
      ValueError: if there is none.
    """
    try:
        return Recompute(recompute)
    except ValueError:
        expected = ", ".join(repr(mode.value) for mode in Recompute)
        raise ValueError(
            f"recompute: got {recompute!r}; expected one of {expected}."
        ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that are recomputed together.

    Attributes:
      indices: their places in the plan.
      ins: the variables that they read.
      outs: the variables that others read of them.
      kept: the variables that the backward pass stores, and the `LowCopy` of those of
        which it stores the copy that matrix products read.
      barriers: the platforms on which there are barriers at what is stored.
      barriers_until: from this place in the plan on there are none.
    """

    indices: Sequence[int]
    ins: Sequence[Any]
    outs: Sequence[Any]
    kept: frozenset[Any]
    barriers: Sequence[str]
    barriers_until: int

    def barriers_at(self, index: int) -> Sequence[str]:
        """Returns the platforms with barriers at what an equation reads or makes."""
        return self.barriers if index < self.barriers_until else keep.NOWHERE


def schedule(
    plan: Plan, recompute: Recompute, compute_dtype: Any
) -> list[Region | int]:
    """Returns the regions and the places of all other equations, in order.

    Args:
      plan: the plan.
      recompute: how much to compute again.
      compute_dtype: the dtype of low-precision values.
    """
    if (
        recompute is Recompute.NEVER
        or plan.site is Site.CLOSED
        or not _sizes_are_known(plan)
    ):
        return list(range(len(plan.steps)))
    values = plan.values()
    loose = moves_of_inputs(plan, values)
    light, heavy = _levels(plan, loose)
    readers = _readers(plan, light)
    order: list[Region | int] = [*loose]
    levels = sorted({*light, *heavy})
    for level in levels:
        if light[level]:
            is_last = (
                plan.site is Site.STRAIGHT and level == levels[-1] and not heavy[level]
            )
            made = [v for i in light[level] for v in plan.jaxpr.eqns[i].outvars]
            outs = [v for v in made if readers[v] - {level}]
            region = _region(
                plan, light[level], outs, values, recompute, compute_dtype, is_last
            )
            order += light[level] if region is None else [region]
        order += heavy[level]
    return order


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
    plan: Plan, loose: Collection[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Sorts equations by how many heavy ones stand before them at most.

    The light ones of one level can run in one go: no path between two of them leads
    through a heavy one.
    """
    level_of: dict[Any, int] = defaultdict(int)
    light: dict[int, list[int]] = defaultdict(list)
    heavy: dict[int, list[int]] = defaultdict(list)
    floor = 0  # effects keep their order
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if i in loose:
            continue
        level = max((level_of[v] for v in variables(eqn.invars)), default=0)
        if is_light(eqn):
            light[level].append(i)
        else:
            if eqn.effects:
                level = floor = max(level, floor)
            heavy[level].append(i)
            level += 1
        level_of.update(dict.fromkeys(eqn.outvars, level))
    return light, heavy


def _readers(plan: Plan, light: dict[int, list[int]]) -> dict[Any, set[int | None]]:
    """Returns the levels whose regions read each variable; `None` stands for others."""
    level_at = {i: level for level, indices in light.items() for i in indices}
    readers: dict[Any, set[int | None]] = defaultdict(set)
    for i, eqn in enumerate(plan.jaxpr.eqns):
        for v in variables(eqn.invars):
            readers[v].add(level_at.get(i))
    for v in variables(plan.jaxpr.outvars):
        readers[v].add(None)
    return readers


def _region(
    plan: Plan,
    indices: list[int],
    outs: list[Any],
    values: dict[Any, Value | None],
    recompute: Recompute,
    compute_dtype: Any,
    is_last: bool,
) -> Region | None:
    """Returns the region of some light equations, if recomputing saves anything."""
    eqns = [plan.jaxpr.eqns[i] for i in indices]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = [v for eqn in eqns for v in variables(eqn.invars)]
    ins = list(dict.fromkeys(v for v in reads if v not in made))
    in_loop = plan.site not in (Site.STRAIGHT, Site.BLOCK)
    keeps_operands = not in_loop and recompute is Recompute.AUTO
    residuals = choose(
        eqns,
        [plan.steps[i] for i in indices],
        ins,
        values,
        compute_dtype,
        keeps_operands=keeps_operands,
    )
    if not _is_worth_it(plan.site, keeps_operands, residuals):
        return None
    if in_loop:
        barriers = keep.NOWHERE
    elif recompute is Recompute.ALWAYS:
        barriers = keep.EVERYWHERE
    else:
        barriers = keep.ON_GPU
    return Region(
        indices=indices,
        ins=ins,
        outs=outs,
        kept=residuals.kept,
        barriers=barriers,
        barriers_until=_start_of_head(plan, indices) if is_last else len(plan.steps),
    )


def _is_worth_it(site: Site, keeps_operands: bool, residuals: Residuals) -> bool:
    """Whether recomputing saves enough."""
    if keeps_operands:
        # Where little is saved, barriers only force XLA to store what it need not.
        return residuals.saved_bytes > 0.5 * residuals.stored_bytes
    saved = residuals.saved_bytes + residuals.called_bytes
    # The steps of an RNN are small and wait for one another: there time counts.
    return saved > (_SMALL_STEP if site is Site.STEPS else 0)


def _start_of_head(plan: Plan, indices: Sequence[int]) -> int:
    """Returns where the head of a model begins: behind its last product but one.

    The backward pass of the head follows at once. Nothing of it is stored for long, and
    there barriers only get in the way of fusions.
    """
    eqns = plan.jaxpr.eqns
    products = [i for i in indices if eqns[i].primitive.name in LOW_OPS]
    return products[-2] + 1 if len(products) > 1 else 0
