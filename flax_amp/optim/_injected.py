"""Hyper-parameters that `optax.inject_hyperparams` keeps in the state.

It copies its numbers into the state at `init`, and computes with these copies for ever
after: they, and not the arguments, are the values of a step.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp.optim._arguments import as_leaf, is_real

PyTree = Any

_KINDS = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def injected(opt_state: PyTree) -> dict[str, Any]:
    """Returns the numbers in a state by name; of several nodes, after their index."""
    entries = _entries(_tree.nodes(opt_state, _KINDS))
    return {name: value for _, name, value in entries}


def inject(opt_state: PyTree, changes: Mapping[str, Any]) -> PyTree:
    """Returns a state with other numbers, by the names of `injected`."""
    nodes = _tree.nodes(opt_state, _KINDS)
    for index, name, value in _entries(nodes):
        if name in changes:
            key = name.rpartition("/")[2]
            nodes[index] = _with(nodes[index], {key: as_leaf(changes[name], value)})
    return _tree.replace_nodes(opt_state, _KINDS, nodes)


def carried_over(opt_state: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Returns a state in which the copies of changed arguments are changed, too.

    Args:
      opt_state: a state.
      before: the one at `init`, with the old arguments.
      after: the same with the new ones.
    """
    nodes = _tree.nodes(opt_state, _KINDS)
    pairs = zip(_tree.nodes(before, _KINDS), _tree.nodes(after, _KINDS), strict=True)
    for index, (old, new) in enumerate(pairs):
        node = nodes[index]
        values = {
            key: jnp.where(
                new.hyperparams[key] == old.hyperparams[key],
                value,
                jnp.asarray(new.hyperparams[key], value.dtype),
            )
            for key, value in node.hyperparams.items()
            if is_real(value)
        }
        nodes[index] = _with(node, values)
    return _tree.replace_nodes(opt_state, _KINDS, nodes)


def _entries(nodes: list[Any]) -> list[tuple[int, str, Any]]:
    """Returns `(index of the node, name, value)` of every number."""
    return [
        (index, key if len(nodes) == 1 else f"{index}/{key}", value)
        for index, node in enumerate(nodes)
        for key, value in node.hyperparams.items()
        if is_real(value)
    ]


def _with(node: Any, values: Mapping[str, Any]) -> Any:
    return node._replace(hyperparams={**node.hyperparams, **values})
