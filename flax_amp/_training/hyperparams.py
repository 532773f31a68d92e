"""The hyper-parameters of all optimizers inside of a state."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flax_amp import _tree
from flax_amp._training.aliases import PyTree
from flax_amp.optim._optimizer import Optimizer, pure


def collect_hyperparams(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns `hyperparams` of the optimizers in a state.

    The names of several optimizers are preceded by their numbers.
    """
    optimizers = _tree.nodes(pure(opt_state), Optimizer)
    return {
        f"{prefix}{name}": value
        for prefix, node in zip(_prefixes(optimizers), optimizers, strict=True)
        for name, value in node.hyperparams.items()
    }


def hyperparam_metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns the numbers among `collect_hyperparams`, under names of metrics."""
    found = collect_hyperparams(opt_state)
    return {
        f"hyperparams/{name}": value for name, value in found.items() if not value.shape
    }


def replace_hyperparams(
    opt_state: PyTree, changes: Mapping[str, Any], caller: str
) -> PyTree:
    """Returns a state with new values for the names of `collect_hyperparams`."""
    nodes = _tree.nodes(opt_state, Optimizer)
    if not nodes:
        raise TypeError(
            f"{caller}: the optimizer has no hyper-parameters to replace; expected one "
            "of flax_amp.optim. Create the state with tx=flax_amp.optim.adamw(3e-4)."
        )
    prefixes = _prefixes(nodes)
    for i, prefix in enumerate(prefixes):
        of_node = {
            name.removeprefix(prefix): value
            for name, value in changes.items()
            if name.startswith(prefix)
        }
        nodes[i] = nodes[i].replace(**of_node) if of_node else nodes[i]
    if unknown := [n for n in changes if not n.startswith(tuple(prefixes))]:
        raise TypeError(
            f"{caller}: no {', '.join(unknown)}; expected some of "
            f"{', '.join(collect_hyperparams(opt_state))}."
        )
    return _tree.replace_nodes(opt_state, Optimizer, nodes)


def _prefixes(optimizers: Sequence[Any]) -> list[str]:
    """Returns what precedes the names of each of several optimizers."""
    several = len(optimizers) > 1
    return [f"{number}/" if several else "" for number in range(len(optimizers))]
