"""Names for the types that pass between the modules of this room, and their check."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp import _tree

Array = jax.Array
PyTree = _tree.PyTree

# A pytree of arrays whose leading axis counts the examples.
Batch = PyTree
# What a step reports, by name: arrays, or what the `aux` of a loss holds.
Metrics = dict[str, Any]
# PRNG keys by the name of their stream.
Rngs = dict[str, Array]
# A function of the user's: `fn(params, batch)` or `fn(model, batch)`.
UserFn = Callable[..., Any]
# The name of a mapped axis, several of them, or `None` for none.
AxisName = Hashable | tuple[Hashable, ...] | None


def check_type(value: object, types: Any, name: str, expected: str) -> None:
    """Raises a TypeError unless `isinstance(value, types)`."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is a {type(value).__name__}; expected {expected}")


def check_leaves(tree: PyTree, name: str, caller: str, advice: str) -> None:
    """Raises a TypeError that lists the leaves that are no arrays and no numbers."""
    if wrong := [
        f"{name}{keystr(path)}, a {_type_name(leaf)}"
        for path, leaf in tree_leaves_with_path(tree)
        if not _tree.is_numeric(leaf)
    ]:
        raise TypeError(f"{caller} {'; '.join(wrong)}; expected {advice}")


def _type_name(leaf: object) -> str:
    dtype = getattr(leaf, "dtype", None)
    return type(leaf).__name__ if dtype is None else f"NumPy array of {dtype}"
