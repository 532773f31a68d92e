"""A DLRM in Linen: one large embedding, products of all pairs, MLPs before and after.

As public ones are written: the categories of all features lie in one table.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.models import base

SIZES = base.sizes(
    "rows width bottom top batch dense categories",
    full=(1 << 20, 128, (512, 256, 128), (1024, 1024, 512, 256), 8192, 13, 26),
    tiny=(1 << 12, 16, (32, 24, 16), (64, 64, 32, 16), 16, 13, 26),
)


class DLRM(base.Module):
    """Predicts a click from numbers and categories."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        x = jnp.log1p(inputs["dense"])
        for width in config.bottom:
            x = nn.relu(nn.Dense(width, dtype=dtype)(x))
        table = nn.Embed(config.rows, config.width, dtype=dtype)
        found = table(inputs["categories"] % config.rows)
        features = jnp.concatenate([x[:, None], found], axis=1)
        products = jnp.einsum("bif,bjf->bij", features, features)
        rows, columns = jnp.triu_indices(features.shape[1])
        x = jnp.concatenate([x, products[:, rows, columns]], axis=-1)
        for width in config.top:
            x = nn.relu(nn.Dense(width, dtype=dtype)(x))
        return nn.Dense(1, dtype=dtype)(x)[:, 0]


def clicks(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of a yes or no, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 3)
    shape = (config.batch, config.categories)
    inputs = {
        "dense": jax.random.exponential(keys[0], (config.batch, config.dense)),
        "categories": jax.random.randint(keys[1], shape, 0, 1 << 30),
    }
    labels = jax.random.bernoulli(keys[2], shape=shape[:1])
    return {"inputs": inputs, "labels": labels.astype(jnp.float32)}


problem = base.problem_of(DLRM, SIZES, batch, clicks)
