"""The interpreters that JAX ships, over `amp` and under it; docs/composition.md."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify, jet, sparse
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from _programs import W, X, norm
from flax_amp import amp
from helpers import relative_error

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
