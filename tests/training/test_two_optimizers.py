"""Two states that share one scaler, and averages that skip with the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from _steps import copy, linear_batch, linear_loss, linear_objects
from flax_amp import AmpTrainState, init_scaler, make_nnx_train_step, make_train_step
from helpers import assert_identical


class AveragedState(AmpTrainState):
    average: Any

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        average = optax.incremental_update(new.params, self.average, 0.01)
        return new.replace(average=average)


def loss_fn(params, batch, other, scale):
    """`scale` makes the gradients overflow in float16, and not the loss."""
    x = batch["x"].astype(jnp.float32)
    product = (x @ params["w"]).astype(jnp.float16).astype(jnp.float32)
    return linear_loss(params, batch) + (scale * product).mean() * other["w"].mean()


def make(scaler):
    w = jnp.array([1.0, -2.0, 0.5])
    return AveragedState.create(
        params={"w": w},
        tx=optax.adam(0.1),
        average={"w": w},
        precision="16-mixed",
        scaler=scaler,
    )


def test_one_scale_for_two_states():
    """A scale that is too high for one of them falls for both; only that one skips."""
    first, second = make(init_scaler(scaler=16)), make(init_scaler(scaler=16))
    step, batch = make_train_step(loss_fn), linear_batch()
    scales, skips = [], []
    for scale in (0.0, 1e9, 0.0):
        first = first.replace(scaler=second.scaler)
        before = copy(first)
        first, metrics = step(first, batch, second.params, jnp.float32(scale))
        skips.append(not metrics["grads_finite"])
        if skips[-1]:
            for name in ("params", "average"):
                assert_identical(getattr(first, name), getattr(before, name))
        else:
            assert (first.average["w"] != before.average["w"]).any()
        second = second.replace(scaler=first.scaler)
        second, metrics = step(second, batch, first.params, jnp.float32(0))
        assert metrics["grads_finite"]
        scales.append(float(metrics["scaler"]))
    assert skips == [False, True, False] and scales == [16, 8, 8]
    assert (
        int(second.scaler["count"]) == 3 and int(first.opt_state.total_notfinite) == 1
    )


def test_an_average_beside_an_nnx_model():
    model, optimizer = linear_objects()
    step = make_nnx_train_step(lambda m, x: m(x).mean(), precision="bf16-mixed")
    average = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    @jax.jit
    def follow(average, params, finite):
        return optax.incremental_update(params, average, jnp.where(finite, 0.01, 0.0))

    scaler = None
    for x in (1.0, np.nan, 1.0):
        before = average
        scaler, metrics = step(model, optimizer, scaler, jnp.full((2, 3), x))
        params = nnx.state(model, nnx.Param)
        average = follow(average, params, metrics["grads_finite"])
        if np.isnan(x):
            assert_identical(average, before)
        else:
            assert (average.kernel[...] != before.kernel[...]).any()
