"""Loops of three public training programs, written anew and small, and what all share.

Each has the shape of its original: how the loss gets its model, its configuration and
its keys, what it returns beside the loss, what `jit`, `scan`, `vmap` or `pmap` runs
around the step, and what the optimizer keeps. `# amp` marks the lines that plain Flax
would write otherwise or not at all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from flax_amp import (
    AmpTrainState,
    all_finite,
    amp,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_train_step,
    no_scaler,
)

PRECISIONS = {
    jnp.float32: "32-true",
    jnp.bfloat16: "bf16-mixed",
    jnp.float16: "16-mixed",
}
WIDTH = 16


class Loop(NamedTuple):
    """A program: `step(carry, batch)` returns the next carry and a loss."""

    carry: Any
    step: Callable[..., Any]
    batches: list[Any]
    traced: list[None]  # grows with each trace of the loss
    bad: Any = None  # a batch whose step has to be skipped, if the program can skip
    kept: Callable[[Any], Any] = lambda carry: carry  # what that step has to keep
    frozen: str = "nothing"  # what no step changes, as a part of paths
    precise: int = 0  # the number of products outside of the loss
    replicated: bool = False  # whether each array of the carry has a row per device


def scaler_of(dtype):
    return init_scaler() if dtype == jnp.float16 else no_scaler()


def init(model, *args):
    return jax.jit(model.init)(jax.random.key(0), *args)["params"]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, other, mask):
        q = nn.Dense(WIDTH, name="query")(x)
        k, v = nn.Dense(WIDTH, name="key")(other), nn.Dense(WIDTH, name="value")(other)
        logits = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
        logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bqk,bkd->bqd", nn.softmax(logits), v)


# Flax's VAE: the loss is a closure over the batch and a key, and sums over pixels.


class Autoencoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x, z_rng):
        h = nn.relu(nn.Dense(32)(x))
        mean, logvar = nn.Dense(self.latents)(h), nn.Dense(self.latents)(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(32)(z))), mean, logvar


@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy(logits, labels):
    log_p = nn.log_sigmoid(logits)
    return -jnp.sum(labels * log_p + (1 - labels) * jnp.log(-jnp.expm1(log_p)))


def vae(dtype):
    traced = []

    @functools.partial(jax.jit, static_argnames="latents")
    def train_step(state, batch, z_rng, latents):
        @amp(compute_dtype=dtype)  # amp
        def loss_fn(params):
            traced.append(None)
            model = Autoencoder(latents)
            recon_x, mean, logvar = model.apply({"params": params}, batch, z_rng)
            reconstruction = binary_cross_entropy(recon_x, batch).mean()
            return reconstruction + kl_divergence(mean, logvar).mean(), recon_x

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), loss

    def step(carry, batch):
        state, rng = carry
        rng, key = jax.random.split(rng)
        state, loss = train_step(state, batch, key, latents=4)
        return (state, rng), loss

    model, key = Autoencoder(4), jax.random.key(0)
    params = init(model, jnp.ones((1, 64)), key)
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    pixels = np.random.default_rng(0).random((16, 64)) > 0.3
    return Loop((state, key), step, [pixels.astype(np.float32)] * 10, traced)


# PureJaxRL's PPO: scans of minibatches, of epochs and of updates; agents under vmap.

STEPS, ENVS, MINIBATCHES, EPOCHS, AGENTS = 8, 4, 2, 2, 2


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        orthogonal = nn.initializers.orthogonal
        h = nn.tanh(nn.Dense(WIDTH, kernel_init=orthogonal(2**0.5))(x))
        logits = nn.Dense(3, kernel_init=orthogonal(0.01))(h)
        h = nn.tanh(nn.Dense(WIDTH, kernel_init=orthogonal(2**0.5))(x))
        return logits, nn.Dense(1, kernel_init=orthogonal(1.0))(h)[..., 0]


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array


def log_prob_of(logits, action):
    log_p = nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, action[..., None], -1)[..., 0]


def env_step(wind, carry, _):
    state, obs, rng = carry
    rng, key = jax.random.split(rng)
    logits, value = state.apply_fn(state.params, obs)
    action = jax.random.categorical(key, logits)
    pushed = obs + 0.2 * (action - 1.0)[:, None] * jnp.array([[1.0, -1.0, 0.5]])
    log_prob = log_prob_of(logits, action)
    reward = wind - (pushed**2).mean(-1)
    transition = Transition(obs, action, log_prob, value, reward)
    return (state, 0.9 * pushed, rng), transition


def advantages_of(transitions, last_value):
    def back(carry, transition):
        gae, next_value = carry
        delta = transition.reward + 0.9 * next_value - transition.value
        gae = delta + 0.9 * 0.95 * gae
        return (gae, transition.value), gae

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(back, start, transitions, reverse=True)[1]


def ppo(dtype):
    traced = []
    network = ActorCritic()

    def loss_fn(params, batch):
        traced.append(None)
        transition, gae, targets = batch
        logits, value = network.apply(params, transition.obs)
        clipped = transition.value + (value - transition.value).clip(-0.2, 0.2)
        errors = jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2)
        value_loss = 0.5 * errors.mean()
        log_prob = log_prob_of(logits, transition.action)
        ratio = jnp.exp(log_prob - transition.log_prob)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        actor_loss = -jnp.minimum(ratio * gae, ratio.clip(0.8, 1.2) * gae).mean()
        entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1).mean()
        total = actor_loss + 0.5 * value_loss - 0.01 * entropy
        return total, (value_loss, actor_loss, entropy)

    update_minibatch = make_train_step(loss_fn, has_aux=True, jit=False)  # amp

    def update(carry, wind):
        act = functools.partial(env_step, wind)
        (state, obs, rng), transitions = jax.lax.scan(act, carry, None, STEPS)
        _, last_value = network.apply(state.params, obs)
        gae = advantages_of(transitions, last_value)
        batch = (transitions, gae, gae + transitions.value)
        batch = jax.tree.map(lambda x: x.reshape(STEPS * ENVS, *x.shape[2:]), batch)

        def epoch(carry, _):
            state, rng = carry
            rng, key = jax.random.split(rng)
            order = jax.random.permutation(key, STEPS * ENVS).reshape(MINIBATCHES, -1)
            parts = jax.tree.map(lambda x: x[order], batch)
            state, metrics = jax.lax.scan(update_minibatch, state, parts)
            value_loss, _, _ = metrics["aux"]
            return (state, rng), value_loss.mean()

        (state, rng), losses = jax.lax.scan(epoch, (state, rng), None, EPOCHS)
        return (state, obs, rng), losses.mean()

    def anneal(count):
        return 2e-2 * (1 - (count // (MINIBATCHES * EPOCHS)) / 24)

    tx = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(learning_rate=anneal, eps=1e-5)
    )

    @jax.jit
    @jax.vmap
    def begin(rng):
        rng, key, obs_key = jax.random.split(rng, 3)
        obs = jax.random.normal(obs_key, (ENVS, 3))
        state = AmpTrainState.create(  # amp
            apply_fn=network.apply,
            params=network.init(key, obs),
            tx=tx,
            precision=PRECISIONS[dtype],
        )
        return state, obs, rng

    train = jax.jit(jax.vmap(lambda carry, winds: jax.lax.scan(update, carry, winds)))

    def step(carry, winds):
        carry, losses = train(carry, winds)
        return carry, losses.mean()

    def second(carry):
        return jax.tree.map(lambda x: x[1], carry[0])

    winds = np.zeros((AGENTS, 2), np.float32)
    bad = np.float32([[0, 0], [np.nan, np.nan]])  # for the second agent
    carry = begin(jax.random.split(jax.random.key(0), AGENTS))
    # The policy that collects data is not in the loss: two calls, of four layers each.
    return Loop(carry, step, [winds] * 10, traced, bad, kept=second, precise=8)


# big_vision's ViT: a dict for a state; frozen parameters; momentum in bfloat16; the
# decay of the weights outside of the optimizer.


class ViT(nn.Module):
    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), name="embedding")(image)
        x = x.reshape(len(x), -1, WIDTH)
        x += self.param("pos_embedding", nn.initializers.normal(0.1), (1, 4, WIDTH))
        y = nn.LayerNorm()(x)
        y = Attention()(y, y, jnp.ones((1, 1, 1), bool))
        x += nn.Dropout(0.1, deterministic=not train)(y)
        x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(4, name="head")(x.mean(1)), {"encoded": x}


def sigmoid_xent(*, logits, labels):
    log_p, log_not_p = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -jnp.sum(labels * log_p + (1.0 - labels) * log_not_p, axis=-1).mean()


def l2(tree):
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def images(seed):
    rng = np.random.default_rng(seed)
    labels = (rng.random((16, 4)) > 0.5).astype(np.float32)
    image = 0.1 * rng.normal(size=(16, 8, 8, 3)) + labels.repeat(2, 1)[:, None, :, None]
    return {"image": image.astype(np.float32), "labels": labels}


def big_vision(dtype):
    traced = []
    model = ViT()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 20)

    def labels_of(params):
        return {k: "frozen" if k == "embedding" else "trained" for k in params}

    trained = optax.chain(
        optax.clip_by_global_norm(10.0),  # above the norms, which thus matter
        optax.trace(decay=0.9, accumulator_dtype=jnp.bfloat16),
        optax.scale(0.1),
        optax.scale_by_schedule(schedule),
        optax.scale(-1.0),
    )
    tx = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": trained}, labels_of
    )

    def decay(rate, path, x):
        decays = path[-1].key == "kernel" and path[0].key != "embedding"
        return x * (1 - 1e-3 * rate) if decays else x

    @functools.partial(jax.jit, donate_argnums=(0,))
    def update_fn(train_state, rng, batch):
        images, labels = batch["image"], batch["labels"]
        count = optax.tree_utils.tree_get(train_state["opt"], "count")
        rng, rng_model = jax.random.split(jax.random.fold_in(rng, count))

        @amp(compute_dtype=dtype)  # amp
        def loss_fn(params):
            traced.append(None)
            logits, _ = model.apply(
                {"params": params}, images, train=True, rngs={"dropout": rng_model}
            )
            return sigmoid_xent(logits=logits, labels=labels)

        params, opt = train_state["params"], train_state["opt"]
        scaler, (loss, grads) = dynamic_scale_value_and_grad(loss_fn)(  # amp
            params, dynamic_scaler_state=train_state["scaler"]
        )
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        params = jax.tree_util.tree_map_with_path(
            functools.partial(decay, schedule(count)), params
        )
        trains = {k: g for k, g in grads.items() if k != "embedding"}
        measurements = {"training_loss": loss, "l2_grads": l2(trains)}
        measurements |= {"l2_params": l2(params), "l2_updates": l2(updates)}
        new = {"params": params, "opt": opt}
        finite = all_finite((loss, grads))  # amp
        new = {  # amp
            name: jax.tree.map(functools.partial(jnp.where, finite), new[name], old)
            for name, old in train_state.items()
            if name != "scaler"
        }
        return new | {"scaler": scaler}, measurements

    def step(train_state, batch):
        train_state, measurements = update_fn(train_state, jax.random.key(1), batch)
        return train_state, measurements["training_loss"]

    batches = [images(seed) for seed in range(15)]
    bad = batches[0] | {"image": batches[0]["image"] * np.inf}
    params = init(model, batches[0]["image"])
    state = {"params": params, "opt": tx.init(params), "scaler": scaler_of(dtype)}
    return Loop(state, step, batches, traced, bad, frozen="['params']['embedding']")
