"""Accumulation within a step: the full batch, its statistics, keys and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import make_batch, nnx_loss
from _steps import copy, linear_batch, linear_loss, linear_state, setup
from flax_amp import AmpTrainState, make_train_step, no_scaler


@pytest.mark.parametrize("steps", [2, 4])
def test_accumulated_steps_equal_the_full_batch(steps):
    def loss(params, batch):
        error = batch["x"] @ params["w"] - batch["y"]
        aux = {"mse": (error**2).mean(), "worst": error.max(), "each": error}
        return (error**2).mean(), aux

    full, metrics = make_train_step(loss, has_aux=True)(linear_state(), linear_batch())
    split, parts = make_train_step(loss, has_aux=True, accum_steps=steps)(
        linear_state(), linear_batch()
    )
    np.testing.assert_allclose(full.params["w"], split.params["w"], rtol=1e-3)
    for key in ("loss", "mse", "grad_norm"):
        np.testing.assert_allclose(metrics[key], parts[key], rtol=1e-3)
    # Micro-batch i holds the examples i, i + steps, i + 2 * steps, ...
    stacked = np.reshape(metrics["each"], (8 // steps, steps)).T
    np.testing.assert_allclose(parts["each"], stacked, rtol=1e-2, atol=1e-2)
    assert int(split.scaler["count"]) == 1  # one update of the scaler


def test_accumulation_is_in_float32():
    def loss(params, batch):
        return params["w"].astype(jnp.float16).astype(jnp.float32) * batch.mean()

    values = np.r_[np.float32(2048), np.ones(255, np.float32)]
    state = AmpTrainState.create(
        params={"w": jnp.float32(0)}, tx=optax.sgd(1.0), scaler=no_scaler()
    )
    state, _ = make_train_step(loss, accum_steps=256)(state, values)
    assert float(state.params["w"]) == -(2048 + 255) / 256


def test_statistics_go_through_the_micro_batches():
    state, _ = setup("nnx")
    step = make_train_step(nnx_loss, has_aux=True, accum_steps=4)
    after, _ = step(copy(state), make_batch())
    count = int(state.variables["dropout"]["rngs"]["count"])
    assert int(after.variables["dropout"]["rngs"]["count"]) == count + 4
    # Four updates with momentum 0.9 leave less of the old mean than one does.
    once, _ = make_train_step(nnx_loss, has_aux=True)(copy(state), make_batch())
    old, new, one = (
        jnp.abs(s.variables["norm"]["var"] - state.variables["norm"]["var"]).sum()
        for s in (state, after, once)
    )
    assert old == 0 and new > 1.5 * one


def test_micro_batches_draw_different_keys():
    def loss(params, batch, *, rngs):
        noise = jax.random.normal(rngs["noise"])
        return params["w"].sum() * 0, {"noise": noise[None]}

    state = linear_state(rngs={"noise": jax.random.key(0)})
    _, metrics = make_train_step(loss, has_aux=True, accum_steps=4)(
        state, linear_batch()
    )
    assert len(set(np.asarray(metrics["noise"]).ravel().tolist())) == 4


def test_metrics_with_a_reduce_method_are_reduced():
    from clu import metrics as clu_metrics

    def loss(params, batch):
        values = batch["x"][:, 0]
        average = clu_metrics.Average.from_model_output(values=values)
        return linear_loss(params, batch), {"mean_x": average}

    step = make_train_step(loss, has_aux=True, accum_steps=2)
    _, metrics = step(linear_state(), linear_batch())
    expected = linear_batch()["x"][:, 0].mean()
    np.testing.assert_allclose(metrics["mean_x"].compute(), expected, rtol=1e-5)


def test_batch_that_does_not_split_is_named():
    step = make_train_step(linear_loss, accum_steps=3)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \(8, 3\).*steps=3"):
        step(linear_state(), linear_batch())
    with pytest.raises(ValueError, match=r"batch\['n'\] has shape \(\)"):
        step(linear_state(), {"x": np.ones((3, 3)), "n": 3})
