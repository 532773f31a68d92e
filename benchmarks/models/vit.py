"""A vision transformer in Linen (`vit_small`, `vit_s16`) and in NNX (`nnx_vit`)."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import base

CONFIGS = {
    "vit_small": base.sizes(
        "image width batch patch layers heads classes",
        full=(32, 192, 128, 4, 6, 3, 10),
        tiny=(16, 48, 8, 4, 6, 3, 10),
    ),
    "vit_s16": base.sizes(
        "image width classes batch patch layers heads",
        full=(224, 384, 1000, 64, 16, 12, 6),
        tiny=(64, 48, 10, 8, 16, 12, 6),
    ),
}


class Block(nn.Module):
    """One pre-norm layer of attention and MLP."""

    heads: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=dtype)
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
            x = Block(config.heads, dtype)(x)
        x = nn.LayerNorm(dtype=dtype)(x[:, 0])
        return nn.Dense(config.classes, dtype=dtype)(x)


class NNXBlock(nnx.Module):
    """`Block` in NNX."""

    def __init__(self, width: int, heads: int, **options: Any):
        self.norm1 = nnx.LayerNorm(width, **options)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **options)
        self.norm2 = nnx.LayerNorm(width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NNXViT(nnx.Module):
    """`ViT` in NNX."""

    def __init__(self, config: base.Config, dtype: base.DType, rngs: nnx.Rngs):
        width, patch = config.width, (config.patch, config.patch)
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        length = (config.image // config.patch) ** 2 + 1
        normal = nnx.initializers.normal(0.02)
        self.dtype = dtype
        self.patches = nnx.Conv(3, width, patch, patch, padding="VALID", **options)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(normal(rngs.params(), (1, length, width)))
        self.blocks = nnx.List(
            [NNXBlock(width, config.heads, **options) for _ in range(config.layers)]
        )
        self.norm = nnx.LayerNorm(width, **options)
        self.head = nnx.Linear(width, config.classes, **options)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = base.cast(self.token[...], self.dtype)
        token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1)
        x = x + base.cast(self.positions[...], self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def problem(name, size, dtype):
    config = CONFIGS[name.replace("nnx_vit", "vit_s16")][size]
    data = functools.partial(base.images, config)
    if name == "nnx_vit":
        return base.nnx_problem(functools.partial(NNXViT, config, dtype), data)
    return base.linen(ViT(config, dtype), data)
