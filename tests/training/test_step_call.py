"""Donated arrays: copies of shared arrays, and errors about deleted arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
    sum_loss,
)
from flax_amp import make_eval_step, make_nnx_train_step, make_train_step

pytestmark = pytest.mark.once

X = jnp.ones(3)
ADAM = functools.partial(linear_state, optax.adam(0.1))


@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_in_two_places_is_copied(devices):
    """In a state that no step has returned, whatever the number of devices."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    everywhere = NamedSharding(mesh, PartitionSpec())

    def loss(params, batch, further=0.0):
        return params["w"].sum() + sum(map(jnp.sum, jax.tree.leaves((batch, further))))

    step = make_train_step(loss)
    for inputs_of in (
        lambda state: (state.replace(variables={"a": state.params["w"]}), X),
        lambda state: (state, state.params["w"]),
        lambda state: (state, X, {"n": 1.0, "x": state.params["w"]}),
    ):
        state, *inputs = inputs_of(jax.device_put(ADAM(), everywhere))
        new, _ = step(state, *inputs)
        assert new.step == 1 and np.isfinite(jax.device_get(inputs[0])).all()


def test_a_teacher_that_shares_arrays_of_the_model():
    """It lives on if the first step sees it."""
    (model, optimizer), x = linear_objects(), jnp.ones((2, 3))
    teacher = nnx.clone(model)
    before = np.asarray(teacher.kernel[...])
    step = make_nnx_train_step(lambda m, x, teacher: (m(x) - teacher(x) + x).sum())
    for _ in range(2):
        step(model, optimizer, x, teacher)
    assert (np.asarray(teacher.kernel[...]) == before).all()


def test_nothing_walks_over_what_the_last_step_returned(monkeypatch):
    step, nnx_step = make_train_step(linear_loss), make_nnx_train_step(sum_loss)
    batch, objects = linear_batch(), linear_objects()
    state, _ = step(linear_state(), batch)
    nnx_step(*objects, X)
    for module in ("train_step", "nnx_step"):
        monkeypatch.setattr(f"flax_amp._training.{module}.copy_aliases", None)
    for _ in range(2):
        state, _ = step(state, batch)
        nnx_step(*objects, X)
    raised(lambda: step(linear_state(), batch), TypeError, "not callable")
    raised(lambda: nnx_step(*linear_objects(), X), TypeError, "not callable")


@pytest.mark.parametrize("told", ["the file was deleted", "donated"])
def test_an_error_of_a_callback_is_the_users(told):
    def fail(x):
        raise RuntimeError(told)

    def loss(params, x):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        y = jax.pure_callback(fail, scalar, jax.lax.stop_gradient(x.sum()))
        return (params["w"] * x).sum() + y

    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(make_train_step(loss)(linear_state(), X))


def test_arrays_that_jax_refuses():
    """The step says where they are, and what to do."""
    step = make_train_step(lambda p, x, t=0.0: (p["w"] * x).sum() + jnp.sum(t))
    old, advice = linear_state(), r".*early stopping.*jnp.copy, state\).*donate=False"
    state, _ = step(old, X)
    deleted = rf"step: state\.\S+ was deleted{advice}"
    for again in (step, make_eval_step(lambda params, x: params["w"] * x)):
        raised(lambda again=again: again(old, X), RuntimeError, deleted)
    twice = rf"^train_step: .*donate{advice}"
    raised(lambda: step(state, X, state.params["w"]), ValueError, twice)
    model, optimizer = linear_objects()
    nnx_step = make_nnx_train_step(lambda m, x, t=None: m(x).sum() + t(x).sum() * 0)
    teacher = nnx.clone(model)
    make_nnx_train_step(sum_loss)(model, optimizer, X)
    deleted = rf"args\[0\]\S* was deleted{advice}"
    raised(lambda: nnx_step(model, optimizer, X, teacher), RuntimeError, deleted)
