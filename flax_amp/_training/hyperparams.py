"""The hyper-parameters of all optimizers inside of a state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_amp import _tree
from flax_amp._training.aliases import PyTree
from flax_amp.optim._optimizer import INJECTED, Optimizer, pure


def collect_hyperparams(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns `hyperparams` of the optimizers in a state.

    They are those of `flax_amp.optim`, and of `optax.inject_hyperparams`. The names of
    several optimizers are preceded by their numbers.
    """
    holders = list(_holders(pure(opt_state)))
    return {
        f"{prefix}{name}": value
        for prefix, node in zip(_prefixes(holders), holders, strict=True)
        for name, value in _values(node).items()
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
    """Returns a state with new values for names of `collect_hyperparams`.

    Those of `optax.inject_hyperparams` cannot be replaced.
    """
    holders = list(_holders(opt_state))
    nodes, left = [], dict(changes)
    for prefix, node in zip(_prefixes(holders), holders, strict=True):
        if isinstance(node, Optimizer):
            of_node = {
                name.removeprefix(prefix): left.pop(name)
                for name in changes
                if name.startswith(prefix)
            }
            nodes.append(node.replace(**of_node) if of_node else node)
    if not nodes:
        raise TypeError(
            f"{caller}: the optimizer has no hyper-parameters to replace (those of "
            "optax.inject_hyperparams cannot be); expected one of flax_amp.optim. "
            "Create the state with tx=flax_amp.optim.adamw(3e-4)."
        )
    if left:
        raise TypeError(
            f"{caller}: no {', '.join(left)}; expected some of "
            f"{', '.join(collect_hyperparams(opt_state))}, except what "
            "optax.inject_hyperparams keeps. Correct the names."
        )
    return _tree.replace_nodes(opt_state, Optimizer, nodes)


def _holders(opt_state: PyTree) -> Iterator[Any]:
    """Yields what has `hyperparams`, from the outside in."""
    for node in _tree.nodes(opt_state, (Optimizer, *INJECTED)):
        yield node
        if not isinstance(node, Optimizer):  # an Optimizer tells those inside of it
            yield from _holders(node.inner_state)


def _values(holder: Any) -> dict[str, jax.Array]:
    """Returns the hyper-parameters of one optimizer."""
    if isinstance(holder, Optimizer):
        return holder.hyperparams
    # Copies, because the state may be donated.
    return jax.tree.map(_tree.strong_copy, dict(holder.hyperparams))


def _prefixes(holders: Sequence[Any]) -> list[str]:
    """Returns what precedes the names of each of several optimizers."""
    several = len(holders) > 1
    return [f"{number}/" if several else "" for number in range(len(holders))]
