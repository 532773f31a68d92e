"""A GPT in Linen that scans its layers, with `nn.remat` or without."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks.models import base
from benchmarks.models.vit import Block

# Whether layers are computed again, and whether the last one is the embedding
RUN: dict[str, Any] = dict(remat=True, tied=True)
FULL: dict[str, Any] = dict(
    width=768, layers=12, heads=12, vocab=50304, length=1024, batch=8
)
TINY: dict[str, Any] = dict(width=48, heads=4, vocab=128, length=32, batch=4)
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_scan": {},
    "gpt_scan_noremat": dict(remat=False),
    # For 256 chips: a sequence for each.
    "gpt_fsdp": dict(width=1024, layers=8, heads=16, batch=256),
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
        step: Any = nn.remat(Step, prevent_cse=False) if config.remat else Step
        layers = base.scan(step, config.layers)
        return layers(config.heads, self.dtype)(x, mask)[0]


def problem(name, size, dtype):
    tiny = TINY if size == "tiny" else {}
    config = base.config(**(RUN | FULL | LAYERS[name] | tiny))
    data = functools.partial(base.texts, config)
    return base.linen(GPT(config, dtype), data)
