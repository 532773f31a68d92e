"""Gradients of functions of NNX modules, with a scaler and without a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from _models import FEATURES, NnxNet, cross_entropy, make_batch
from _steps import arrays
from flax_amp import (
    amp,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    no_scaler,
    static_scaler,
)
from helpers import assert_close, assert_same_avals

SCALER = static_scaler(8.0)


def loss_fn(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def pair_loss(model, batch):
    logits = model(batch["x"])
    return cross_entropy(logits, batch["y"]), {"logits": logits}


@pytest.mark.parametrize(
    "lowered, has_aux, redo, compiled",
    [(False, False, 2, True), (True, True, 0, False)],
)
def test_changes_and_gradients_are_those_of_nnx(lowered, has_aux, redo, compiled):
    fun = pair_loss if has_aux else loss_fn
    fun = amp(fun, compute_dtype=jnp.float16) if lowered else fun
    model, twin = NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(0))
    grad_fn = dynamic_scale_value_and_grad(fun, has_aux=has_aux, redo_on_nan=redo)

    def run(model, batch):
        return grad_fn(model, batch, dynamic_scaler_state=SCALER)

    run = nnx.jit(run) if compiled else run
    reference = nnx.jit(nnx.value_and_grad(fun, has_aux=has_aux))
    before = arrays(model)
    for seed in range(2):
        scaler, (value, grads) = run(model, make_batch(seed))
        expected, expected_grads = reference(twin, make_batch(seed))
        assert type(grads) is nnx.State
        assert_same_avals(grads, expected_grads)
        dtype = jnp.float16 if lowered else jnp.float32
        assert_close(grads, expected_grads, dtype, gradient=True)
        assert_same_avals(value, expected)
        assert_close(value, expected, dtype)
    assert int(scaler["total_resets"]) == 0
    after, wanted = arrays(model), arrays(twin)
    assert_same_avals(after, wanted)
    assert int(model.dropout.rngs.count[...]) == int(twin.dropout.rngs.count[...]) == 2
    assert not np.allclose(model.norm.mean[...], before[0]["norm"]["mean"])
    np.testing.assert_allclose(model.norm.mean[...], twin.norm.mean[...], atol=2e-2)


def test_what_is_differentiated_is_said_as_in_nnx():
    """By position, by `DiffState`, in containers; beside modules that do not train."""
    model, teacher = (nnx.Linear(FEATURES, 3, rngs=nnx.Rngs(i)) for i in range(2))
    x = jnp.ones((4, FEATURES))

    def loss(models, teacher, x, scale):
        out = models["m"](x) * scale
        return ((out - teacher(x)) ** 2).mean() + 0 * models["s"]

    args = {"m": model, "s": jnp.float32(1)}, teacher, x, jnp.float32(2)
    bias = nnx.DiffState(1, nnx.PathContains("bias"))
    for argnums in (0, (0, 3), bias, (0, bias), 1):
        _, grads = dynamic_scale_grad(loss, argnums=argnums)(
            *args, dynamic_scaler_state=SCALER
        )
        expected = nnx.grad(loss, argnums=argnums)(*args)
        assert_same_avals(grads, expected)
        assert_close(grads, expected, jnp.float32)


def test_states_of_parameters_are_ordinary_trees():
    """`nnx.split` and a pure function of its parts, as many loops have it."""
    graphdef, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def pure(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return loss_fn(model, batch), nnx.state(model, nnx.Not(nnx.Param))

    args = params, rest, make_batch()
    _, (grads, new) = dynamic_scale_grad(pure, has_aux=True)(
        *args, dynamic_scaler_state=no_scaler()
    )
    expected, wanted = jax.grad(pure, has_aux=True)(*args)
    assert_same_avals(grads, expected)
    assert_close(grads, expected, jnp.float32)
    assert_same_avals(new, wanted)


def grows(model, batch):
    model.seen = nnx.BatchStat(jnp.zeros(2))
    return loss_fn(model, batch)


def reshapes(model, batch):
    model.norm.mean = nnx.BatchStat(jnp.zeros((2, 2)))
    return cross_entropy(model.first(batch["x"])[:, :3], batch["y"])


def evaluates(model, batch):
    model.eval()
    return loss_fn(model, batch)


@pytest.mark.parametrize(
    "fun, message",
    [
        (grows, r"dynamic_scale_grad: grows changed the structure.* the variables \['"),
        (evaluates, "dynamic_scale_grad: evaluates changed a static attribute"),
        (
            reshapes,
            r"dynamic_scale_grad: the variable NnxNet.norm.mean changed from "
            r"float32\[8\] to float32\[2, 2\]; expected the same shape",
        ),
    ],
)
def test_changes_that_cannot_be_carried_are_named(fun, message):
    with pytest.raises(ValueError, match=message):
        dynamic_scale_grad(fun)(
            NnxNet(nnx.Rngs(0)), make_batch(), dynamic_scaler_state=SCALER
        )


class Counts(nnx.Module):
    """Its counter is a Python number."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones(3)), nnx.Variable(0)

    def __call__(self, x):
        self.n.set_value(self.n.get_value() + 1)
        return (self.w * x).sum()


@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("axis_name", [None, "i"])
def test_variables_may_hold_python_numbers(redo, axis_name):
    model = Counts()
    grad_fn = dynamic_scale_grad(
        lambda model, x: model(x), redo_on_nan=redo, axis_name=axis_name
    )

    def count(x):
        model = Counts()
        grad_fn(model, x, dynamic_scaler_state=SCALER)
        return model.n.get_value()

    if axis_name:
        counted = jax.vmap(count, axis_name=axis_name)(jnp.ones((2, 3)))
        assert counted.tolist() == [1, 1]
    else:
        for calls in (1, 2):
            grad_fn(model, jnp.ones(3), dynamic_scaler_state=SCALER)
            assert int(model.n.get_value()) == calls
