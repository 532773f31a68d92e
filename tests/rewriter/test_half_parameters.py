"""A gradient of half-precision parameters warns; other arrays in half never do."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import flax_amp
from _programs import normal
from flax_amp import amp
from helpers import HALVES

half = functools.partial(amp, compute_dtype=jnp.bfloat16)
FLOATS = {"w": normal(0, 4, 4), "v": normal(1, 4, 4)}
X = normal(2, 8, 4)
LOW = jnp.bfloat16


def lowered(tree, dtype=LOW):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]).astype(jnp.float32) ** 2)


def mean(tree):
    return sum(jnp.mean(x.astype(jnp.float32)) for x in jax.tree.leaves(tree))


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [w for w in caught if "parameters are in half" in str(w.message)]
    assert {w.filename for w in found} <= {__file__}
    return [str(w.message) for w in found]


class Model(nnx.Module):
    def __init__(self, dtype=LOW):
        self.dense = nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return mean(self.dense(x))


class Cyclic(Model, pytree=False):
    def __init__(self):
        super().__init__()
        self.root = self


linen = nn.Dense(4, param_dtype=LOW)
VARIABLES = linen.init(jax.random.key(0), X)


def step(params, x):
    grads = jax.grad(half(loss))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


# What trains parameters in half precision.
WARNS = {
    "grad": lambda p: jax.grad(half(loss))(p, X),
    "scan": lambda p: lax.scan(lambda p, x: (step(p, x), None), p, X[None]),
    "some": lambda p: jax.grad(half(loss))(p | {"v": FLOATS["v"]}, X),
    "closed over batch": lambda p: jax.grad(half(lambda p: loss(p, X)))(p),
    "amp of the model": lambda p: jax.grad(
        lambda p: mean(half(linen.apply)(lowered(VARIABLES) | {"params": p}, X))
    )(VARIABLES["params"]),
    "vmap": lambda p: jax.grad(
        lambda p: jax.vmap(half(loss), (None, 0))(p, X[None]).mean()
    )(p),
    "ensemble": lambda p: jax.grad(
        lambda p: jax.vmap(half(loss), (0, None))(p, X).mean()
    )(jax.tree.map(lambda x: x[None], p)),
    "batch in half": lambda p: jax.grad(half(loss))(p, X.astype(LOW)),
    "nnx": lambda p: nnx.grad(half(lambda model, x: model(x)))(Model(), X),
    "nnx with a cycle": lambda p: nnx.grad(half(lambda model, x: model(x)))(
        Cyclic(), X
    ),
    "scaled": lambda p: flax_amp.dynamic_scale_value_and_grad(half(loss))(
        p, X, dynamic_scaler_state=flax_amp.init_scaler()
    ),
}


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", WARNS)
def test_parameters_in_half_warn_once(name, dtype):
    run = functools.partial(WARNS[name], lowered(FLOATS, dtype))
    (message,) = warned(run)
    assert "is lost" in message and "Expected float32 parameters" in message
    if name == "grad":
        assert "2 of 2 parameters" in message
        assert f"in half precision, {dtype.__name__}: an update" in message
        assert f"below 1/{2048 if dtype == jnp.float16 else 256} of" in message


def test_one_warning_for_a_function():
    run = jax.grad(half(loss))
    assert len(warned(lambda: [run(lowered(FLOATS), X) for _ in range(3)])) == 1


# --- what is in half precision without harm ------------------------------------------


def cell(state, x):
    """A cell of an RNN with weights that it closes over."""
    return jnp.tanh(state @ FLOATS["w"].astype(LOW) + x.astype(LOW))


def unrolled(w, run):
    state = jnp.zeros((8, 4), LOW)
    for _ in range(3):
        state = run(state * w.astype(LOW)[:1], X)
    return mean(state)


def cached(params, cache, x):
    """Attention to a cache of keys and values."""
    scores = jax.nn.softmax((x @ params["w"]) @ cache["k"].T.astype(jnp.float32))
    return mean(scores @ cache["v"].astype(jnp.float32) @ params["v"])


CACHE = lowered({"k": X, "v": X})
SILENT = {
    "batch": lambda: jax.grad(half(loss))(FLOATS, X.astype(LOW)),
    "batch first": lambda: jax.grad(half(lambda x, p: loss(p, x)), 1)(
        X.astype(LOW), FLOATS
    ),
    "batch first, its gradient as well": lambda: jax.grad(
        half(lambda batch, p: loss(p, batch["x"])), (0, 1)
    )(lowered({"x": X, "y": X}), FLOATS),
    "cache": lambda: jax.grad(half(cached))(FLOATS, CACHE, X),
    "copies of float32": lambda: jax.grad(lambda p: half(loss)(lowered(p), X))(FLOATS),
    "state of an RNN": lambda: jax.grad(lambda w: unrolled(w, half(cell)))(FLOATS["w"]),
    "activations": lambda: jax.grad(
        lambda w: half(lambda h, y: mean(h * y))((X @ w).astype(LOW), X)
    )(FLOATS["w"]),
    "gradient of an input": lambda: jax.grad(half(loss), argnums=1)(
        FLOATS, X.astype(LOW)
    ),
    "gradient of a state that comes first": lambda: jax.grad(
        half(lambda state, p, x: loss(p, x) + mean(state)), (0, 1)
    )((X.astype(LOW), X.astype(LOW)), FLOATS, X),
    "a stage of a pipeline": lambda: jax.vjp(
        half(lambda x, p: x @ p["w"]), X.astype(LOW), FLOATS
    ),
    "no gradient": lambda: half(loss)(lowered(FLOATS), X),
    "frozen": lambda: jax.grad(
        half(lambda p, frozen, x: loss(p, x) + mean(frozen["w"]))
    )(FLOATS, lowered(FLOATS), X),
    "float32": lambda: jax.grad(half(loss))(FLOATS, X),
    "nnx": lambda: nnx.grad(half(lambda m, x: m(x)))(Model(jnp.float32), X.astype(LOW)),
}


@pytest.mark.parametrize("name", SILENT)
def test_other_arrays_in_half_are_silent(name):
    assert warned(SILENT[name]) == []


def test_steps_say_it_themselves():
    """A step with a batch in half precision is silent, too."""
    state = flax_amp.AmpTrainState.create(
        params=FLOATS, tx=optax.sgd(0.1), precision="bf16-mixed"
    )
    train_step = flax_amp.make_train_step(loss)
    assert warned(lambda: train_step(state, X.astype(LOW))) == []
