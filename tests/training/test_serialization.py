"""`flax.serialization` writes and reads a state, its keys included."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import serialization

from _models import make_batch, nnx_loss, nnx_state
from _steps import linear_state, raised
from flax_amp import AmpTrainState, make_train_step, optim
from helpers import assert_identical


class Extended(AmpTrainState):
    """A subclass with keys and other fields of its own."""

    sampler: Any
    ema: Any


class Further(Extended):
    note: jax.Array


def keys(impl=None):
    return {"dropout": jax.random.key(1, impl=impl), "noise": jax.random.key(2)}


def extended(cls=Extended, **options):
    return cls.create(
        params={"w": jnp.ones(3)},
        tx=optax.adam(0.1),
        rngs=keys(),
        sampler={"each": jax.random.split(jax.random.key(3), 4), "n": 1},
        ema=(jnp.ones(3), [jax.random.key(4, impl="rbg")]),
        **options,
    )


STATES = {
    "no keys": lambda: linear_state(optax.adam(0.1)),
    "two implementations": lambda: linear_state(rngs=keys("rbg")),
    "nnx": nnx_state,
    "optim": lambda: linear_state(optim.adam(0.1), rngs=keys()),
    "subclass": lambda: extended(Further, note=jnp.zeros(2)),
    "key in the optimizer": lambda: linear_state(
        optax.add_noise(0.1, 0.5, key=jax.random.key(5))
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_round_trip(name):
    state = STATES[name]()
    target = jax.tree.map(
        lambda x: (
            jax.random.fold_in(x, 1)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.shape
            else jnp.copy(x)
        ),
        state,
    )
    saved = serialization.to_state_dict(state)
    for leaf in jax.tree.leaves(saved):
        assert not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    for found in (
        serialization.from_bytes(target, serialization.to_bytes(state)),
        serialization.from_state_dict(target, saved),
    ):
        assert type(found) is type(state)
        assert_identical(jax.tree.map(jnp.asarray, found), state)


def test_a_run_goes_on():
    """Its next step draws the same numbers, and compiles nothing."""
    traces = []

    def loss(model, batch):
        traces.append(None)
        return nnx_loss(model, batch)

    step = make_train_step(loss, has_aux=True, donate=False, precision="32-true")
    start = nnx_state()
    state, _ = step(start, make_batch())
    restored = serialization.from_bytes(start, serialization.to_bytes(state))
    expected, found = (step(s, make_batch())[0] for s in (state, restored))
    assert_identical(found, expected)
    assert len(traces) == 1
    # The target may be abstract.
    shapes = jax.eval_shape(lambda: linear_state(rngs=keys()))
    saved = serialization.to_bytes(linear_state(rngs=keys()))
    assert_identical(serialization.from_bytes(shapes, saved).rngs, keys())


@pytest.mark.once
def test_what_does_not_fit():
    state = linear_state(rngs=keys())
    saved = serialization.to_state_dict(state)
    restore = serialization.from_state_dict
    rows = [
        (
            (linear_state(rngs=keys("rbg")), saved),
            r"dropout is uint32\[2\]; .*uint32\[4\].*that was saved",
        ),
        ((state, saved | {"ema": 1}), "Unknown field.*ema.*AmpTrainState"),
        ((extended(), saved), "do not match|Missing field"),
    ]
    for args, message in rows:
        raised(lambda a=args: restore(*a), ValueError, message)
