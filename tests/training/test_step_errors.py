"""Losses, collections, arguments and states that a step cannot take are named."""

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from _models import linen_loss, linen_state, make_batch, nnx_state
from _steps import linear_batch, linear_loss, linear_state
from flax_amp import make_eval_step, make_train_step


def linen_with(update):
    def loss(params, batch, *, state, rngs):
        value, aux = linen_loss(params, batch, state=state, rngs=rngs)
        return value, update(aux)

    return loss


def grow(aux):
    return {"variables": jax.tree.map(lambda x: x[None], aux["variables"])}


@pytest.mark.parametrize(
    "loss, options, error, message",
    [
        (lambda p, b: p["w"], {}, TypeError, r"float32\[3\] as its loss.*mean\(\)"),
        (lambda p, b: p["w"].sum().astype(int), {}, TypeError, r"int32\[\] as its"),
        (lambda p, b: None, {}, TypeError, "NoneType as its loss"),
        (
            lambda p, b: (p["w"].sum(), {}),
            {},
            TypeError,
            "tuple as its loss.*has_aux=True",
        ),
        (
            linear_loss,
            dict(has_aux=True),
            TypeError,
            r"make_train_step: linear_loss returned.*expected a \(loss, aux\) pair",
        ),
        (
            lambda p, b: (p["w"].sum(), 3.0),
            dict(has_aux=True),
            TypeError,
            "a float as aux; expected a dict",
        ),
        (
            lambda p, b: (p["w"].sum(), {"loss": 3.0, "scaler": 1}),
            dict(has_aux=True),
            ValueError,
            r"reserved names \['loss', 'scaler'\]",
        ),
        (
            lambda p, b: (p["w"].sum(), {"variables": {"cache": 1}}),
            dict(has_aux=True),
            ValueError,
            r"aux\['variables'\] with \['cache'\]; expected .* collections \[\]",
        ),
    ],
)
def test_bad_losses_are_named(loss, options, error, message):
    with pytest.raises(error, match=message):
        make_train_step(loss, **options)(linear_state(), linear_batch())


@pytest.mark.parametrize(
    "update, message",
    [
        (grow, r"batch_stats\['BatchNorm_0'\]\['mean'\]: float32\[8\] before, float32"),
        (
            lambda aux: {"variables": {"batch_stats": {}}},
            r"\['mean'\]: float32\[8\] before, absent now",
        ),
        (
            lambda aux: {"variables": {"intermediates": {}}},
            r"\['intermediates'\]; expected .*\['batch_stats'\]",
        ),
        (lambda aux: {"variables": 3}, "with int; expected a dict"),
    ],
)
def test_bad_collections_are_named(update, message):
    with pytest.raises(ValueError, match=message):
        make_train_step(linen_with(update), has_aux=True)(linen_state(), make_batch())


def test_frozen_collections_are_taken():
    def freeze(aux):
        return {"variables": flax.core.freeze(aux["variables"])}

    state, _ = make_train_step(linen_with(freeze), has_aux=True)(
        linen_state(), make_batch()
    )
    assert type(state.variables["batch_stats"]) is dict


def test_nnx_state_that_grows_is_named():
    def loss(model, batch):
        model.seen = nnx.BatchStat(jnp.zeros(2))
        return model(batch["x"]).mean()

    with pytest.raises(ValueError, match=r"\['seen'\]: absent before, float32"):
        make_train_step(loss)(nnx_state(), make_batch())


def test_nnx_loss_must_not_return_collections():
    def loss(model, batch):
        return model(batch["x"]).mean(), {"variables": {"norm": 1}}

    with pytest.raises(ValueError, match="model's own state is collected"):
        make_train_step(loss, has_aux=True)(nnx_state(), make_batch())


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(compute_dtype=jnp.int8), TypeError, "compute_dtype.*int8"),
        (dict(compute_dtype="float17"), TypeError, "compute_dtype.*float17"),
        (dict(accum_steps=0), ValueError, "accum_steps=0; expected"),
        (dict(accum_steps=1.5), ValueError, "accum_steps=1.5; expected"),
        (dict(redo_on_nan=-1), ValueError, "make_train_step: redo_on_nan=-1"),
        (dict(loss_fn=3), TypeError, "loss_fn is a int; expected a function"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_train_step(**(dict(loss_fn=linear_loss) | options))


def test_bad_states_are_named():
    from flax.training.train_state import TrainState

    plain = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)
    )
    for make in (make_train_step, make_eval_step):
        with pytest.raises(TypeError, match="state is a TrainState; expected an Amp"):
            make(linear_loss)(plain, linear_batch())
        with pytest.raises(TypeError, match="state is a dict"):
            make(linear_loss)({"w": jnp.ones(3)}, linear_batch())
    state = linear_state()
    state = state.replace(opt_state=state.opt_state.inner_state)
    with pytest.raises(TypeError, match="expected an optax.ApplyIfFiniteState"):
        make_train_step(linear_loss)(state, linear_batch())
    with pytest.raises(TypeError, match="make_eval_step: fn is a NoneType"):
        make_eval_step(None)
