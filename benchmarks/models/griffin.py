"""A gated linear recurrence in Linen (RG-LRU, the recurrent blocks of Griffin).

As public ones are written: the coefficients and the recurrence are in float32, and an
associative scan runs over the words. `griffin_loop` runs a loop over them. The layers
are scanned, for they are slow to compile.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.llama import RMSNorm

SIZES = base.sizes(
    "width vocab length layers batch heads",
    full=(768, 32000, 1024, 6, 4, 8),
    tiny=(48, 128, 32, 6, 4, 8),
)


def associative(a: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the states of `h = a * h + x` along axis 1, in the dtype of both."""

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return jax.lax.associative_scan(join, (a, x), axis=1)[1]


def loop(a: jax.Array, x: jax.Array) -> jax.Array:
    """Returns what `associative` does, one word after the other."""

    def turn(h, inputs):
        h = inputs[0] * h + inputs[1]
        return h, h

    turned = a.swapaxes(0, 1), x.swapaxes(0, 1)
    return jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), turned)[1].swapaxes(0, 1)


class Gate(nn.Module):
    """A sigmoid of a linear layer whose matrix has a block for each head."""

    heads: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = x.shape[-1] // self.heads
        init = nn.initializers.lecun_normal(batch_axis=0)
        w = self.param("w", init, (self.heads, size, size))
        b = self.param("b", nn.initializers.zeros, (self.heads, size))
        y = x.reshape(*x.shape[:-1], self.heads, size)
        y = jnp.einsum("...hi,hij->...hj", y, base.cast(w, self.dtype))
        return nn.sigmoid(y + base.cast(b, self.dtype)).reshape(x.shape)


class RGLRU(nn.Module):
    """The real-gated linear recurrent unit."""

    heads: int
    looped: bool
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.uniform(1.0)
        a = self.param("a", init, (x.shape[-1],))
        opened = Gate(self.heads, self.dtype, name="input")(x)
        kept = Gate(self.heads, self.dtype, name="recurrence")(x)
        log_a = -8.0 * kept.astype(jnp.float32) * nn.softplus(a)
        rate = jnp.sqrt(1.0 - jnp.exp(2.0 * log_a) + 1e-6)
        gated = (x * opened).astype(jnp.float32) * rate
        run = loop if self.looped else associative
        return run(jnp.exp(log_a), gated).astype(x.dtype)


class Block(base.Module):
    """A recurrent block and a gated MLP, with a norm before each, for `nn.scan`."""

    looped: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width, dtype = self.config.width, self.dtype

        def dense(features, name):
            return nn.Dense(features, dtype=dtype, name=name)

        y = RMSNorm(dtype)(x)
        gate = nn.gelu(dense(width, "gate")(y))
        y = dense(width, "mix")(y)
        y = nn.Conv(
            width, (4,), padding="CAUSAL", feature_group_count=width, dtype=dtype
        )(y)
        y = RGLRU(self.config.heads, self.looped, dtype)(y)
        x = x + dense(width, "out")(y * gate)
        y = RMSNorm(dtype)(x)
        y = nn.gelu(dense(3 * width, "mlp_gate")(y)) * dense(3 * width, "mlp_up")(y)
        return x + dense(width, "mlp_down")(y), None


class LanguageModel(base.Module):
    """Embeddings, scanned blocks, and a head that is the embedding of the words."""

    block: Any = Block
    looped: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        embed = nn.Embed(config.vocab, config.width, dtype=dtype)
        x = embed(tokens)
        blocks = base.scan(self.block, config.layers)(config, dtype, self.looped)
        x, _ = blocks(x, None)
        return embed.attend(RMSNorm(dtype)(x))


def problem(name, size, dtype):
    config = SIZES[size]
    model = LanguageModel(config, dtype, Block, name == "griffin_loop")
    return base.linen(model, functools.partial(base.texts, config))
