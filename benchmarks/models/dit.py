"""A diffusion transformer (DiT-S/2) in Linen, its layers written inline.

Each layer is shifted, scaled and gated by the time and the class (adaLN-zero). Public
ones begin with gates of zero, where most gradients are zero; here they are small.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.unet import noised, waves

SIZES = base.sizes(
    "image width heads classes batch channels patch layers",
    full=(32, 384, 6, 1000, 64, 4, 2, 12),
    tiny=(8, 48, 4, 10, 4, 4, 2, 12),
)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Shifts and scales the channels of each example."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiT(base.Module):
    """Predicts the noise in an image from it, the time of the noise, and a class."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        width, heads, patch = config.width, config.heads, config.patch
        small = nn.initializers.normal(0.02)
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(
            nn.LayerNorm, 1e-6, use_bias=False, use_scale=False, dtype=dtype
        )

        window = (patch, patch)
        x = nn.Conv(width, window, window, dtype=dtype)(inputs["images"])
        batch, side = x.shape[:2]
        x = x.reshape(batch, side * side, width)
        positions = self.param("positions", small, (1, side * side, width))
        x = x + base.cast(positions, dtype)

        time = nn.silu(dense(width)(waves(inputs["times"], 256)))
        found = nn.Embed(config.classes, width, dtype=dtype)(inputs["classes"])
        condition = nn.silu(dense(width)(time) + found)

        for _ in range(config.layers):
            modulation = dense(6 * width, kernel_init=small)(condition)
            shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(
                modulation, 6, axis=-1
            )
            y = dense(3 * width)(modulate(norm()(x), shift1, scale1))
            y = y.reshape(batch, side * side, 3, heads, width // heads)
            query, key, value = y[:, :, 0], y[:, :, 1], y[:, :, 2]
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
            scores = scores * (width // heads) ** -0.5
            weights = nn.softmax(scores)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
            x = x + gate1[:, None] * dense(width)(y)
            y = nn.gelu(dense(4 * width)(modulate(norm()(x), shift2, scale2)))
            x = x + gate2[:, None] * dense(width)(y)

        shift, scale = jnp.split(
            dense(2 * width, kernel_init=small)(condition), 2, axis=-1
        )
        x = dense(patch * patch * config.channels)(modulate(norm()(x), shift, scale))
        x = x.reshape(batch, side, side, patch, patch, config.channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(inputs["images"].shape)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 4)
    shape = (config.batch, config.image, config.image, config.channels)
    found = noised(jax.random.normal(keys[0], shape), *keys[1:3])
    classes = jax.random.randint(keys[3], shape[:1], 0, config.classes)
    return found | {"inputs": found["inputs"] | {"classes": classes}}


problem = base.problem_of(DiT, SIZES, batch, base.squared_error)
