"""A text classifier with linear attention in Linen, its layers written inline.

In place of a softmax, queries and keys go through `elu(x) + 1`, so that the products of
keys and values are summed once for all queries.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "width heads vocab length classes batch layers",
    full=(512, 8, 32000, 2048, 10, 8, 8),
    tiny=(48, 4, 128, 64, 10, 8, 8),
)


class LinearTransformer(base.Module):
    """Embeddings, layers, and a head on the mean of the words."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype, width = self.config, self.dtype, self.config.width
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(nn.LayerNorm, dtype=dtype)
        heads = (*tokens.shape, config.heads, width // config.heads)

        x = nn.Embed(config.vocab, width, dtype=dtype)(tokens)
        small = nn.initializers.normal(0.02)
        positions = self.param("positions", small, (config.length, width))
        x = x + base.cast(positions, dtype)
        for _ in range(config.layers):
            y = norm()(x)
            query = nn.elu(dense(width)(y).reshape(heads)) + 1
            key = nn.elu(dense(width)(y).reshape(heads)) + 1
            value = dense(width)(y).reshape(heads)
            summed = jnp.einsum("bkhd,bkhe->bhde", key, value)
            total = jnp.einsum("bqhd,bhd->bqh", query, key.sum(axis=1))
            y = jnp.einsum("bqhd,bhde->bqhe", query, summed)
            y = y / (total[..., None] + 1e-6)
            x = x + dense(width)(y.reshape(x.shape))
            x = x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))
        return dense(config.classes)(norm()(x).mean(axis=1))


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key)
    shape = (config.batch, config.length)
    tokens = jax.random.randint(keys[0], shape, 0, config.vocab)
    labels = jax.random.randint(keys[1], shape[:1], 0, config.classes)
    return {"inputs": tokens, "labels": labels}


problem = base.problem_of(LinearTransformer, SIZES, batch)
