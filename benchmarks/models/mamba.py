"""Mamba in Linen: a state space whose steps depend on the input, as public ones are.

The steps and the states are in float32. `mamba` runs an associative scan over the
words, `mamba_loop` a loop over them, which forms each step as it comes. The layers are
scanned, for they are slow to compile.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.griffin import LanguageModel, associative
from benchmarks.models.llama import RMSNorm

SIZES = base.sizes(
    "width vocab length states layers batch",
    full=(512, 32000, 512, 16, 6, 4),
    tiny=(48, 128, 32, 4, 6, 4),
)


def scan_all(
    x: jax.Array, step: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """Returns the outputs of the state space, of all words at once.

    `x` and `step` are `(batch, length, channels)`, `b` and `c` `(batch, length,
    states)`, and `a` is `(channels, states)`; all are in float32.
    """
    kept = jnp.exp(step[..., None] * a)
    added = (step * x)[..., None] * b[..., None, :]
    return jnp.einsum("blcs,bls->blc", associative(kept, added), c)


def scan_each(
    x: jax.Array, step: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """Returns what `scan_all` does, one word after the other."""

    def turn(state, inputs):
        x, step, b, c = inputs
        state = jnp.exp(step[..., None] * a) * state
        state = state + (step * x)[..., None] * b[:, None]
        return state, jnp.einsum("bcs,bs->bc", state, c)

    start = jnp.zeros((x.shape[0], *a.shape), x.dtype)
    turned = jax.tree.map(lambda y: y.swapaxes(0, 1), (x, step, b, c))
    return jax.lax.scan(turn, start, turned)[1].swapaxes(0, 1)


def steps_bias(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Returns a bias whose softplus lies between 0.001 and 0.1, uniform in its log."""
    step = jnp.exp(
        jax.random.uniform(key, shape, dtype) * math.log(100) + math.log(1e-3)
    )
    return step + jnp.log(-jnp.expm1(-step))


class Block(base.Module):
    """A gated convolution and a state space, for `nn.scan`."""

    looped: bool = False

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
        run = scan_each if self.looped else scan_all
        y = (run(wide, step, -jnp.exp(log_a), b, c) + skip * wide).astype(y.dtype)
        return x + dense(config.width, "out")(y * nn.silu(gate)), None


def problem(name, size, dtype):
    config = SIZES[size]
    model = LanguageModel(config, dtype, Block, name == "mamba_loop")
    return base.linen(model, functools.partial(base.texts, config))
