"""What is measured of an array and its counterpart in float32, on the device.

Only a few numbers for each array, and for each iteration of the loop around it, leave
the device.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._compat import Array

# Magnitudes are counted by exponent: `e` has those above `2**(e - 1)`, up to `2**e`.
# What lies outside counts at the border.
EXPONENTS = range(-48, 25)
FLUSHED = -25  # float16 rounds magnitudes of up to this exponent to zero


class Difference(NamedTuple):
    """How an array differs from its counterpart, one number for each iteration.

    Attributes:
      distance: the L2 norm of the difference, over the finite elements of the
        counterpart. It is infinite if one of them is not finite in the array.
      reference: the L2 norm of these elements of the counterpart.
    """

    distance: Any
    reference: Any


class Magnitudes(NamedTuple):
    """The finite magnitudes in an array.

    Attributes:
      largest: the largest one.
      counts: how many there are of each exponent in `EXPONENTS`, without zeros.
    """

    largest: Any
    counts: Any


@functools.partial(jax.jit, static_argnames="times")
def difference(x: Array, reference: Array, times: int) -> Difference:
    """Compares an array with its counterpart.

    Args:
      x: the array.
      reference: its counterpart.
      times: how many iterations it has, along its leading axes.
    """
    wide = jnp.promote_types(reference.dtype, jnp.float32)
    reference = reference.reshape(times, -1).astype(wide)
    x = x.reshape(times, -1).astype(wide)
    known = jnp.isfinite(reference)
    lost = (known & ~jnp.isfinite(x)).any(1)
    distance = _norm(jnp.where(known, x - reference, 0))
    return Difference(
        jnp.where(lost, math.inf, distance), _norm(jnp.where(known, reference, 0))
    )


def _norm(x: Array) -> Array:
    """Returns the norm of each row; no square overflows or becomes zero."""
    largest = jnp.abs(x).max(1, keepdims=True, initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit[:, 0] * jnp.sqrt(jnp.square(x / unit).sum(1))


@jax.jit
def magnitudes(x: Array) -> Magnitudes:
    """Counts the magnitudes in an array."""
    size = jnp.abs(x.astype(jnp.float32)).ravel()
    counted = jnp.isfinite(size) & (size > 0)
    # A power of two has no digits; one less in its bits is of the exponent below.
    exponent = ((jax.lax.bitcast_convert_type(size, jnp.int32) - 1) >> 23) - 126
    exponent = jnp.clip(exponent, EXPONENTS[0], EXPONENTS[-1])
    # XLA fuses this into one loop, which compiles faster than a scatter.
    in_bin = counted[None] & (exponent[None] == jnp.array(EXPONENTS)[:, None])
    return Magnitudes(jnp.where(counted, size, 0).max(initial=0), in_bin.sum(1))


# --- on the host: sums over arrays ---------------------------------------------------


def relative(found: Sequence[Difference]) -> float | None:
    """Returns the relative L2 error of several arrays; `None` without arrays."""
    if not found:
        return None
    distance, reference = (
        float(np.linalg.norm(np.concatenate(norms, dtype=float)))
        for norms in zip(*found, strict=True)
    )
    if not distance:
        return 0.0
    return distance / reference if reference else math.inf


def iterations(found: Sequence[Difference]) -> tuple[float, ...]:
    """Returns the relative error in each iteration; nothing without one loop of all."""
    times = {len(d.distance) for d in found}
    if times == {1} or len(times) != 1:
        return ()
    rows = ([Difference(*(x[[i]] for x in d)) for d in found] for i in range(*times))
    return tuple(relative(row) or 0.0 for row in rows)


def largest(found: Sequence[Magnitudes]) -> float:
    """Returns the largest magnitude in several arrays."""
    return max((float(m.largest) for m in found), default=0.0)


def histogram(found: Sequence[Magnitudes]) -> dict[int, int]:
    """Returns how many numbers have each exponent, for those that there are."""
    counts = np.sum([m.counts for m in found], axis=0) if found else []
    return {e: int(n) for e, n in zip(EXPONENTS, counts, strict=False) if n}


def flushed(counts: dict[int, int]) -> float:
    """Returns the share of nonzero numbers that float16 rounds to zero."""
    lost = sum(n for exponent, n in counts.items() if exponent <= FLUSHED)
    return lost / sum(counts.values()) if lost else 0.0
