"""A Llama in Linen as public ones are written, scanned with `nn.remat`.

`llama_4k` has layers as wide as those of Llama 3 8B.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.gpt import over_chips

NAMES = "width hidden heads kv_heads vocab length layers batch"
SIZES = base.sizes(
    NAMES,
    full=(1024, 2816, 16, 4, 32000, 1024, 12, 4),
    tiny=(48, 128, 4, 2, 128, 32, 12, 4),
)

WIDE = SIZES | base.sizes(NAMES, full=(4096, 14336, 32, 8, 32000, 2048, 4, 8))


class RMSNorm(nn.Module):
    """Divides by the root mean square, in float32 whatever comes in."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return base.cast(wide * jax.lax.rsqrt(mean + 1e-5) * scale, self.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates the halves of each head by its position, in float32."""
    size = x.shape[-1] // 2
    frequencies = 1e4 ** (-jnp.arange(size, dtype=jnp.float32) / size)
    angles = positions[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(base.Module):
    """Causal attention in which several queries share a key and a value."""

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.config
        size = config.width // config.heads
        groups = config.heads // config.kv_heads

        def project(name, heads):
            return nn.DenseGeneral(
                (heads, size), use_bias=False, dtype=self.dtype, name=name
            )(x)

        query = rotate(project("query", config.heads), positions)
        key = rotate(project("key", config.kv_heads), positions)
        key = jnp.repeat(key, groups, axis=2)
        value = jnp.repeat(project("value", config.kv_heads), groups, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
        mask = positions[:, None] >= positions[None, :]
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        mixed = mixed.reshape(*mixed.shape[:2], config.width)
        return nn.Dense(config.width, use_bias=False, dtype=self.dtype)(mixed)


class Layer(base.Module):
    """Attention and a gated MLP, in the form that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, None]:
        config, dtype = self.config, self.dtype

        def dense(width, name):
            return nn.Dense(width, use_bias=False, dtype=dtype, name=name)

        x = over_chips(x)
        x = x + Attention(config, dtype)(RMSNorm(dtype)(x), positions)
        y = RMSNorm(dtype)(x)
        y = nn.silu(dense(config.hidden, "gate")(y)) * dense(config.hidden, "up")(y)
        return x + dense(config.width, "down")(y), None


class Llama(base.Module):
    """A decoder with rotary positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        x = nn.Embed(config.vocab, config.width, dtype=dtype)(tokens)
        layers = base.scan(nn.remat(Layer, prevent_cse=False), config.layers)
        x, _ = layers(config, dtype)(x, jnp.arange(tokens.shape[1]))
        return nn.Dense(config.vocab, use_bias=False, dtype=dtype)(RMSNorm(dtype)(x))


problem = base.problem_of(Llama, SIZES, base.texts)
wide = base.problem_of(Llama, WIDE, base.texts)
