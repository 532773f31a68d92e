"""Gradient accumulation: within a step, over steps with MultiSteps, and both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import make_batch
from _steps import linear_batch, linear_loss, linear_state, setup
from flax_amp import AmpTrainState, make_train_step, no_scaler
from helpers import assert_close, assert_identical

CLIP = 0.05  # far below the norm of the gradient: it always clips
POISONED = {"x": np.full((2, 3), np.inf, np.float32), "y": np.zeros(2, np.float32)}


def part(i, parts):
    return jax.tree.map(lambda leaf: leaf[i::parts], linear_batch())


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))


@functools.cache
def step(accum_steps=1):
    return make_train_step(
        linear_loss, precision="32-true", donate=False, accum_steps=accum_steps
    )


@functools.cache
def full_batch_steps(count):
    state = linear_state(optimizer(), scaler=no_scaler())
    for _ in range(count):
        state, _ = step()(state, linear_batch())
    return state


def guarded(tx):
    return optax.apply_if_finite(tx.gradient_transformation(), 2**30)


@pytest.mark.parametrize(
    "accum_steps, every, wrap",
    [(4, 1, None), (1, 4, None), (2, 2, None), (2, 4, None), (1, 2, guarded)],
)
def test_any_way_to_accumulate_equals_the_full_batch(accum_steps, every, wrap):
    """The clip sees the mean gradient of all the examples, whatever the way."""
    tx = optax.MultiSteps(optimizer(), every)
    state = linear_state(wrap(tx) if wrap else tx, scaler=no_scaler())
    for i in range(3 * every):
        state, _ = step(accum_steps)(state, part(i % every, every))
    assert_close(state.params, full_batch_steps(3).params, jnp.float32)
    assert int(state.step) == 3 * every


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_micro_step_is_not_counted(bad):
    """MultiSteps waits for one more: its window holds good gradients only."""
    batches = [part(i, 4) for i in range(4)]
    batches.insert(bad, POISONED)
    state = linear_state(optax.MultiSteps(optimizer(), 4), scaler=no_scaler())
    for batch in batches:
        before = state
        state, metrics = step()(state, batch)
        assert bool(metrics["grads_finite"]) == (batch is not POISONED)
        if batch is POISONED:
            assert_identical(state.opt_state.inner_state, before.opt_state.inner_state)
    assert_close(state.params, full_batch_steps(1).params, jnp.float32)
    assert int(metrics["skipped_total"]) == 1


def test_accumulation_is_in_float32():
    def loss(params, batch):
        return params["w"].astype(jnp.float16).astype(jnp.float32) * batch.mean()

    values = np.r_[np.float32(2048), np.ones(255, np.float32)]
    state = AmpTrainState.create(
        params={"w": jnp.float32(0)}, tx=optax.sgd(1.0), precision="bf16-mixed"
    )
    state, _ = make_train_step(loss, accum_steps=256)(state, values)
    assert float(state.params["w"]) == -(2048 + 255) / 256


@pytest.mark.once
def test_statistics_go_through_the_micro_batches():
    """Four updates with momentum 0.9 leave less of the old mean than one does."""
    state, _ = setup("nnx", accum_steps=1, donate=False)
    moved = []
    for accum_steps in (1, 4):
        _, step = setup("nnx", accum_steps=accum_steps, donate=False)
        old, new = (s.variables for s in (state, step(state, make_batch())[0]))
        counts = [int(v["dropout"]["rngs"]["count"]) for v in (old, new)]
        assert counts[1] == counts[0] + accum_steps
        moved.append(jnp.abs(new["norm"]["var"] - old["norm"]["var"]).sum())
    assert moved[1] > 1.5 * moved[0]
