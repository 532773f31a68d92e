"""Models on handwritten digits: ResNet, LSTM, diffusion U-Net, GAN."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.convergence.task import Carry, Program, PyTree, Way, supervised
from benchmarks.models import base, small, unet
from benchmarks.models import resnet as zoo
from examples.digits import data as digits

BATCH = 64
_IMAGE = np.zeros((1, 8, 8, 1), np.float32)


def _load() -> dict[str, PyTree]:
    train, test = digits.load(split_seed=0)
    return {"train": train, "test": test}


def _sample(data: PyTree, key: jax.Array) -> PyTree:
    rows = jax.random.randint(key, (BATCH,), 0, len(data["train"]["label"]))
    return jax.tree.map(lambda x: jnp.asarray(x)[rows], data["train"])


def _adam(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def resnet(way: Way, steps: int) -> Program:
    """Classifies digits; BatchNorm takes the statistics of the test images, too."""

    def logits(model, variables, batch):
        # Doubled, so that something is left after four strides.
        image = jnp.repeat(jnp.repeat(batch["image"], 2, axis=1), 2, axis=2)
        return model.apply(variables, image, mutable=["batch_stats"])

    def loss(model, variables, batch):
        found, updates = logits(model, variables, batch)
        return base.cross_entropy(found, batch["label"]), updates

    def accuracy(model, variables, batch):
        found, _ = logits(model, variables, batch)
        return jnp.mean(found.argmax(-1) == batch["label"])

    config, tx = base.config(width=8, classes=10, stages=(1, 1, 1)), _adam(3e-3, steps)
    model = functools.partial(zoo.ResNet, config)
    return supervised(way, model, [_IMAGE], tx, _load(), _sample, loss, accuracy)


def lstm(way: Way, steps: int) -> Program:
    """Predicts each of the 64 pixels, of 17 shades, from those before it."""

    def bits(model, variables, batch):
        pixels = jnp.reshape(batch["image"], (-1, 64))
        text = jnp.round(16 * pixels).astype(jnp.int32)
        logits = model.apply(variables, text[:, :-1])
        return base.cross_entropy(logits, text[:, 1:]) / jnp.log(2.0), {}

    config, tx = base.config(width=48, vocab=17), _adam(1e-2, steps)
    model = functools.partial(small.LSTM, config)
    text = np.zeros((1, 63), np.int32)
    return supervised(way, model, [text], tx, _load(), _sample, bits)


def diffusion(way: Way, steps: int) -> Program:
    """Predicts the noise in a digit, at all levels of noise."""

    def noised(image, key):
        return unet.noised(2 * jnp.asarray(image) - 1, *jax.random.split(key))

    def sample(data, key):
        keys = jax.random.split(key)
        return noised(_sample(data, keys[0])["image"], keys[1])

    def error(model, variables, batch):
        found = model.apply(variables, batch["inputs"])
        return base.squared_error(found, batch["labels"]), {}

    def metric(model, variables, batch):
        return error(model, variables, noised(batch["image"], jax.random.key(0)))[0]

    config = base.config(width=16, groups=4, factors=(1, 2), blocks=1, attended=1)
    model = functools.partial(unet.UNet, config)
    inputs, tx = [{"images": _IMAGE, "times": np.zeros(1)}], _adam(3e-3, steps)
    return supervised(way, model, inputs, tx, _load(), sample, error, metric)


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
        judging = judge.init(keys[1], _IMAGE)["params"]
        return {
            "generator": way.state(params=made, tx=tx),
            "discriminator": way.state(params=judging, tx=tx),
        }

    def step(carry: Carry, data, key):
        keys, judged = jax.random.split(key, 3), carry["discriminator"]
        z = jax.random.normal(keys[0], (2, BATCH, 16))
        real = _sample(data, keys[1])["image"]
        fake = draw(carry["generator"], z[0])
        judged, _ = step_judge(judged, {"real": real, "fake": fake})
        batch = {"z": z[1], "judge": judged.params}
        made, _ = step_make(carry["generator"], batch)
        return {"generator": made, "discriminator": judged}

    def evaluate(carry, data):
        z = jax.random.normal(jax.random.key(0), (512, 16))
        fake = Generator().apply({"params": carry["generator"].params}, z)
        return energy_distance(fake, data["test"]["image"])

    return Program(_load(), start, step, evaluate)
