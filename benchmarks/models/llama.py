"""A Llama in Linen, scanned over its layers, as public ones are written.

`llama` computes its layers again in the backward pass, `llama_noremat` stores them.
`llama_1b` has the sizes of Llama 3.2 1B, for 256 chips: a sequence for each. `llama_4k`
has layers as wide as those of Llama 3 8B, `mlp_4k` their gated MLPs alone, unrolled:
nothing but wide products.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base
from benchmarks.models.gpt import over_chips

SIZES = base.sizes(
    "width hidden heads kv_heads vocab length layers batch remat",
    full=(1024, 2816, 16, 4, 32000, 1024, 12, 4, True),
    tiny=(48, 128, 4, 2, 128, 32, 12, 4, True),
)

LARGE = base.config(
    width=2048,
    hidden=8192,
    heads=32,
    kv_heads=8,
    vocab=128256,
    length=2048,
    layers=16,
    batch=256,
    remat=True,
)
WIDE = LARGE._replace(width=4096, hidden=14336, vocab=32000, layers=4, batch=8)


class RMSNorm(nn.Module):
    """Divides by the root mean square, in float32 whatever comes in."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return base.cast(wide * jax.lax.rsqrt(mean + 1e-5) * scale, self.dtype)


def rotate(x: jax.Array, positions: jax.Array, theta: float = 1e4) -> jax.Array:
    """Rotates the halves of each head by its position, in float32."""
    size = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(size, dtype=jnp.float32) / size)
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
        x = over_chips(x)
        attention = Attention(self.config, self.dtype)
        x = x + attention(RMSNorm(self.dtype)(x), positions)
        return x + gated(self.config, self.dtype, RMSNorm(self.dtype)(x)), None


def gated(config: base.Config, dtype: base.DType, x: jax.Array) -> jax.Array:
    """The gated MLP of the module in which it is called."""

    def dense(width, name):
        return nn.Dense(width, use_bias=False, dtype=dtype, name=name)

    y = nn.silu(dense(config.hidden, "gate")(x)) * dense(config.hidden, "up")(x)
    return dense(config.width, "down")(y)


class MLP(base.Module):
    """A norm and the gated MLP of a layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + gated(self.config, self.dtype, RMSNorm(self.dtype)(x))


class MLPs(base.Module):
    """The layers of a Llama without attention, unrolled, and no embedding."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.config.layers):
            x = MLP(self.config, self.dtype)(x)
        return x


class Llama(base.Module):
    """A decoder with rotary positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        x = nn.Embed(config.vocab, config.width, dtype=dtype)(tokens)
        layer = nn.remat(Layer, prevent_cse=False) if config.remat else Layer
        layers = base.scan(layer, config.layers)
        x, _ = layers(config, dtype)(x, jnp.arange(tokens.shape[1]))
        return nn.Dense(config.vocab, use_bias=False, dtype=dtype)(RMSNorm(dtype)(x))


def vectors(config: base.Config, key: jax.Array) -> base.Batch:
    shape = (config.batch, config.length, config.width)
    inputs, labels = jax.random.normal(key, (2, *shape))
    return {"inputs": inputs, "labels": labels}


def problem(name, size, dtype):
    others = {"llama_1b": LARGE, "llama_4k": WIDE, "mlp_4k": WIDE}
    is_other = name in others and size == "full"
    config = others[name] if is_other else SIZES[size]
    if name == "mlp_4k":
        data = functools.partial(vectors, config)
        return base.linen(MLPs(config, dtype), data, base.squared_error)
    config = config._replace(remat=name != "llama_noremat")
    return base.linen(Llama(config, dtype), functools.partial(base.texts, config))
