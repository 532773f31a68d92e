"""An encoder as "Attention is all you need" has it: norms after the sums, dropout.

It sorts texts into classes.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.attention import Attention
from benchmarks.models.unet import waves

SIZES = base.sizes(
    "width heads vocab classes length batch layers rate",
    full=(512, 8, 32000, 10, 512, 16, 6, 0.1),
    tiny=(48, 4, 128, 10, 32, 4, 6, 0.1),
)


class Encoder(base.Module):
    """Embeddings with waves of the positions, layers, and a head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        width = config.width

        def dropout(x: jax.Array) -> jax.Array:
            return nn.Dropout(config.rate, deterministic=False)(x)

        x = nn.Embed(config.vocab, width, dtype=dtype)(tokens) * width**0.5
        positions = waves(jnp.arange(tokens.shape[1], dtype=jnp.float32), width)
        x = dropout(x + base.cast(positions, dtype))
        for _ in range(config.layers):
            y = Attention(config.heads, dtype, config.rate)(x, x)
            x = nn.LayerNorm(dtype=dtype)(x + dropout(y))
            y = dropout(nn.relu(nn.Dense(4 * width, dtype=dtype)(x)))
            y = nn.Dense(width, dtype=dtype)(y)
            x = nn.LayerNorm(dtype=dtype)(x + dropout(y))
        return nn.Dense(config.classes, dtype=dtype)(jnp.mean(x, axis=1))


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 3)
    shape = (config.batch, config.length)
    return {
        "inputs": jax.random.randint(keys[0], shape, 0, config.vocab),
        "labels": jax.random.randint(keys[1], shape[:1], 0, config.classes),
        "dropout": jax.random.key_data(keys[2]),
    }


problem = base.problem_of(Encoder, SIZES, batch)
