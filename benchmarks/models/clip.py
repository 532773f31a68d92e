"""CLIP in Linen: a tower for images, one for texts, and a contrastive loss.

The layers of a tower are written inline. Each tower has 6 layers, not 12: equal layers
are slow to compile.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

# A head is of one size in both towers.
SIZES = base.sizes(
    "image patch image_width text_width vocab length embedding head batch layers",
    full=(224, 32, 768, 512, 49408, 77, 512, 64, 128, 6),
    tiny=(32, 8, 48, 32, 128, 16, 24, 8, 8, 6),
)


class Tower(nn.Module):
    """The layers of a transformer, with a norm before each part."""

    layers: int
    head: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        heads = (*x.shape[:2], width // self.head, self.head)
        for _ in range(self.layers):
            y = norm()(x)
            query, key, value = (dense(width)(y).reshape(heads) for _ in range(3))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query * self.head**-0.5, key)
            if mask is not None:
                scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
            weights = nn.softmax(scores)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
            x = x + dense(width)(y.reshape(x.shape))
            y = dense(4 * width)(norm()(x))
            x = x + dense(width)(y * nn.sigmoid(1.702 * y))
        return norm()(x)


class CLIP(base.Module):
    """Returns how similar each image is to each text."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        small = nn.initializers.normal(0.02)

        width, patch = config.image_width, (config.patch, config.patch)
        x = nn.Conv(width, patch, patch, use_bias=False, dtype=dtype)(inputs["images"])
        x = x.reshape(x.shape[0], -1, width)
        token = base.cast(self.param("class", small, (width,)), dtype)
        token = jnp.broadcast_to(token, (x.shape[0], 1, width))
        x = jnp.concatenate([token, x], axis=1)
        positions = self.param("image_positions", small, x.shape[1:])
        x = nn.LayerNorm(dtype=dtype)(x + base.cast(positions, dtype))
        x = Tower(config.layers, config.head, dtype, name="image")(x)[:, 0]

        texts = inputs["texts"]
        y = nn.Embed(config.vocab, config.text_width, dtype=dtype)(texts)
        positions = self.param("text_positions", small, y.shape[1:])
        y = y + base.cast(positions, dtype)
        mask = nn.make_causal_mask(texts[:1], dtype=bool)
        y = Tower(config.layers, config.head, dtype, name="text")(y, mask)
        y = y[jnp.arange(y.shape[0]), jnp.argmax(texts, axis=-1)]  # the end of a text

        x = nn.Dense(config.embedding, use_bias=False, dtype=dtype)(x)
        y = nn.Dense(config.embedding, use_bias=False, dtype=dtype)(y)
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        y = y / jnp.linalg.norm(y, axis=-1, keepdims=True)
        first = nn.initializers.constant(jnp.log(1 / 0.07))
        scale = jnp.exp(self.param("scale", first, ()))
        return base.cast(scale, dtype) * x @ y.T


def contrast(similar: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the texts of images and the images of texts."""
    return (
        base.cross_entropy(similar, labels) + base.cross_entropy(similar.T, labels)
    ) / 2


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key)
    images = (config.batch, config.image, config.image, 3)
    texts = (config.batch, config.length)
    inputs = {
        "images": jax.random.normal(keys[0], images),
        "texts": jax.random.randint(keys[1], texts, 0, config.vocab),
    }
    return {"inputs": inputs, "labels": jnp.arange(config.batch)}


problem = base.problem_of(CLIP, SIZES, batch, contrast)
