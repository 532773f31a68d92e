"""EfficientNet-B0 in Linen, with squeeze-and-excite, as public ones are written.

Seven of its sixteen blocks are here, for they are slow to compile: each kernel, each
stride, with and without a shortcut.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

# (repeats, kernel, stride, expansion, width)
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (1, 3, 2, 6, 80),
    (1, 5, 2, 6, 192),
)

# `scale` is that of the widths.
SIZES = base.sizes(
    "image scale classes batch",
    full=(224, 1.0, 1000, 32),
    tiny=(32, 0.25, 10, 8),
)


class Block(nn.Module):
    """An inverted bottleneck, whose channels are weighted by a look at the image."""

    kernel: int
    stride: int
    expansion: int
    width: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, inner = self.dtype, x.shape[-1] * self.expansion
        conv, norm = base.conv_and_norm(dtype, 0.99)
        y = x
        if self.expansion > 1:
            y = nn.swish(norm()(conv(inner, (1, 1))(y)))
        size, strides = (self.kernel,) * 2, (self.stride,) * 2
        y = conv(inner, size, strides, feature_group_count=inner)(y)
        y = nn.swish(norm()(y))
        seen = jnp.mean(y, axis=(1, 2), keepdims=True)
        seen = nn.swish(nn.Conv(max(1, x.shape[-1] // 4), (1, 1), dtype=dtype)(seen))
        y = y * nn.sigmoid(nn.Conv(inner, (1, 1), dtype=dtype)(seen))
        y = norm()(conv(self.width, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNet(base.Module):
    """The stages, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        conv, norm = base.conv_and_norm(dtype, 0.99)
        x = conv(int(32 * config.scale), (3, 3), (2, 2))(x)
        x = nn.swish(norm()(x))
        for repeats, kernel, stride, expansion, width in STAGES:
            width = int(width * config.scale)
            for strides in [stride] + [1] * (repeats - 1):
                x = Block(kernel, strides, expansion, width, dtype)(x)
        x = nn.swish(norm()(conv(int(1280 * config.scale), (1, 1))(x)))
        return nn.Dense(config.classes, dtype=dtype)(jnp.mean(x, axis=(1, 2)))


problem = base.problem_of(EfficientNet, SIZES, base.images)
