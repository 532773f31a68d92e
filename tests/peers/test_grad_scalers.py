"""What peers test of their loss scalers: torch, Keras, Flax, Lightning, Accelerate.

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
from jax.experimental import sparse

from _steps import copy, linear_batch, linear_loss, linear_state
from flax_amp import (
    AmpTrainState,
    all_finite,
    init_scaler,
    make_eval_step,
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


def test_torch_scale():
    """Any number is scaled in float32: a float16 loss does not overflow."""
    scaler = init_scaler(scaler=2.0**16)
    losses = [jnp.float16(8), jnp.bfloat16(8), jnp.float32(8), 8.0]
    scaled = [scale_loss(loss, scaler) for loss in losses]
    assert [float(x) for x in scaled] == [2.0**19] * 4
    assert {x.dtype for x in scaled} == {jnp.dtype("float32")}


@pytest.mark.parametrize("bad", [None, jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_torch_unscale(dtype, bad):
    """Whatever the dtypes are; torch refuses float16, here it is widened."""
    grads = {"first": jnp.full((2, 2), 256, dtype), "second": jnp.full(3, 512.0)}
    if bad is not None:
        grads["first"] = grads["first"].at[1, 1].set(bad)
    unscaled = unscale_grads(grads, init_scaler(scaler=START))
    assert bool(all_finite(unscaled)) == (bad is None)
    assert unscaled["first"].dtype == unscaled["second"].dtype == jnp.float32
    assert float(unscaled["first"][0, 0]) == 2 and float(unscaled["second"][0]) == 4


def test_torch_unscale_sparse():
    """The numbers of a sparse gradient are unscaled, and its indices are not."""
    numbers, indices = jnp.array([256.0, 512.0]), jnp.array([[0], [2]])
    gradient = sparse.BCOO((numbers, indices), shape=(3,))
    unscaled = unscale_grads(gradient, init_scaler(scaler=START))
    np.testing.assert_array_equal(unscaled.data, [2, 4])
    np.testing.assert_array_equal(unscaled.indices, indices)
    assert all_finite(unscaled)
    assert not all_finite(sparse.BCOO((numbers / 0, indices), shape=(3,)))


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
    "moments": optax.adam(RATE),
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


def test_torch_clipping_separate_unscale():
    """A loop of the user's own: unscale, clip, step, update, in this order."""
    one = overflows_above(300)  # the third scale
    clip = optax.clip_by_global_norm(20.0)  # as above

    @jax.jit
    def step(params, scaler):
        scaled = lambda p: scale_loss(one(linear_loss(p, BATCHES[0])), scaler)  # noqa: E731
        grads = unscale_grads(jax.grad(scaled)(params), scaler)
        finite = all_finite(grads)
        updates, _ = clip.update(grads, clip.init(params))
        new = jax.tree.map(
            lambda p, u: jnp.where(finite, p - RATE * u, p), params, updates
        )
        return new, update_scaler(scaler, finite), optax.tree.norm(updates)

    params, scaler = [PARAMS], init_scaler(scaler=START, patience=0)
    scales, norms = [], []
    for _ in range(3):
        new, scaler, norm = step(params[-1], scaler)
        params.append(new)
        scales.append(float(scaler["scaler"]))
        norms.append(float(norm))
    assert scales == [2 * START, 4 * START, 2 * START]
    plain = [optax.tree.norm(jax.grad(linear_loss)(p, BATCHES[0])) for p in params[:2]]
    np.testing.assert_allclose(norms[:2], plain, rtol=1e-5)
    assert_identical(params[3], params[2])


def test_torch_penalty():
    """A loss with the norm of its own scaled gradient in it, unscaled in between."""
    batch = BATCHES[0]

    def with_penalty(params, scaler):
        grads = jax.grad(lambda p: scale_loss(linear_loss(p, batch), scaler))(params)
        norm = optax.tree.norm(unscale_grads(grads, scaler))
        return scale_loss(linear_loss(params, batch) + norm, scaler)

    def plain(params):
        return linear_loss(params, batch) + optax.tree.norm(
            jax.grad(linear_loss)(params, batch)
        )

    scaler = init_scaler(scaler=START)
    grads = unscale_grads(jax.jit(jax.grad(with_penalty))(PARAMS, scaler), scaler)
    np.testing.assert_allclose(
        grads["w"], jax.jit(jax.grad(plain))(PARAMS)["w"], rtol=1e-5
    )


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


# --- Keras' LossScaleOptimizer -------------------------------------------------------


def test_keras_finite_and_infinite_steps():
    """A finite step moves the variables by the unscaled gradients, a bad one does not.

    The inner optimizer's count of iterations stands still with them.
    """
    gradient = jnp.array([1.0, 6.0, 7.0, 2.0])

    def loss(params, factor):
        return (params["w"] * gradient).sum() * factor

    step = make_train_step(loss, precision="32-true")
    state = AmpTrainState.create(
        params={"w": jnp.arange(1.0, 5.0)},
        tx=optax.sgd(optax.constant_schedule(0.5)),  # adam would hide a scale
        scaler=init_scaler(scaler=4),
    )
    state, _ = step(state, jnp.float32(jnp.inf))
    np.testing.assert_array_equal(state.params["w"], [1, 2, 3, 4])
    assert int(optax.tree.get(state.opt_state, "count")) == 0
    state, _ = step(state, jnp.float32(1))
    np.testing.assert_allclose(state.params["w"], [0.5, -1, -0.5, 3], rtol=1e-5)
    assert int(optax.tree.get(state.opt_state, "count")) == 1


@pytest.mark.parametrize(
    "start, steps, finite, scale", [(400, 4, False, 25), (2, 8, True, 32)]
)
def test_keras_tables(start, steps, finite, scale):
    """400 falls to 25 after 4 bad steps; 2 grows to 32 after 8 good ones.

    `dynamic_growth_steps=2` of Keras is `patience=1`.
    """
    scaler = init_scaler(scaler=start, patience=1)
    for _ in range(steps):
        scaler = update_scaler(scaler, finite)
    assert float(scaler["scaler"]) == scale


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


# --- Lightning, Accelerate, Apex, optax ----------------------------------------------


def test_a_schedule_does_not_move_on_a_skipped_step():
    """The steps have the rates that they would have without the bad batch."""
    rates = [2.0**-4, 2.0**-5, 2.0**-6]
    schedule = lambda count: jnp.array(rates)[count]  # noqa: E731
    step = make_train_step(linear_loss, precision="32-true")
    good, bad = linear_batch(), linear_batch(poisoned=True)
    runs = []
    for batches in ([good, good], [bad, good, bad, good]):
        state = linear_state(optax.sgd(schedule))
        for batch in batches:
            state, _ = step(state, batch)
        runs.append(state)
    assert_identical(runs[0].params, runs[1].params)
    counts = [int(optax.tree.get(s.opt_state, "count")) for s in runs]
    assert counts == [2, 2] and int(runs[1].step) == 4


def test_apex_train_eval_train():
    """Nothing is cached: an evaluation sees new weights, and changes no training."""
    step = make_train_step(linear_loss)
    evaluate = make_eval_step(linear_loss)
    state = linear_state()
    alone = copy(state)
    losses = []
    for _ in range(3):
        alone, _ = step(alone, linear_batch())
        losses.append(float(evaluate(state, linear_batch())))
        state, metrics = step(state, linear_batch())
        assert losses[-1] == pytest.approx(float(metrics["loss"]), rel=1e-3)
        fresh = make_eval_step(linear_loss)(copy(state), linear_batch())
        assert float(evaluate(state, linear_batch())) == float(fresh)
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
    assert_identical(state, alone)


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
