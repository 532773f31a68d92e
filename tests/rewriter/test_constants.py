"""Constants and masks: finite stays finite, signs and NaN survive."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from flax_amp._rewriter.casts import cast_number, finfo
from helpers import assert_close, both_halves, jit

# --- constants: a number is its bits, the sign of zero and NaN included --------------

NUMBERS = {
    "zero": [0.0] * 3,
    "negative zero": [-0.0] * 3,
    "nan": [np.nan] * 3,
    "infinite": [-np.inf] * 3,
    "mixed": [1e-40, -0.0, np.inf],
}
KINDS = {
    "literal": lambda numbers: numbers[0],
    "numpy": lambda numbers: np.array(numbers, np.float32),
    "jnp": lambda numbers: jnp.array(numbers, jnp.float32),
}
PLACES = {
    "straight": lambda f: f,
    "jit": lambda f: lambda x: jax.jit(f)(x),
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x[None])[0]), 0, x)[1],
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, jnp.exp, x),
}
WEIGHT = jnp.eye(3)
INPUT = jnp.arange(1.0, 7).reshape(2, 3)


def angle(y, constant):
    """The angle of a point left of the origin: its sign is that of the constant."""
    return lax.atan2(jnp.broadcast_to(constant, y.shape).astype(y.dtype), -y)


def at(constant, x):
    return angle(x @ WEIGHT, constant)


def observed(y):
    y = np.asarray(y, np.float32)
    return np.where(np.isnan(y), 2, np.sign(y)).tolist()


@pytest.mark.parametrize("name", NUMBERS)
def test_signs_survive(name):
    """Among low values, wherever the code stands, a constant keeps its sign."""

    constants = {kind: make(NUMBERS[name]) for kind, make in KINDS.items()}

    def everywhere(x):
        return {
            (kind, where): place(functools.partial(at, constant))(x)
            for kind, constant in constants.items()
            for where, place in PLACES.items()
        }

    lowered = amp(everywhere, compute_dtype=jnp.float16)
    expected, found = jit(lambda x: (everywhere(x), lowered(x)))(INPUT)
    observe = functools.partial(jax.tree.map, observed)
    assert observe(found) == observe(expected)


# --- casts ---------------------------------------------------------------------------

LOWEST = float(jnp.finfo(jnp.float32).min)


@both_halves
@pytest.mark.parametrize(
    "value", [-1e9, 1e30, -1e38, LOWEST, 3.0, 0.0, np.inf, -np.inf, np.nan]
)
def test_numbers_saturate(value, dtype):
    """What is finite stays so; the rest is itself."""
    limit = float(finfo(dtype).max)
    is_large = np.isfinite(value) and abs(value) > limit
    expected = np.copysign(limit / 2, value) if is_large else value
    cast = cast_number(np.float32(value), dtype)
    assert cast.dtype == dtype
    np.testing.assert_allclose(np.asarray(cast, np.float64), expected, rtol=1e-2)


MASK = jnp.triu(jnp.ones((4, 4)), 1)


@both_halves
@pytest.mark.parametrize("large", [-1e9, LOWEST, -np.inf])
def test_a_mask_among_the_arguments(large, dtype):
    """It is added to scores as it is, or as the lowest number of half precision."""

    def attend(w, x, mask):
        weights = jax.nn.softmax(x @ w @ x.T + mask)
        return jnp.sum((weights @ x) ** 2), weights

    def gradient(fn):
        return jax.jit(jax.value_and_grad(fn, has_aux=True))(w, x, mask)

    w, x = jax.random.normal(jax.random.key(0), (2, 4, 4)) / 2
    mask = jnp.where(MASK > 0, large, 0.0)
    actual, expected = map(gradient, (amp(attend, compute_dtype=dtype), attend))
    assert_close(actual, expected, dtype, gradient=True)
    assert not (actual[0][1] * MASK).any()
