"""Constants and casts: finite stays finite, signs and NaN survive, rules are linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_amp import amp
from flax_amp._rewriter.casts import cast_constant, finfo, saturating_cast
from flax_amp._rewriter.plan import LEAF, value_of
from helpers import both_halves, jit

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
    assert LEAF.constant is None and value(1.5).constant == 1.5


# --- casts ---------------------------------------------------------------------------

LOWEST = float(jnp.finfo(jnp.float32).min)


@both_halves
@pytest.mark.parametrize("headroom", [False, True])
@pytest.mark.parametrize(
    "value", [-1e9, 1e30, -1e38, LOWEST, 3.0, 0.0, np.inf, -np.inf, np.nan]
)
def test_casts_saturate(value, headroom, dtype):
    """What is finite stays so, if asked at half of the limit; the rest is itself."""
    limit = float(finfo(dtype).max)
    is_large = np.isfinite(value) and abs(value) > limit
    expected = np.copysign(limit / (1 + headroom), value) if is_large else value
    for cast in (
        cast_constant(np.float32(value), dtype, headroom),
        saturating_cast(jnp.full(3, value, jnp.float32), dtype, headroom),
    ):
        assert cast.dtype == dtype
        np.testing.assert_allclose(np.asarray(cast, np.float64), expected, rtol=1e-2)


def _mesh(kind):
    return jax.make_mesh((2,), ("d",), (kind,), devices=jax.devices()[:2])


def _in_shard_map(cast):
    mesh = _mesh(AxisType.Auto)
    return jax.shard_map(cast, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def _with_explicit_sharding(cast):
    mesh = _mesh(AxisType.Explicit)

    def call(x):
        with jax.set_mesh(mesh):
            out = jax.jit(cast)(jax.device_put(x, P("d")))
        assert jax.typeof(out).sharding.spec[0] == "d"
        return out

    return call


def _assert_same_numbers(found, expected):
    """The sign of zero included, that of NaN not."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    np.testing.assert_array_equal(found, expected)
    is_number = ~np.isnan(expected)
    signs = [np.signbit(x)[is_number] for x in (found, expected)]
    np.testing.assert_array_equal(*signs)


PLACES_OF_CASTS = {
    "eager": lambda cast: cast,
    "constant": lambda cast: lambda x: jax.jit(lambda: cast(jnp.asarray(x)))(),
    "jit": jax.jit,
    "vmap": jax.vmap,
    "shard_map": _in_shard_map,
    "explicit sharding": _with_explicit_sharding,
}


@both_halves
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("place", PLACES_OF_CASTS)
def test_casts_saturate_everywhere(place, x64, dtype):
    """Bit for bit, also next to the limit, of no elements and of float64."""
    largest = np.float32(finfo(dtype).max)
    beyond = np.nextafter(largest, np.float32(np.inf))
    numbers = [0, 1, 0.1, largest, beyond, 3.4e38, np.inf, np.nan]
    numbers = np.array([*numbers, *np.negative(numbers)], np.float32)
    is_over = np.isfinite(numbers) & (abs(numbers) > largest)
    with jax.enable_x64(x64):
        cast = functools.partial(saturating_cast, dtype=dtype)
        for source in (np.float32, np.float64)[: 1 + x64]:
            x = numbers.astype(source)
            expected = np.where(is_over, np.copysign(largest, x), x).astype(dtype)
            for shape in ((4, 4), (0, 3)):
                given, wanted = (
                    a[: np.prod(shape)].reshape(shape) for a in (x, expected)
                )
                found = PLACES_OF_CASTS[place](cast)(given)
                assert found.dtype == dtype
                _assert_same_numbers(found, wanted)


@both_halves
def test_casts_of_scalars_saturate(dtype):
    """Python's numbers are weakly typed; the result is not."""
    cast = functools.partial(saturating_cast, dtype=dtype)
    for x in (1e38, np.float32(-1e38), jnp.float32(3), jnp.asarray(2.0)):
        for found in (jax.jit(cast)(x), jax.vmap(cast)(jnp.full(2, x))[0]):
            assert found.dtype == dtype and found.shape == () and not found.weak_type
            limit = float(finfo(dtype).max)
            _assert_same_numbers(found, np.clip(float(x), -limit, limit).astype(dtype))


@pytest.mark.parametrize("headroom", [False, True])
def test_derivatives_are_those_of_the_plain_cast(headroom):
    """Also where it saturates; nothing is stored for them. Transposed or batched."""
    dtype = jnp.float16

    def cast(x):
        return saturating_cast(x, dtype, headroom)

    x = jnp.array([1.0, 2.0, 1e9, -1e9], jnp.float32)
    cotangents = jnp.arange(1.0, 5)
    for function in (cast, jax.vmap(cast)):
        out, vjp = jax.vjp(function, x)
        assert not [leaf for leaf in jax.tree.leaves(vjp) if jnp.shape(leaf)]
        (from_vjp,) = vjp(cotangents.astype(dtype))
        transpose = jax.linear_transpose(function, x)
        (transposed,) = transpose(cotangents.astype(dtype))
        for gradient in (from_vjp, transposed):
            assert gradient.dtype == jnp.float32
            np.testing.assert_array_equal(gradient, cotangents)
        _, tangent = jax.jvp(function, (x,), (x,))
        assert tangent.dtype == out.dtype == dtype
    (unused,) = jax.linear_transpose(lambda x: (cast(x) * 0, x)[1], x)(x)
    np.testing.assert_array_equal(unused, x)
