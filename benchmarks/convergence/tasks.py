"""A mixture of experts on characters, PPO, and the table of all tasks."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.convergence import digits
from benchmarks.convergence.task import Carry, Program, Task, Way, supervised
from benchmarks.models import base, moe
from configs import char_lm as char_lm_config
from examples.char_lm import data as text


def char_moe(way: Way, steps: int) -> Program:
    """A GPT of characters whose MLPs are four experts, two of them for each token."""
    sizes = dict(width=64, layers=2, heads=4, length=32, batch=16)
    options = dict(experts=4, chosen=2, capacity=1.25, tied=False)
    config = base.config(**sizes, **options, vocab=text.VOCABULARY)
    settings = char_lm_config.get_config()
    settings.update(length=config.length, eval_windows=128, max_chars=1_000_000)
    train, test = text.load(settings)
    data = {"train": train, "test": text.test_batch(settings, test)}

    def sample(data, key):
        starts = jax.random.randint(
            key, (config.batch,), 0, len(data["train"]) - config.length
        )
        rows = jnp.asarray(data["train"])[
            starts[:, None] + jnp.arange(config.length + 1)
        ]
        return {"input": rows[:, :-1], "target": rows[:, 1:]}

    def bits(model, variables, batch):
        logits, sown = model.apply(variables, batch["input"], mutable="losses")
        balance = sum(jax.tree.leaves(sown))  # of a router, if there is one
        return base.cross_entropy(logits, batch["target"]) / jnp.log(2.0), balance

    def loss(model, variables, batch):
        loss, balance = bits(model, variables, batch)
        return loss + 0.01 * balance, {}

    def metric(*args):
        return bits(*args)[0]

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, optax.adamw(schedule, weight_decay=0.1))
    model = functools.partial(moe.MoE, config)
    inputs = [np.zeros((1, config.length), np.int32)]
    return supervised(way, model, inputs, tx, data, sample, loss, metric)


class ActorCritic(nn.Module):
    """The logits of two actions, and the value of a state."""

    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        actor = nn.tanh(dense(64)(nn.tanh(dense(64)(x))))
        critic = nn.tanh(dense(64)(nn.tanh(dense(64)(x))))
        outputs = dense(2)(actor), dense(1)(critic)[..., 0]
        return jax.tree.map(lambda x: x.astype(jnp.float32), outputs)


def _cart_pole(x: jax.Array, action: jax.Array, gust: jax.Array) -> jax.Array:
    """Returns the next positions and speeds of cart and pole, as in Gymnasium.

    A gust shakes the cart, so that no policy keeps every pole up forever.
    """
    place, speed, angle, turn = jnp.moveaxis(x, -1, 0)
    force = jnp.where(action == 1, 10.0, -10.0) + 15 * gust
    pushed = (force + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    turning = (9.8 * jnp.sin(angle) - jnp.cos(angle) * pushed) / (
        0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    )
    pulled = pushed - 0.05 * turning * jnp.cos(angle) / 1.1
    new = place + 0.02 * speed, speed + 0.02 * pulled, angle + 0.02 * turn
    return jnp.stack([*new, turn + 0.02 * turning], axis=-1)


def _fallen(x: jax.Array) -> jax.Array:
    return (jnp.abs(x[..., 0]) > 2.4) | (jnp.abs(x[..., 2]) > 0.2095)


def _first(key: jax.Array, count: int) -> jax.Array:
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


_ENVIRONMENTS, _LENGTH, _LIMIT = 32, 64, 500


def _rollout(policy: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    """Plays on in all environments; one whose pole falls begins anew."""

    def body(x, key):
        keys = jax.random.split(key, 3)
        logits, value = policy(x)
        action = jax.random.categorical(keys[0], logits)
        new = _cart_pole(x, action, jax.random.normal(keys[1], action.shape))
        fell = _fallen(new)
        chosen = jax.nn.log_softmax(logits)[jnp.arange(len(action)), action]
        told = dict(x=x, action=action, value=value, chosen=chosen, fell=fell)
        return jnp.where(fell[:, None], _first(keys[2], len(x)), new), told

    return lax.scan(body, x, jax.random.split(key, _LENGTH))


def _advantages(told: Any, last: jax.Array, decay: float = 0.95) -> jax.Array:
    """Returns the generalized advantages; each step that ends upright earns 1."""

    def body(carry, now):
        advantage, value = carry
        alive = 0.99 * (1 - now["fell"])
        error = (1.0 - now["fell"]) + alive * value - now["value"]
        advantage = error + alive * decay * advantage
        return (advantage, now["value"]), advantage

    return lax.scan(body, (jnp.zeros_like(last), last), told, reverse=True)[1]


def ppo(way: Way, steps: int) -> Program:
    """Proximal policy optimization of a cart-pole in gusts of wind."""
    model, reference = ActorCritic(way.dtype), ActorCritic()

    def loss_fn(params, batch, *, state):
        logits, value = model.apply({"params": params}, batch["x"])
        logs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logs, batch["action"][:, None], axis=1)[:, 0]
        ratio, gain = jnp.exp(chosen - batch["chosen"]), batch["advantage"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        critic = jnp.square(value - batch["goal"]).mean()
        entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
        return actor + 0.5 * critic - 0.01 * entropy, {}

    train_step = way.train_step(loss_fn)
    play = way.eval_step(lambda params, x: model.apply({"params": params}, x))

    def start(key):
        keys = jax.random.split(key)
        params = model.init(keys[0], jnp.zeros((1, 4)))["params"]
        schedule = optax.linear_schedule(3e-3, 0.0, 16 * steps)
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))
        state = way.state(params=params, tx=tx)
        return {"model": state, "x": _first(keys[1], _ENVIRONMENTS)}

    def step(carry: Carry, data, key):
        """Plays, then learns from what it played: four times all, in quarters."""
        state, keys = carry["model"], jax.random.split(key, 5)
        x, told = _rollout(functools.partial(play, state), carry["x"], keys[0])
        told["advantage"] = _advantages(told, play(state, x)[1])
        told["goal"] = told["advantage"] + told["value"]
        told = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), told)

        def epoch(state, key):
            order = jax.random.permutation(key, _ENVIRONMENTS * _LENGTH).reshape(4, -1)
            batches = jax.tree.map(lambda a: a[order], told)
            return lax.scan(train_step, state, batches)[0], None

        return {"model": lax.scan(epoch, state, keys[1:])[0], "x": x}

    def evaluate(carry, data):
        """Returns how long a pole stays up, 500 steps at most."""

        def body(carried, turn):
            x, up = carried
            keys = jax.random.split(jax.random.fold_in(key, turn))
            logits, _ = reference.apply({"params": params}, x)
            action = jax.random.categorical(keys[0], logits)
            x = _cart_pole(x, action, jax.random.normal(keys[1], action.shape))
            up &= ~_fallen(x)
            return (x, up), up.mean()

        params, key = carry["model"].params, jax.random.key(0)
        begin = _first(key, 256), jnp.ones(256, bool)
        return lax.scan(body, begin, jnp.arange(_LIMIT))[1].sum()

    return Program((), start, step, evaluate)


_ACCURACY: Any = dict(higher=True, resolution=1 / 360)  # one test image
TASKS = {
    "resnet": Task("ResNet, digits", "test accuracy", digits.resnet, 300, **_ACCURACY),
    "lstm": Task("LSTM, pixels of digits", "bits per pixel", digits.lstm, 250),
    "diffusion": Task("diffusion U-Net, digits", "test error", digits.diffusion, 400),
    "gan": Task(
        "GAN, digits", "energy distance to test images", digits.gan, 400, seeds=20
    ),
    "char_moe": Task("MoE, characters", "bits per character", char_moe, 500),
    "ppo": Task("PPO, cart-pole", "steps upright", ppo, 40, higher=True, seeds=20),
}
