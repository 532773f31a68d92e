"""A bounded function is float32 for a float32 reader, whoever else reads it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import with_vjp
from flax_amp import amp
from helpers import assert_close, both_halves, equations, equations_of, jit

X = jax.random.normal(jax.random.key(0), (6, 8))
W = 1.5 * jax.random.normal(jax.random.key(1), (8, 5))  # so that many are near one
V = jax.random.normal(jax.random.key(2), (5, 3))

FUNCTIONS = {
    "logistic": jax.nn.sigmoid,
    "tanh": lambda z: (1 + jnp.tanh(z / 2)) / 2,
    "erf": lambda z: (1 + jax.scipy.special.erf(z / 3)) / 2,
    "erfc": lambda z: jax.scipy.special.erfc(-z / 3) / 2,
}


def surprise(p):
    return -1024 * jnp.log(1 - p + 1e-5).mean()  # scaled, as for float16


def rows(fn, z):
    return lax.scan(lambda c, row: (c, fn(row)), 0.0, z)[1]


def product(p):
    return jnp.mean((p @ V) ** 2) / 8


def variance(p):
    return ((p - p.mean(0, keepdims=True)) ** 2).mean()


def normalized(p):
    return product((p - p.mean(-1, keepdims=True)) * lax.rsqrt(1 + variance(p)))


def composited(p):
    """Whether it is the first one, as in a mixture made by breaking a stick."""
    others = jnp.cumprod(1 - p, axis=-1)
    return -1024 * jnp.log(p * others / (1 - p + 1e-5) + 1e-8).mean()


def recomputed(fn):
    call = jax.custom_vjp(lambda z: fn(z))
    call.defvjp(lambda z: (fn(z), z), lambda z, ct: jax.vjp(fn, z)[1](ct))
    return call


def beside(*readers):
    def program(fn, z):
        p = fn(z)
        return surprise(p) + sum(read(p) for read in readers)

    return program


PLACES = {
    "straight": lambda fn, z: surprise(fn(z)),
    "beside a product": beside(product),
    "beside a mean": beside(jnp.mean, product),
    "beside a log of a mean": beside(lambda p: jnp.log(p.mean(0)).sum(), product),
    "beside a variance": beside(variance),
    "beside a variance and a product": beside(variance, product),
    "beside a norm": beside(normalized),
    "jit": lambda fn, z: surprise(jax.jit(fn)(z)),
    "cond": lambda fn, z: surprise(lax.cond(z[0, 0] < 99, fn, jnp.zeros_like, z)),
    "scan": lambda fn, z: surprise(rows(fn, z)),
    "map": lambda fn, z: surprise(lax.map(fn, z)),
    "into scan": lambda fn, z: rows(surprise, fn(z)).mean(),
    "checkpoint": lambda fn, z: surprise(jax.checkpoint(fn)(z)),
    "beside its product": lambda fn, z: composited(fn(z)),
    "rule": lambda fn, z: surprise(with_vjp(fn)(z)),
    "into rule": lambda fn, z: with_vjp(surprise)(fn(z)),
}


@both_halves
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_surprise(name, place, dtype):
    check(functools.partial(PLACES[place], FUNCTIONS[name]), name, dtype)


@both_halves
@pytest.mark.parametrize("name", ["logistic", "tanh"])
def test_backward_functions(name, dtype):
    """The derivatives of the others have no bounded function."""
    check(lambda z: surprise(recomputed(FUNCTIONS[name])(z)), name, dtype)


def check(loss, name, dtype):
    # The product is rounded before: the reference begins at the rounded logits.
    logits = (X.astype(dtype) @ W.astype(dtype)).astype(jnp.float32)

    def program(shift):
        return loss(logits @ jnp.eye(5) + shift)

    shift = jnp.zeros((1, 5))
    lowered = jax.value_and_grad(amp(program, compute_dtype=dtype))
    traced = jax.make_jaxpr(lowered)(shift)
    found = {
        e.outvars[0].aval.dtype
        for _, e in equations(traced)
        if e.primitive.name == name
    }
    assert found == {jnp.dtype(jnp.float32)}
    value, gradient = jit(lowered)(shift)
    expected, expected_gradient = jit(jax.value_and_grad(program))(shift)
    assert_close(value, expected, dtype)
    assert_close(gradient, expected_gradient, dtype, gradient=True)


OTHER_READERS = {
    "product": product,
    "norm": normalized,
    "loop and product": lambda p: rows(lambda row: row @ V, p).sum(),
}


@both_halves
@pytest.mark.parametrize("reader", OTHER_READERS)
def test_other_readers(reader, dtype):
    """Where nothing but a product or a norm reads it, it is in half precision."""
    fn = amp(lambda w: OTHER_READERS[reader](jnp.tanh(X @ w)), compute_dtype=dtype)
    (found,) = equations_of(fn, W, primitive="tanh")
    assert found.outvars[0].aval.dtype == dtype
