"""A GPT in Linen: scanned or unrolled over its layers, with or without remat.

`nnx_gpt` is in NNX, unrolled, without remat.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from benchmarks.models import base
from benchmarks.models.vit import Block, NNXBlock

# How the layers are run, and whether the last one is the embedding
RUN: dict[str, Any] = dict(scan=True, remat=True, tied=True)
FULL: dict[str, Any] = dict(
    width=768, layers=12, heads=12, vocab=50304, length=1024, batch=8
)
TINY: dict[str, Any] = dict(width=48, heads=4, vocab=128, length=32, batch=4)
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_scan": {},
    "gpt_unroll": dict(scan=False),
    "gpt_scan_noremat": dict(remat=False),
    # For the cost of tracing: nothing is shared between the layers.
    "gpt_24": dict(layers=24, scan=False, remat=False),
    # For 256 chips: a sequence for each.
    "gpt_fsdp": dict(width=1024, layers=8, heads=16, batch=256),
    "nnx_gpt": dict(layers=6, scan=False, remat=False),
}


def over_chips(x: jax.Array) -> jax.Array:
    """Shards the examples over the axis "data" of the mesh in use, if there is one."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data"))


class Step(nn.Module):
    """A block in the form that `nn.scan` wants."""

    heads: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x = over_chips(x)
        return Block(self.heads, self.dtype)(x, mask), None


class GPT(base.Module):
    """A decoder with learned positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        embed = nn.Embed(config.vocab, config.width, dtype=dtype)
        x = embed(tokens)
        positions = nn.Embed(config.length, config.width, dtype=dtype)
        x = x + positions(jnp.arange(tokens.shape[1]))
        x = self._layers(x, nn.make_causal_mask(tokens[:1], dtype=bool))
        x = nn.LayerNorm(dtype=dtype)(over_chips(x))
        if config.tied:
            return embed.attend(x)
        return nn.Dense(config.vocab, use_bias=False, dtype=dtype)(x)

    def _layers(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.config
        arguments = config.heads, self.dtype
        step: Any = Step
        if config.remat:
            step = nn.remat(Step, prevent_cse=not config.scan)
        if not config.scan:
            for _ in range(config.layers):
                x, _ = step(*arguments)(x, mask)
            return x
        return base.scan(step, config.layers)(*arguments)(x, mask)[0]


class NNXGPT(nnx.Module):
    """`GPT` in NNX."""

    def __init__(self, config: base.Config, dtype: base.DType, rngs: nnx.Rngs):
        width = config.width
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(config.vocab, width, **options)
        self.positions = nnx.Embed(config.length, width, **options)
        self.blocks = nnx.List(
            [NNXBlock(width, config.heads, **options) for _ in range(config.layers)]
        )
        self.norm = nnx.LayerNorm(width, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens[:1], dtype=bool)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def problem(name, size, dtype):
    tiny = TINY if size == "tiny" else {}
    config = base.config(**(RUN | FULL | LAYERS[name] | tiny))
    data = functools.partial(base.texts, config)
    if name == "nnx_gpt":
        return base.nnx_problem(functools.partial(NNXGPT, config, dtype), data)
    return base.linen(GPT(config, dtype), data)
