"""The tasks: models of the benchmarks on digits and on characters, and a GAN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.convergence.gan import gan
from benchmarks.convergence.task import Program, Task, Way, batch_of, load, supervised
from benchmarks.models import base, moe, resnet, small, unet, vit
from configs import char_lm as char_lm_config
from examples.char_lm import data as text


def _adam(rate: float, steps: int, **options: Any) -> optax.GradientTransformation:
    """Returns adamw with clipping and a rate that rises and falls."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.adamw(schedule, **options))


def _accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(logits.argmax(-1) == labels)


def resnet_task(way: Way, steps: int) -> Program:
    """Classifies digits; BatchNorm takes the statistics of the test images, too."""

    def doubled(part):  # so that something is left after four strides
        image = np.repeat(np.repeat(part["image"], 2, axis=1), 2, axis=2)
        return {"inputs": image, "labels": part["label"]}

    config, tx = base.config(width=8, classes=10, stages=(1, 1, 1)), _adam(3e-3, steps)
    data = load(doubled)
    return supervised(
        way, resnet.ResNet, config, tx, data, batch_of, metric_of=_accuracy
    )


def vit_task(way: Way, steps: int) -> Program:
    """Classifies digits in patches of 2 x 2."""

    def images(part):
        return {"inputs": part["image"], "labels": part["label"]}

    config = base.config(width=32, classes=10, patch=2, layers=2, heads=4)
    data, tx = load(images), _adam(3e-3, steps)
    return supervised(way, vit.ViT, config, tx, data, batch_of, metric_of=_accuracy)


def lstm_task(way: Way, steps: int) -> Program:
    """Predicts each of the 64 pixels, of 17 shades, from those before it."""

    def shades(part):
        pixels = np.round(16 * part["image"].reshape(-1, 64)).astype(np.int32)
        return {"inputs": pixels[:, :-1], "labels": pixels[:, 1:]}

    config, tx = base.config(width=48, vocab=17), _adam(1e-2, steps)
    return supervised(way, small.LSTM, config, tx, load(shades), batch_of, base.bits)


def diffusion_task(way: Way, steps: int) -> Program:
    """Predicts the noise in a digit, at all levels of noise."""

    def noised(part, key):
        image = 2 * jnp.asarray(part["image"]) - 1
        return unet.noised(image, *jax.random.split(key))

    def sample(data, key):
        keys = jax.random.split(key)
        return noised(batch_of(data, keys[0]), keys[1])

    data = load(dict, lambda part: noised(part, jax.random.key(0)))
    config = base.config(width=16, groups=4, factors=(1, 2), blocks=1, attended=1)
    tx = _adam(3e-3, steps)
    return supervised(way, unet.UNet, config, tx, data, sample, base.squared_error)


def moe_task(way: Way, steps: int) -> Program:
    """A GPT of characters whose MLPs are four experts, two of them for each token."""
    sizes = dict(width=64, layers=2, heads=4, length=32, batch=16)
    options = dict(experts=4, chosen=2, capacity=1.25, tied=False)
    config = base.config(**sizes, **options, vocab=text.VOCABULARY)
    settings = char_lm_config.get_config()
    settings.update(length=config.length, eval_windows=128, max_chars=1_000_000)
    train, test = text.load(settings)
    batch = text.test_batch(settings, test)
    held_out = {"inputs": batch["input"], "labels": batch["target"]}
    data = {"train": train, "test": held_out}

    def sample(data, key):
        last = len(data["train"]) - config.length
        starts = jax.random.randint(key, (config.batch, 1), 0, last)
        rows = jnp.asarray(data["train"])[starts + jnp.arange(config.length + 1)]
        return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}

    tx = _adam(1e-2, steps, weight_decay=0.1)
    return supervised(way, moe.MoE, config, tx, data, sample, base.bits)


_ACCURACY: Any = dict(higher=True, resolution=1 / 360)  # one test image
TASKS = {
    "resnet": Task("ResNet, digits", "test accuracy", resnet_task, 300, **_ACCURACY),
    "vit": Task("ViT, digits", "test accuracy", vit_task, 400, **_ACCURACY),
    "lstm": Task("LSTM, pixels of digits", "bits per pixel", lstm_task, 250),
    "diffusion": Task("diffusion U-Net, digits", "test error", diffusion_task, 400),
    "gan": Task("GAN, digits", "energy distance to test images", gan, 400),
    "char_moe": Task("MoE, characters", "bits per character", moe_task, 500),
}
