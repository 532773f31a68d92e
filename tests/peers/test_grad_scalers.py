"""What peers test of their loss scalers: torch and Flax.

Where a test compares runs with different scales, these are powers of two: parameters
must be the same to the bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given, settings
from hypothesis import strategies as st

from _steps import linear_batch, linear_loss, linear_state
from flax_amp import (
    AmpTrainState,
    all_finite,
    init_scaler,
    make_train_step,
    scale_loss,
    unscale_grads,
    update_scaler,
)
from helpers import assert_identical

# What the scaler does is arithmetic, the same on every version of JAX.
pytestmark = pytest.mark.once

START = 128.0
RATE = 2.0**-6
BATCHES = [linear_batch(), linear_batch(poisoned=True), linear_batch()]
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5])}


def overflows_above(limit):
    """An identity. A gradient above a limit becomes infinite in it."""

    @jax.custom_vjp
    def one(scaled):
        return scaled

    def backward(_, g):
        return (jnp.where(jnp.abs(g) > limit, jnp.inf, g),)

    one.defvjp(lambda scaled: (scaled, None), backward)
    return one


# --- torch's GradScaler --------------------------------------------------------------


def trained(tx, **scaler):
    """Trains over good and bad batches; returns the state and the scales."""
    state = linear_state(tx, scaler=init_scaler(patience=0, **scaler))
    step = make_train_step(linear_loss, precision="32-true")
    scales = []
    for batch in [*BATCHES, BATCHES[0]]:
        state, metrics = step(state, batch)
        scales.append(float(metrics["scaler"]))
    return state, scales


OPTIMIZERS = {
    "autocast": optax.sgd(RATE),
    # The limit is above the norm of the gradients, and below that of scaled ones.
    "clipping": optax.chain(optax.clip_by_global_norm(20.0), optax.sgd(RATE)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_autocast_and_clipping(name):
    """The optimizer sees unscaled gradients, so that it clips what it should clip.

    The scale grows on each good step. The bad batch leaves it alone, because its loss
    is not finite; torch would halve it.
    """
    tx = OPTIMIZERS[name]
    state, scales = trained(tx, scaler=START)
    assert scales == [2 * START, 2 * START, 4 * START, 8 * START]
    plain, still = trained(tx, scaler=1.0, adjust_factor=1.0)
    assert still == [1.0] * 4
    assert_identical(state.params, plain.params)

    params, opt_state = PARAMS, tx.init(PARAMS)  # without flax_amp, and compiled too
    grad = jax.jit(jax.grad(linear_loss))
    for batch in [BATCHES[0]] * 3:
        updates, opt_state = tx.update(grad(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_torch_multiple(bad):
    """Two models, two losses over both, two optimizers, one scaler.

    An optimizer whose gradients are not finite skips; the other one steps; the scale
    moves once.
    """
    one = overflows_above(START / 2)
    x, y = linear_batch()["x"], linear_batch()["y"]

    def losses(params, wrap):
        first, second = (x @ wrap(p, i) for i, p in enumerate(params))
        return (
            ((2 * first + 3 * second - y) ** 2).mean(),
            ((first / 2 - second / 4 - y) ** 2).mean(),
        )

    def step(params, scaler, wrap):
        grads = [
            jax.grad(lambda p, i=i: scale_loss(losses(p, wrap)[i], scaler))(params)
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
    wrap = lambda p, i: one(p) if i == bad else p  # noqa: E731
    new, after = jax.jit(functools.partial(step, wrap=wrap))(params, scaler)
    plain, _ = jax.jit(functools.partial(step, wrap=lambda p, i: p))(
        params, init_scaler(scaler=1.0)
    )
    for i in range(2):
        expected = params[i] if i == bad else plain[i]
        np.testing.assert_array_equal(new[i], expected)
    assert float(after["scaler"]) == (2 * START if bad is None else START / 2)


# --- Flax' DynamicScale --------------------------------------------------------------

LENGTH = 32


@jax.jit
def scales_of_both(outcomes, interval, factor, start):
    def step(both, finite):
        ours, (scale, steps) = both
        flax = DynamicScale(
            growth_factor=factor,
            backoff_factor=1 / factor,
            growth_interval=interval,
            minimum_scale=2.0**-24,
            scale=scale,
            fin_steps=steps,
        )
        grad_fn = flax.value_and_grad(lambda w: w * jnp.where(finite, 1.0, jnp.inf))
        flax = grad_fn(jnp.float32(1))[0]
        ours = update_scaler(ours, finite)
        both = ours, (flax.scale, flax.fin_steps)
        return both, ((ours["scaler"], ours["count"]), both[1])

    ours = init_scaler(scaler=start, patience=interval, adjust_factor=factor)
    return jax.lax.scan(step, (ours, (start, jnp.int32(0))), outcomes)[1]


@given(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    st.integers(0, 9),
    st.sampled_from([2.0, 4.0]),
    st.integers(-20, 12),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_flax_dynamic_scale(outcomes, interval, factor, start):
    """Scale and count are Flax's after each step, if `patience` is its interval.

    Both grow on step interval + 1. Flax has no upper limit but float32's, which
    this compares up to 2**24.
    """
    args = jnp.int32(interval), jnp.float32(factor), 2.0**start
    ours, flax = scales_of_both(jnp.array(outcomes), *args)
    below = np.asarray(flax[0]) <= 2.0**24
    np.testing.assert_array_equal(
        ours[0][below.cumprod() > 0], flax[0][below.cumprod() > 0]
    )
    np.testing.assert_array_equal(ours[1], flax[1])


# --- trees ---------------------------------------------------------------------------


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
