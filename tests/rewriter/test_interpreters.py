"""The interpreters that JAX ships, over `amp` and under it; `jax.export`.

docs/composition.md lists them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export, lax
from jax.experimental import checkify, jet, sparse
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from _programs import W, X, norm, normal, squares
from flax_amp import amp
from helpers import exact_jit, relative_error

lower = functools.partial(amp, compute_dtype=jnp.bfloat16)


def layers(w, x):
    for _ in range(3):
        x = jnp.tanh(norm(x @ w + x[0, 0]))
    return jnp.mean((x @ (w * 2)) ** 3)


def series(fn):
    """The value and three derivatives along a line."""
    zeros = jnp.zeros_like
    terms = (W.T / 4, zeros(W), zeros(W)), (X[::-1] / 8, zeros(X), zeros(X))
    return lambda w, x: jet.jet(fn, (w, x), terms)


def in_sparse(fn):
    def run(w, x):
        return sparse.sparsify(fn)(sparse.BCOO.fromdense(w, nse=w.size), x)

    return run


def checked(fn):
    def run(w, x):
        error, out = checkify.checkify(fn, errors=checkify.float_checks)(w, x)
        error.throw()
        return out

    return run


def keys_checked(fn):
    def run(w, x):
        with jax.debug_key_reuse(True):
            return jax.jit(fn)(w, x)

    return run


def without_dead_code(fn):
    """By `jax.interpreters.partial_eval`."""

    def run(w, x):
        closed = jax.make_jaxpr(fn)(w, x)
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True])
        kept = [a for a, is_used in zip((w, x), used, strict=True) if is_used]
        return jax.core.eval_jaxpr(jaxpr, closed.consts, *kept)

    return run


def as_function(fn):
    return lambda *args: jaxpr_as_fun(jax.make_jaxpr(fn)(*args))(*args)[0]


ALL = (checked, keys_checked, without_dead_code, as_function)
WITHOUT_RULES = (series, in_sparse)  # for a checkpoint


@pytest.mark.parametrize("interpreter", ALL + WITHOUT_RULES)
def test_over_amp(interpreter):
    options = dict(recompute=False) if interpreter in WITHOUT_RULES else {}
    actual = interpreter(lower(layers, **options))(W, X)
    assert relative_error(actual, interpreter(layers)(W, X)) < 0.1


@pytest.mark.parametrize("interpreter", [*ALL, series])
def test_under_amp(interpreter):
    inside = interpreter(layers)
    actual, expected = lower(inside)(W, X), inside(W, X)
    assert relative_error(actual, expected) < 0.1
    assert "bf16[" in str(jax.make_jaxpr(lower(inside))(W, X))


# --- `jax.export` with symbolic shapes, for several platforms -------------------------


def layers_and_rows(w, x):
    """Branches, a checkpoint, and a loop of which the length is a symbol."""
    x = lax.cond(x.sum() > 0, lambda: norm(nn.gelu(x @ w)), lambda: x)
    x = jax.checkpoint(lambda x: norm(nn.relu(x @ w)))(x)
    return lax.scan(lambda c, x: (c + jnp.sum(nn.silu(x @ w)), norm(x)), 0.0, x)


def test_export():
    """One program computes the function and its gradient at two sizes."""
    w, lowered = normal(0, 4, 4), amp(layers_and_rows)

    def both(w, x):
        return lowered(w, x), jax.grad(lambda w: squares(lowered(w, x)))(w)

    shape = *export.symbolic_shape("b, 2*s"), 4
    args = w, jax.ShapeDtypeStruct(shape, w.dtype)
    done = export.export(jax.jit(both), platforms=("cpu", "cuda", "tpu"))(*args)
    done = export.deserialize(done.serialize())
    for size in (2, 6):
        args = w, normal(1, size, size, 4)
        found, expected = (exact_jit(fn)(*args) for fn in (done.call, both))
        # A compiler may add up the gradient of a bias in half or in float32.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5),
            found,
            expected,
        )
