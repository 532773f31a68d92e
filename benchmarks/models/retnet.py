"""A RetNet in Linen, in its parallel form, as public ones are written.

Words are mixed by `(q @ k.T * decay) @ v`, without a softmax. What a word reads of
another fades with their distance, at a rate of its own in each head.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.llama import rotate

SIZES = base.sizes(
    "width heads vocab length batch layers",
    full=(512, 8, 32000, 1024, 4, 6),
    tiny=(48, 4, 128, 32, 4, 6),
)


def decay(heads: int, length: int) -> jax.Array:
    """Returns how much of each word another one reads, of each head, in float32."""
    rates = 1 - jnp.exp2(-5.0 - jnp.arange(heads))
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    faded = rates[:, None, None] ** jnp.maximum(distance, 0)
    found = jnp.where(distance >= 0, faded, 0.0)
    return found / jnp.sqrt(jnp.sum(found, axis=-1, keepdims=True))


class Retention(base.Module):
    """Retention of several heads, each with a norm, behind a gate."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        heads, dtype = self.config.heads, self.dtype
        width = x.shape[-1]

        def dense(features: int, name: str, inputs: jax.Array) -> jax.Array:
            return nn.Dense(features, use_bias=False, dtype=dtype, name=name)(inputs)

        def project(name: str, features: int) -> jax.Array:
            y = dense(features, name, x)
            return y.reshape(*x.shape[:2], heads, features // heads)

        positions = jnp.arange(x.shape[1])
        query = rotate(project("query", width), positions)
        key = rotate(project("key", width), positions) * (width // heads) ** -0.5
        value = project("value", 2 * width)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        y = jnp.einsum("bhqk,bkhd->bqhd", scores * base.cast(mask, dtype), value)
        # Of each word for itself
        y = nn.GroupNorm(heads, dtype=dtype)(y.reshape(-1, 2 * width))
        y = y.reshape(*x.shape[:2], 2 * width)
        return dense(width, "out", nn.swish(dense(2 * width, "gate", x)) * y)


class RetNet(base.Module):
    """A decoder of retention and MLPs."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        mask = decay(config.heads, tokens.shape[1])
        x = nn.Embed(config.vocab, config.width, dtype=dtype)(tokens)
        for _ in range(config.layers):
            x = x + Retention(config, dtype)(nn.LayerNorm(dtype=dtype)(x), mask)
            y = nn.LayerNorm(dtype=dtype)(x)
            y = nn.gelu(nn.Dense(2 * config.width, dtype=dtype)(y))
            x = x + nn.Dense(config.width, dtype=dtype)(y)
        x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(config.vocab, use_bias=False, dtype=dtype)(x)


problem = base.problem_of(RetNet, SIZES, base.texts)
