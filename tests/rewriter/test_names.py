"""Errors about traced values name the user's function and its arguments."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_amp import AmpTrainState, amp, make_nnx_train_step, make_train_step

PARAMS = {"w": jnp.ones((2, 2))}
BATCH = {"x": jnp.ones((2, 2)), "y": [jnp.ones(2)]}


class Model(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


def output(params, batch):
    if isinstance(params, nnx.Module):
        return params(batch["x"])
    return batch["x"] @ params["w"]


def on_batch(params, batch):
    if batch["x"].sum() > 0:
        return output(params, batch).mean()
    return 0.0


def on_weight(params, batch):
    weights = jax.tree.leaves(params)
    return float(weights[-1].sum()) * output(params, batch).mean()


def in_loop(params, batch):
    for _ in range(batch["y"][0].sum().astype(int)):
        params = params
    return output(params, batch).mean()


LOSSES = ((on_batch, "batch['x']"), (in_loop, "batch['y'][0]"))


def linen_step(loss, **options):
    state = AmpTrainState.create(params=PARAMS, tx=optax.sgd(0.1))
    make_train_step(loss, **options)(state, BATCH)


def nnx_step(loss):
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    make_nnx_train_step(loss, precision="bf16-mixed")(model, optimizer, BATCH)


# name: the call, and what its parameters are called
CALLS = {
    "amp": (lambda f: amp(f)(PARAMS, BATCH), "params['w']"),
    "by keyword": (lambda f: amp(f)(batch=BATCH, params=PARAMS), "params['w']"),
    "partial": (lambda f: amp(functools.partial(f, PARAMS))(BATCH), None),
    "grad": (lambda f: jax.grad(amp(f))(PARAMS, BATCH), "params['w']"),
    "nnx": (lambda f: amp(f)(Model(), BATCH), "params.dense.kernel"),
    "step": (linen_step, "params['w']"),
    "step, accumulated": (lambda f: linen_step(f, accum_steps=2), "params['w']"),
    "step of nnx": (nnx_step, "params['model']['dense']['kernel']"),
}


def place_of(call):
    """A step calls the loss from a function with its name."""
    return "" if "step" in call else f"{__file__}:"


@pytest.mark.parametrize("call", CALLS)
def test_a_decision_on_a_traced_value(call):
    run, parameter = CALLS[call]
    error = jax.errors.ConcretizationTypeError | jax.errors.TracerIntegerConversionError
    for loss, name in (*LOSSES, *([(on_weight, parameter)] if parameter else [])):
        with pytest.raises(error.__args__) as caught:
            run(loss)
        message = str(caught.value)
        assert f"function {loss.__name__} at {place_of(call)}" in message
        # Of a parameter, plain JAX does not know it everywhere.
        assert f"the argument {name}" in message or "argument" not in message
        assert "argument" in message or loss is on_weight
        assert "arrays[" not in message


@pytest.mark.parametrize("call", CALLS)
def test_a_tracer_that_leaks(call):
    leaked = []

    def leaking(params, batch):
        leaked.append(jnp.sin(batch["x"]))
        return output(params, batch).mean()

    CALLS[call][0](leaking)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        leaked[0] + 1
    traced = re.search("being traced when the value leaked was (.*)", str(caught.value))
    assert traced[1].startswith(f"leaking at {place_of(call)}")


def test_other_signatures():
    """Of `*args` and keywords there are only places; some functions have none."""

    def loss(*args, **kwargs):
        return float(kwargs["scale"][1]) * args[1]["x"].sum()

    error = jax.errors.ConcretizationTypeError
    with pytest.raises(error, match=r"kwargs\['scale'\]\[1"):
        amp(loss)(PARAMS, BATCH, scale=[jnp.ones(()), jnp.ones(())])

    def same_name(x, /, **kwargs):
        return float(kwargs["x"].sum()) * x.sum()

    # JAX loses a name here.
    with pytest.raises(error, match="same_name at"):
        amp(same_name)(jnp.ones(2), x=jnp.ones(2))

    class Callable:
        def __call__(self, params, batch):
            return on_batch(params, batch)

    with pytest.raises(error, match=r"batch\['x'\]"):
        amp(Callable())(PARAMS, BATCH)
