"""Gradients with a scaler: the published expectations of jaxamp, to the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _steps import raised
from flax_amp import (
    AmpTrainState,
    DynamicScalerState,
    all_finite,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_train_step,
    scale_loss,
    static_scaler,
    unscale_grads,
)


@pytest.mark.parametrize("filter, has_aux", [(True, False), (False, True)])
def test_seed_table(filter, has_aux):
    def cube(x):
        return (x**3, 1.0) if has_aux else x**3

    def expect(scale, count, correct=True):
        nonlocal state
        state, (value, grad) = grad_fn(jnp.float16(2), dynamic_scaler_state=state)
        value, aux = value if has_aux else (value, 1.0)
        assert (float(state["scaler"]), int(state["count"])) == (scale, count)
        assert (value, value.dtype, aux) == (8.0, jnp.float16, 1.0)
        assert not correct or (grad, grad.dtype) == (12.0, jnp.float16)

    options = dict(filter=filter, has_aux=has_aux)
    transform = functools.partial(dynamic_scale_value_and_grad, cube, **options)
    # 12 * 2**13 is beyond float16, 12 * 2**12 is not.
    grad_fn = jax.jit(transform(redo_on_nan=100))
    state = DynamicScalerState(patience=10)
    for count in range(1, 11):
        expect(2**12, count)
    expect(2**13, 0)
    expect(2**12, 1)

    grad_fn = jax.jit(transform(redo_on_nan=0))
    state = DynamicScalerState(scaler=2**15)
    for scale in (2**14, 2**13, 2**12):
        expect(scale, 0, correct=False)
    expect(2**12, 1)


@pytest.mark.parametrize(
    "loss, start, scale",
    [
        (lambda x: x * jnp.inf, init_scaler(), 2.0**15),  # no scale helps
        (lambda x: jnp.sqrt(x - 2), static_scaler(8.0), 8),  # nor is a lower left
        (lambda x: jnp.sqrt(x - 2), init_scaler(scaler=2.0**-23), 2.0**-24),
    ],
)
def test_redo_stops_where_no_lower_scale_helps(loss, start, scale):
    passes = []

    def counted(x):
        jax.debug.callback(lambda: passes.append(None))
        return loss(x)

    grad_fn = jax.jit(dynamic_scale_grad(counted, redo_on_nan=50))
    state, _ = grad_fn(jnp.float32(2), dynamic_scaler_state=start)
    jax.effects_barrier()
    assert float(state["scaler"]) == scale and int(state["count"]) == 0
    assert len(passes) == (2 if scale == 2.0**-24 else 1)


@pytest.mark.parametrize("redo, scale, finite", [(0, 14, 0), (2, 12, 0), (3, 12, 1)])
def test_redo_stops_after_so_many_times(redo, scale, finite):
    grad_fn = dynamic_scale_grad(lambda x: x**3, redo_on_nan=redo)
    state, grads = grad_fn(jnp.float16(2), dynamic_scaler_state=init_scaler())
    assert float(state["scaler"]) == 2**scale
    assert bool(jnp.isfinite(grads)) == bool(finite)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_loss_and_gradients_are_exact_while_the_scale_moves(dtype, count_traces):
    counted, traces = count_traces(lambda x: x**3)
    grad_fn = jax.jit(dynamic_scale_value_and_grad(counted))
    state = init_scaler(scaler=2.0**10, patience=1)
    moves = [jnp.inf, 2, 2, 2, jnp.inf, 2]  # bad, good, grow, good, bad, grow
    scales = []
    for x in moves:
        state, (loss, grad) = grad_fn(dtype(x), dynamic_scaler_state=state)
        scales.append(float(state["scaler"]))
        assert loss.dtype == grad.dtype == dtype
        if x == 2:
            assert (loss, grad) == (8, 12)
    assert scales == [2.0**e for e in (10, 10, 11, 11, 11, 12)]
    assert traces() == 1 and grad_fn._cache_size() == 1


def test_a_scale_beyond_float16_and_a_scaled_loss_beyond_float32():
    state = static_scaler(2.0**20)
    assert float(scale_loss(jnp.float16(4), state)) == 2.0**22
    assert float(unscale_grads(jnp.float16(4), state)) == 2.0**-18
    grad_fn = dynamic_scale_value_and_grad(lambda x: x * 1e30)
    state, (loss, grad) = grad_fn(
        jnp.float32(1e3), dynamic_scaler_state=static_scaler(2.0**24)
    )
    assert loss == jnp.float32(1e30) * jnp.float32(1e3)
    assert grad == jnp.float32(1e30)


def test_nothing_to_differentiate():
    """A tree of gradients may be empty, or hold integers, `None` and float0."""
    scaler = init_scaler(scaler=128.0)
    assert unscale_grads({}, scaler) == {} and all_finite({})
    step = make_train_step(lambda params, batch: batch.sum())
    state = AmpTrainState.create(params={}, tx=optax.adam(0.1), scaler=scaler)
    state, metrics = step(state, jnp.ones(3))
    assert metrics["grads_finite"] and float(metrics["grad_norm"]) == 0
    _, zero = jax.grad(lambda w, n: w * n, (0, 1), allow_int=True)(2.0, 3)
    grads = {"w": jnp.float32(128.0), "none": None, "zero": zero}
    unscaled = unscale_grads(grads, scaler)
    assert float(unscaled["w"]) == 1 and unscaled["zero"] is zero and all_finite(grads)


@pytest.mark.parametrize("redo", [0, 2])
def test_filter_passes_other_leaves_through(redo):
    others = {
        "ints": jnp.arange(3),
        "none": None,
        "name": "layer",
        "number": 4.0,
        "fun": jnp.tanh,
        "key": jax.random.key(0),
    }
    params = others | {"w": jnp.float32(2), "half": np.float16(3)}

    def loss(params, offset):
        assert all(params[key] is others[key] for key in others)
        total = params["w"] * params["number"] * params["ints"].sum() + offset
        aux = dict(key=params["key"], total=total, note=None, five=5)
        return total * params["half"], aux

    grad_fn = dynamic_scale_grad(loss, has_aux=True, redo_on_nan=redo)
    _, (grads, aux) = grad_fn(
        params, offset=1.0, dynamic_scaler_state=static_scaler(16)
    )
    assert grads.pop("w") == 4 * 3 * 3
    half = grads.pop("half")
    assert (half, half.dtype) == (2 * 4 * 3 + 1, jnp.float16)
    assert set(grads.values()) == {None}
    assert (aux["total"], aux["five"], aux["key"]) == (25, 5, others["key"])


@pytest.mark.parametrize(
    "argnums, filter",
    [(0, False), (1, True), (-1, True), ((1,), False), ((0, 1), True), ((1, 0), True)],
)
def test_argnums_as_in_jax(argnums, filter):
    def loss(x, y):
        return (x * y).sum() ** 2

    args = jnp.arange(1.0, 4), jnp.float32(3)
    _, grads = dynamic_scale_grad(loss, filter=filter, argnums=argnums)(
        *args, dynamic_scaler_state=init_scaler()
    )
    expected = jax.grad(loss, argnums=argnums)(*args)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, grads, expected)


def test_vmap_over_scalers_of_a_gradient_that_retries():
    states = jax.vmap(lambda scale: init_scaler(scaler=scale))(
        jnp.array([2.0**15, 2.0**10])
    )
    grad_fn = dynamic_scale_grad(lambda x: x**3, redo_on_nan=8)
    run = jax.vmap(lambda s: grad_fn(jnp.float16(2), dynamic_scaler_state=s))
    states, grads = jax.jit(run)(states)
    np.testing.assert_array_equal(states["scaler"], [2.0**12, 2.0**10])
    np.testing.assert_array_equal(grads, [12, 12])


def test_what_is_no_parameter():
    """`jax.grad` would take a number; here it is static, as in jaxamp."""

    def call(x):
        grad_fn = dynamic_scale_grad(lambda w, x: w * x)
        return grad_fn(x, jnp.float32(3), dynamic_scaler_state=init_scaler())

    for number in (2.0, 2):
        told = f"argument 0, {number}, is static; .*jnp.f"
        raised(lambda number=number: call(number), TypeError, told)
    # What a module updates in itself would be lost.
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    told = "got a Linear; .*make_nnx_train_step"
    raised(lambda: call(model), TypeError, told)
