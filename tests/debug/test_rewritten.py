"""A function that amp has rewritten already is refused, however it is handed over."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, amp, compare_precision, explain, find_nonfinite

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def loss(model, batch):
    return (model(batch) ** 2).mean()


def inside(model, batch):
    return functools.partial(amp(loss))(model, batch)


def arrays(w, x):
    return (x @ w).sum()


# name: what the user passes; it takes a module and a batch
OF_A_MODULE = {
    "amp": lambda: amp(loss),
    "decorator": lambda: amp(compute_dtype=jnp.bfloat16)(loss),
    "nnx.value_and_grad": lambda: nnx.value_and_grad(amp(loss)),
    "nnx.jit": lambda: nnx.jit(amp(loss)),
    "lambda": lambda: lambda *args: amp(loss)(*args) * 2,
    "partial": lambda: functools.partial(amp(loss)),
    "inside": lambda: inside,
    "amp_stop": lambda: flax_amp.amp_stop(amp(loss)),
    "float32": lambda: amp(loss, compute_dtype=jnp.float32),
}
OF_ARRAYS = {
    "grad": jax.grad,
    "jit": jax.jit,
    "jit of a gradient": lambda f: jax.jit(jax.value_and_grad(f)),
    "vmap": lambda f: jax.vmap(f, (None, None), axis_size=2),
    "checkpoint": jax.checkpoint,
}


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def state():
    return AmpTrainState.create(model=linear(), tx=optax.sgd(0.1))


def refuses(tool, call):
    name = tool.__name__
    match = f"^{name}: .* expected .*before amp: {name}.loss., not {name}.amp"
    with pytest.raises(TypeError, match=match):
        call()


@pytest.mark.parametrize("name", OF_A_MODULE)
def test_of_a_module(name):
    refuses(explain, lambda: explain(OF_A_MODULE[name]())(linear(), X))


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_of_arrays(name):
    fun = OF_ARRAYS[name](amp(arrays))
    refuses(explain, lambda: explain(fun)(W, X))
    fun(W, X)  # JAX does not trace it again
    refuses(explain, lambda: explain(fun)(W, X))
    scaled = flax_amp.dynamic_scale_value_and_grad(amp(arrays))
    refuses(explain, lambda: explain(scaled)(flax_amp.init_scaler(), W, X))


@pytest.mark.parametrize("jit", [False, True])
def test_of_a_state(jit):
    train_step = flax_amp.make_train_step(loss, jit=jit)
    eval_step = flax_amp.make_eval_step(loss, jit=jit)
    for step in (train_step, eval_step):
        refuses(explain, lambda step=step: explain(step)(state(), X))
        step(state(), X)
        refuses(explain, lambda step=step: explain(step)(state(), X))
    refuses(explain, lambda: explain(state(), amp(loss), X))
    model = linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    nnx_step = flax_amp.make_nnx_train_step(loss, jit=jit)
    refuses(explain, lambda: explain(nnx_step)(model, optimizer, X))


@pytest.mark.parametrize("tool", [compare_precision, find_nonfinite])
def test_every_tool_names_itself(tool):
    for name in ("amp", "inside"):
        refuses(tool, lambda name=name: tool(OF_A_MODULE[name]())(linear(), X))
    refuses(tool, lambda: tool(jax.jit(amp(arrays)))(W, X))
    for fun in (amp(loss), flax_amp.make_train_step(loss)):
        refuses(tool, lambda fun=fun: tool(state(), fun, X))


@pytest.mark.parametrize("tool", [compare_precision, find_nonfinite])
@pytest.mark.parametrize("out", [lambda y: y, lambda y: (y.sum(), y, y)])
def test_a_loss_that_is_no_scalar(tool, out):
    with pytest.raises(TypeError, match="expected a scalar float. Reduce") as caught:
        tool(lambda w, x: out(x @ w))(W, X)
    assert "has_aux" not in str(caught.value)  # which these tools do not have


def test_the_function_before_amp_is_not_refused():
    rewritten = amp(arrays)
    assert not explain(arrays)(W, X).problems
    assert not explain(rewritten.__wrapped__)(W, X).problems
    assert rewritten(W, X) == 256  # explain leaves it alone
