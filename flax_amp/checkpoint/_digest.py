"""A fingerprint of an array that does not depend on how the array is sharded.

Orbax checks the files that describe an array, not the bytes of the array itself: one
flipped byte is restored without a word. The digest here is computed where the array
lies, by every device on its own part, and summed on the host; so it costs one pass over
memory and no transfer of arrays, holds on any mesh and any number of processes, and is
exact: it is integer arithmetic on bits. The devices do not talk to each other: programs
with collectives that are dispatched one after the other may wait for each other for
ever where several processes run them.

Each 32-bit word is mixed with its place by a bijection, and the mixed words are added
up modulo 2**32; so are those words mixed once more. A change of one word changes its
summand, and so the sum, with certainty; other changes go unseen with a probability of
about 2**-64, but for words that change places over a distance of a multiple of 2**32.
It guards against broken disks, not against malice. The mixing step is the finalizer of
MurmurHash3 (Appleby, 2011).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

PyTree = Any

_ODD = 0x9E3779B1  # spreads the places; odd, so one to one
_AGAIN = 0x85157AF5  # before the second mixing, for it not to be the first one
_NOTHING = np.zeros(2, np.uint32)


def digests(tree: PyTree) -> PyTree:
    """Returns 16 hexadecimal digits for each array of a tree.

    Args:
      tree: JAX or NumPy arrays of any shape and dtype, typed keys included. A tree
        with arrays that live on several processes must be passed by all of them.

    Example:
      >>> digests({"w": jnp.zeros(3)}) == digests({"w": np.zeros(3, np.float32)})
      True
      >>> digests({"w": jnp.zeros(3)}) == digests({"w": -jnp.zeros(3)})
      False
    """
    leaves, treedef = jax.tree.flatten(tree)
    together = not all(map(_is_whole, leaves))
    # What each process has whole is answered for by the first.
    mine = not together or jax.process_index() == 0
    parts = [
        _parts(_as_data(leaf)) if mine or not _is_whole(leaf) else [_NOTHING]
        for leaf in leaves
    ]
    sums: Any = np.array(
        [np.sum(p, axis=0, dtype=np.uint32) for p in jax.device_get(parts)]
    ).reshape(len(leaves), 2)
    if together:
        everybody = multihost_utils.process_allgather(sums)
        sums = np.sum(everybody, axis=0, dtype=np.uint32)
    return jax.tree.unflatten(treedef, [f"{a:08x}{b:08x}" for a, b in sums])


def _is_whole(leaf: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _as_data(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize >= 8:
        # JAX would take half of the bits away.
        return np.ascontiguousarray(leaf)[..., None].view(np.uint32)
    return leaf


def _parts(array: Any) -> list[jax.Array]:
    """Returns uint32[2] for each part of an array that this process answers for."""
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
    if isinstance(array, jax.Array):
        shards = [s for s in array.addressable_shards if s.replica_id == 0]
        parts = [(s.data, [at.start or 0 for at in s.index]) for s in shards]
    else:
        parts = [(array, [0] * array.ndim)]
    return [
        _digest(data, _uint32(start), _uint32(strides)) for data, start in parts
    ] or [_NOTHING]


def _uint32(numbers: list[int]) -> np.ndarray:
    return np.array([number % 2**32 for number in numbers], np.uint32)


@jax.jit
def _digest(part: jax.Array, start: jax.Array, strides: jax.Array) -> jax.Array:
    """Sums the mixed words of a part that begins at `start` of the whole array."""
    words = _words(part)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(part.ndim):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place + (along + start[axis]) * strides[axis]
    for axis in range(part.ndim, words.ndim):  # several words to an element
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * jnp.uint32(words.shape[axis]) + along
    mixed = _mix(words ^ (place * jnp.uint32(_ODD)))
    again = _mix(mixed ^ jnp.uint32(_AGAIN))
    # One reduction of two: XLA does not fuse two of one, and reads twice.
    zero = jnp.uint32(0)
    sums = jax.lax.reduce((mixed, again), (zero, zero), _add, range(words.ndim))
    return jnp.stack(sums)


def _add(left: Any, right: Any) -> Any:
    return left[0] + right[0], left[1] + right[1]


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
    unsigned = {16: jnp.uint16, 8: jnp.uint8, 4: jnp.uint4, 2: jnp.uint2}[size]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Maps uint32 to uint32, one to one; every bit of the result hangs on all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
