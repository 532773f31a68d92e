"""BERT in Linen, with the head that predicts masked words, as public ones are written.

The norms come after the sums, and an array tells which words are padding. The layers
are scanned, which public ones leave unrolled: they take minutes to compile.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "width heads vocab length batch layers",
    full=(768, 12, 30522, 512, 8, 12),
    tiny=(48, 4, 128, 32, 4, 12),
    cpu=(256, 4, 4096, 128, 4, 4),
)


class Attention(base.Module):
    """Attention with a bias for what is masked."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        width, heads = x.shape[-1], self.config.heads

        def project(name):
            y = nn.Dense(width, dtype=self.dtype, name=name)(x)
            return y.reshape(*y.shape[:2], heads, width // heads)

        query, key, value = project("query"), project("key"), project("value")
        lowest = jnp.finfo(query.dtype).min
        bias = jnp.where(mask[:, None, None], 0.0, lowest).astype(query.dtype)
        weights = nn.dot_product_attention_weights(
            query, key, bias=bias, dtype=self.dtype
        )
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        return nn.Dense(width, dtype=self.dtype)(mixed)


class Layer(base.Module):
    """Attention and an MLP, each with a norm after its sum, for `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        dtype, width = self.dtype, x.shape[-1]
        x = x + Attention(self.config, dtype)(x, mask)
        x = nn.LayerNorm(1e-12, dtype=dtype)(x)
        y = nn.Dense(4 * width, dtype=dtype)(x)
        y = nn.Dense(width, dtype=dtype)(nn.gelu(y, approximate=False))
        return nn.LayerNorm(1e-12, dtype=dtype)(x + y), None


class BERT(base.Module):
    """Embeddings of words, positions and segments, layers, and the head for words."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype

        def embed(size):
            return nn.Embed(size, config.width, dtype=dtype)

        words = embed(config.vocab)
        tokens = inputs["tokens"]
        x = words(tokens) + embed(config.length)(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(1e-12, dtype=dtype)(x + embed(2)(inputs["segments"]))
        x, _ = base.scan(Layer, config.layers)(config, dtype)(x, inputs["mask"])
        x = nn.gelu(nn.Dense(config.width, dtype=dtype)(x), approximate=False)
        x = words.attend(nn.LayerNorm(1e-12, dtype=dtype)(x))
        bias = self.param("bias", nn.initializers.zeros, (config.vocab,))
        return x + base.cast(bias, dtype)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    shape = (config.batch, config.length)
    keys = jax.random.split(key, 3)
    lengths = jax.random.randint(keys[1], shape[:1], 1, config.length + 1)
    places = jnp.arange(config.length)
    inputs = {
        "tokens": jax.random.randint(keys[0], shape, 0, config.vocab),
        "segments": jnp.broadcast_to(places >= config.length // 2, shape) * 1,
        "mask": places < lengths[:, None],
    }
    labels = jax.random.randint(keys[2], shape, 0, config.vocab)
    return {"inputs": inputs, "labels": labels}


problem = base.problem_of(BERT, SIZES, batch)
