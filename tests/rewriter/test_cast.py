"""Casts: what is finite stays so, infinities and NaN survive, rules stay linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

from flax_amp import amp
from flax_amp._rewriter.casts import cast_constant, finfo, saturating_cast

HALVES = (jnp.float16, jnp.bfloat16)
FLOAT32_MIN = float(jnp.finfo(jnp.float32).min)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [-1e9, 1e30, FLOAT32_MIN, 3.0, 0.0])
def test_finite_stays_finite(dtype, value):
    limit = float(finfo(dtype).max)
    expected = np.clip(value, -limit, limit)
    constant = cast_constant(value, dtype)
    array = saturating_cast(jnp.full(3, value, jnp.float32), dtype)
    assert constant.dtype == array.dtype == dtype
    np.testing.assert_allclose(np.float64(constant), expected, rtol=1e-2)
    np.testing.assert_allclose(np.asarray(array, np.float64), expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [-1e39, -3.39e38, 3.0])
def test_headroom_is_left_to_what_saturates(dtype, value):
    value = np.float32(value) if abs(value) < 3.4e38 else FLOAT32_MIN
    limit = float(finfo(dtype).max)
    expected = np.copysign(limit / 2, value) if abs(value) > limit else value
    casts = (
        cast_constant(value, dtype, True),
        saturating_cast(jnp.float32(value), dtype, True),
    )
    for cast in casts:
        np.testing.assert_allclose(np.float64(cast), expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_non_finite_survives(dtype, value):
    np.testing.assert_equal(float(cast_constant(value, dtype)), value)
    array = saturating_cast(jnp.float32(value), dtype)
    np.testing.assert_equal(float(array), value)


@pytest.mark.parametrize("dtype", HALVES)
def test_derivative_is_that_of_the_plain_cast(dtype):
    x = jnp.array([1.0, 1e9, -1e9], jnp.float32)
    out, vjp = jax.vjp(lambda x: saturating_cast(x, dtype), x)
    (grad,) = vjp(jnp.full(3, 0.5, dtype))
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, 0.5)
    _, tangent = jax.jvp(lambda x: saturating_cast(x, dtype), (x,), (x,))
    assert tangent.dtype == out.dtype == dtype


def test_nothing_is_kept_for_the_backward_pass():
    x = jnp.ones(3)
    _, vjp = jax.vjp(lambda x: saturating_cast(x, jnp.float16), x)
    assert not [leaf for leaf in jax.tree.leaves(vjp) if jnp.shape(leaf)]


@pytest.mark.parametrize("dtype", HALVES)
def test_jet(dtype):
    """Taylor series outside of `amp`: the primitives of the rewriter have rules."""
    w = jnp.eye(4) / 2 + 0.1

    def f(x):
        return jnp.tanh(x @ w + 0.1 * w[:1]) @ w

    x = jnp.ones((2, 4))
    exact = jet.jet(f, (x,), ((x, x),))
    for recompute in ("auto", "always"):
        lowered = amp(f, compute_dtype=dtype, recompute=recompute)
        found = jet.jet(lowered, (x,), ((x, x),))
        for got, expected in zip(
            jax.tree.leaves(found), jax.tree.leaves(exact), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=3e-2, atol=3e-2)
