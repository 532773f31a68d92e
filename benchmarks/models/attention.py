"""Attention with the casts of an expert, for the models that share it."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base


class Attention(nn.Module):
    """Attention of several heads, from each row of `x` to the rows of `read`.

    The softmax is computed in float32, and its result cast back. Dropout of the weights
    needs the key "dropout".
    """

    heads: int
    dtype: base.DType = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        width, shape = x.shape[-1], (self.heads, x.shape[-1] // self.heads)

        def project(name: str, source: jax.Array) -> jax.Array:
            return nn.DenseGeneral(shape, dtype=self.dtype, name=name)(source)

        query, key = project("query", x), project("key", read)
        value = project("value", read)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query / shape[1] ** 0.5, key)
        weights = nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)
        weights = nn.Dropout(self.dropout, deterministic=not self.dropout)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        mixed = mixed.reshape(*mixed.shape[:2], width)
        return nn.Dense(width, dtype=self.dtype, name="out")(mixed)
