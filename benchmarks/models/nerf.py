"""A neural radiance field in Linen, as public ones are written.

An MLP maps the encoded positions of samples along rays to densities and colours. What
a camera sees of them, integrated in float32, is compared with the pixels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

# The layer `skip` reads the encoded positions again.
SIZES = base.sizes(
    "rays samples width layers skip positions directions",
    full=(4096, 64, 256, 8, 5, 10, 4),
    tiny=(32, 8, 48, 8, 5, 10, 4),
)


def encode(x: jax.Array, octaves: int) -> jax.Array:
    """Returns coordinates with their sines and cosines, in float32."""
    angles = x[..., None] * 2.0 ** jnp.arange(octaves)
    angles = angles.reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=-1)


def render(density: jax.Array, colour: jax.Array, depths: jax.Array) -> jax.Array:
    """Returns the colour of each ray, in float32 whatever the dtype that comes in."""
    density, colour = density.astype(jnp.float32), colour.astype(jnp.float32)
    steps = jnp.diff(depths, axis=-1)
    steps = jnp.concatenate([steps, jnp.full_like(steps[:, :1], 1e10)], axis=-1)
    opacity = 1 - jnp.exp(-nn.relu(density) * steps)
    passed = jnp.cumprod(1 - opacity + 1e-10, axis=-1)
    passed = jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], axis=-1)
    return jnp.sum((passed * opacity)[..., None] * nn.sigmoid(colour), axis=-2)


class NeRF(base.Module):
    """The colours of rays, from their origins, directions, and depths of samples."""

    @nn.compact
    def __call__(self, rays: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        depths, directions = rays["depths"], rays["directions"]
        places = rays["origins"][:, None] + directions[:, None] * depths[..., None]
        encoded = base.cast(encode(places, config.positions), dtype)
        x = encoded
        for layer in range(config.layers):
            if layer == config.skip:
                x = jnp.concatenate([encoded, x], axis=-1)
            x = nn.relu(nn.Dense(config.width, dtype=dtype)(x))
        density = nn.Dense(1, dtype=dtype)(x)[..., 0]
        x = nn.Dense(config.width, dtype=dtype)(x)
        seen = base.cast(encode(directions, config.directions), dtype)[:, None]
        seen = jnp.broadcast_to(seen, (*x.shape[:2], seen.shape[-1]))
        x = jnp.concatenate([x, seen], axis=-1)
        x = nn.relu(nn.Dense(config.width // 2, dtype=dtype)(x))
        return render(density, nn.Dense(3, dtype=dtype)(x), depths)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 4)
    directions = jax.random.normal(keys[1], (config.rays, 3))
    inputs = {
        "origins": 0.1 * jax.random.normal(keys[0], (config.rays, 3)),
        "directions": directions / jnp.linalg.norm(directions, axis=-1, keepdims=True),
        # One in each of equal parts between 2 and 6
        "depths": 2 + 4 * _stratified(keys[2], config.rays, config.samples),
    }
    return {"inputs": inputs, "labels": jax.random.uniform(keys[3], (config.rays, 3))}


def _stratified(key: jax.Array, rays: int, samples: int) -> jax.Array:
    offsets = jax.random.uniform(key, (rays, samples))
    return (jnp.arange(samples) + offsets) / samples


problem = base.problem_of(NeRF, SIZES, batch, base.squared_error)
