"""A function that amp has rewritten already is refused, however it is handed over."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import (
    AmpTrainState,
    amp,
    compare_precision,
    explain,
    find_nonfinite,
)

X = jnp.ones((4, 8))


def loss(model, batch):
    return (model(batch) ** 2).mean()


def partial(model, batch):
    return functools.partial(amp(loss))(model, batch)


# name: what the user passes; it takes a module and a batch
REWRITTEN = {
    "amp": lambda: amp(loss),
    "decorator": lambda: amp(compute_dtype=jnp.bfloat16)(loss),
    "nnx.value_and_grad": lambda: nnx.value_and_grad(amp(loss)),
    "nnx.jit": lambda: nnx.jit(amp(loss)),
    "lambda": lambda: lambda *args: amp(loss)(*args) * 2,
    "partial": lambda: functools.partial(amp(loss)),
    "inside": lambda: partial,
    "amp_stop": lambda: flax_amp.amp_stop(amp(loss)),
    "float32": lambda: amp(loss, compute_dtype=jnp.float32),
}


def arrays(w, x):
    return (x @ w).sum()


OF_ARRAYS = {
    "amp": lambda f: f,
    "value_and_grad": jax.value_and_grad,
    "grad": jax.grad,
    "jit": jax.jit,
    "jit of a gradient": lambda f: jax.jit(jax.value_and_grad(f)),
    "vmap": lambda f: jax.vmap(f, (None, None), axis_size=2),
    "checkpoint": jax.checkpoint,
    "scaled": lambda f: flax_amp.dynamic_scale_value_and_grad(f),
}


def refuses(call):
    with pytest.raises(TypeError, match="before amp: explain.loss., not explain.amp"):
        call()


@pytest.mark.parametrize("name", REWRITTEN)
def test_of_a_module(name):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    refuses(lambda: explain(REWRITTEN[name]())(model, X))


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("name", [name for name in OF_ARRAYS if name != "scaled"])
def test_of_arrays(name, was_called):
    fun = OF_ARRAYS[name](amp(arrays))
    w = jnp.ones((8, 8))
    if was_called:  # JAX does not trace it again
        fun(w, X)
    refuses(lambda: explain(fun)(w, X))


def test_of_a_scaled_gradient():
    fun = OF_ARRAYS["scaled"](amp(arrays))
    refuses(lambda: explain(fun)(flax_amp.init_scaler(), jnp.ones((8, 8)), X))


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_of_a_state(jit, was_called):
    def state():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        return AmpTrainState.create(model=model, tx=optax.sgd(0.1))

    train_step = flax_amp.make_train_step(loss, jit=jit)
    eval_step = flax_amp.make_eval_step(loss, jit=jit)
    for step in (train_step, eval_step):
        if was_called:
            step(state(), X)
        refuses(lambda step=step: explain(step)(state(), X))
    refuses(lambda: explain(state(), amp(loss), X))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    nnx_step = flax_amp.make_nnx_train_step(loss, jit=jit)
    refuses(lambda: explain(nnx_step)(model, optimizer, None, X))


@pytest.mark.parametrize("tool", [explain, compare_precision, find_nonfinite])
@pytest.mark.parametrize(
    "how", ["amp", "inside", "lambda", "jit", "nnx.jit", "state", "step", "eval step"]
)
def test_every_tool_names_itself(tool, how):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
    steps = {
        "state": amp(loss),
        "step": flax_amp.make_train_step(loss),
        "eval step": flax_amp.make_eval_step(loss),
    }
    name = tool.__name__
    with pytest.raises(TypeError, match=f"^{name}: .* expected .*: {name}.loss., not"):
        if how in steps:
            tool(state, steps[how], X)
        elif how == "jit":
            tool(jax.jit(amp(arrays)))(jnp.ones((8, 8)), X)
        else:
            tool(REWRITTEN[how]())(model, X)


@pytest.mark.parametrize("tool", [compare_precision, find_nonfinite])
@pytest.mark.parametrize("out", [lambda y: y, lambda y: (y.sum(), y, y)])
def test_a_loss_that_is_no_scalar(tool, out):
    with pytest.raises(TypeError, match="expected a scalar float. Reduce") as caught:
        tool(lambda w, x: out(x @ w))(jnp.ones((8, 8)), X)
    assert "has_aux" not in str(caught.value)  # which these tools do not have


def test_the_function_before_amp_is_not_refused():
    w = jnp.ones((8, 8))
    rewritten = amp(arrays)
    with pytest.raises(TypeError):
        explain(rewritten)(w, X)
    assert not explain(arrays)(w, X).problems
    assert not explain(rewritten.__wrapped__)(w, X).problems
    assert rewritten(w, X) == 256  # explain leaves it alone
