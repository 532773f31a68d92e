"""What peers test of their loss scalers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from flax_amp import (
    AmpTrainState,
    all_finite,
    init_scaler,
    make_train_step,
    unscale_grads,
    update_scaler,
)

# What the scaler does is arithmetic, the same on every version of JAX.
pytestmark = pytest.mark.once

START = 128.0


@pytest.mark.parametrize("interval", [0, 1, 4])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_flax_dynamic_scale(interval, factor, rng):
    """Scale and count are Flax's after each step, if `patience` is its interval.

    Both grow on step interval + 1. Flax has no upper limit but float32's.
    """
    ours = init_scaler(scaler=2.0**-18, patience=interval, adjust_factor=factor)
    flax = DynamicScale(
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=interval,
        minimum_scale=2.0**-24,
        scale=ours["scaler"],
    )

    @jax.jit
    def step(ours, flax, finite):
        grad_fn = flax.value_and_grad(lambda w: w * jnp.where(finite, 1.0, jnp.inf))
        return update_scaler(ours, finite), grad_fn(jnp.float32(1))[0]

    for finite in rng.random(40) < 0.6:
        ours, flax = step(ours, flax, finite)
        assert (ours["scaler"], ours["count"]) == (flax.scale, flax.fin_steps)
    assert flax.scale <= 2.0**24


def test_nothing_to_differentiate():
    """A tree of gradients may be empty, or hold integers, `None` and float0."""
    scaler = init_scaler(scaler=START)
    assert unscale_grads({}, scaler) == {} and all_finite({})
    step = make_train_step(lambda params, batch: batch.sum())
    state = AmpTrainState.create(params={}, tx=optax.adam(0.1), scaler=scaler)
    state, metrics = step(state, jnp.ones(3))
    assert metrics["grads_finite"] and float(metrics["grad_norm"]) == 0
    _, zero = jax.grad(lambda w, n: w * n, (0, 1), allow_int=True)(2.0, 3)
    grads = {"w": jnp.float32(START), "none": None, "zero": zero}
    unscaled = unscale_grads(grads, scaler)
    assert float(unscaled["w"]) == 1 and unscaled["zero"] is zero and all_finite(grads)
