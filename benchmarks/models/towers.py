"""Two towers that retrieve items for users, in Linen, as public ones are written.

Nearly all parameters are in two tables. The other items of a batch are what a user did
not choose.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

SIZES = base.sizes(
    "users items width hidden features seen batch",
    full=(200000, 200000, 64, 256, 16, 32, 4096),
    tiny=(100, 100, 24, 48, 8, 4, 32),
)


class Tower(base.Module):
    """An MLP whose result has the norm one, computed in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        x = nn.relu(nn.Dense(config.hidden, dtype=dtype)(x))
        x = nn.relu(nn.Dense(config.hidden, dtype=dtype)(x))
        x = nn.Dense(config.width, dtype=dtype)(x)
        wide = x.astype(jnp.float32)
        length = jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        return (wide / length).astype(x.dtype)


class Towers(base.Module):
    """The likeness of each user of a batch to each item of the batch."""

    @nn.compact
    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        users = nn.Embed(config.users, config.width, dtype=dtype)
        items = nn.Embed(config.items, config.width, dtype=dtype)
        features = base.cast(inputs["features"], dtype)
        seen = jnp.mean(items(inputs["seen"]), axis=1)
        user = jnp.concatenate([users(inputs["users"]), seen, features], axis=-1)
        user = Tower(config, dtype)(user)
        item = Tower(config, dtype)(items(inputs["items"]))
        return (user @ item.T).astype(jnp.float32) / 0.1


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 4)
    count = config.batch
    seen = (count, config.seen)
    inputs = {
        "users": jax.random.randint(keys[0], (count,), 0, config.users),
        "items": jax.random.randint(keys[1], (count,), 0, config.items),
        "seen": jax.random.randint(keys[2], seen, 0, config.items),
        "features": jax.random.normal(keys[3], (count, config.features)),
    }
    return {"inputs": inputs, "labels": jnp.arange(count)}


problem = base.problem_of(Towers, SIZES, batch)
