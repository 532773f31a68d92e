"""Mamba in Linen: a state space whose steps depend on the input, as public ones are.

The steps and the states are in float32, and an associative scan runs over the words.
The layers are scanned, for they are slow to compile.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.llama import RMSNorm

SIZES = base.sizes(
    "width vocab length states layers batch",
    full=(512, 32000, 512, 16, 6, 4),
    tiny=(48, 128, 32, 4, 6, 4),
)


def scan(
    x: jax.Array, step: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """Returns the outputs of the state space.

    `x` and `step` are `(batch, length, channels)`, `b` and `c` `(batch, length,
    states)`, and `a` is `(channels, states)`; all are in float32.
    """
    kept = jnp.exp(step[..., None] * a)
    added = (step * x)[..., None] * b[..., None, :]

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    states = jax.lax.associative_scan(join, (kept, added), axis=1)[1]
    return jnp.einsum("blcs,bls->blc", states, c)


def steps_bias(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Returns a bias whose softplus lies between 0.001 and 0.1, uniform in its log."""
    step = jnp.exp(
        jax.random.uniform(key, shape, dtype) * math.log(100) + math.log(1e-3)
    )
    return step + jnp.log(-jnp.expm1(-step))


class Block(base.Module):
    """A gated convolution and a state space, for `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        config, dtype = self.config, self.dtype
        inner, states = 2 * config.width, config.states

        def dense(features, name, **options):
            return nn.Dense(features, use_bias=False, dtype=dtype, name=name, **options)

        y, gate = jnp.split(dense(2 * inner, "in")(RMSNorm(dtype)(x)), 2, axis=-1)
        y = nn.silu(
            nn.Conv(
                inner, (4,), padding="CAUSAL", feature_group_count=inner, dtype=dtype
            )(y)
        )
        rank = math.ceil(config.width / 16)
        selected = dense(rank + 2 * states, "select")(y)
        step, b, c = jnp.split(selected, [rank, rank + states], axis=-1)
        step = nn.Dense(inner, bias_init=steps_bias, dtype=dtype, name="step")(step)
        step = nn.softplus(step.astype(jnp.float32))
        log_a = self.param(
            "log_a",
            lambda key, shape: jnp.log(jnp.arange(1.0, 1 + states) * jnp.ones(shape)),
            (inner, states),
        )
        skip = self.param("skip", nn.initializers.ones, (inner,))
        wide, b, c = (value.astype(jnp.float32) for value in (y, b, c))
        y = scan(wide, step, -jnp.exp(log_a), b, c) + skip * wide
        y = y.astype(gate.dtype)
        return x + dense(config.width, "out")(y * nn.silu(gate)), None


class Mamba(base.Module):
    """Embeddings, scanned blocks, and a head that is the embedding of the words."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        embed = nn.Embed(config.vocab, config.width, dtype=dtype)
        blocks = base.scan(Block, config.layers)(config, dtype)
        x, _ = blocks(embed(tokens), None)
        return embed.attend(RMSNorm(dtype)(x))


problem = base.problem_of(Mamba, SIZES, base.texts)
