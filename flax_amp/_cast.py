"""Casts between float32 and the compute dtype."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def finfo(dtype: Any) -> Any:
    """Returns the float limits of `dtype`, bfloat16 included."""
    return ml_dtypes.finfo(dtype)


def cast_constant(value: Any, dtype: Any) -> np.ndarray:
    """Casts a scalar constant; a finite value out of range becomes the limit.

    A mask of `-1e9` or `finfo(float32).min` stays a finite, very negative number, so
    that a fully masked softmax row gives no NaN. True infinities stay infinite.
    """
    limit = float(finfo(dtype).max)
    constant = np.asarray(value, np.float64)
    if np.isfinite(constant):
        constant = np.clip(constant, -limit, limit)
    return constant.astype(dtype)


def saturating_cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts a float32 array down; finite values out of range become the limit.

    The derivative is that of the plain cast, so no mask is kept for the backward
    pass and the rule stays linear.
    """
    return _saturating_cast(jnp.dtype(dtype))(x)


@functools.cache
def _saturating_cast(dtype: Any) -> Any:
    limit = float(finfo(dtype).max)

    @jax.custom_jvp
    @jax.jit
    def saturating_cast(x: jax.Array) -> jax.Array:
        bounded = jax.lax.clamp(-limit, x, limit)
        return jnp.where(jnp.isinf(x), x, bounded).astype(dtype)

    @saturating_cast.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return saturating_cast(*primals), tangents[0].astype(dtype)

    return saturating_cast
