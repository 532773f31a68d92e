"""MLP-Mixer-S/16 in Linen, a module for each part, as public ones are written."""

import flax.linen as nn
import jax

from benchmarks.models import base

SIZES = base.sizes(
    "image width tokens channels classes batch patch layers",
    full=(224, 512, 256, 2048, 1000, 64, 16, 8),
    tiny=(64, 48, 24, 96, 10, 8, 16, 8),
)


class MLP(nn.Module):
    """Two dense layers over the last axis."""

    hidden: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class Block(base.Module):
    """An MLP over the patches, then one over the channels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        y = nn.LayerNorm(dtype=dtype)(x).swapaxes(1, 2)
        y = MLP(config.tokens, dtype, name="tokens")(y)
        x = x + y.swapaxes(1, 2)
        y = nn.LayerNorm(dtype=dtype)(x)
        return x + MLP(config.channels, dtype, name="channels")(y)


class Mixer(base.Module):
    """Patches, blocks, and a head on the mean of the patches."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        patch = (config.patch, config.patch)
        x = nn.Conv(config.width, patch, patch, dtype=dtype)(images)
        x = x.reshape(x.shape[0], -1, config.width)
        for _ in range(config.layers):
            x = Block(config, dtype)(x)
        x = nn.LayerNorm(dtype=dtype)(x).mean(axis=1)
        return nn.Dense(config.classes, dtype=dtype)(x)


problem = base.problem_of(Mixer, SIZES, base.images)
