"""What the arguments of a factory are to JAX: leaves, or a part of the structure.

An argument may hold both, such as the optimizers and the plain functions in a tuple.
Its `moving` part is the same tree with `None` for what is fixed, its `fixed` part the
same with `None` for what moves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._compat import weakly_typed
from flax_amp._exact import Exact, split

PyTree = Any

# How numbers are handed to a factory under a trace: as `Exact`, as a weakly typed
# array, or, where neither works, as a Python number, which JAX does not trace at all.
EXACT, ARRAY, STATIC = "exact", "array", "static"


class Fixed:
    """The fixed parts of all arguments, as hashable metadata of a pytree.

    Args:
      values: by the name of the argument.
      modes: how the numbers of an argument are handed over.
      places: trees like the arguments, with the place that what a number leaves out has
        in the array of remainders.
    """

    def __init__(
        self,
        values: Mapping[str, PyTree],
        modes: Mapping[str, str],
        places: Mapping[str, PyTree],
    ):
        self.values = dict(values)
        self.modes = dict(modes)
        self.places = dict(places)
        # One tuple, made once: JAX compares it at every call of a compiled function.
        self._key = (
            tuple((name, *key_of(value)) for name, value in self.values.items()),
            tuple(self.modes.items()),
            tuple((name, *key_of(tree)) for name, tree in self.places.items()),
        )
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Fixed) and self._key == other._key)

    def __repr__(self) -> str:
        # JAX shows it where two structures should be one and are not.
        shown = (f"{n}={v!r}" for n, v in self.values.items() if any_of(v))
        return f"Fixed({', '.join(shown)})"


def key_of(value: PyTree) -> tuple[Any, ...]:
    """Returns what tells two fixed values apart, hashable."""
    leaves, structure = jax.tree.flatten(value, is_leaf=_ends)
    return structure, *map(_leaf_key, leaves)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        return type(leaf), id(leaf)
    if _tree.is_array(leaf):
        array = np.asarray(leaf)
        return array.shape, str(array.dtype), array.tobytes()
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal


# Parts of an argument


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a real number: of Python, of NumPy, or an array of no axes."""
    if isinstance(leaf, int | float):
        return not isinstance(leaf, bool)
    return is_real(leaf) and leaf.shape == ()


def is_real(leaf: Any) -> bool:
    """Whether a leaf is an array of real numbers, one for each run of a sweep, say."""
    if isinstance(leaf, type) or not hasattr(leaf, "shape"):
        return False
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    )


def map_nested(function: Callable[[tuple[str, ...], Any], Any], value: PyTree) -> Any:
    """Maps over `(path, leaf)` of an argument; optimizers and functions are leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(tuple(map(key_name, path)), leaf),
        value,
        is_leaf=_ends,
    )


def nested_leaves(value: PyTree) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the `(path, leaf)` pairs that `map_nested` maps over."""
    named = jax.tree_util.tree_leaves_with_path(value, is_leaf=_ends)
    return [(tuple(map(key_name, path)), leaf) for path, leaf in named]


def key_name(key: Any) -> str:
    """Returns the name of one step of a path."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def any_of(part: PyTree) -> bool:
    """Whether a part of an argument holds anything."""
    return any(leaf is not None for leaf in jax.tree.leaves(part, is_leaf=_ends))


def may_move(value: PyTree) -> bool:
    """Whether an argument holds a number or an array, not inside of something else."""
    leaves = jax.tree.leaves(value, is_leaf=_ends)
    return any(is_number(leaf) or _tree.is_array(leaf) for leaf in leaves)


def fitted(value: PyTree, old: PyTree, fixed: PyTree, mode: str) -> Any:
    """Returns an argument as leaves that replace older ones, if the structure stays.

    Args:
      value: the argument.
      old: the moving part of the one that it replaces.
      fixed: the fixed part of that.
      mode: of both.

    Returns:
      `(moving, lows)`, with `None` in `lows` where the old remainder stays; or `None`
      if it does not fit.
    """
    moving, rest = part(value, mode)
    if key_of(rest) != key_of(fixed):
        return None
    structure: Any
    news, structure = jax.tree.flatten(moving, is_leaf=_ends)
    olds, other = jax.tree.flatten(old, is_leaf=_ends)
    pairs = list(zip(news, olds, strict=False))
    if structure != other or not all(_replaces(new, leaf) for new, leaf in pairs):
        return None
    leaves = [
        as_leaf(new, leaf) if new is not leaf and _is_value(new) else (new, None)
        for new, leaf in pairs
    ]
    return tuple(structure.unflatten([leaf[i] for leaf in leaves]) for i in (0, 1))


def _is_value(leaf: Any) -> bool:
    return is_number(leaf) or is_real(leaf)


def _replaces(new: Any, old: Any) -> bool:
    if _is_value(new):
        return is_real(old)
    structure: Any = jax.tree.structure(new)
    return structure == jax.tree.structure(old)


def part(value: PyTree, mode: str) -> tuple[PyTree, PyTree]:
    """Splits an argument into `(moving, fixed)`."""
    moving = walk(lambda leaf: leaf if _moves(leaf, mode) else None, value)
    fixed = walk(lambda leaf: None if _moves(leaf, mode) else leaf, value)
    return moving, fixed


def join(moving: PyTree, fixed: PyTree) -> PyTree:
    """Undoes `part`; whatever took the place of a moving leaf is kept."""
    return walk(lambda rest, leaf: leaf if rest is None else rest, fixed, moving)


def walk(function: Callable[..., Any], value: PyTree, *others: PyTree) -> PyTree:
    """Maps over the leaves of an argument, `None` being one."""
    return jax.tree.map(function, value, *others, is_leaf=_ends)


def _moves(leaf: Any, mode: str) -> bool:
    if is_number(leaf) or _tree.is_array(leaf):
        return mode != STATIC and not _is_flag(leaf)
    return leaf is not None and _is_node(leaf)


def _is_flag(leaf: Any) -> bool:
    """Whether an array is a known bool, as in masks."""
    if isinstance(leaf, jax.core.Tracer) or not _tree.is_array(leaf):
        return False
    return leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.bool_)


def _ends(value: Any) -> bool:
    """Whether a value is taken as one: functions and optimizers, even if a pytree."""
    optimizer = hasattr(value, "init") and hasattr(value, "update")
    return value is None or callable(value) or optimizer


def _is_node(leaf: Any) -> bool:
    """Whether something that is taken as one is a pytree of arrays to JAX."""
    leaves = jax.tree.leaves(leaf)
    itself = len(leaves) == 1 and leaves[0] is leaf
    return not itself and all(map(_tree.is_array, leaves))


# Numbers as leaves


def leaves_of(moving: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the moving part of an argument as arrays, and what these leave out."""
    pairs = walk(_leaf_of, moving)
    return tuple(walk(lambda _, pair, i=i: pair[i], moving, pairs) for i in (0, 1))


def _leaf_of(value: Any) -> tuple[Any, Any]:
    if is_number(value):
        return as_leaf(value)
    dtype = jax.dtypes.canonicalize_dtype(float)
    if is_real(value) and value.dtype == dtype:  # the numbers of several runs
        return value, np.zeros((), dtype)
    return value, None


def as_leaf(number: Any, like: Any = None) -> tuple[Any, Any]:
    """Returns a number as a strongly typed array, and what that leaves out.

    Args:
      number: of Python, of NumPy, or an array.
      like: the leaf that it replaces; it then lies where that lies, and is a float if
        that is one. One number replaces those of all runs of a sweep.

    Returns:
      Two arrays of one dtype; the second is `None` for integers, and 0 for arrays.
    """
    floating = any(_is_float(x) for x in (number, like) if x is not None)
    dtype = jax.dtypes.canonicalize_dtype(float if floating else int)
    if like is not None and _is_float(like):
        dtype = like.dtype
    high: Any
    low: Any
    if isinstance(number, jax.Array):
        # A copy: donating the one must not delete the other.
        high = jnp.array(number, dtype, copy=True)
        low = jnp.zeros((), dtype)
    elif np.ndim(number):
        high, low = np.asarray(number, dtype), np.zeros((), dtype)
    elif floating:
        high, low = split(number, dtype)
    else:
        high, low = _as_int(number, dtype), None
    if like is not None and np.ndim(like) and not np.ndim(high):
        high = jnp.broadcast_to(high, like.shape)
    if isinstance(like, jax.Array):
        high, low = jax.tree.map(lambda x: _placed(x, like), (high, low))
    return high, low if floating else None


def _is_float(number: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(number), jnp.floating)


def _as_int(number: Any, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        value = np.asarray(number).astype(dtype)
    if np.any(value != number):
        raise OverflowError(
            f"optim: {number} does not fit into {dtype}; expected a smaller whole "
            "number, or a float."
        )
    return value


def _placed(x: Any, like: jax.Array) -> jax.Array:
    if isinstance(like, jax.core.Tracer) or not like.committed:
        return jnp.asarray(x)
    return jax.device_put(x, like.sharding)


def given(leaf: Any, rest: Any, mode: str) -> Any:
    """Returns a leaf of a moving part as it is handed to a factory.

    Args:
      leaf: a number, an array, or what becomes an argument by itself.
      rest: what a number leaves out, or `None`.
      mode: of its argument.
    """
    if hasattr(leaf, "as_argument"):
        return leaf.as_argument()
    if not is_number(leaf):
        return leaf
    if _is_known(leaf) and (rest is None or _is_known(rest)):
        # Nothing to trace: as if it had been called with the Python number.
        high = np.asarray(leaf)
        if rest is None or high + rest != high:  # see below
            return high.item()
        return high.item() + np.asarray(rest).item()
    array = jnp.asarray(leaf)
    if mode == EXACT and rest is not None:
        # A number that was changed by other means than `replace`, by `tree.map` say,
        # still has the remainder of the old one.
        return Exact(array, jnp.where(array + rest == array, rest, 0))
    return weakly_typed(array)


def stacked(lows: list[Any]) -> Any:
    """Returns the remainders of several numbers as one array, the last axis of which
    goes over the numbers; `None` if there are none."""
    if not lows:
        return None
    if all(isinstance(low, np.ndarray) for low in lows):
        return np.stack(lows, -1)
    return jnp.stack(jnp.broadcast_arrays(*lows), -1)


def put(remainders: Any, place: int, low: Any) -> Any:
    """Returns remainders with another one at a place."""
    if np.ndim(low) >= np.ndim(remainders):  # of several runs
        remainders = jnp.broadcast_to(remainders, (*low.shape, remainders.shape[-1]))
    if isinstance(remainders, np.ndarray) and isinstance(low, np.ndarray):
        changed = remainders.copy()
        changed[..., place] = low
        return changed
    return jnp.asarray(remainders).at[..., place].set(low)


def taken(remainders: Any, places: PyTree) -> PyTree:
    """Returns what the numbers of an argument leave out, `None` where nothing."""
    if remainders is not None:
        # It says nothing of its own: what is differentiated is the number.
        known = _is_known(remainders)
        remainders = (
            np.asarray(remainders) if known else jax.lax.stop_gradient(remainders)
        )
    return walk(lambda i: None if i is None else remainders[..., i], places)


def places_of(places: Mapping[str, PyTree]) -> dict[tuple[str, ...], int]:
    """Returns the places in the remainders by argument and path."""
    return {
        (name, *path): place
        for name, tree in places.items()
        for path, place in nested_leaves(tree)
        if place is not None
    }


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    return getattr(leaf, "is_fully_addressable", True)
