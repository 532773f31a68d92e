"""Values of every dtype between the equations that are computed again."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _transformer import exact_jit, keeps
from flax_amp import amp
from helpers import equations, relative_error

MODES = ("auto", "always")


def fourier(w, x):
    """A layer of a Fourier neural operator: complex weights for each frequency."""
    spectrum = jnp.fft.rfft(x, axis=0) @ lax.complex(w, 2 * w)
    return jax.nn.gelu(x @ w + jnp.fft.irfft(jnp.tanh(spectrum), len(x), axis=0)) @ w


def phase(w, x):
    z = jnp.exp(1j * (x @ w)) * jnp.exp(1j * x)
    return jax.nn.gelu(z.real * z.imag) @ w + jnp.abs(z)


def recurrence(w, x):
    """A complex diagonal recurrence, as of state-space models."""
    decay = jnp.exp(lax.complex(-jnp.abs(w[0]), w[1]))

    def step(state, x):
        state = decay * state + x @ w
        return state, jax.nn.gelu(state.real * jnp.tanh(state.imag))

    return lax.scan(step, jnp.zeros(4, jnp.complex64), x)[1]


def associative(w, x):
    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jnp.exp(lax.complex(-jnp.abs(x), x))
    states = lax.associative_scan(join, (decay, (x @ w).astype(jnp.complex64)))[1]
    return jax.nn.gelu(states.real) @ w


def jitted(w, x):
    magnify = jax.jit(lambda z: z * jnp.conj(z) + jnp.exp(z))
    return jax.nn.gelu(jnp.abs(magnify(lax.complex(x @ w, x)))) @ w


def float8(w, x):
    """Quantized values up to the largest float8, and subnormal ones.

    Cotangents are float8 too: a larger factor than 1e3 makes those of a second order
    NaN, without amp as well.
    """
    h = jnp.tanh(x @ w)
    large = jnp.clip(h * 1e3, -448, 448).astype(jnp.float8_e4m3fn)
    product = large @ jnp.eye(4, dtype=jnp.float8_e4m3fn)
    small = (h / 512).astype(jnp.float8_e4m3fn).astype(jnp.float32) * 512
    h = jnp.sin(product.astype(jnp.float32) / 448) * jnp.tanh(small) * h
    return jnp.sin(large.astype(jnp.float32) / 448) * h @ w


def float16(w, x):
    h = jax.nn.gelu(x @ w).astype(jnp.float16)
    return (jnp.sin(h) * jnp.exp(h)).astype(jnp.float32) @ w


def integers(w, x):
    h = jax.nn.gelu(x @ w)
    whole = jnp.round(h * 3).astype(jnp.int8)
    chosen = jnp.where(h > 0, h, jnp.sin(h)) * jax.nn.one_hot(jnp.argmax(h, -1), 4)
    return (chosen * whole * jnp.round(h * 2).astype(jnp.int4).astype(jnp.float32)) @ w


def keys(w, x):
    h = jax.nn.gelu(x @ w)
    number = lax.stop_gradient(h).sum().astype(jnp.int32)
    pair = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    key = jnp.where(h[0, 0] > 0, pair[0], pair[1])
    return jnp.sin(h @ w * jax.random.normal(key, h.shape))


def float64(w, x):
    h = jax.nn.gelu(x @ w).astype(jnp.float64)
    return (jnp.sin(h) * jnp.exp(h)).astype(jnp.float32) @ w


def complex128(w, x):
    h = jax.nn.gelu(x @ w).astype(jnp.complex128)
    return (jnp.sin(h) * jnp.exp(h)).real.astype(jnp.float32) @ w


UNSTORED = (fourier, phase, recurrence, associative, jitted, float8)
OTHERS = (float16, integers, keys)
WIDE = (float64, complex128)


def args():
    key = jax.random.key(0)
    return jax.random.normal(key, (4, 4)) * 0.5, jax.random.normal(key, (8, 4))


def straight(function):
    return lambda w, x: jnp.mean(function(w, x) ** 2)


def layered(function):
    """Three such layers in a loop."""

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x + function(w, x)), None

        return jnp.mean(lax.scan(layer, x, jnp.stack([w] * 3))[0] ** 2)

    return loss


def gradient(loss):
    return jax.value_and_grad(loss, (0, 1))


def checkpointed_gradient(loss):
    def size(w, x):
        return jnp.sum(jax.grad(loss)(w, x) ** 2)

    return jax.grad(jax.checkpoint(size))


@pytest.mark.parametrize(
    "wrap", [straight, pytest.param(layered, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("function", [*UNSTORED, *OTHERS])
def test_modes_agree(function, wrap):
    """What cannot be stored is not: values and gradients are those of "never".

    In a loop the low cotangents of what a layer reads add up in another order.
    """
    bound = 1e-6 if wrap is straight else 1e-2
    _assert_modes_agree(wrap(function), gradient, bound)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [straight, layered])
@pytest.mark.parametrize("function", [*UNSTORED, *OTHERS])
def test_modes_agree_at_second_order(function, wrap):
    _assert_modes_agree(wrap(function), checkpointed_gradient, 3e-2)


@pytest.mark.parametrize("function", WIDE)
def test_modes_agree_in_double_precision(function):
    with jax.enable_x64(True):
        _assert_modes_agree(straight(function), gradient, 1e-6)
        _assert_modes_agree(straight(function), checkpointed_gradient, 3e-2)


def _assert_modes_agree(loss, transform, bound):
    def result(mode):
        lowered = amp(loss, compute_dtype=jnp.bfloat16, recompute=mode)
        return exact_jit(transform(lowered))(*args())

    expected = result("never")
    for mode in MODES:
        assert relative_error(result(mode), expected) < bound, mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", UNSTORED)
def test_regions_hold_what_can_be_stored(function, mode):
    """No value in a region is complex or float8; what is around it still has one."""
    lowered = amp(straight(function), compute_dtype=jnp.bfloat16, recompute=mode)
    jaxpr = jax.make_jaxpr(jax.grad(lowered))(*args())
    storable = ("float16", "bfloat16", "float32")
    inside = [
        e for path, e in equations(jaxpr) if "remat2" in path or "checkpoint" in path
    ]
    for eqn in inside:
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = atom.aval.dtype
            assert not jnp.issubdtype(dtype, jnp.inexact) or dtype.name in storable
    assert keeps(lowered, *args()) or mode == "auto"


def test_plain_functions_keep_their_regions():
    loss = straight(float16)
    assert keeps(amp(loss, compute_dtype=jnp.bfloat16), *args())
