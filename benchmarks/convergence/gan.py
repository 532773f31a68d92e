"""A GAN of handwritten digits: two networks that train each other in one step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.convergence.task import (
    BATCH,
    Program,
    Way,
    batch_of,
    drawing,
    load,
)
from benchmarks.models import base


class Generator(nn.Module):
    """Noise to an image, through two transposed convolutions."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(4 * 32, dtype=self.dtype)(z)).reshape(-1, 2, 2, 32)
        for features in (32, 16):
            x = nn.ConvTranspose(features, (4, 4), (2, 2), dtype=self.dtype)(x)
            x = nn.relu(nn.GroupNorm(4, dtype=self.dtype)(x))
        return nn.sigmoid(nn.Conv(1, (3, 3), dtype=self.dtype)(x))


class Discriminator(nn.Module):
    """An image to a number: above 0 for what it takes to be a digit."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (4, 4), (2, 2), dtype=self.dtype)(x)
            x = nn.leaky_relu(x, 0.2)
        x = x.reshape(len(x), -1)
        return nn.Dense(1, dtype=self.dtype)(x)[:, 0].astype(jnp.float32)


def energy_distance(x: Any, y: Any) -> jax.Array:
    """Returns how far two samples are from each other; 0 for equal distributions."""

    def mean(a, b):
        squares = jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None]
        return jnp.mean(jnp.sqrt(jnp.maximum(squares - 2 * a @ b.T, 0.0)))

    x, y = (jnp.reshape(a, (len(a), -1)) for a in (x, y))
    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def gan(way: Way, steps: int) -> Program:
    """Two networks with one loss each; the discriminator has a gradient penalty.

    The state holds both, and its loss is the sum of the two. `stop_gradient` around
    the other network leaves each one the gradient of its own loss.
    """
    generator, judge = Generator(way.dtype), Discriminator(way.dtype)
    stop = jax.lax.stop_gradient

    def score(params, image):
        return judge.apply({"params": params}, image)

    def generate(params, z):
        return generator.apply({"params": params}, z)

    def judge_loss(params, real, fake):
        loss = jnp.mean(nn.softplus(-score(params, real)))
        loss += jnp.mean(nn.softplus(score(params, fake)))
        slope = jax.grad(lambda x: jnp.sum(score(params, x)))(real)
        return loss + 0.5 * jnp.mean(jnp.sum(jnp.square(slope), axis=(1, 2, 3)))

    def loss_fn(params, batch, *, state):
        makes, judges = params["generator"], params["discriminator"]
        fake = stop(generate(makes, batch["z"][0]))
        judged = judge_loss(judges, batch["real"], fake)
        taken = score(stop(judges), generate(makes, batch["z"][1]))
        return judged + jnp.mean(nn.softplus(-taken)), {}

    def init(key):
        keys = jax.random.split(key)
        return {
            "generator": generator.init(keys[0], jnp.zeros((1, 16)))["params"],
            "discriminator": judge.init(keys[1], jnp.zeros((1, 8, 8, 1)))["params"],
        }

    init = jax.jit(init)
    tx = optax.adam(optax.linear_schedule(2e-3, 0.0, steps), b1=0.5)

    def make(seed):
        return way.state(params=init(jax.random.key(seed)), tx=tx)

    def sample(data, key):
        keys = jax.random.split(key)
        z = jax.random.normal(keys[0], (2, BATCH, 16))
        return {"z": z, "real": batch_of(data, keys[1])["image"]}

    data = load(dict)

    @jax.jit
    def distance(params):
        z = jax.random.normal(jax.random.key(0), (512, 16))
        fake = Generator().apply({"params": params}, z)
        return energy_distance(fake, data["test"]["image"])

    def evaluate(state):
        return distance(state.params["generator"])

    return Program(make, loss_fn, drawing(data, sample), evaluate)
