"""Where arrays that were read lie: on the devices of the target's."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp.checkpoint._layout import Path, name_of

T = TypeVar("T")


def samples(target: Any, where: str) -> dict[Path, Any]:
    """Returns the leaves of a target by path, each with a shape and a dtype.

    Raises:
      TypeError: if one has none.
    """
    found = {}
    for path, leaf in ocp.tree.to_flat_dict(target).items():
        if type(leaf) in (bool, int, float, complex):  # np.float64 is a float, too
            leaf = np.asarray(jnp.asarray(leaf))
        if not (path and hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{where}: {name_of(path) or 'the whole'} of the target is a "
                f"{type(leaf).__name__}; expected arrays and numbers. Pass an "
                "AmpTrainState, a TrainState or a dict of arrays."
            )
        found[path] = leaf
    return found


def rebuilt(target: T, values: Mapping[Path, Any]) -> T:
    """Returns a target with other leaves, by path; those that are missing stay."""
    leaves = ocp.tree.to_flat_dict(target)
    new = [values.get(path, leaf) for path, leaf in leaves.items()]
    result: T = jax.tree.unflatten(jax.tree.structure(target), new)
    return result


def abstract(leaf: Any) -> Any:
    """Describes a leaf to Orbax, with the sharding to restore it to."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def indivisible(wanted: Mapping[Path, Any]) -> list[str]:
    """Returns a line for each leaf whose shape its sharding does not divide."""
    lines = []
    for path, leaf in wanted.items():
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            continue
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            lines.append(
                f"{name_of(path)}: {list(leaf.shape)} not to be split by {sharding}"
            )
    return lines


def place(value: np.ndarray, like: Any) -> Any:
    """Puts a value where `like` lies, or would; of a typed key, the value is its data.

    Python numbers and NumPy arrays stay such.
    """
    if isinstance(like, bool | int | float | complex):
        return type(like)(value.item())
    if isinstance(like, np.ndarray | np.generic):
        return np.array(value, like.dtype)
    array: jax.Array
    if _is_placed(like):
        array = jax.make_array_from_callback(
            value.shape, like.sharding, lambda index: value[index]
        )
    else:
        array = jnp.array(value)
    if _tree.is_key(like):
        return jax.random.wrap_key_data(array, impl=_impl_of(like))
    return array


def commit_like(leaf: Any, like: Any) -> Any:
    """Undoes Orbax's commitment to a device where `like` is not committed to one.

    Whether an array is committed is part of what a compiled step is looked up by: the
    step would be compiled a second time after each restore.
    """
    if _is_placed(like):
        return leaf
    if _tree.is_key(leaf) or not isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
        return place(np.asarray(data), like)
    return jax.device_put(np.asarray(leaf))


def _impl_of(key: Any) -> Any:
    """Returns the implementation of a typed key, which may be abstract."""
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf has a value: it is neither abstract nor was it donated."""
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted()
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def _is_placed(like: Any) -> bool:
    """Whether the place of an array was chosen, and is not just JAX's default."""
    if isinstance(like, jax.Array):
        return like.committed
    return getattr(like, "sharding", None) is not None
