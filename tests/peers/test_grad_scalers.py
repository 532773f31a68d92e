"""What peers test of their loss scalers: torch and Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from _steps import linear_batch
from flax_amp import (
    AmpTrainState,
    all_finite,
    init_scaler,
    make_train_step,
    scale_loss,
    unscale_grads,
    update_scaler,
)

# What the scaler does is arithmetic, the same on every version of JAX.
pytestmark = pytest.mark.once

START = 128.0
RATE = 2.0**-6


@jax.custom_vjp
def overflows(x):
    """An identity, in which a gradient that is scaled becomes infinite."""
    return x


overflows.defvjp(
    lambda x: (x, None), lambda _, g: (jnp.where(jnp.abs(g) > START / 2, jnp.inf, g),)
)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_torch_multiple(bad):
    """Two models, two losses over both, two optimizers, one scaler.

    An optimizer whose gradients are not finite skips; the other one steps; the scale
    moves once. The scales are powers of two, so that parameters are equal to the bit.
    """
    x, y = linear_batch()["x"], linear_batch()["y"]

    def losses(params, bad):
        outputs = [x @ (overflows(p) if i == bad else p) for i, p in enumerate(params)]
        first, second = outputs
        return (
            ((2 * first + 3 * second - y) ** 2).mean(),
            ((first / 2 - second / 4 - y) ** 2).mean(),
        )

    def step(params, scaler, bad):
        grads = [
            jax.grad(lambda p, i=i: scale_loss(losses(p, bad)[i], scaler))(params)
            for i in range(2)
        ]
        grads = unscale_grads(jax.tree.map(jnp.add, *grads), scaler)
        finite = [all_finite(g) for g in grads]
        new = [
            jnp.where(ok, p - RATE * g, p)
            for ok, p, g in zip(finite, params, grads, strict=True)
        ]
        return new, update_scaler(scaler, finite[0] & finite[1])

    params = [jnp.array([1.0, -2.0, 0.5]), jnp.array([0.5, 1.0, -1.0])]
    scaler = init_scaler(scaler=START, patience=0)
    new, after = jax.jit(functools.partial(step, bad=bad))(params, scaler)
    plain, _ = jax.jit(functools.partial(step, bad=None))(params, init_scaler(scaler=1))
    for i in range(2):
        expected = params[i] if i == bad else plain[i]
        np.testing.assert_array_equal(new[i], expected)
    assert float(after["scaler"]) == (2 * START if bad is None else START / 2)


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
