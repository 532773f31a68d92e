"""Where arrays that were read lie: on the devices of the target's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._layout import is_key


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Describes a leaf with the sharding to restore it to."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


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
    if is_key(like):
        return jax.random.wrap_key_data(array, impl=_impl_of(like))
    return array


def commit_like(leaf: jax.Array, like: Any) -> jax.Array:
    """Undoes Orbax's commitment to a device where `like` is not committed to one.

    Whether an array is committed is part of what a compiled step is looked up by: the
    step would be compiled a second time after each restore.
    """
    if _is_placed(like):
        return leaf
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    placed: jax.Array = place(np.asarray(data), like)
    return placed


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
