"""Models on handwritten digits: ResNet, LSTM, diffusion U-Net, GAN."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.convergence.task import Carry, Program, PyTree, Way, supervised
from benchmarks.models import base, small
from examples.digits import data as digits

BATCH = 64


def _load() -> dict[str, PyTree]:
    train, test = digits.load(split_seed=0)
    return {"train": train, "test": test}


def _sample(data: PyTree, key: jax.Array) -> PyTree:
    rows = jax.random.randint(key, (BATCH,), 0, len(data["train"]["label"]))
    return jax.tree.map(lambda x: jnp.asarray(x)[rows], data["train"])


def _adam(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def _accuracy(logits: Any, labels: jax.Array) -> jax.Array:
    return jnp.mean(logits.argmax(-1) == labels)


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
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
        for features, stride in ((8, 1), (16, 2), (32, 2)):
            x = ResBlock(features, stride, train, self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


def resnet(way: Way, steps: int) -> Program:
    model, reference = ResNet(way.dtype), ResNet()

    def create(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return dict(
            params=variables["params"],
            variables={"batch_stats": variables["batch_stats"]},
            tx=_adam(3e-3, steps),
        )

    def loss_fn(params, batch, *, state):
        variables = {"params": params, **state.variables}
        logits, updates = model.apply(
            variables, batch["image"], train=True, mutable=["batch_stats"]
        )
        loss = base.cross_entropy(logits, batch["label"])
        return loss, {"variables": updates}

    def evaluate(state, data):
        variables = {"params": state.params, **state.variables}
        logits = reference.apply(variables, data["test"]["image"], train=False)
        return _accuracy(logits, data["test"]["label"])

    return supervised(way, _load(), create, loss_fn, _sample, evaluate)


def lstm(way: Way, steps: int) -> Program:
    """Predicts each of the 64 pixels, of 17 shades, from those before it."""
    model, reference = (small.LSTM(48, 17, dtype) for dtype in (way.dtype, None))

    def pixels(image):
        return jnp.round(16 * jnp.reshape(image, (-1, 64))).astype(jnp.int32)

    def create(key):
        variables = model.init(key, jnp.zeros((1, 63), jnp.int32))
        return dict(params=variables["params"], tx=_adam(1e-2, steps))

    def bits(module, params, image):
        text = pixels(image)
        logits = module.apply({"params": params}, text[:, :-1])
        return base.cross_entropy(logits, text[:, 1:]) / jnp.log(2.0)

    def loss_fn(params, batch, *, state):
        return bits(model, params, batch["image"]), {}

    def evaluate(state, data):
        return bits(reference, state.params, data["test"]["image"])

    return supervised(way, _load(), create, loss_fn, _sample, evaluate)


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
    model, reference = UNet(way.dtype), UNet()

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

    def create(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), jnp.zeros((1,)))
        return dict(params=variables["params"], tx=_adam(3e-3, steps))

    def error(module, params, batch):
        found = module.apply({"params": params}, batch["x"], batch["time"])
        return jnp.mean(jnp.square(found - batch["noise"]))

    def loss_fn(params, batch, *, state):
        return error(model, params, batch), {}

    def evaluate(state, data):
        batch = noisy(jnp.asarray(data["test"]["image"]), jax.random.key(0))
        return error(reference, state.params, batch)

    return supervised(way, _load(), create, loss_fn, sample, evaluate)


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

    def batches(carry, data, key):
        keys = jax.random.split(key, 3)
        z = jax.random.normal(keys[0], (2, BATCH, 16))
        real = _sample(data, keys[1])["image"]
        fake = draw(carry["generator"], z[0])
        return {
            "discriminator": {"real": real, "fake": fake},
            "generator": {"z": z[1], "judge": carry["discriminator"].params},
        }

    def step(carry: Carry, data, key):
        batch = batches(carry, data, key)
        judged, _ = step_judge(carry["discriminator"], batch["discriminator"])
        made, _ = step_make(
            carry["generator"], batch["generator"] | {"judge": judged.params}
        )
        return {"generator": made, "discriminator": judged}

    def evaluate(carry, data):
        z = jax.random.normal(jax.random.key(0), (512, 16))
        fake = Generator().apply({"params": carry["generator"].params}, z)
        return energy_distance(fake, data["test"]["image"])

    losses = {"discriminator": judge_loss, "generator": make_loss}
    return Program(_load(), start, step, evaluate, losses, batches)
