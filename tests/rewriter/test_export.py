"""`jax.export` with symbolic shapes, for several platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import export, lax

import flax_amp
from _models import linen_state, make_batch
from _programs import norm, normal, squares
from _transformer import exact_jit, keeps
from flax_amp import amp

PLATFORMS = ("cpu", "cuda", "tpu")


def struct(x, *shape):
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype)


def number(x):
    """An array as float32, because NumPy does not compare bfloat16; a key's bits."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x, np.float32)


def assert_exports(function, make, symbolic):
    """Asserts that one export computes what the function does, at two sizes."""
    leaves, treedef = jax.tree.flatten(symbolic)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(treedef, leaves)))

    done = export.export(jax.jit(flat), platforms=PLATFORMS)(*leaves)
    done = export.deserialize(done.serialize())
    for size in (2, 6):
        args = make(size)
        found = exact_jit(done.call)(*jax.tree.leaves(args))
        expected = jax.tree.leaves(exact_jit(function)(*args))
        for actual, desired in zip(
            map(number, found), map(number, expected), strict=True
        ):
            # A compiler may add up the gradient of a bias in half or in float32.
            np.testing.assert_allclose(actual, desired, rtol=2e-3, atol=1e-5)


def layers(w, x):
    return lax.scan(lambda x, w: (nn.gelu(norm(x @ w)) + x, None), x, w[None])[0]


def rows(w, x):
    """A loop of which the length is a symbol."""
    return lax.scan(lambda c, x: (c + jnp.sum(nn.silu(x @ w)), norm(x)), 0.0, x)


def branches(w, x):
    y = lax.cond(x.sum() > 0, lambda: norm(nn.gelu(x @ w)), lambda: x)
    return jax.checkpoint(lambda y: norm(nn.relu(y @ w)))(y) * jnp.zeros(x.shape)


@pytest.mark.parametrize("function", [layers, rows, branches])
def test_functions(function):
    """The function and its gradient, with a symbol for the batch and the length."""
    w, lowered = normal(0, 4, 4), amp(function)

    def both(w, x):
        return lowered(w, x), jax.grad(lambda w: squares(lowered(w, x)))(w)

    shape = *export.symbolic_shape("b, 2*s"), 4
    make = lambda size: (w, normal(1, size, size, 4))  # noqa: E731
    assert_exports(both, make, (struct(w), struct(w, *shape)))


def predict(params, batch, state):
    variables = {"params": params, **state.variables}
    return state.apply_fn(variables, batch["x"], train=False)


def test_eval_step():
    """An evaluation step plans nothing to store, and exports."""
    state, step = linen_state(tx=optax.sgd(0.1)), flax_amp.make_eval_step(predict)
    make = lambda size: (state, make_batch(size=size))  # noqa: E731
    (size,) = export.symbolic_shape("size")
    batch = {name: struct(x, size, *x.shape[1:]) for name, x in make_batch().items()}
    assert not keeps(step, *make(2))
    assert_exports(step, make, (jax.tree.map(struct, state), batch))
