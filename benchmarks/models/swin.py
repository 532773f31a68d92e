"""Swin-T in Linen, its layers written inline.

Attention stays inside of windows, which are shifted by half a window in every second
layer, and adds a bias for how far apart two patches are. The stages have 2, 2, 2 and 2
layers, not 2, 2, 6 and 2: equal layers are slow to compile.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import base

SIZES = base.sizes(
    "image width window classes batch depths heads",
    full=(224, 96, 7, 1000, 32, (2, 2, 2, 2), (3, 6, 12, 24)),
    tiny=(64, 24, 2, 10, 4, (2, 2, 2, 2), (3, 6, 12, 24)),
)


def to_windows(x: jax.Array, size: int) -> jax.Array:
    """Cuts images into windows: `(batch * windows, size * size, channels)`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)


def from_windows(x: jax.Array, size: int, side: int) -> jax.Array:
    """Puts windows together again to images of a side."""
    windows, channels = side // size, x.shape[-1]
    x = x.reshape(-1, windows, windows, size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side, side, channels)


def relative_places(size: int) -> np.ndarray:
    """Returns the row of the table of biases for each pair of places in a window."""
    y, x = np.indices((size, size)).reshape(2, -1)
    rows = y[:, None] - y[None, :] + size - 1
    return rows * (2 * size - 1) + x[:, None] - x[None, :] + size - 1


def shifted_mask(side: int, size: int, shift: int) -> np.ndarray:
    """Returns -100 for pairs that only a shift put into one window, and else 0."""
    bands = np.zeros(side, int)
    bands[side - size : side - shift], bands[side - shift :] = 1, 2
    parts = bands[:, None] * 3 + bands[None, :]
    windows = side // size
    parts = parts.reshape(windows, size, windows, size).transpose(0, 2, 1, 3)
    parts = parts.reshape(windows * windows, size * size)
    return np.where(parts[:, :, None] == parts[:, None, :], 0.0, -100.0)


class Swin(base.Module):
    """Four stages of attention in windows; patches are merged between them."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config, dtype, size = self.config, self.dtype, self.config.window
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(nn.LayerNorm, dtype=dtype)

        x = norm()(nn.Conv(config.width, (4, 4), (4, 4), dtype=dtype)(images))
        for stage, (depth, heads) in enumerate(
            zip(config.depths, config.heads, strict=True)
        ):
            if stage > 0:
                corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
                x = norm()(jnp.concatenate(corners, axis=-1))
                x = dense(x.shape[-1] // 2, use_bias=False)(x)
            side, width = x.shape[1], x.shape[-1]
            for layer in range(depth):
                shift = size // 2 if layer % 2 == 1 and side > size else 0
                y = norm()(x)
                if shift:
                    y = jnp.roll(y, (-shift, -shift), axis=(1, 2))
                y = dense(3 * width)(to_windows(y, size))
                y = y.reshape(*y.shape[:2], 3, heads, width // heads)
                query, key, value = y.transpose(2, 0, 3, 1, 4)
                scores = query * (width // heads) ** -0.5 @ key.swapaxes(-1, -2)
                table = self.param(
                    f"biases_{stage}_{layer}",
                    nn.initializers.truncated_normal(0.02),
                    ((2 * size - 1) ** 2, heads),
                )
                bias = base.cast(table, dtype)[relative_places(size)]
                scores = scores + bias.transpose(2, 0, 1)
                if shift:
                    mask = jnp.asarray(shifted_mask(side, size, shift), scores.dtype)
                    mask = mask[None, :, None]
                    split = scores.reshape(-1, mask.shape[1], *scores.shape[1:])
                    scores = (split + mask).reshape(scores.shape)
                y = nn.softmax(scores) @ value
                y = y.swapaxes(1, 2).reshape(y.shape[0], size * size, width)
                y = from_windows(dense(width)(y), size, side)
                if shift:
                    y = jnp.roll(y, (shift, shift), axis=(1, 2))
                x = x + y
                y = nn.gelu(dense(4 * width)(norm()(x)), approximate=False)
                x = x + dense(width)(y)
        return dense(config.classes)(norm()(x).mean(axis=(1, 2)))


problem = base.problem_of(Swin, SIZES, base.images)
