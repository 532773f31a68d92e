"""A GPT in Linen that scans its layers, with `nn.remat` or without."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks.models import base
from benchmarks.models.vit import Block

# `remat`: layers are computed again; `tied`: the head is the embedding.
NAMES = "width heads vocab length batch layers remat tied"
SIZES = base.sizes(
    NAMES,
    full=(768, 12, 50304, 1024, 8, 12, True, True),
    tiny=(48, 4, 128, 32, 4, 12, True, True),
    cpu=(256, 4, 4096, 128, 4, 4, True, True),
)
NOREMAT = {size: config._replace(remat=False) for size, config in SIZES.items()}
# For 256 chips: a sequence for each.
FSDP = base.sizes(
    NAMES,
    full=(1024, 16, 50304, 1024, 256, 8, True, True),
    tiny=(48, 4, 128, 32, 256, 8, True, True),
)


def over_chips(x: jax.Array) -> jax.Array:
    """Shards the examples over the axis "data" of the mesh in use, if there is one."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data"))


class Step(base.Module):
    """A block in the form that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        return Block(self.config, self.dtype)(over_chips(x), mask), None


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
        return base.scan(step, config.layers)(config, self.dtype)(x, mask)[0]


problem = base.problem_of(GPT, SIZES, base.texts)
noremat = base.problem_of(GPT, NOREMAT, base.texts)
fsdp = base.problem_of(GPT, FSDP, base.texts)
