"""Loops other than one state and one step: epochs in one jit, GANs, penalties."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from _models import MODELS, changed, make_batch
from flax_amp import AmpTrainState, amp, init_scaler, make_eval_step, make_train_step
from helpers import assert_close, assert_identical, both_halves, dtypes_of, jit


@pytest.mark.parametrize("name", MODELS)
def test_scan_over_steps_equals_the_steps(name):
    """One compiled epoch, with a bad batch in it, is the loop of steps.

    The loop transfers nothing: metrics stay on the device until somebody asks.
    """
    make, loss_fn = MODELS[name]
    scaler = init_scaler(scaler=2.0**6, patience=2)
    batches = jax.device_put([make_batch(i, poisoned=i == 2) for i in range(6)])
    step = make_train_step(loss_fn, has_aux=True, donate=False)

    @functools.wraps(loss_fn)  # its keywords, too
    def only_loss(*args, **kwargs):
        return loss_fn(*args, **kwargs)[0]

    evaluate = make_eval_step(only_loss)
    looped, history = make(tx=optax.sgd(0.1), scaler=scaler), []
    with jax.transfer_guard("disallow"):
        for batch in batches:
            looped, metrics = step(looped, batch)
            history.append(metrics)
            evaluate(looped, batch)

    inner = make_train_step(loss_fn, has_aux=True, jit=False)
    epoch = jax.jit(lambda state, batches: jax.lax.scan(inner, state, batches))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    start = make(tx=optax.sgd(0.1), scaler=scaler)
    scanned, metrics = epoch(start, stacked)
    assert metrics["grads_finite"].tolist() == [True] * 2 + [False] + [True] * 3
    assert metrics["loss"].shape == (6,)
    assert_identical(scanned.scaler, looped.scaler)
    assert_close(scanned.params, looped.params, jnp.float16, gradient=True)
    good = jnp.array([0, 1, 3, 4, 5])
    losses = jnp.stack([metrics["loss"] for metrics in history])
    assert_close(metrics["loss"][good], losses[good], jnp.float16)
    # The state is a fixed point of the step: types, weak ones too, and structure.
    out, _ = jax.eval_shape(inner, start, batches[0])
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(out), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert not after.weak_type


# Two networks, two states, two scalers


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.Dense(2)(nn.relu(nn.Dense(16)(z)))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.softplus(nn.Dense(16)(x)))[:, 0]


def generator_loss(params, batch):
    fake = Generator().apply({"params": params}, batch["noise"])
    return -Critic().apply({"params": batch["critic"]}, fake).mean()


def critic_loss(params, batch):
    """WGAN-GP: the gradient with respect to the input is part of the loss."""
    critic = functools.partial(Critic().apply, {"params": params})
    slopes = jax.vmap(jax.grad(lambda x: critic(x[None])[0]))(batch["real"])
    penalty = ((jnp.sqrt((slopes**2).sum(-1) + 1e-6) - 1) ** 2).mean()
    distance = critic(batch["fake"]).mean() - critic(batch["real"]).mean()
    return distance + penalty


def gan_states():
    generator = Generator().init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    critic = Critic().init(jax.random.key(1), jnp.ones((1, 2)))["params"]
    return tuple(
        AmpTrainState.create(params=params, tx=optax.adam(1e-2), precision="16-mixed")
        for params in (generator, critic)
    )


def gan_inputs(seed):
    noise, real = jax.random.split(jax.random.key(seed))
    real = jax.random.normal(real, (16, 2)) + 3
    return jax.random.normal(noise, (16, 4)), real


def test_gan():
    """Both networks train in one jit; the critic's own gradient is differentiated.

    A bad batch for the critic skips the critic only; no scale would mend it.
    """
    train_critic = make_train_step(critic_loss, jit=False)
    train_generator = make_train_step(generator_loss, jit=False)

    @jax.jit
    def step(generator, critic, noise, real):
        fake = Generator().apply({"params": generator.params}, noise)
        critic, told = train_critic(critic, {"real": real, "fake": fake})
        batch = {"noise": noise, "critic": critic.params}
        generator, _ = train_generator(generator, batch)
        return generator, critic, told

    generator, critic = start = gan_states()
    for seed in range(3):
        generator, critic, told = step(generator, critic, *gan_inputs(seed))
    assert told["grads_finite"]
    assert changed(start[0].params, generator.params)
    assert changed(start[1].params, critic.params)
    noise, real = gan_inputs(0)
    after, skipped, told = step(generator, critic, noise, real.at[0].set(jnp.inf))
    assert not told["grads_finite"]
    assert not changed(critic.params, skipped.params)
    assert changed(generator.params, after.params)
    for old, new in [(generator, after), (critic, skipped)]:
        assert old.scaler["scaler"] == new.scaler["scaler"]


@both_halves
def test_gradient_penalty(dtype):
    """grad of grad through `amp`: in half precision, and close to float32."""
    params = Critic().init(jax.random.key(1), jnp.ones((1, 2)))["params"]
    _, real = gan_inputs(0)
    batch = {"real": real, "fake": -real}
    lowered = jax.grad(amp(critic_loss, compute_dtype=dtype))

    exact = jit(jax.grad(critic_loss))(params, batch)
    assert_close(jit(lowered)(params, batch), exact, dtype, gradient=True)
    # The slope of the last layer is an outer product of a number and its weights. It
    # stays in float32, and so does its derivative.
    found = dtypes_of(lowered, params, batch)
    assert found.count((jnp.dtype(dtype).name,) * 2) == len(found) - 2 == 15


def test_two_optimizers_of_one_nnx_model():
    """`wrt` splits a model between two states, which train in turn."""

    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(4, 4, rngs=rngs)
            self.decoder = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.decoder(nnx.tanh(self.encoder(x)))

    def loss_fn(model, x):
        return ((model(x) - x) ** 2).mean()

    model, x = Pair(nnx.Rngs(0)), jnp.ones((3, 4))
    step = make_train_step(loss_fn, donate=False)
    for part, other in [("encoder", "decoder"), ("decoder", "encoder")]:
        state = AmpTrainState.create(
            model=model, tx=optax.sgd(0.1), wrt=lambda path, _, part=part: part in path
        )
        state, _ = step(state, x)
        trained = state.merge_model()
        assert_identical(
            nnx.to_pure_dict(nnx.state(getattr(trained, other))),
            nnx.to_pure_dict(nnx.state(getattr(model, other))),
        )
        assert (getattr(trained, part).kernel[...] != getattr(model, part).kernel).any()
        model = trained
