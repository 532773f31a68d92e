"""A WaveNet in Linen, its layers written inline, as public ones are.

Causal convolutions with holes that double, a gate of tanh and sigmoid, and one sum of
what all layers give to the output. It has one stack of 10 layers, not several: equal
layers are slow to compile.
"""

import functools
from typing import Any

import flax.linen as nn
import jax

from benchmarks.models import base

SIZES = base.sizes(
    "width skip length batch vocab layers",
    full=(128, 256, 8192, 8, 256, 10),
    tiny=(16, 32, 64, 4, 256, 10),
)


class WaveNet(base.Module):
    """Predicts the next sample of a sound from all before it."""

    @nn.compact
    def __call__(self, samples: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        conv = functools.partial(nn.Conv, padding="CAUSAL", dtype=dtype)
        x = nn.Embed(config.vocab, config.width, dtype=dtype)(samples)
        x = conv(config.width, (2,))(x)
        skips: list[Any] = []
        for layer in range(config.layers):
            dilated = functools.partial(
                conv, config.width, (2,), kernel_dilation=2**layer
            )
            y = nn.tanh(dilated()(x)) * nn.sigmoid(dilated()(x))
            skips.append(conv(config.skip, (1,))(y))
            x = x + conv(config.width, (1,))(y)
        y = conv(config.skip, (1,))(nn.relu(sum(skips)))
        return conv(config.vocab, (1,))(nn.relu(y))


problem = base.problem_of(WaveNet, SIZES, base.texts)
