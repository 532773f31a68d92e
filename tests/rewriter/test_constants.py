"""Constants: a number is its bits, the sign of zero and NaN included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from flax_amp._rewriter.plan import LEAF, value_of
from helpers import jit

NUMBERS = {
    "zero": [0.0] * 3,
    "negative zero": [-0.0] * 3,
    "mixed zeros": [0.0, -0.0, 0.0],
    "nan": [np.nan] * 3,
    "infinite": [-np.inf] * 3,
    "subnormal": [-1e-40] * 3,
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


@pytest.mark.parametrize("number", [0.0, np.nan])
def test_plans_of_different_constants_differ(number):
    """One jitted function that is called with both zeros, or both NaN."""
    jitted = jax.jit(angle)

    def both(x):
        y = x @ WEIGHT
        signs = (number, -number)
        return [jitted(y, jnp.full(3, sign, jnp.float32)) for sign in signs]

    found = amp(both, compute_dtype=jnp.bfloat16)(INPUT)
    assert [observed(y) for y in found] == [observed(y) for y in both(INPUT)]


def test_one_plan_for_equal_constants():
    """A NaN is the same constant as itself; the zeros, and two NaN, are not equal."""

    def value(number):
        jaxpr = jax.make_jaxpr(lambda x: x * number)(jnp.float32(1))
        (literal,) = [v for v in jaxpr.jaxpr.eqns[0].invars if hasattr(v, "val")]
        return value_of(literal, {})

    assert value(float("nan")) == value(float("nan"))
    assert value(0.0) != value(-0.0)
    assert LEAF.constant is None and value(1.5).without_constant() == LEAF
