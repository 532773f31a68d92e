"""A Conformer in Linen, which names the sound of each frame, as public ones are.

A block has half an MLP, attention, a convolution over time, and half an MLP.
"""

import flax.linen as nn
import jax

from benchmarks.models import base
from benchmarks.models.attention import Attention

SIZES = base.sizes(
    "width heads classes frames mels kernel batch layers",
    full=(256, 4, 128, 1024, 80, 31, 16, 4),
    tiny=(48, 4, 10, 64, 20, 7, 4, 4),
)


class HalfMLP(base.Module):
    """Half of what an MLP gives."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        y = nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        return 0.5 * nn.Dense(width, dtype=dtype)(nn.swish(y))


class Convolution(base.Module):
    """A gate, a convolution of each channel over time, and BatchNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        y = nn.Dense(2 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        kernel = (self.config.kernel,)
        conv, norm = base.conv_and_norm(dtype, 0.9)
        y = conv(width, kernel, feature_group_count=width)(nn.glu(y))
        return nn.Dense(width, dtype=dtype)(nn.swish(norm()(y)))


class Conformer(base.Module):
    """Convolutions that leave a quarter of the frames, blocks, and a head."""

    @nn.compact
    def __call__(self, sound: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        x = sound[..., None]
        for _ in range(2):
            x = nn.relu(nn.Conv(config.width, (3, 3), (2, 2), dtype=dtype)(x))
        x = nn.Dense(config.width, dtype=dtype)(x.reshape(*x.shape[:2], -1))
        for _ in range(config.layers):
            x = x + HalfMLP(config, dtype)(x)
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + Attention(config.heads, dtype)(y, y)
            x = x + Convolution(config, dtype)(x)
            x = x + HalfMLP(config, dtype)(x)
            x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(config.classes, dtype=dtype)(x)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key)
    sound = jax.random.normal(keys[0], (config.batch, config.frames, config.mels))
    shape = (config.batch, config.frames // 4)
    labels = jax.random.randint(keys[1], shape, 0, config.classes)
    return {"inputs": sound, "labels": labels}


problem = base.problem_of(Conformer, SIZES, batch)
