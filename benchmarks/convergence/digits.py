"""Models on handwritten digits: ResNet, LSTM, diffusion U-Net, GAN."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.convergence.task import Carry, Program, PyTree, Way, supervised
from benchmarks.models import base, small
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


class ResBlock(nn.Module):
    """Two convolutions and a shortcut; begins as the identity."""

    features: int
    stride: int
    train: bool
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, not self.train, momentum=0.9, dtype=self.dtype
        )
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(x)))
        y = conv(self.features, (3, 3))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(conv(self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Three blocks of growing width."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
        for features, stride in ((8, 1), (16, 2), (32, 2)):
            x = ResBlock(features, stride, train, self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


def resnet(way: Way, steps: int) -> Program:
    def loss(model, variables, batch):
        logits, updates = model.apply(
            variables, batch["image"], train=True, mutable=["batch_stats"]
        )
        return base.cross_entropy(logits, batch["label"]), updates

    def accuracy(model, variables, batch):
        logits = model.apply(variables, batch["image"])
        return jnp.mean(logits.argmax(-1) == batch["label"])

    tx = _adam(3e-3, steps)
    return supervised(way, ResNet, [_IMAGE], tx, _load(), _sample, loss, accuracy)


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


class UNet(nn.Module):
    """Two resolutions with a skip between them; GroupNorm, and the time as a bias."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * jnp.exp2(jnp.arange(8.0))[None] * jnp.pi / 2
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = nn.silu(nn.Dense(64, dtype=self.dtype)(waves))

        def block(x, features):
            norm = functools.partial(nn.GroupNorm, 4, dtype=self.dtype)
            y = nn.Conv(features, (3, 3), dtype=self.dtype)(nn.silu(norm()(x)))
            y = y + nn.Dense(features, dtype=self.dtype)(time)[:, None, None]
            y = nn.Conv(features, (3, 3), dtype=self.dtype)(nn.silu(norm()(y)))
            if x.shape != y.shape:
                x = nn.Dense(features, dtype=self.dtype)(x)
            return x + y

        fine = block(nn.Conv(16, (3, 3), dtype=self.dtype)(x), 16)
        y = nn.Conv(32, (3, 3), (2, 2), dtype=self.dtype)(fine)
        y = block(block(y, 32), 32)
        y = nn.ConvTranspose(16, (2, 2), (2, 2), dtype=self.dtype)(y)
        y = block(jnp.concatenate([y, fine], axis=-1), 16)
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(y))
        return nn.Conv(1, (3, 3), dtype=self.dtype)(y)


def diffusion(way: Way, steps: int) -> Program:
    """Predicts the noise in a digit, at all levels of noise."""

    def noisy(image, key):
        keys = jax.random.split(key)
        time = jax.random.uniform(keys[0], (len(image),))
        noise = jax.random.normal(keys[1], image.shape)
        angle = (jnp.pi / 2 * time)[:, None, None, None]
        x = jnp.cos(angle) * (2 * image - 1) + jnp.sin(angle) * noise
        return {"x": x, "time": time, "noise": noise}

    def sample(data, key):
        keys = jax.random.split(key)
        return noisy(_sample(data, keys[0])["image"], keys[1])

    def error(model, variables, batch):
        found = model.apply(variables, batch["x"], batch["time"])
        return jnp.mean(jnp.square(found - batch["noise"])), {}

    def metric(model, variables, batch):
        batch = noisy(jnp.asarray(batch["image"]), jax.random.key(0))
        return error(model, variables, batch)[0]

    inputs, tx = [_IMAGE, np.zeros(1, np.float32)], _adam(3e-3, steps)
    return supervised(way, UNet, inputs, tx, _load(), sample, error, metric)


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
