"""A diffusion transformer (DiT-S/2) in Linen, its layers written inline.

Each layer is shifted, scaled and gated by the time and the class (adaLN-zero). Public
ones begin with gates of zero, where most gradients are zero; here they are small.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.unet import waves


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a DiT and of its batch."""

    image: int
    channels: int
    width: int
    heads: int
    classes: int
    batch: int
    patch: int = 2
    layers: int = 12


SIZES = {
    "full": Config(32, 4, 384, 6, 1000, 64),
    "tiny": Config(8, 4, 48, 4, 10, 4),
}


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Shifts and scales the channels of each example."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiT(nn.Module):
    """Predicts the noise in an image from it, the time of the noise, and a class."""

    config: Config
    dtype: base.DType = None

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


def problem(name, size, dtype):
    config = SIZES[size]
    shape = (config.batch, config.image, config.image, config.channels)

    def batch(key):
        keys = jax.random.split(key, 4)
        noise = jax.random.normal(keys[1], shape)
        times = jax.random.uniform(keys[2], shape[:1])
        share = times[:, None, None, None]
        images = jnp.sqrt(1 - share) * jax.random.normal(keys[0], shape)
        inputs = {
            "images": images + jnp.sqrt(share) * noise,
            "times": 1000 * times,
            "classes": jax.random.randint(keys[3], shape[:1], 0, config.classes),
        }
        return {"inputs": inputs, "labels": noise}

    return base.linen(DiT(config, dtype), batch, base.squared_error)
