"""T5 in Linen, an encoder and a decoder, as public ones are written.

Attention is not divided by the root of a head's size, and adds a bias for how far apart
two words are, which all layers of a stack share. The layers are scanned.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.llama import RMSNorm

# Text and answer are of one length.
SIZES = base.sizes(
    "width hidden heads vocab length batch layers",
    full=(512, 2048, 8, 32128, 512, 8, 6),
    tiny=(48, 128, 4, 128, 32, 4, 6),
)


def bucket(
    distance: jax.Array, causal: bool, buckets: int = 32, farthest: int = 128
) -> jax.Array:
    """Returns the bucket of a distance: near ones by themselves, far ones by log."""
    first = jnp.zeros_like(distance)
    if causal:
        distance = -jnp.minimum(distance, 0)
    else:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = jnp.abs(distance)
    exact = buckets // 2
    far = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(farthest / exact)
    far = exact + (far * (buckets - exact)).astype(jnp.int32)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


class Attention(base.Module):
    """Attention to the same or to another text, with a bias."""

    @nn.compact
    def __call__(
        self, x: jax.Array, text: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        width, heads = x.shape[-1], self.config.heads

        def project(name, y):
            y = nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(y)
            return y.reshape(*y.shape[:2], heads, width // heads)

        query, key, value = project("q", x), project("k", text), project("v", text)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores = scores + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        dense = nn.Dense(width, use_bias=False, dtype=self.dtype, name="o")
        return dense(mixed.reshape(x.shape))


class Layer(base.Module):
    """A layer of an encoder, or of a decoder if there is a text to attend to.

    `context` is the bias, and that text or `None`.
    """

    @nn.compact
    def __call__(self, x: jax.Array, context: Any) -> tuple[jax.Array, None]:
        config, dtype = self.config, self.dtype
        bias, text = context
        y = RMSNorm(dtype)(x)
        x = x + Attention(config, dtype)(y, y, bias)
        if text is not None:
            x = x + Attention(config, dtype)(RMSNorm(dtype)(x), text, None)
        y = nn.Dense(config.hidden, use_bias=False, dtype=dtype)(RMSNorm(dtype)(x))
        y = nn.Dense(config.width, use_bias=False, dtype=dtype)(nn.relu(y))
        return x + y, None


class Stack(base.Module):
    """The layers of an encoder or of a decoder."""

    @nn.compact
    def __call__(self, x: jax.Array, text: jax.Array | None = None) -> jax.Array:
        config, dtype = self.config, self.dtype
        bias = self._bias(x.shape[1], causal=text is not None)
        x, _ = base.scan(Layer, config.layers)(config, dtype)(x, (bias, text))
        return RMSNorm(dtype)(x)

    def _bias(self, length: int, causal: bool) -> jax.Array:
        places = jnp.arange(length)
        distance = places[None, :] - places[:, None]
        table = nn.Embed(32, self.config.heads, dtype=self.dtype, name="distances")
        bias = table(bucket(distance, causal)).transpose(2, 0, 1)[None]
        if not causal:
            return bias
        lowest = jnp.finfo(bias.dtype).min
        return bias + jnp.where(distance > 0, lowest, 0).astype(bias.dtype)


class T5(base.Module):
    """An encoder, a decoder, and a head that is the embedding of the words."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        words = nn.Embed(config.vocab, config.width, dtype=dtype)
        text = Stack(config, dtype, name="encoder")(words(inputs["text"]))
        x = Stack(config, dtype, name="decoder")(words(inputs["answer"]), text)
        return words.attend(x * config.width**-0.5)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key)
    answer, text = base.texts(config, keys[0]), base.texts(config, keys[1])["inputs"]
    inputs = {"text": text, "answer": answer["inputs"]}
    return {"inputs": inputs, "labels": answer["labels"]}


problem = base.problem_of(T5, SIZES, batch)
