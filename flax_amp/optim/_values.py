"""What hyper-parameters are at this step: numbers, and schedules at their counts."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp.optim._arguments import key_name
from flax_amp.optim._transformation import settled_leaf

PyTree = Any


# What states of optax call the count that they give to schedules.
_COUNTS = ("count", "step_count", "step")

# States of what does not update the optimizer inside at every step.
_GATES = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)


def last_counts(opt_state: PyTree, schedules: int) -> list[Any]:
    """Returns the counts that the last update gave to schedules, 0 before the first.

    Where the state has a count for each schedule they are in one order; else all are
    taken to count alike, unless some optimizers of the state are not updated at every
    step. `None` if the state counts nothing, or not all alike.
    """
    if opt_state is None:
        return [0] * schedules
    counts = _scheduled(opt_state)
    if len(counts) != schedules:
        candidates = [found for part in _parts(opt_state) if (found := _counts(part))]
        alike = len(candidates) == 1
        counts = [candidates[0][0] if alike else None] * schedules
    return [None if count is None else jnp.maximum(count - 1, 0) for count in counts]


def _counts(opt_state: PyTree) -> list[Any]:
    """Returns what may be the count of all schedules, the likeliest first."""
    if counts := _scheduled(opt_state):
        return counts
    named = jax.tree_util.tree_leaves_with_path(opt_state)
    names = [(key_name(path[-1]), leaf) for path, leaf in named if path]
    return [leaf for wanted in _COUNTS for name, leaf in names if name == wanted]


def _scheduled(opt_state: PyTree) -> list[Any]:
    """Returns the counts that optax keeps for schedules and nothing else."""
    return [node.count for node in _tree.nodes(opt_state, optax.ScaleByScheduleState)]


def _parts(opt_state: PyTree) -> Iterator[PyTree]:
    """Yields the parts of a state that are updated at the same steps."""
    gates = _tree.nodes(opt_state, _GATES)
    yield _tree.replace_nodes(opt_state, _GATES, [None] * len(gates))
    for gate in gates:
        yield from _parts(tuple(gate))


def value_at(entry: Any, count: Any) -> jax.Array | None:
    """Returns the value of a number or a schedule; `None` without a count."""
    if callable(entry):
        return None if count is None else settled_leaf(jnp.asarray(entry(count)))
    return settled_leaf(jnp.array(entry))  # the state may be donated


def gives_a_float(function: Callable[..., Any]) -> bool:
    """Whether a function of unknown type is a schedule: one number in, one out."""
    try:
        value = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # whatever a function raises for what it does not expect
        return False
    return getattr(value, "shape", None) == () and jnp.issubdtype(
        value.dtype, jnp.floating
    )
