"""A fingerprint of an array that does not depend on how the array is sharded.

Orbax checks the files that describe an array, not the bytes of the array itself: one
flipped byte is restored without a word. The digest here is computed where the array
lies, by every device on its own part, and summed; so it costs one pass over memory and
no transfer, holds on any mesh and any number of processes, and is exact: it is integer
arithmetic on bits.

Each 32-bit word is mixed with its place by a bijection, and the mixed words are added
up modulo 2**32, twice with different constants. A change of one word changes its
summand, and so the sum, with certainty; other changes go unseen with a probability of
about 2**-64. It guards against broken disks, not against malice. The mixing step is the
finalizer of MurmurHash3 (Appleby, 2011).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

_SEEDS = (0x9E3779B9, 0x85EBCA77)


def digests(tree: PyTree) -> PyTree:
    """Returns 16 hexadecimal digits for each array of a tree.

    Args:
      tree: JAX or NumPy arrays of any shape and dtype, typed keys included. Arrays that
        live on several processes must be passed by all of them.

    Example:
      >>> digests({"w": jnp.zeros(3)}) == digests({"w": np.zeros(3, np.float32)})
      True
      >>> digests({"w": jnp.zeros(3)}) == digests({"w": -jnp.zeros(3)})
      False
    """
    leaves, treedef = jax.tree.flatten(tree)
    sums = jax.device_get([_digest(_as_data(leaf)) for leaf in leaves])
    return jax.tree.unflatten(treedef, [f"{a:08x}{b:08x}" for a, b in sums])


def _as_data(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize == 8:
        return leaf.view(np.uint32)  # JAX would take half of the bits away
    return leaf


@jax.jit
def _digest(array: jax.Array) -> jax.Array:
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place + along * jnp.uint32(stride) if size > 1 else place
    mixed = [_mix(words ^ _mix(place + jnp.uint32(seed))) for seed in _SEEDS]
    # dtype: with x64 enabled a sum of uint32 would be 64 bits wide.
    return jnp.stack([jnp.sum(m, dtype=jnp.uint32) for m in mixed])


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32, of its shape or with one axis more."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], -1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = jnp.iinfo if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo
    size = bits(array.dtype).bits
    if size >= 32:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    unsigned = {16: jnp.uint16, 8: jnp.uint8}.get(size)
    if unsigned is None:  # int4 and smaller: every value is its own
        return array.astype(jnp.int32).view(jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Maps uint32 to uint32, one to one; every bit of the result hangs on all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
