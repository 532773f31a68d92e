"""What is measured of an array and its counterpart in float32, on the device.

Only a few numbers for each array, and for each iteration of the loop around it, leave
the device.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._compat import Array

# Exponents, `floor(log2(abs(x)))`, from and to which numbers are counted; what lies
# outside counts at the border.
EXPONENTS = range(-48, 25)
_FLUSHED = 2.0**-25  # the largest number that float16 rounds to zero


class Difference(NamedTuple):
    """How an array differs from its counterpart, one number for each iteration.

    Attributes:
      reference: the L2 norm of the counterpart, over its finite elements.
      distance: the L2 norm of the difference, where both are finite.
      lost: how many elements are finite in the counterpart only.
      count: how many elements of the counterpart are finite.
    """

    reference: Any
    distance: Any
    lost: Any
    count: Any


class Range(NamedTuple):
    """The magnitudes in an array.

    Attributes:
      largest: the largest finite one.
      nonzero: how many elements are finite and not zero.
      flushed: how many of these float16 rounds to zero.
      flushed_scaled: how many it rounds to zero once they are multiplied by a scale.
      histogram: how many there are of each exponent in `EXPONENTS`.
    """

    largest: Any
    nonzero: Any
    flushed: Any
    flushed_scaled: Any
    histogram: Any


def compiler_options() -> dict[str, Any]:
    """Returns the options of XLA for programs that run only once.

    A CPU computes halves in float32, where XLA would leave out the roundings in between
    that other devices do.
    """
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    names = "times" if function is _difference else None
    return jax.jit(function, static_argnames=names, compiler_options=compiler_options())


def difference(x: Array, reference: Array, scale: float, times: int) -> Difference:
    """Compares an array, divided by a scale, with its counterpart.

    Args:
      x: the array.
      reference: its counterpart.
      scale: the factor of the array.
      times: how many iterations it has, along its leading axes.
    """
    return _compiled(_difference)(x, reference, scale, times=times)


def _difference(x: Array, reference: Array, scale: Array, *, times: int) -> Difference:
    wide = jnp.promote_types(reference.dtype, jnp.float32)
    reference = reference.reshape(times, -1).astype(wide)
    x = x.reshape(times, -1).astype(wide) / scale
    known = jnp.isfinite(reference)
    lost = known & ~jnp.isfinite(x)
    return Difference(
        _norm(jnp.where(known, reference, 0)),
        _norm(jnp.where(known & ~lost, x - reference, 0)),
        lost.sum(1),
        known.sum(1),
    )


def _norm(x: Array) -> Array:
    """Returns the norm of each row; no square overflows or becomes zero."""
    largest = jnp.abs(x).max(1, keepdims=True, initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit[:, 0] * jnp.sqrt(jnp.square(x / unit).sum(1))


def magnitudes(x: Array, scale: float) -> Range:
    """Counts the magnitudes in an array.

    Args:
      x: the array.
      scale: the factor that `flushed_scaled` is about.
    """
    return _compiled(_magnitudes)(x, scale)


def _magnitudes(x: Array, scale: Array) -> Range:
    size = jnp.abs(x.astype(jnp.float32)).ravel()
    counted = jnp.isfinite(size) & (size > 0)
    exponent = (jax.lax.bitcast_convert_type(size, jnp.int32) >> 23) - 127
    exponent = jnp.clip(exponent, EXPONENTS[0], EXPONENTS[-1])
    # XLA fuses this into one loop, which compiles faster than a scatter.
    in_bin = counted[None] & (exponent[None] == jnp.array(EXPONENTS)[:, None])
    return Range(
        jnp.where(counted, size, 0).max(initial=0),
        counted.sum(),
        (counted & (size <= _FLUSHED)).sum(),
        (counted & (size * scale <= _FLUSHED)).sum(),
        in_bin.sum(1),
    )


# --- on the host: sums over arrays ---------------------------------------------------


def relative(found: Sequence[Difference]) -> float | None:
    """Returns the relative L2 error of several arrays together.

    It is infinite if an element is not finite that should be; `None` without arrays.
    """
    if not found:
        return None
    if any(np.any(d.lost) for d in found):
        return math.inf
    distance, reference = (
        math.sqrt(sum(float(np.sum(np.square(x, dtype=float))) for x in norms))
        for norms in zip(*((d.distance, d.reference) for d in found), strict=True)
    )
    if not distance:
        return 0.0
    return distance / reference if reference else math.inf


def iterations(found: Sequence[Difference]) -> tuple[float, ...]:
    """Returns the relative error in each iteration of the innermost loops."""
    times = {len(d.reference) for d in found}
    if times == {1} or len(times) != 1:
        return ()
    rows = [
        [Difference(*(x[[i]] for x in d)) for d in found] for i in range(times.pop())
    ]
    return tuple(relative(row) or 0.0 for row in rows)


def share(counts: Iterable[Any], sizes: Iterable[Any]) -> float:
    """Returns the sum of counts over the sum of sizes; 0 if there is nothing."""
    total = sum(float(np.sum(size)) for size in sizes)
    return sum(float(np.sum(count)) for count in counts) / total if total else 0.0
