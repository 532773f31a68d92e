"""A Perceiver IO in Linen, which predicts masked bytes, as public ones are written.

A few latent rows read a long text, compute on their own, and are read by a learned
query for each place of the text.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.attention import Attention

SIZES = base.sizes(
    "width heads latents vocab length batch layers",
    full=(512, 8, 256, 262, 2048, 8, 6),
    tiny=(48, 4, 16, 128, 32, 4, 6),
)


class Block(base.Module):
    """Attention to other rows, or to its own if there are none, and an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array | None = None) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        y = nn.LayerNorm(dtype=dtype)(x)
        read = y if read is None else nn.LayerNorm(dtype=dtype)(read)
        x = x + Attention(self.config.heads, dtype)(y, read)
        y = nn.gelu(nn.Dense(width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
        return x + nn.Dense(width, dtype=dtype)(y)


class Perceiver(base.Module):
    """An encoder into latents, blocks on them, and a decoder."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        width = config.width
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocab, width, dtype=dtype)
        positions = nn.Embed(config.length, width, dtype=dtype)
        text = embed(tokens) + positions(jnp.arange(tokens.shape[1]))

        def learned(name: str, rows: int) -> jax.Array:
            found = base.cast(self.param(name, small, (rows, width)), dtype)
            return jnp.broadcast_to(found, (tokens.shape[0], *found.shape))

        x = Block(config, dtype)(learned("latents", config.latents), text)
        for _ in range(config.layers):
            x = Block(config, dtype)(x)
        x = Block(config, dtype)(learned("queries", config.length), x)
        return embed.attend(nn.LayerNorm(dtype=dtype)(x))


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key)
    shape = (config.batch, config.length)
    labels = jax.random.randint(keys[0], shape, 1, config.vocab)
    is_masked = jax.random.bernoulli(keys[1], 0.15, shape)
    return {"inputs": jnp.where(is_masked, 0, labels), "labels": labels}


problem = base.problem_of(Perceiver, SIZES, batch)
