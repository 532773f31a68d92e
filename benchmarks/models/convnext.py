"""ConvNeXt-T in Linen, as public ones are written.

Its stages have 1, 1, 2 and 1 blocks, not 3, 3, 9 and 3: equal blocks are slow to
compile.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "image widths classes batch depths",
    full=(224, (96, 192, 384, 768), 1000, 32, (1, 1, 2, 1)),
    tiny=(32, (8, 16, 24, 32), 10, 8, (1, 1, 2, 1)),
)


class Block(nn.Module):
    """A convolution in each channel, a norm, an MLP, and a scale for each channel."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, width = self.dtype, x.shape[-1]
        y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=dtype)(x)
        y = nn.LayerNorm(1e-6, dtype=dtype)(y)
        y = nn.gelu(nn.Dense(4 * width, dtype=dtype)(y), approximate=False)
        y = nn.Dense(width, dtype=dtype)(y)
        small = nn.initializers.constant(1e-6)
        scale = self.param("scale", small, (width,))
        return x + y * base.cast(scale, dtype)


class ConvNeXt(base.Module):
    """Four stages, each of which halves the image, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        for stage, (width, depth) in enumerate(
            zip(config.widths, config.depths, strict=True)
        ):
            if stage == 0:
                x = nn.Conv(width, (4, 4), (4, 4), dtype=dtype)(x)
                x = nn.LayerNorm(1e-6, dtype=dtype)(x)
            else:
                x = nn.LayerNorm(1e-6, dtype=dtype)(x)
                x = nn.Conv(width, (2, 2), (2, 2), dtype=dtype)(x)
            for _ in range(depth):
                x = Block(dtype)(x)
        x = nn.LayerNorm(1e-6, dtype=dtype)(jnp.mean(x, axis=(1, 2)))
        return nn.Dense(config.classes, dtype=dtype)(x)


problem = base.problem_of(ConvNeXt, SIZES, base.images)
