"""A vision transformer: ViT-S/16."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "image width classes batch patch layers heads",
    full=(224, 384, 1000, 64, 16, 12, 6),
    tiny=(64, 48, 10, 8, 16, 12, 6),
    cpu=(128, 256, 100, 8, 16, 4, 4),
)


class Block(base.Module):
    """One pre-norm layer of attention and MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(self.config.heads, dtype=dtype)
        x = x + attention(nn.LayerNorm(dtype=dtype)(x), mask=mask)
        y = nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        return x + nn.Dense(width, dtype=dtype)(nn.gelu(y))


class ViT(base.Module):
    """A vision transformer with a class token and learned positions."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        width, patch = config.width, (config.patch, config.patch)
        x = nn.Conv(width, patch, patch, padding="VALID", dtype=dtype)(images)
        x = x.reshape(x.shape[0], -1, width)
        normal = nn.initializers.normal(0.02)
        token = self.param("token", nn.initializers.zeros, (1, 1, width))
        positions = self.param("positions", normal, (1, x.shape[1] + 1, width))
        token = jnp.broadcast_to(base.cast(token, dtype), (x.shape[0], 1, width))
        x = jnp.concatenate([token, x], axis=1) + base.cast(positions, dtype)
        for _ in range(config.layers):
            x = Block(config, dtype)(x)
        x = nn.LayerNorm(dtype=dtype)(x[:, 0])
        return nn.Dense(config.classes, dtype=dtype)(x)


problem = base.problem_of(ViT, SIZES, base.images)
