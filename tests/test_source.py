"""Errors, profiles and HLO name the functions, arguments and lines of the user."""

import linecache
import traceback

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend import source_info_util

from flax_amp import AmpTrainState, amp, make_nnx_train_step, make_train_step
from helpers import equations, rewritten_in_float32

PARAMS = {"w": jnp.ones((2, 2))}
RNGS = nnx.Rngs(0)
BATCH = {"x": jnp.ones((2, 2)), "y": [jnp.ones(2)]}


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
    model = nnx.Linear(2, 2, rngs=RNGS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    make_nnx_train_step(loss, precision="bf16-mixed")(model, optimizer, BATCH)


# name: the call, and what its parameters are called
CALLS = {
    "amp": (lambda f: amp(f)(PARAMS, BATCH), "params['w']"),
    "grad": (lambda f: jax.grad(amp(f))(PARAMS, BATCH), "params['w']"),
    "nnx": (lambda f: amp(f)(nnx.Linear(2, 2, rngs=RNGS), BATCH), "params.kernel"),
    "step": (linen_step, "params['w']"),
    "step, accumulated": (lambda f: linen_step(f, accum_steps=2), "params['w']"),
    "step of nnx": (nnx_step, "params['model']['kernel']"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_decision_on_a_traced_value(call):
    run, parameter = CALLS[call]
    # A step calls the loss from a function with its name.
    place = "" if "step" in call else f"{__file__}:"
    error = jax.errors.ConcretizationTypeError | jax.errors.TracerIntegerConversionError
    for loss, name in (*LOSSES, (on_weight, parameter)):
        with pytest.raises(error.__args__) as caught:
            run(loss)
        message = str(caught.value)
        assert f"function {loss.__name__} at {place}" in message
        # Of a parameter, plain JAX does not know it everywhere.
        assert f"the argument {name}" in message or "argument" not in message
        assert "argument" in message or loss is on_weight
        assert "arrays[" not in message


def test_a_signature_without_names():
    """Of `*args` and keywords there are only places."""

    def loss(*args, **kwargs):
        return float(kwargs["scale"][1]) * args[1]["x"].sum()

    error = jax.errors.ConcretizationTypeError
    with pytest.raises(error, match=r"kwargs\['scale'\]\[1"):
        amp(loss)(PARAMS, BATCH, scale=[jnp.ones(()), jnp.ones(())])


# --- lines, which are not those of amp ------------------------------------------------

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


def bad(y):
    return jnp.log(y - 100.0)  # makes a NaN


def in_layers(w, x):
    for _ in range(8):
        x = jax.nn.relu(jnp.tanh(x @ w) + jnp.sin(x) * jnp.cos(x) - jnp.sin(x @ w))
        x = bad(x * 2)
    return x


# The line that calls a loop is what plain JAX names.
def scanned(w, x):
    return lax.scan(lambda c, _: (bad(c @ w), 0), x, length=2)[0]  # loop


def looped(w, x):
    x = lax.stop_gradient(x @ w)
    return jnp.sum(w) + lax.fori_loop(0, 2, lambda _, x: bad(x), x)  # loop


def branched(w, x):
    return lax.cond(jnp.sum(x) > 0, bad, lambda y: y, x @ w)  # loop


def with_vjp(forward, backward):
    made = jax.custom_vjp(lambda y: forward(y)[0])
    made.defvjp(forward, backward)
    return lambda w, x: made(x @ w)


NAN, LOOP = "makes a NaN", "# loop"
CASES = {
    "straight": (lambda w, x: bad(x @ w), NAN),
    "jit": (lambda w, x: jax.jit(lambda y: bad(y) + 1)(x @ w), NAN),
    "checkpoint": (jax.checkpoint(lambda w, x: jax.jit(bad)(x @ w)), NAN),
    "layers": (in_layers, NAN),
    "backward": (with_vjp(lambda y: (y, None), lambda _, t: (bad(t),)), NAN),
    "scan": (scanned, LOOP),
    "while": (looped, LOOP),
    "cond": (branched, LOOP),
}


def last_line(error):
    """The last line of this file in the traceback of an error, without its causes."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == __file__]
    return linecache.getline(__file__, own[-1].lineno)  # with its comment


@pytest.mark.parametrize(
    "jit, lower",
    [(jax.jit, amp), (lambda fn: fn, rewritten_in_float32)],
    ids=["jit", "eager"],
)
@pytest.mark.parametrize("fn, line", CASES.values(), ids=CASES)
def test_a_nan_names_the_line_that_makes_it(fn, line, jit, lower):
    lowered = lower(lambda w, x: jnp.sum(fn(w, x)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        jax.block_until_ready(jit(jax.value_and_grad(lowered))(W, X))
    assert line in last_line(caught.value)


def everything(w, x):
    x = jax.nn.gelu(jnp.log(x @ w + 9)) + jnp.exp(x)
    x = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0]
    x = jnp.sum(CASES["backward"][0](w, jnp.cumsum(x)[None, :4])) + x
    return jnp.mean(jax.checkpoint(jnp.sin)(x) - x.mean(-1, keepdims=True))


def test_rewritten_equations_have_the_lines_of_the_user():
    """In the jaxpr and in what XLA gets."""
    traced = jax.jit(jax.grad(amp(everything))).trace(W, X)
    found = equations(traced.jaxpr)
    lines = {source_info_util.summarize(eqn.source_info) for _, eqn in found}
    assert len(lines) > 5
    # None has a line of a function of JAX that nobody calls from here.
    assert {line.partition(":")[0] for line in lines} <= {__file__, ""}
    text = traced.lower().as_text(debug_info=True)
    for plain in ("jnp.tanh(c @ w)", "jnp.log(x @ w + 9)"):
        lines = linecache.getlines(__file__)
        number = 1 + next(i for i, line in enumerate(lines) if plain in line)
        assert f'test_source.py":{number}:' in text
