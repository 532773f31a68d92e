"""Structured primitives: what is inside them is rewritten, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _structured import CASES, SIZE, arguments, differentiate, loss_of
from flax_amp import amp
from helpers import (
    assert_all_in,
    assert_close,
    assert_same_avals,
    both_halves,
    dtypes_of,
    jit,
)


@pytest.fixture(scope="module")
def exact():
    """The value and gradients of a case in float64."""

    @functools.cache
    def compute(name):
        case = CASES[name]
        with jax.enable_x64(True):
            w, x = arguments(np.float64)
            return jax.tree.map(
                np.asarray, jit(differentiate(case.fn, case.both))(w, x)
            )

    return compute


@both_halves
@pytest.mark.parametrize("name", CASES)
def test_matmuls_inside_are_low(name, dtype, exact):
    """Every matmul is in the compute dtype, forward and backward, and right."""
    case, args = CASES[name], arguments()
    lowered = amp(case.fn, compute_dtype=dtype)
    assert_all_in(lowered, *args, dtype=dtype, count=case.forward)
    assert_same_avals(jax.eval_shape(lowered, *args), jax.eval_shape(case.fn, *args))
    whole = differentiate(lowered, case.both)
    original = differentiate(case.fn, case.both)
    count = case.both or len(dtypes_of(original, *args))
    assert len(dtypes_of(original, *args)) == count
    assert_all_in(whole, *args, dtype=dtype, count=count)
    value, grads = jit(whole)(*args)
    assert_same_avals((value, grads), jax.eval_shape(original, *args))
    expected, expected_grads = exact(name)
    assert_close(value, expected, dtype)
    assert_close(grads, expected_grads, dtype, gradient=True)


@both_halves
def test_linear_solves(dtype):
    """The solver runs in float32; the products of the map that it inverts run low."""

    def solve(w, x):
        a = jnp.eye(SIZE) * 4 + w
        return lax.custom_linear_solve(
            lambda v: a @ v,
            x,
            lambda _, b: jnp.linalg.solve(a, b),
            lambda _, b: jnp.linalg.solve(a.T, b),
        )

    args = arguments()
    lowered = amp(loss_of(solve), compute_dtype=dtype)
    grad = jax.grad(lowered, argnums=(0, 1))
    assert (jnp.dtype(dtype).name,) * 2 in dtypes_of(grad, *args)
    expected = jax.grad(loss_of(solve), argnums=(0, 1))(*args)
    assert_close(grad(*args), expected, dtype, gradient=True)


@both_halves
def test_custom_root_is_right(dtype):
    """Newton's method, implicitly differentiated: sqrt(2), and 1 / (2 sqrt(2))."""

    def root(a):
        f = lambda y: y * y - a  # noqa: E731
        step = lambda y, f: y - f(y) / (2 * y)  # noqa: E731
        return lax.custom_root(
            f,
            jnp.ones_like(a),
            lambda f, y: lax.fori_loop(0, 8, lambda _, y: step(y, f), y),
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    value, grad = jax.value_and_grad(amp(root, compute_dtype=dtype))(jnp.float32(2.0))
    assert_close(value, np.sqrt(2), dtype)
    assert_close(grad, 1 / np.sqrt(8), dtype, gradient=True)
