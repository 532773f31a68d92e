"""Helpers for pytrees and lists. They know nothing of policies, scalers or Flax."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

PyTree = Any
Kind = type | tuple[type, ...]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a JAX or NumPy array, typed PRNG keys and tracers included.

    NumPy arrays of objects, strings and times do not count, because JAX does not take
    such arrays.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUmM"
    return isinstance(leaf, jax.Array)


def is_array_or_shape(leaf: Any) -> bool:
    """Whether a leaf is an array, or a `ShapeDtypeStruct`."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is an array, a `ShapeDtypeStruct` or a Python number."""
    return is_array_or_shape(leaf) or isinstance(leaf, bool | int | float | complex)


def is_inexact_array(leaf: Any) -> bool:
    """Whether a leaf is an array of floating or complex numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_half(leaf: Any) -> bool:
    """Whether a leaf is an array, or a shape, of bfloat16 or float16."""
    return getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array or a Python number that is floating or complex."""
    return isinstance(leaf, float | complex) or is_inexact_array(leaf)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, or the shape of such an array."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_impl(key: Any) -> Any:
    """Returns the implementation of typed keys, which may be abstract."""
    # Only a trace tells the implementation of a `ShapeDtypeStruct`.
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


def widen(x: Any) -> jax.Array:
    """Returns an array, or a Python number, in at least float32."""
    x = jnp.asarray(x)
    # float64 and complex numbers are wider already, and keep their dtype.
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def float32_if_bfloat16(leaf: Any) -> Any:
    """Returns a bfloat16 array or shape in float32, and each further leaf unchanged."""
    if getattr(leaf, "dtype", None) != jnp.bfloat16:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=jnp.float32)
    return leaf.astype(jnp.float32)


def own(leaf: Any) -> Any:
    """Copies an array to a JAX array; the original stays when the copy is donated."""
    return jnp.array(leaf, copy=True) if is_array(leaf) else leaf


def strong_copy(leaf: Any) -> Any:
    """Returns a number or an array as a strongly typed JAX array of its own.

    JAX would trace a step again for an array with a weak type.
    """
    if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
        return leaf
    array = jnp.asarray(leaf)
    return jnp.array(array, dtype=array.dtype, copy=True)


def with_weak_type(x: jax.Array, is_weak: bool) -> jax.Array:
    """Returns an array with or without a weak type.

    Arrays with a weak type promote as Python numbers do. JAX has no public function
    that casts to a weak type.
    """
    if getattr(jax.typeof(x), "weak_type", False) == is_weak:
        return x
    convert = primitives.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=is_weak, sharding=None)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns bool[]: no floating or complex leaf of `tree` holds an inf or a NaN.

    A tree without such leaves is finite.

    Args:
      tree: any pytree, such as `(loss, grads)`.

    Example:
      >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf]), "n": 3}))
      False
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return _all([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])


def stays_finite(new: PyTree, old: PyTree) -> jax.Array:
    """Returns bool[]: no element is an inf or a NaN in `new` that was finite in `old`.

    An element that was not finite before may stay infinite or NaN: a running maximum
    starts at -inf. `None` in `new` stands for a leaf that did not change.
    """

    def of_leaf(new: Any, old: Any) -> Any:
        if new is None or not is_inexact(new):
            return None
        return jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))

    # `None`, for a leaf that did not change, is no leaf, and so has no flag.
    return _all(jax.tree.leaves(map_or_none(of_leaf, new, old)))


def _all(flags: Sequence[jax.Array]) -> jax.Array:
    if not flags:
        return jnp.array(True)
    return jnp.all(jnp.stack(flags))


def select(predicate: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Returns the leaves of `on_true` or `on_false` bit for bit, also typed keys."""
    # By `where`, not by a product with 0 and 1: `0 * nan` is NaN, and -0.0 stays -0.0.
    return jax.tree.map(
        lambda new, old: jnp.where(predicate, new, old), on_true, on_false
    )


def nodes(tree: PyTree, kind: Kind) -> list[Any]:
    """Returns the outermost nodes of a type in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def replace_nodes(tree: PyTree, kind: Kind, new: Iterable[Any]) -> PyTree:
    """Returns a tree with new nodes in place of the nodes that `nodes` returns."""
    new = iter(new)
    return jax.tree.map(
        lambda leaf: next(new) if isinstance(leaf, kind) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )


def partition(tree: PyTree, where: Callable[[Any], bool]) -> tuple[PyTree, PyTree]:
    """Splits a tree into `(matching, rest)`, with `None` in place of absent leaves."""
    # Two maps, because a pair in the place of each leaf would be two more leaves.
    matching = jax.tree.map(lambda leaf: leaf if where(leaf) else None, tree)
    rest = jax.tree.map(lambda leaf: None if where(leaf) else leaf, tree)
    return matching, rest


def map_or_none(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps over the leaves of trees; `None` counts as a leaf."""
    return jax.tree.map(function, *trees, is_leaf=lambda leaf: leaf is None)


def partition_like(tree: PyTree, matching: PyTree) -> PyTree:
    """Returns `tree` with `None` where `matching` has `None`."""
    return map_or_none(
        lambda leaf, like: None if like is None else leaf, tree, matching
    )


def combine(matching: PyTree, rest: PyTree) -> PyTree:
    """Puts the two trees of `partition` together again."""
    return map_or_none(
        lambda left, right: right if left is None else left, matching, rest
    )


@dataclasses.dataclass(frozen=True)
class Method:
    """A method that is equal to the same method of an equal object.

    Python compares bound methods by the identity of their objects. Two states have the
    same structure, and share a compiled step, only if their static functions are equal.
    """

    of: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.of, self.name)(*args, **kwargs)


# --- lists ---------------------------------------------------------------------------


def pick(items: Iterable[Any], mask: Iterable[bool]) -> list[Any]:
    """Returns the items in the places that a mask selects."""
    return [item for item, chosen in zip(items, mask, strict=True) if chosen]


def fill(
    chosen: Iterable[Any], mask: Iterable[bool], others: Iterable[Any]
) -> list[Any]:
    """Returns `others` with the chosen items in the places that a mask selects."""
    rest = iter(chosen)
    pairs = zip(mask, others, strict=True)
    return [next(rest) if is_chosen else other for is_chosen, other in pairs]


def split_list(items: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
    """Splits a sequence into groups of the given sizes and the rest."""
    rest = iter(items)
    return [*(tuple(itertools.islice(rest, n)) for n in counts), tuple(rest)]
