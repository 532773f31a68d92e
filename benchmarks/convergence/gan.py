"""A GAN of handwritten digits: two states that train each other."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.convergence.task import BATCH, Carry, Program, Way, batch_of, load
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
    """Two states that train each other; the discriminator has a gradient penalty."""
    make, judge = Generator(way.dtype), Discriminator(way.dtype)

    def score(params, image):
        return judge.apply({"params": params}, image)

    def generate(params, z):
        return make.apply({"params": params}, z)

    def judge_loss(params, batch, *, state):
        loss = jnp.mean(nn.softplus(-score(params, batch["real"])))
        loss += jnp.mean(nn.softplus(score(params, batch["fake"])))
        slope = jax.grad(lambda x: jnp.sum(score(params, x)))(batch["real"])
        return loss + 0.5 * jnp.mean(jnp.sum(jnp.square(slope), axis=(1, 2, 3))), {}

    def make_loss(params, batch, *, state):
        fake = generate(params, batch["z"])
        return jnp.mean(nn.softplus(-score(batch["judge"], fake))), {}

    step_judge, step_make = way.train_step(judge_loss), way.train_step(make_loss)
    draw = way.eval_step(generate)

    def start(key):
        keys = jax.random.split(key)
        tx = optax.adam(optax.linear_schedule(2e-3, 0.0, steps), b1=0.5)
        made = make.init(keys[0], jnp.zeros((1, 16)))["params"]
        judging = judge.init(keys[1], jnp.zeros((1, 8, 8, 1)))["params"]
        return {
            "generator": way.state(params=made, tx=tx),
            "discriminator": way.state(params=judging, tx=tx),
        }

    def step(carry: Carry, data, key):
        keys, judged = jax.random.split(key, 3), carry["discriminator"]
        z = jax.random.normal(keys[0], (2, BATCH, 16))
        real = batch_of(data, keys[1])["image"]
        fake = draw(carry["generator"], z[0])
        judged, _ = step_judge(judged, {"real": real, "fake": fake})
        batch = {"z": z[1], "judge": judged.params}
        made, _ = step_make(carry["generator"], batch)
        return {"generator": made, "discriminator": judged}

    def evaluate(carry, data):
        z = jax.random.normal(jax.random.key(0), (512, 16))
        fake = Generator().apply({"params": carry["generator"].params}, z)
        return energy_distance(fake, data["test"]["image"])

    return Program(load(dict), start, step, evaluate)
