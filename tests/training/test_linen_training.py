"""Training a Linen model with everything that a Linen model may hold."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

from _models import changed, cross_entropy
from flax_amp import AmpTrainState, init_scaler, make_train_step, no_scaler
from helpers import assert_close, both_halves, dtypes_of

WIDTH, CLASSES, LENGTH, LAYERS = 8, 3, 5, 2
COLLECTIONS = ["batch_stats", "usage", "cache"]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        calls = self.variable("usage", "calls", jnp.zeros, (), jnp.int32)
        calls.value += 1
        y = nn.relu(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.2, deterministic=False)(y), None


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        largest = self.variable("cache", "largest", jnp.zeros, (WIDTH,))
        largest.value = jnp.maximum(largest.value, jnp.abs(x).max(0))
        return nn.Dense(CLASSES)(x / (1 + largest.value)[None])


class Everything(nn.Module):
    """RNN, scan, remat and jit; three collections, two streams."""

    @nn.compact
    def __call__(self, x):
        x = x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        x = nn.RNN(nn.LSTMCell(WIDTH), name="rnn")(x)[:, -1]
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        x, _ = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, "usage": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )(name="layers")(x, None)
        return nn.jit(Head)(name="head")(x)


def make_batch(seed=0, poisoned=False):
    x = jax.random.normal(jax.random.key(seed), (6, LENGTH, WIDTH))
    x = x.at[0, 0, 0].set(jnp.nan) if poisoned else x
    return {"x": x, "y": jnp.arange(6) % CLASSES}


def loss_fn(params, batch, *, state, rngs):
    logits, updates = state.apply_fn(
        {"params": params, **state.variables},
        batch["x"],
        mutable=COLLECTIONS,
        rngs=rngs,
    )
    return cross_entropy(logits, batch["y"]), {"variables": updates}


def keys():
    return {"dropout": jax.random.key(1), "noise": jax.random.key(2)}


@functools.cache
def initial():
    model = Everything()
    streams = {"params": jax.random.key(0), **keys()}
    return model, jax.jit(model.init)(streams, make_batch()["x"])


@functools.cache
def make_step(dtype):
    return make_train_step(loss_fn, has_aux=True, compute_dtype=dtype, donate=False)


@functools.cache
def make_state(scale=None):
    """One for all tests, which share what is compiled for it; nothing donates it."""
    model, variables = initial()
    return AmpTrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        variables={name: variables[name] for name in COLLECTIONS},
        rngs=keys(),
        tx=optax.sgd(0.1),
        scaler=init_scaler(scaler=scale) if scale else no_scaler(),
    )


@pytest.mark.slow
def test_equals_plain_flax():
    """Without lower precision: TrainState and a loop by hand, collections included."""
    model, variables = initial()
    variables = {**variables}
    params = variables.pop("params")
    plain = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1)
    )

    @jax.jit
    def by_hand(plain, variables, batch):
        def loss(params):
            rngs = {k: jax.random.fold_in(v, plain.step) for k, v in keys().items()}
            logits, updates = model.apply(
                {"params": params, **variables},
                batch["x"],
                mutable=COLLECTIONS,
                rngs=rngs,
            )
            return cross_entropy(logits, batch["y"]), updates

        grads, updates = jax.grad(loss, has_aux=True)(plain.params)
        return plain.apply_gradients(grads=grads), updates

    state, step = make_state(), make_step(jnp.float32)
    for seed in range(4):
        state, _ = step(state, make_batch(seed))
        plain, variables = by_hand(plain, variables, make_batch(seed))

    assert_close(state.params, plain.params, jnp.float32)
    assert_close(state.variables, dict(variables), jnp.float32)
    assert state.variables["usage"]["layers"]["calls"].tolist() == [5] * LAYERS


@both_halves
def test_every_product_is_low_and_every_collection_moves(dtype):
    state, step = make_state(2.0**6), make_step(dtype)
    after, metrics = step(state, make_batch())

    assert metrics["grads_finite"]
    found = dtypes_of(step, state, make_batch())
    assert {name for names in found for name in names} == {jnp.dtype(dtype).name}
    moved = changed(state.variables, after.variables)
    assert {path.split("'")[1] for path in moved} == set(COLLECTIONS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after.params)} == {"float32"}


def test_a_bad_step_moves_nothing():
    state, step = make_state(2.0**6), make_step(jnp.float16)
    after, metrics = step(state, make_batch(poisoned=True))
    assert not metrics["grads_finite"]
    assert not changed(state.params, after.params)
    assert not changed(state.variables, after.variables)


def test_each_stream_is_its_own():
    """Another key in one stream changes the loss; the same keys do not."""
    state, step = make_state(), make_step(jnp.float32)

    def loss(**streams):
        changed = state.replace(rngs={**state.rngs, **streams})
        return float(step(changed, make_batch())[1]["loss"])

    assert loss() == loss()
    other = jax.random.key(9)
    assert len({loss(), loss(dropout=other), loss(noise=other)}) == 3


@pytest.mark.slow
def test_some_collections_may_stay_out_of_the_update():
    def partial(params, batch, *, state, rngs):
        loss, aux = loss_fn(params, batch, state=state, rngs=rngs)
        kept = {"batch_stats": aux["variables"]["batch_stats"]}
        return loss, {"variables": kept}

    state = make_state(2.0**6)
    after, _ = make_train_step(partial, has_aux=True, donate=False)(state, make_batch())
    moved = changed(state.variables, after.variables)
    assert {path.split("'")[1] for path in moved} == {"batch_stats"}
