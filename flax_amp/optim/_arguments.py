"""What the arguments of a factory are to JAX: leaves, or a part of the structure.

An argument may hold both, such as the optimizers and the plain functions in a tuple.
Its `moving` part is the same tree with `None` for what is fixed, its `fixed` part the
same with `None` for what moves.

A float is a leaf in float32, and a pair in the array of remainders: the leaf again, and
what it leaves out of the Python float. The remainder counts only while leaf and pair
agree, so whatever else writes the leaf, an update by its gradient or a checkpoint, has
not to know of it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._compat import weakly_typed
from flax_amp.optim._decisions import Decisions
from flax_amp.optim._exact import Exact, split

PyTree = Any

# How numbers are handed to a factory under a trace: as `Exact`, as a weakly typed
# array, as an `Exact` that answers for a branch, or, where nothing else works, as a
# Python number, which JAX does not trace at all.
EXACT, ARRAY, BRANCH, STATIC = "exact", "array", "branch", "static"


class Fixed:
    """The fixed parts of all arguments, as hashable metadata of a pytree.

    Args:
      values: by the name of the argument.
      modes: how the numbers of an argument are handed over.
      places: of the floats in the array of remainders, by argument and path.
      decisions: the branches that the factory takes, see `flax_amp._decisions`.
    """

    def __init__(
        self,
        values: Mapping[str, PyTree],
        modes: Mapping[str, str],
        places: Mapping[tuple[str, ...], int],
        decisions: tuple[bool, ...] = (),
    ):
        self.values = dict(values)
        self.modes = dict(modes)
        self.places = dict(places)
        self.decisions = decisions
        # One tuple, made once: JAX compares it at every call of a compiled function.
        self._key = (
            tuple((name, *key_of(value)) for name, value in self.values.items()),
            tuple(self.modes.items()),
            tuple(self.places.items()),
            self.decisions,
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


def key_of(value: PyTree, leaf_key: Callable[[Any], Any] | None = None) -> Any:
    """Returns what tells two fixed values apart, hashable."""
    leaves, structure = jax.tree.flatten(value, is_leaf=_ends)
    return structure, *map(leaf_key or same_leaf, leaves)


def same_leaf(leaf: Any) -> Any:
    """Returns what tells two leaves apart, hashable."""
    if isinstance(leaf, jax.core.Tracer):
        return type(leaf), id(leaf)
    if _tree.is_array(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        return array.shape, str(leaf.dtype), array.tobytes()
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal


# Parts of an argument


def is_python(leaf: Any) -> bool:
    """Whether a leaf is a real number of Python."""
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a real number: of Python, of NumPy, or an array of no axes."""
    return is_python(leaf) or (is_real(leaf) and leaf.shape == ())


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
      `(moving, pairs)`, new pairs by path; or `None` if it does not fit.
    """
    moving, rest = part(value, mode)
    if key_of(rest) != key_of(fixed):
        return None
    structure: Any
    news, structure = jax.tree.flatten(moving, is_leaf=_ends)
    olds, other = jax.tree.flatten(old, is_leaf=_ends)
    both = list(zip(news, olds, strict=False))
    if structure != other or not all(_replaces(new, leaf) for new, leaf in both):
        return None
    leaves = [_as_own(new, leaf) for new, leaf in both]
    pairs = {path: pair for path, pair in pairs_of(moving).items() if pair.any()}
    return structure.unflatten(leaves), pairs


def _as_own(new: Any, old: Any) -> Any:
    if new is old:
        return old
    if _is_value(new):
        return as_leaf(new, old)
    return jax.tree.map(lambda x: _tree.own(x) if isinstance(x, jax.Array) else x, new)


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
        return mode != STATIC and not _is_flag(leaf) and not _is_too_large(leaf)
    return leaf is not None and _is_node(leaf)


def _is_too_large(leaf: Any) -> bool:
    """Whether a known integer has no array, as seeds above 2**31."""
    if not isinstance(leaf, int | np.integer):
        return False
    info = np.iinfo(jax.dtypes.canonicalize_dtype(int))
    return not info.min <= leaf <= info.max


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


def leaves_of(moving: PyTree) -> PyTree:
    """Returns the moving part of an argument as arrays."""
    return walk(lambda leaf: as_leaf(leaf) if is_number(leaf) else leaf, moving)


def pairs_of(moving: PyTree) -> dict[tuple[str, ...], Any]:
    """Returns `(number, remainder)`, float32[2], of each float by its path.

    Zeros for what is an array already, which leaves out nothing.
    """
    dtype = jax.dtypes.canonicalize_dtype(float)
    pairs = {}
    for path, leaf in nested_leaves(moving):
        if isinstance(leaf, float | np.floating):
            pairs[path] = np.stack(split(leaf, dtype))
        elif _is_value(leaf) and jnp.result_type(leaf) == dtype:
            pairs[path] = np.zeros(2, dtype)
    return pairs


def as_leaf(number: Any, like: Any = None) -> Any:
    """Returns a number as a strongly typed array.

    Args:
      number: of Python, of NumPy, or an array.
      like: the leaf that it replaces; it then lies where that lies, and is a float if
        that is one. One number replaces those of all runs of a sweep.
    """
    floating = any(_is_float(x) for x in (number, like) if x is not None)
    dtype = jax.dtypes.canonicalize_dtype(float if floating else int)
    if like is not None and _is_float(like):
        dtype = like.dtype
    # A copy: donating the one must not delete the other, nor may it be written to.
    if isinstance(number, jax.Array):
        leaf: Any = jnp.array(number, dtype, copy=True)
    else:
        with np.errstate(over="ignore"):
            leaf = np.array(number, dtype)
    known = not floating and is_known(number)
    if known and np.any(np.asarray(leaf) != np.asarray(number)):
        raise OverflowError(
            f"optim: {number} does not fit into {dtype}; expected a smaller integer."
        )
    if like is not None and np.ndim(like) and not np.ndim(leaf):
        leaf = jnp.broadcast_to(leaf, like.shape)
    return _placed(leaf, like) if isinstance(like, jax.Array) else leaf


def _is_float(number: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(number), jnp.floating)


def _placed(leaf: Any, like: jax.Array) -> jax.Array:
    if isinstance(like, jax.core.Tracer) or not like.committed:
        return jnp.asarray(leaf)
    return jax.device_put(leaf, like.sharding)


def shown(
    moving: PyTree,
    pairs: Mapping[Any, Any],
    mode: str,
    decisions: Decisions | None = None,
    known: Mapping[Any, Any] | None = None,
) -> PyTree:
    """Returns the moving part of an argument as it is handed to a factory.

    Args:
      moving: the part.
      pairs: those of its floats, by path.
      mode: of the argument.
      decisions: for a mode of `BRANCH`; `None` if all its numbers are known.
      known: the values of its numbers by path, if these decide.
    """

    def given(path: tuple[str, ...], leaf: Any) -> Any:
        pair = pairs.get(path)
        if mode != BRANCH or decisions is None or not is_number(leaf):
            return _given(leaf, pair, EXACT if mode == BRANCH else mode)
        value = None if known is None else functools.partial(known.get, path)
        return _exact_of(jnp.asarray(leaf), pair).deciding(value, decisions)

    return map_nested(given, moving)


def _given(leaf: Any, pair: Any, mode: str) -> Any:
    if hasattr(leaf, "as_argument"):
        return leaf.as_argument()
    if not is_number(leaf):
        return leaf
    if is_known(leaf) and (pair is None or is_known(pair)):
        # Nothing to trace: as if it had been called with the Python number.
        return _as_python(np.asarray(leaf), pair)
    array = jnp.asarray(leaf)
    return _exact_of(array, pair) if mode == EXACT else weakly_typed(array)


def _exact_of(array: jax.Array, pair: Any) -> Exact:
    if jnp.issubdtype(array.dtype, jnp.integer):
        return Exact(None, None, array)
    if np.ndim(pair) != 1:  # of several runs, or none
        return Exact(array, jnp.zeros_like(array))
    return Exact(array, jnp.where(pair[0] == array, pair[1], 0))


def _as_python(number: np.ndarray, pair: Any) -> Any:
    if np.ndim(pair) != 1 or pair[0] != number or not np.isfinite(number):
        return number.item()
    value = float(number) + float(pair[1])
    # The sum has 48 bits of 53. What was written with few digits is found again.
    short = float(f"{value:.14g}")
    return (
        short if np.array_equal(np.stack(split(short, number.dtype)), pair) else value
    )


def put(remainders: Any, place: int, pair: Any) -> Any:
    """Returns remainders with another pair at a place."""
    if np.ndim(pair) >= np.ndim(remainders):  # of several runs
        remainders = jnp.broadcast_to(
            remainders, (*pair.shape[:-1], *remainders.shape[-2:])
        )
    if isinstance(remainders, np.ndarray) and isinstance(pair, np.ndarray):
        changed = remainders.copy()
        changed[..., place, :] = pair
        return changed
    return jnp.asarray(remainders).at[..., place, :].set(pair)


def taken(remainders: Any, place: int) -> Any:
    """Returns the pair at a place."""
    if is_known(remainders):
        return np.asarray(remainders)[..., place, :]
    # It says nothing of its own: what is differentiated is the number.
    return jax.lax.stop_gradient(remainders)[..., place, :]


def is_known(leaf: Any) -> bool:
    """Whether the value of a leaf can be had now."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    return getattr(leaf, "is_fully_addressable", True)
