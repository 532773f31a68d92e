"""A vision transformer in Linen: `vit_small` and `vit_s16`."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.models import base


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a vision transformer and of its batch."""

    image: int
    patch: int
    width: int
    layers: int
    heads: int
    classes: int
    batch: int


CONFIGS = {
    ("vit_small", "full"): Config(32, 4, 192, 6, 3, 10, 128),
    ("vit_small", "tiny"): Config(16, 4, 48, 6, 3, 10, 8),
    ("vit_s16", "full"): Config(224, 16, 384, 12, 6, 1000, 64),
    ("vit_s16", "tiny"): Config(64, 16, 48, 12, 6, 10, 8),
}


class Block(nn.Module):
    """One pre-norm layer of attention and MLP."""

    heads: int
    dtype: DTypeLike | None = None
    softmax_dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.heads,
            dtype=dtype,
            force_fp32_for_softmax=self.softmax_dtype == jnp.float32,
        )
        x = x + attention(nn.LayerNorm(dtype=dtype)(x), mask=mask)
        y = nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        return x + nn.Dense(width, dtype=dtype)(nn.gelu(y))


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    config: Config
    dtype: DTypeLike | None = None
    softmax_dtype: DTypeLike | None = None

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
            x = Block(config.heads, dtype, self.softmax_dtype)(x)
        x = nn.LayerNorm(dtype=dtype)(x[:, 0])
        return nn.Dense(config.classes, dtype=dtype)(x)


def problem(
    name: str,
    size: str = "full",
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> base.Problem:
    """Makes the problem of `vit_small` or `vit_s16`."""
    config = CONFIGS[name, size]
    return base.linen_problem(name, ViT(config, dtype, softmax_dtype), batch(config))


def batch(config: Config):
    """Returns the maker of the images and labels."""
    shape = (config.batch, config.image, config.image, 3)
    return base.vectors(shape, config.classes)
