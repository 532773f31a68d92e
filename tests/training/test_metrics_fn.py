"""`metrics_fn`: what users measure of gradients and updates, inside of the step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    sum_loss,
)
from flax_amp import (
    init_scaler,
    make_nnx_train_step,
    make_train_step,
)
from helpers import assert_close, assert_identical


def everything(state, grads, updates):
    """What each argument holds, by name, to compare with what is expected."""
    return {"before": state.params, "grads": grads, "updates": updates}


def measured(state, batch, metrics_fn=everything, **options):
    step = make_train_step(linear_loss, metrics_fn=metrics_fn, donate=False, **options)
    return step(state, batch)


def clipped():
    return optax.chain(optax.clip(0.01), optax.sgd(0.5))


@pytest.mark.parametrize(
    "precision, options",
    [("16-mixed", {}), ("bf16-mixed", {"accum_steps": 2, "redo_on_nan": 2})],
)
def test_gradients_are_unscaled_and_updates_are_applied(precision, options):
    scaler = init_scaler(scaler=2.0**10) if precision == "16-mixed" else None
    state = linear_state(clipped(), precision=precision, scaler=scaler)
    new, found = measured(state, linear_batch(), **options)
    expected = jax.grad(linear_loss)(state.params, linear_batch())
    dtype = {"bf": jnp.bfloat16, "16": jnp.float16}[precision[:2]]
    assert_close(found["grads"], expected, dtype)
    assert_identical(found["before"], state.params)
    difference = jax.tree.map(jnp.subtract, new.params, state.params)
    assert_identical(found["updates"], difference)
    assert float(jnp.abs(difference["w"]).max()) <= 0.005 + 1e-7  # clipped


def test_a_skipped_step_shows_what_it_did_not_apply():
    state = linear_state(precision="16-mixed", scaler=init_scaler())
    new, found = measured(state, linear_batch(poisoned=True))
    assert not found["grads_finite"] and not jnp.isfinite(found["updates"]["w"]).all()
    assert_identical(new.params, state.params)


def test_gradients_are_those_of_all_devices():
    def step(state, batch):
        return measured(state, batch, jit=False, axis_name="data")

    state = linear_state(precision="32-true")
    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), linear_batch())
    _, found = jax.vmap(step, (None, 0), axis_name="data")(state, halves)
    _, whole = measured(state, linear_batch())
    for device in range(2):
        of_device = jax.tree.map(lambda x: x[device], found["grads"])  # noqa: B023
        assert_close(of_device, whole["grads"], jnp.float32)


def test_an_nnx_model():
    model, optimizer = linear_objects(tx=clipped())
    before, x = nnx.state(nnx.clone(model), nnx.Param), jnp.ones((2, 3))

    def parts(model, grads, updates):
        return {"before": nnx.state(model, nnx.Param), "g": grads, "u": updates}

    options = dict(precision="32-true", metrics_fn=parts, donate=False)
    step = make_nnx_train_step(sum_loss, **options)
    expected = nnx.grad(sum_loss)(nnx.clone(model), x)
    found = step(model, optimizer, x)
    assert_close(nnx.to_pure_dict(found["g"]), nnx.to_pure_dict(expected), jnp.float32)
    after = nnx.state(model, nnx.Param)
    assert_identical(found["u"], jax.tree.map(jnp.subtract, after, before))
    assert_identical(found["before"], before)
