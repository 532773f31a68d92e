"""Names of types, and checks of arguments, that the modules of this room share."""

import contextlib
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def check_count(value: Any, seen: str, what: str, least: int = 1) -> int:
    """Returns an integer, of Python or NumPy, or raises a ValueError if it is none.

    `seen` is the argument with its value for the message, `what` is what it counts.
    """
    with contextlib.suppress(TypeError):
        count = operator.index(value)
        if count >= least and not isinstance(value, bool):
            return count
    raise ValueError(
        f"{seen}; expected an integer of at least {least}, the number {what}."
    )


def first_of(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Returns the first items as text, and how many more there are."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def describe(value: Any) -> str:
    """Returns dtype and shape of a number or an array; the type of all else."""
    if _tree.is_numeric(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    dtype = getattr(value, "dtype", None)
    return f"a {type(value).__name__}" if dtype is None else f"a NumPy array of {dtype}"


def check_leaves(tree: PyTree, name: str, caller: str, expected: str) -> None:
    """Raises a TypeError that lists the leaves that are neither arrays nor numbers."""
    if wrong := [
        ", ".join(filter(None, (f"{name}{keystr(path)}", describe(leaf))))
        for path, leaf in tree_leaves_with_path(tree)
        if not _tree.is_numeric(leaf)
    ]:
        raise TypeError(f"{caller} {'; '.join(wrong)}; expected {expected}")
