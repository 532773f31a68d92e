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
FLOAT = jnp.float32


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def exported(function, *structs):
    """The function as it comes back from a file, if files can be written here."""
    done = export.export(jax.jit(function), platforms=PLATFORMS)(*structs)
    try:
        import flatbuffers  # noqa: F401
    except ImportError:
        return done
    return export.deserialize(done.serialize())


def number(x):
    """An array as float32, because NumPy does not compare bfloat16; a key's bits."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x, np.float32)


def assert_exports(function, make, symbolic):
    """Asserts that one export computes what the function does, at two sizes."""
    leaves, treedef = jax.tree.flatten(symbolic)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(treedef, leaves)))

    done = exported(flat, *leaves)
    assert done.platforms == PLATFORMS
    for size in (2, 6):
        args = make(size)
        found = exact_jit(done.call)(*jax.tree.leaves(args))
        expected = jax.tree.leaves(exact_jit(function)(*args))
        for actual, desired in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                # A compiler may add up the gradient of a bias in half or in float32.
                number(actual),
                number(desired),
                rtol=2e-3,
                atol=1e-5,
            )


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
    batch, length = export.symbolic_shape("b, 2*s")
    shape = (batch, length, 4)
    w = normal(0, 4, 4)
    lowered = amp(function, compute_dtype=jnp.bfloat16)

    def make(size):
        return w, normal(1, size, size, 4)

    def both(w, x):
        return lowered(w, x), jax.grad(lambda w: squares(lowered(w, x)))(w)

    assert_exports(both, make, (struct(w), jax.ShapeDtypeStruct(shape, FLOAT)))


# --- the steps -----------------------------------------------------------------------


def trained():
    """A state, its batches, and a batch of which the size is a symbol."""
    state = linen_state(
        tx=optax.sgd(0.1)
    )  # Adam divides gradients of zero by themselves

    def make(size):
        return state, make_batch(size=size)

    # Even, so that two micro-batches split it.
    size = 2 * export.symbolic_shape("half")[0]
    batch = {
        name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
        for name, x in make_batch().items()
    }
    return make, (jax.tree.map(struct, state), batch)


def predict(params, batch, state):
    variables = {"params": params, **state.variables}
    return state.apply_fn(variables, batch["x"], train=False)


def test_eval_step():
    """An evaluation step plans nothing to store, and exports."""
    make, symbolic = trained()
    step = flax_amp.make_eval_step(predict)
    assert not keeps(step, *make(2))
    assert_exports(step, make, symbolic)
