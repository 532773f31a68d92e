"""The U-Net of a diffusion model in Linen, as public ones are written.

It predicts the noise in an image from the image and the time of the noise. It has two
levels with a block each, and attention in the lower one: more are slow to compile.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

# The levels from `attended` on have attention.
SIZES = base.sizes(
    "image width batch groups factors blocks attended",
    full=(64, 128, 32, 32, (1, 2), 1, 1),
    tiny=(16, 16, 4, 4, (1, 2), 1, 1),
)


def waves(times: jax.Array, width: int) -> jax.Array:
    """Returns sines and cosines of times, in float32."""
    rates = jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2) / (width // 2 - 1))
    angles = times[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def noised(images: jax.Array, *keys: jax.Array) -> base.Batch:
    """Returns noised images with the times of the noise, which is the label."""
    noise = jax.random.normal(keys[0], images.shape)
    times = jax.random.uniform(keys[1], images.shape[:1])
    share = times[:, None, None, None]
    images = jnp.sqrt(1 - share) * images + jnp.sqrt(share) * noise
    return {"inputs": {"images": images, "times": 1000 * times}, "labels": noise}


class ResBlock(nn.Module):
    """Two convolutions after norms, between which the time is added."""

    width: int
    groups: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        dtype, width = self.dtype, self.width
        y = nn.swish(nn.GroupNorm(self.groups, dtype=dtype)(x))
        y = nn.Conv(width, (3, 3), dtype=dtype)(y)
        y = y + nn.Dense(width, dtype=dtype)(nn.swish(time))[:, None, None]
        y = nn.swish(nn.GroupNorm(self.groups, dtype=dtype)(y))
        y = nn.Conv(width, (3, 3), dtype=dtype)(y)
        if x.shape != y.shape:
            x = nn.Conv(width, (1, 1), dtype=dtype)(x)
        return x + y


class Attention(base.Module):
    """Attention of one head between the places of an image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        y = nn.GroupNorm(self.config.groups, dtype=dtype)(x)
        y = y.reshape(x.shape[0], -1, width)
        query, key, value = (nn.Dense(width, dtype=dtype)(y) for _ in range(3))
        scores = jnp.einsum("bqc,bkc->bqk", query, key) * width**-0.5
        y = jnp.einsum("bqk,bkc->bqc", nn.softmax(scores), value)
        return x + nn.Dense(width, dtype=dtype)(y).reshape(x.shape)


class UNet(base.Module):
    """Levels down, a middle, and levels up, which read what was stored on the way."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        width, last = config.width, len(config.factors) - 1
        time = nn.Dense(4 * width, dtype=dtype)(waves(inputs["times"], width))
        time = nn.Dense(4 * width, dtype=dtype)(nn.swish(time))
        x = nn.Conv(width, (3, 3), dtype=dtype)(inputs["images"])
        stored = [x]
        for level, factor in enumerate(config.factors):
            for _ in range(config.blocks):
                x = self._block(level, factor, x, time)
                stored.append(x)
            if level < last:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2), dtype=dtype)(x)
                stored.append(x)
        x = self._block(last, config.factors[-1], x, time)
        for level, factor in reversed([*enumerate(config.factors)]):
            for _ in range(config.blocks + 1):
                x = jnp.concatenate([x, stored.pop()], axis=-1)
                x = self._block(level, factor, x, time)
            if level > 0:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = nn.Conv(x.shape[-1], (3, 3), dtype=dtype)(x)
        x = nn.swish(nn.GroupNorm(config.groups, dtype=dtype)(x))
        return nn.Conv(inputs["images"].shape[-1], (3, 3), dtype=dtype)(x)

    def _block(
        self, level: int, factor: int, x: jax.Array, time: jax.Array
    ) -> jax.Array:
        config = self.config
        x = ResBlock(config.width * factor, config.groups, self.dtype)(x, time)
        if level < config.attended:
            return x
        return Attention(config, self.dtype)(x)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 3)
    shape = (config.batch, config.image, config.image, 3)
    return noised(jax.random.normal(keys[0], shape), *keys[1:])


problem = base.problem_of(UNet, SIZES, batch, base.squared_error)
