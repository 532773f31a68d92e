"""A step that is skipped changes its counters and not one other bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import MODELS, changed, make_batch
from _steps import (
    DTYPES,
    SKIP_LEAVES,
    EmaState,
    copy,
    linear_batch,
    linear_loss,
    linear_state,
    setup,
)
from flax_amp import AmpTrainState, make_train_step


@pytest.mark.parametrize(
    "dtype, cls, accum_steps",
    [(dtype, AmpTrainState, 1) for dtype in DTYPES] + [(jnp.float16, EmaState, 4)],
)
@pytest.mark.parametrize("name", MODELS)
def test_poisoned_batch_changes_no_other_bit(name, dtype, cls, accum_steps):
    state, step = setup(name, cls=cls, compute_dtype=dtype, accum_steps=accum_steps)
    after, metrics = step(copy(state), make_batch(poisoned=True))
    assert changed(state, after) == SKIP_LEAVES
    assert not metrics["grads_finite"] and int(metrics["skipped_total"]) == 1
    assert int(after.step) == int(state.step) + 1
    # The next good step is what it would have been, but for its number and scale.
    if name == "linen":  # whose dropout follows the step; NNX counts applied ones
        after = after.replace(step=state.step)
    after = after.replace(scaler=state.scaler)
    seen, _ = step(copy(after), make_batch(5))
    never, _ = step(copy(state), make_batch(5))
    counters = {".opt_state.total_notfinite", ".step"}
    assert changed(seen, never) - counters == set()
    assert seen.opt_state.notfinite_count == 0


def test_negative_zeros_survive_a_skipped_step():
    w = jnp.array([-0.0, 0.0, -1.0])
    step = make_train_step(linear_loss)
    after, _ = step(linear_state(w=w), linear_batch(poisoned=True))
    np.testing.assert_array_equal(np.signbit(after.params["w"]), [True, False, True])


def test_many_skipped_steps_do_no_harm_and_are_left_again():
    state = linear_state(optax.adam(0.1))
    step = make_train_step(linear_loss)
    before = copy(state)
    for _ in range(40):
        state, metrics = step(state, linear_batch(poisoned=True))
    assert changed(before, state) == SKIP_LEAVES
    assert (float(metrics["scaler"]), int(metrics["skipped_total"])) == (16.0, 40)
    state, metrics = step(state, linear_batch())
    assert metrics["grads_finite"] and changed(before.params, state.params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.apply_if_finite(optax.adam(0.1), 0),  # applies the NaN at once
        optax.chain(optax.apply_if_finite(optax.adam(0.1), 0)),
        optax.contrib.schedule_free_sgd(0.1),
    ],
)
def test_skips_whatever_the_optimizer(tx):
    step = make_train_step(linear_loss)
    state = linear_state(tx)
    for _ in range(3):
        state, _ = step(state, linear_batch())
    after, _ = step(copy(state), linear_batch(poisoned=True))
    assert changed(state, after) <= SKIP_LEAVES
    for _ in range(2):
        after, _ = step(after, linear_batch())
    assert changed(state.params, after.params)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, batch: p["w"].sum() + jax.lax.stop_gradient(batch),  # only the loss
        lambda p, batch: p["w"].sum() + 0 * jnp.sqrt(p["w"][0] * 0) * batch,
        lambda p, batch: p["w"].sum() * batch,
    ],
)
def test_one_flag_covers_loss_and_gradients(loss):
    state = linear_state(optax.adam(0.1))
    after, metrics = make_train_step(loss)(copy(state), np.float32(np.inf))
    assert not metrics["grads_finite"]
    assert changed(state, after) == SKIP_LEAVES


def test_aux_that_is_not_finite_skips_nothing():
    def loss(params, batch):
        return linear_loss(params, batch), {"ratio": jnp.float32(jnp.nan)}

    _, metrics = make_train_step(loss, has_aux=True)(linear_state(), linear_batch())
    assert metrics["grads_finite"] and np.isnan(metrics["ratio"])


def test_redo_lowers_the_scale_within_the_step():
    def loss(params, batch):
        # The cotangent of the cast is float16: 2**15 * 12 does not fit.
        return (params["w"].astype(jnp.float16) ** 3).astype(jnp.float32)

    state = AmpTrainState.create(params={"w": jnp.float32(2)}, tx=optax.sgd(0.125))
    for redo, scale, skipped, w in [(0, 14, 1, 2), (2, 13, 1, 2), (3, 12, 0, 0.5)]:
        after, metrics = make_train_step(loss, redo_on_nan=redo)(copy(state), 0.0)
        if redo == 2:
            scale = 12  # lowered three times, the last time for the next step
        assert float(metrics["scaler"]) == 2.0**scale
        assert int(metrics["skipped_total"]) == skipped
        assert float(after.params["w"]) == w


@pytest.mark.parametrize("name", MODELS)
def test_redo_with_all_collections(name):
    state, step = setup(name, redo_on_nan=3)
    after, metrics = step(copy(state), make_batch(poisoned=True))
    assert changed(state, after) == SKIP_LEAVES
    assert int(after.scaler["total_resets"]) == 1  # no lower scale would have helped
    assert int(metrics["skipped_total"]) == 1
    good, _ = step(copy(state), make_batch())
    assert changed(state.params, good.params)
