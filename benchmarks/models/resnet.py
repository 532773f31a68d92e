"""ResNet-50, with batch statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "image width classes batch stages",
    full=(224, 64, 1000, 32, (3, 4, 6, 3)),
    tiny=(32, 8, 10, 8, (3, 4, 6, 3)),
    cpu=(64, 64, 100, 8, (1, 1, 1, 1)),
)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    width: int
    stride: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = base.conv_and_norm(self.dtype, 0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(base.Module):
    """ResNet-50, version 1.5."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = self.config.width, self.dtype
        conv, norm = base.conv_and_norm(dtype, 0.9)
        x = nn.relu(norm()(conv(width, (7, 7), (2, 2))(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(self.config.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(width * 2**stage, stride, dtype)(x)
        return nn.Dense(self.config.classes, dtype=dtype)(jnp.mean(x, axis=(1, 2)))


problem = base.problem_of(ResNet, SIZES, base.images)
