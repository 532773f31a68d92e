"""`recompute` decides what is stored and changes no result, whatever the program."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import (
    loss_of,
    normal,
    softmax_between_products,
)
from _transformer import MODES, bfloat16, exact_jit, keeps
from helpers import (
    assert_same_avals,
    equations,
    relative_error,
)

ARGS = normal(0, 4, 4) * 0.4, normal(0, 8, 4)


def tuned(loss):
    """The gradient through two checkpointed steps of gradient descent in a loop."""

    def outer(w, x):
        step = lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), None)  # noqa: E731
        return loss(lax.scan(jax.checkpoint(step), w, length=2)[0], x)

    return jax.grad(outer)


def test_amp_of_a_derivative_of_amp():
    """The primitives of the inner transformation pass through the outer one."""
    loss = softmax_between_products
    inner = tuned(bfloat16(loss, recompute="always"))
    actual = exact_jit(bfloat16(inner, recompute="always"))(*ARGS)
    expected = exact_jit(tuned(bfloat16(loss, recompute="never")))(*ARGS)
    assert relative_error(actual, expected) < 2e-2


# --- values of every dtype between what is computed again ----------------------------


def fourier(w, x):
    """A layer of a Fourier neural operator: complex weights for each frequency."""
    spectrum = jnp.fft.rfft(x, axis=0) @ lax.complex(w, 2 * w)
    return jax.nn.gelu(x @ w + jnp.fft.irfft(jnp.tanh(spectrum), len(x), axis=0)) @ w


def phase(w, x):
    z = jnp.exp(1j * (x @ w)) * jnp.exp(1j * x)
    return jax.nn.gelu(z.real * z.imag) @ w + jnp.abs(z)


def associative(w, x):
    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jnp.exp(lax.complex(-jnp.abs(x), x))
    states = lax.associative_scan(join, (decay, (x @ w).astype(jnp.complex64)))[1]
    return jax.nn.gelu(states.real) @ w


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


def in_dtype(dtype):
    """A program with a part in another dtype than float32."""

    def program(w, x):
        h = jax.nn.gelu(x @ w).astype(dtype)
        return (jnp.sin(h) * jnp.exp(h)).real.astype(jnp.float32) @ w

    return program


UNSTORED = (fourier, phase, associative, float8)
PROGRAMS = {function.__name__: function for function in (*UNSTORED, integers, keys)}
PROGRAMS |= {name: in_dtype(name) for name in ("float16", "float64", "complex128")}


def assert_regions_hold_what_can_be_stored(jaxpr):
    """No value in a region is complex or float8; what is around it still has one."""
    for path, eqn in equations(jaxpr):
        if "remat2" in path or "checkpoint" in path:
            for atom in (*eqn.invars, *eqn.outvars):
                dtype = atom.aval.dtype
                is_storable = dtype.name in ("float16", "bfloat16", "float32")
                assert not jnp.issubdtype(dtype, jnp.inexact) or is_storable


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_dtypes(name):
    """Each mode gives what "never" gives, of the same types.

    Low cotangents of regions on both sides of float8 values add up in another order.
    """
    loss, results = loss_of(PROGRAMS[name]), []
    with jax.enable_x64(name.endswith(("64", "128"))):
        for mode in MODES:
            lowered = bfloat16(loss, recompute=mode)
            gradient = jax.value_and_grad(lowered, (0, 1))
            assert_regions_hold_what_can_be_stored(jax.make_jaxpr(gradient)(*ARGS))
            results.append(exact_jit(gradient)(*ARGS))
        assert keeps(lowered, *ARGS)
        assert_same_avals(
            results[0], jax.eval_shape(jax.value_and_grad(loss, (0, 1)), *ARGS)
        )
    never, *others = results
    for found in others:
        assert relative_error(found, never) < (1e-2 if name == "float8" else 1e-6)


# --- linear functions ----------------------------------------------------------------

LINEAR = {
    "product": lambda w, x: x @ w,
    "scan": lambda w, x: lax.scan(lambda c, x: (c * 2 + x @ w, x / 2), x[0], x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: (x @ w) @ w * 2)(x),
    "jit": lambda w, x: jax.jit(lambda x: jnp.concatenate([x @ w, x]))(x * 2),
    "layers": lambda w, x: functools.reduce(lambda x, _: (x @ w) / 2, range(8), x),
}


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_transposed(name, mode):
    """`jax.linear_transpose` of a transformed linear function, as of the plain one."""
    w, x = jnp.eye(4) / 2 + 0.25, jnp.arange(8.0).reshape(2, 4)
    f = functools.partial(LINEAR[name], w)
    (actual,) = jax.linear_transpose(bfloat16(f, recompute=mode), x)(f(x))
    (expected,) = jax.linear_transpose(f, x)(f(x))
    assert actual.dtype == jnp.float32
    assert relative_error(actual, expected) < 1e-2
