"""Training a Linen model with everything that a Linen model may hold."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from _models import changed, cross_entropy
from _steps import linear_state
from flax_amp import AmpTrainState, init_scaler, make_train_step
from helpers import dtypes_of

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


def make_state(scale):
    model = Everything()
    streams = {"params": jax.random.key(0), **keys()}
    variables = jax.jit(model.init)(streams, make_batch()["x"])
    return AmpTrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        variables={name: variables[name] for name in COLLECTIONS},
        rngs=keys(),
        tx=optax.sgd(0.1),
        scaler=init_scaler(scaler=scale),
    )


def test_a_model_with_everything():
    """Every product is low, every collection moves, and each stream is its own."""
    state = make_state(2.0**6)
    step = make_train_step(loss_fn, has_aux=True, precision="16-mixed", donate=False)
    after, metrics = step(state, make_batch())
    assert metrics["grads_finite"]
    found = dtypes_of(step, state, make_batch())
    assert {name for names in found for name in names} == {"float16"}
    moved = changed(state.variables, after.variables)
    assert {path.split("'")[1] for path in moved} == set(COLLECTIONS)
    assert after.variables["usage"]["layers"]["calls"].tolist() == [2] * LAYERS
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after.params)} == {"float32"}

    def loss(**streams):
        changed = state.replace(rngs={**state.rngs, **streams})
        return float(step(changed, make_batch())[1]["loss"])

    other = jax.random.key(9)
    assert loss() == metrics["loss"]
    assert len({loss(), loss(dropout=other), loss(noise=other)}) == 3
    skipped, metrics = step(state, make_batch(poisoned=True))
    assert not metrics["grads_finite"]
    assert not changed(state.params, skipped.params)
    assert not changed(state.variables, skipped.variables)


def test_some_collections_may_stay_out_of_the_update():
    def loss(params, batch, *, state):
        seen = {"mean": state.variables["stats"]["mean"] + 1}
        return params["w"].sum(), {"variables": {"stats": seen}}

    variables = {"stats": {"mean": jnp.zeros(3)}, "cache": {"k": jnp.ones(2)}}
    state = linear_state(variables=variables)
    after, _ = make_train_step(loss, has_aux=True, donate=False)(state, 0.0)
    assert changed(state.variables, after.variables) == {"['stats']['mean']"}
