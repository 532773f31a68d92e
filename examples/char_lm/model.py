"""A GPT, in Linen and in NNX, in float32; nothing in this file is about precision.

Both run their layers as a scan with remat: compiled once, and computed again in the
backward pass. Both have the same parameters, by name and shape.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from ml_collections import ConfigDict

from examples.char_lm.data import VOCABULARY


class LinenBlock(nn.Module):
    """Attention and two dense layers, each on a normalized residual stream."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(self.heads, name="attention")
        x = x + attention(nn.LayerNorm(name="norm_1")(x), mask=mask)
        y = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="norm_2")(x))
        return x + nn.Dense(width, name="down")(nn.gelu(y)), None


class LinenGPT(nn.Module):
    """Characters `[batch, length]` to logits, through one scanned stack of layers."""

    config: ConfigDict

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        embed = nn.Embed(VOCABULARY, c.width, name="embed")
        positions = nn.Embed(c.length, c.width, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        layers = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),  # a scan needs no such barrier
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.layers,
        )
        mask = nn.make_causal_mask(tokens[:1], dtype=bool)
        x, _ = layers(c.heads, name="blocks")(x, mask)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


class NNXBlock(nnx.Module):
    """The block of `LinenBlock`."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NNXGPT(nnx.Module):
    """The model of `LinenGPT`."""

    def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs) -> None:
        c = config
        self.embed = nnx.Embed(VOCABULARY, c.width, rngs=rngs)
        self.positions = nnx.Embed(c.length, c.width, rngs=rngs)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> NNXBlock:
            return NNXBlock(c.width, c.heads, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(c.width, rngs=rngs)
        self.head = nnx.Linear(c.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(tokens[:1], dtype=bool)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(prevent_cse=False)
        def layers(x: jax.Array, block: NNXBlock) -> jax.Array:
            return block(x, mask)

        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        return self.head(self.norm(layers(x, self.blocks)))


def forward(model: Any, tokens: jax.Array, state: Any) -> jax.Array:
    """Returns the logits; `model` is an NNX model or the parameters of a Linen one."""
    if isinstance(model, nnx.Module):
        return model(tokens)  # type: ignore[operator]
    return state.apply_fn({"params": model}, tokens)


def loss_fn(model, batch, *, state):
    """Returns the mean cross entropy, and the same in bits per character."""
    logits = forward(model, batch["input"], state)
    loss = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["target"]
    ).mean()
    return loss, {"bits": loss / math.log(2)}


def next_char(model, batch, *, state):
    """Draws the character that follows a window of text."""
    logits = forward(model, batch["window"][None], state)[0, -1]
    return jax.random.categorical(batch["key"], logits / batch["temperature"])
