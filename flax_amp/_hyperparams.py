"""The hyper-parameters of all optimizers inside of a state."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flax_amp import _tree
from flax_amp._optimizer import Optimizer
from flax_amp._values import pure

PyTree = Any


def hyperparams_in(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns `hyperparams` of the optimizers in a state.

    The names of several optimizers are preceded by their numbers.
    """
    optimizers = _tree.nodes(pure(opt_state), Optimizer)
    return {
        f"{start}{name}": value
        for start, node in zip(_starts(optimizers), optimizers, strict=True)
        for name, value in node.hyperparams.items()
    }


def hyperparam_metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns the numbers among `hyperparams_in`, under names of metrics."""
    found = hyperparams_in(opt_state)
    return {
        f"hyperparams/{name}": value for name, value in found.items() if not value.shape
    }


def replace_in(opt_state: PyTree, changes: Mapping[str, Any], where: str) -> PyTree:
    """Returns a state with other hyper-parameters, by the names of `hyperparams_in`."""
    structure: Any
    leaves, structure = jax.tree.flatten(opt_state, is_leaf=_is_optimizer)
    at = [i for i, leaf in enumerate(leaves) if _is_optimizer(leaf)]
    if not at:
        raise TypeError(
            f"{where}: the optimizer has no hyper-parameters to replace; expected one "
            "of flax_amp.optim. Create the state with tx=flax_amp.optim.adamw(3e-4)."
        )
    starts = _starts(at)
    for start, i in zip(starts, at, strict=True):
        mine = {n[len(start) :]: v for n, v in changes.items() if n.startswith(start)}
        leaves[i] = leaves[i].replace(**mine) if mine else leaves[i]
    if lost := [n for n in changes if not n.startswith(tuple(starts))]:
        raise TypeError(
            f"{where}: no {', '.join(lost)}; expected some of "
            f"{', '.join(hyperparams_in(opt_state))}."
        )
    return structure.unflatten(leaves)


def _starts(optimizers: Sequence[Any]) -> list[str]:
    """Returns what precedes the names of each of several optimizers."""
    several = len(optimizers) > 1
    return [f"{number}/" if several else "" for number in range(len(optimizers))]


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, Optimizer)
