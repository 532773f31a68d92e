"""Bad arguments and losses: one error that says what was seen and what to do."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from _models import linen_loss, linen_state, make_batch, nnx_loss, nnx_state
from _steps import (
    linear_batch,
    linear_loss,
    linear_state,
    raised,
    raising,
    run,
    run_nnx,
)
from flax_amp import (
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
)

pytestmark = pytest.mark.once

X = jnp.ones(3)
MAKERS = (make_train_step, make_eval_step)
TRANSFORMS = (dynamic_scale_grad, dynamic_scale_value_and_grad)

# Arguments


STEP_ARGUMENTS = [
    (dict(compute_dtype=jnp.int8), TypeError, "compute_dtype.*int8"),
    (dict(compute_dtype="float17"), TypeError, "compute_dtype.*float17"),
    (dict(accum_steps=0), ValueError, "NAME: accum_steps=0; expected"),
    (dict(accum_steps=1.5), ValueError, "NAME: accum_steps=1.5; expected"),
    (dict(accum_steps=True), ValueError, "NAME: accum_steps=True; expected"),
    (dict(accum_steps=np.float32(2)), ValueError, "NAME: accum_steps=.*; expected"),
    (dict(redo_on_nan=-1), ValueError, "NAME: redo_on_nan=-1"),
    (dict(redo_on_nan=np.bool_(True)), ValueError, "NAME: redo_on_nan=.*True"),
    (dict(loss_fn=3), TypeError, "NAME: loss_fn is a int; expected a function"),
]


@pytest.mark.parametrize("make", [make_train_step, make_nnx_train_step])
def test_arguments_of_the_steps(make):
    for options, error, message in STEP_ARGUMENTS:
        call = functools.partial(make, **(dict(loss_fn=linear_loss) | options))
        raised(call, error, message.replace("NAME", make.__name__))


@pytest.mark.parametrize("number", [int, np.int32, np.uint8, np.array, jnp.array])
def test_counts_may_be_integers_of_numpy(number):
    options = dict(accum_steps=number(2), redo_on_nan=number(1))
    state, _ = make_train_step(linear_loss, **options)(linear_state(), linear_batch())
    assert state.step == 1


ARGUMENTS = {
    ValueError: {
        "state_shardings with jit=False": lambda: make_train_step(
            nnx_loss, state_shardings=3, jit=False
        ),
        **{
            f"nan={n}": lambda n=n: dynamic_scale_grad(X, redo_on_nan=n)
            for n in (-1, 1.5, None)
        },
    },
    TypeError: {
        "make_eval_step: fn is a NoneType": lambda: make_eval_step(None),
        "make_nnx_train_step.*'rngs'.*before keywords": lambda: make_nnx_train_step(
            lambda model, batch, *, rngs: 0.0
        ),
        **{
            f"{make.__name__}: .*{message}": functools.partial(make, loss)
            for make in MAKERS
            for loss, message in [
                (lambda params: 0.0, r"signature \(params\) \(too many positional"),
                (lambda p, b, *, key: 0.0, "'key'.*keywords state and rngs.*functools"),
                (lambda p, state, b: 0.0, "multiple values for argument 'state'"),
            ]
        },
    },
}


@raising(ARGUMENTS)
def test_arguments(call, error, message):
    raised(call, error, message)


@pytest.mark.parametrize("axis", [3, ("data", 3), ["data"], True, {"data"}])
def test_axes_that_are_no_names(axis):
    for make in (make_train_step, make_nnx_train_step, *TRANSFORMS):
        with pytest.raises(TypeError) as caught:
            make(linear_loss, axis_name=axis)
        message = f"{make.__name__}: axis_name={axis!r}; expected the name"
        assert message in str(caught.value)


def test_any_other_name_of_an_axis_is_taken():
    for axis in ("data", object(), (("rows", 0),)):
        make_train_step(linear_loss, axis_name=axis)


# Losses


def pair(aux):
    return lambda params, batch: (params["w"].sum(), aux)


def linen_with(update):
    """The loss of a Linen model that makes something else of its collections."""

    def loss(params, batch, *, state, rngs):
        value, aux = linen_loss(params, batch, state=state, rngs=rngs)
        return value, {"variables": update(aux["variables"])}

    return run(loss, linen_state, make_batch, has_aux=True)


def grows(model, batch):
    model.seen = nnx.BatchStat(jnp.zeros(2))
    return model(batch["x"]).mean()


def fails(*args):
    raise ValueError("mine")


def statistics():
    return linear_state(variables={"batch_stats": {"mean": X}})


RETURNED = [
    (lambda p, b: p["w"], r"float32\[3\] as its loss.*mean\(\)"),
    (lambda p, b: p["w"].sum().astype(int), r"int32\[\] as its.*scalar float"),
    (lambda p, b: p["w"].sum() + 0j, r"complex64\[\] as its.*scalar float"),
    (lambda p, b: None, "a NoneType as its loss"),
    (lambda p, b: (p["w"].sum(), {}), "tuple as its loss.*has_aux=True"),
]


LOSSES = {
    TypeError: {
        **{message: run(loss) for loss, message in RETURNED},
        r"make_train_step: linear_loss returned.*expected a \(loss, aux\) pair": run(
            linear_loss, has_aux=True
        ),
        "make_nnx_train_step: <lambda> returned": run_nnx(
            lambda model, batch: model(batch)
        ),
    },
    ValueError: {
        r"aux\['variables'\] with \['cache'\]; expected .* collections \[\]": run(
            pair({"variables": {"cache": 1}}), has_aux=True
        ),
        r"aux\['variables'\] with \w*Tracer; expected a dict .* collections": run(
            lambda p, b: (linear_loss(p, b), {"variables": jnp.sum(b["x"])}),
            has_aux=True,
        ),
        r"\['batch_stats'\].*aux\['variables'\]": run(
            pair({"batch_stats": {"mean": X}}), statistics, has_aux=True
        ),
        r"\['BatchNorm_0'\]\['mean'\]: float32\[8\] before, float32": linen_with(
            lambda updates: jax.tree.map(lambda x: x[None], updates)
        ),
        r"\['mean'\]: float32\[8\] before, absent now": linen_with(
            lambda updates: {"batch_stats": {}}
        ),
        r"\['intermediates'\]; expected .*\['batch_stats'\]": linen_with(
            lambda updates: {"intermediates": {}}
        ),
        "with int; expected a dict": linen_with(lambda updates: 3),
        "with NoneType; expected a dict": linen_with(lambda updates: None),
        r"\['seen'\]: absent before, float32": run(grows, nnx_state, make_batch),
        "model's own state is collected": run(
            lambda model, batch: (model(batch["x"]).sum(), {"variables": {"n": 1}}),
            nnx_state,
            make_batch,
            has_aux=True,
        ),
        "^mine": run(fails),
    },
    NameError: {
        "make_train_step: axis_name='data' is not the axis of a map around this c": run(
            linear_loss, axis_name="data"
        ),
    },
}


@raising(LOSSES)
def test_losses(call, error, message):
    raised(call, error, message)


@pytest.mark.parametrize(
    "batch, steps, message",
    [
        (
            {"x": X[:2], "y": np.ones(4)},
            2,
            r"\['x'\] has shape \(2,\); batch\['y'\] ha",
        ),
        ({"x": np.ones((4, 2)), "w": np.ones(2)}, 2, r"\['w'\] has shape \(2,\)"),
        ({"x": np.ones(4), "n": np.float32(1)}, 2, r"\['n'\] has shape \(\)"),
        ({"x": np.ones((3, 3)), "n": 3}, 3, r"batch\['n'\] has shape \(\)"),
        ({"x": X, "y": X}, 2, r"\['x'\] has shape \(3,\)"),
        (linear_batch(), 3, r"batch\['x'\] has shape \(8, 3\)"),
    ],
)
def test_batches_that_do_not_split(batch, steps, message):
    call = run(pair({}), batch=lambda: batch, has_aux=True, accum_steps=steps)
    expected = f"the same for all.*accum_steps={steps}.*as a further argument"
    raised(call, ValueError, f"{message}.*{expected}")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients(transform):
    def grad(fun, **options):
        return lambda: transform(fun, **options)({"w": X}, X, dynamic_scaler_state={})

    name = transform.__name__
    for call, message in [
        *((grad(loss), message) for loss, message in RETURNED),
        (grad(RETURNED[0][0], has_aux=True), r"expected a \(loss, aux\) pair"),
        (grad(linear_loss, argnums=2), f"^{name}: argnums=2 names an argument"),
        (grad(linear_loss, argnums=None), "argnums=None; expected an integer.* Leave"),
        (grad(linear_loss, argnums=(0, "x")), r"argnums=\(0, 'x'\); expected an int"),
        (lambda: transform(linear_loss)(X), f"^{name}: .*scaler_state is missing"),
    ]:
        raised(call, TypeError, message)
    unbound = f"{name}: axis_name='data' is not the axis of a map around this call"
    raised(grad(linear_loss, axis_name="data"), NameError, unbound)


def test_frozen_collections_are_taken():
    state, _ = linen_with(flax.core.freeze)()
    assert type(state.variables["batch_stats"]) is dict
