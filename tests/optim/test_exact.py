"""Traced numbers keep the precision of Python's, whatever XLA makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_amp.optim._exact import Exact, split

FORMULAS = {
    "1 - b": lambda b: 1 - b,
    "1 + b**2": lambda b: 1 + b**2,
    "2 / (1 - b) - 1": lambda b: 2 / (1 - b) - 1,
    "(1 - b) * (1 - b / 2)": lambda b: (1 - b) * (1 - b / 2),
    "b / 3": lambda b: b / 3,
    "-b * 3.7": lambda b: -b * 3.7,
    "abs(b - 1)": lambda b: abs(b - 1),
    "(b + b * b) / (1 + b)": lambda b: (b + b * b) / (1 + b),
    "1 - b**5": lambda b: 1 - b**5,
    "b / 7 - 10**6": lambda b: b / 7 - 10**6,
}
VALUES = [0.9, 0.999, 0.1, 1e-3, 3e-4, *np.random.default_rng(0).uniform(0, 1, 40)]


def exact(value):
    return Exact(*split(value, np.float32))


@pytest.mark.parametrize("formula", FORMULAS)
def test_rounds_once_as_a_python_float_does(formula):
    function = FORMULAS[formula]

    @jax.jit
    def compute(high, low):
        result = function(Exact(high, low))
        return jnp.asarray(result), result._low

    for value in map(float, VALUES):
        high, low = compute(*split(value, np.float32))
        expected = function(value)
        assert high == np.float32(expected), value
        assert abs(float(high) + float(low) - expected) < 1e-11 * abs(expected)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38])
def test_extremes(value):
    for function in (
        lambda b: b * 3,
        lambda b: b + 1,
        lambda b: 1 - b,
        lambda b: b / 3,
    ):
        with np.errstate(over="ignore"):
            expected = np.float32(function(value))
        found = jax.jit(lambda h, low, f=function: jnp.asarray(f(Exact(h, low))))(
            *split(value, np.float32)
        )
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-37)


def test_meets_arrays_as_a_python_number_does():
    def compute(high, low, x):
        b = Exact(high, low)
        return x * b, b * x, x - b, b - x, x / b, b / x, b**x, x**b, jnp.maximum(b, x)

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.arange(1, 4, dtype=dtype)
        found = jax.jit(compute)(*split(0.3, np.float32), x)
        b = 0.3
        expected = x * b, b * x, x - b, b - x, x / b, b / x, b**x, x**b
        for ours, plain in zip(found, (*expected, jnp.maximum(b, x)), strict=True):
            assert ours.dtype == plain.dtype == dtype
            np.testing.assert_allclose(
                np.float32(ours), np.float32(plain), rtol=float(jnp.finfo(dtype).eps)
            )


def test_numpy_leaves_the_arithmetic_to_it():
    assert isinstance(np.float32(2) * exact(0.1), Exact)
    assert isinstance(np.ones(2, np.float32) - exact(0.1), jax.Array)


def test_goes_through_compiled_functions():
    high, _ = split(0.999, np.float32)
    result = jax.jit(lambda b: jax.jit(lambda c: 1 - c)(b))(exact(0.999))
    assert jnp.asarray(result) == np.float32(1 - 0.999) != 1 - high


def test_derivatives():
    def compute(high):
        b = Exact(high, jnp.zeros_like(high))
        return jnp.asarray(2 / (1 - b) - b * b)

    slope = jax.grad(compute)(jnp.float32(0.9))
    np.testing.assert_allclose(slope, 2 / 0.1**2 - 1.8, rtol=1e-5)


def test_is_used_as_a_value_only_when_known():
    assert float(exact(0.5)) == 0.5 and int(exact(2.0)) == 2 and bool(exact(1.0))
    assert exact(0.25) < 0.5 and exact(0.5) == exact(0.5) and not callable(exact(1.0))
    assert repr(exact(0.5)) == "Exact(0.5, 0.0)" and (+exact(0.5)).ndim == 0
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda high: 1 if Exact(high, 0) > 0 else 2)(0.5)


def _barriers(leaves):
    def compute(high, low, xs):
        b = Exact(high, low)
        return [(1 - b) * x + b * x for x in xs]

    jaxpr = jax.make_jaxpr(compute)(*split(0.9, np.float32), [jnp.ones(3)] * leaves)
    return str(jaxpr).count("optimization_barrier")


def test_computes_once_for_all_leaves():
    assert _barriers(20) == _barriers(1) > 0


def test_no_trace_sees_what_an_inner_one_computed():
    @jax.jit
    def compute(high, low, x):
        b = Exact(high, low)
        inside = jax.lax.cond(x > 0, lambda: (1 - b) * x, lambda: (1 - b) + x)
        summed, _ = jax.lax.scan(lambda c, _: (c + (1 - b) * b, None), x, length=2)
        slope = jax.grad(lambda y: (1 - b) * y * b)(x)
        return inside, summed, slope, (1 - b) * x

    plain = 1 - 0.9
    expected = plain * 2, 2 + 2 * plain * 0.9, plain * 0.9, plain * 2
    found = compute(*split(0.9, np.float32), jnp.float32(2))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


WHOLE = {
    "1e9 / (n * n)": lambda n: 1e9 / (n * n),
    "1 - 1 / n": lambda n: 1 - 1 / n,
    "0.1 * (n - 7) / -n": lambda n: 0.1 * (n - 7) / -n,
    "n**3 - abs(-n)": lambda n: (n**3 - abs(-n)) / 1,
}


@pytest.mark.parametrize("formula", WHOLE)
def test_integers_do_not_wrap_as_numbers(formula):
    function = WHOLE[formula]
    for value in (3, 1000, 50_000, 123_456, 2**24 + 1, -77_777):
        result = jax.jit(lambda n: jnp.asarray(function(Exact(None, None, n))))(value)
        np.testing.assert_allclose(result, function(value), rtol=1e-7)


def test_integers_are_integers_to_arrays():
    @jax.jit
    def compute(n, count):
        n = Exact(None, None, n)
        return count - 2 * n, count // n, count % n, jnp.minimum(count, n), n * 0.5

    found = compute(4, jnp.int32(9))
    assert [int(x) for x in found[:4]] == [1, 2, 1, 4]
    assert all(x.dtype == jnp.int32 for x in found[:4])
    assert float(jnp.asarray(found[4])) == 2.0


def test_halves_are_no_numbers_to_map_over():
    """As a factory does with a dict of hyper-parameters."""
    b = exact(0.9)
    with pytest.raises(TypeError, match="key<"):
        jax.tree.map(lambda x: 1 - x, {"b": b})
    for leaf in (b, 1 - b, Exact(None, None, jnp.int32(3)) * 2):
        mapped = jax.tree.map(lambda x: x, leaf)
        for one, other in zip(mapped._pair(), leaf._pair(), strict=True):
            assert one == other


def test_goes_through_compiled_functions_in_double_precision():
    with jax.enable_x64(True):
        b = Exact(*split(0.1, np.float64)) / 3
        mapped = jax.jit(lambda b: b)(b)
        assert (mapped._pair()[0] == b._pair()[0]) and (mapped - b)._pair()[0] == 0


def test_comparisons_see_both_halves():
    above, below = exact(0.9 + 1e-10), exact(0.9 - 1e-10)
    assert below < 0.9 < above and below <= 0.9 and above != 0.9 and below != above
    assert above >= below and above > below and exact(0.1) == 0.1
    assert (exact(0.5) < jnp.ones(2)).all()


def test_has_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        {0.5: 1}.get(exact(0.5))


@pytest.mark.parametrize("tiny", [1.2e-38, 1e-30])
def test_products_of_very_small_numbers(tiny):
    for factor in (1.0, 1 / 3, 1e-6):
        found = jax.jit(lambda h, l, f=factor: jnp.asarray(Exact(h, l) * f))(  # noqa: E741
            *split(tiny, np.float32)
        )
        plain = jnp.float32(tiny) * jnp.float32(factor)
        np.testing.assert_allclose(found, plain, rtol=2e-7)


def test_complex_numbers_meet_its_array():
    assert jnp.asarray(exact(3.0) * np.complex64(2 + 1j)) == 6 + 3j


def test_zeros_have_signs():
    b = exact(0.5)
    assert jnp.asarray(b / 0.0) == np.inf and jnp.asarray(b / -0.0) == -np.inf
