"""Gathers: the cotangents of what is read again and again add up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from helpers import assert_identical, both_halves, equations, jit, relative_error

NODES, SIZE, EDGES = 4, 4, 2048
SCALE = 2.0**10  # for float16


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X = normal(0, SIZE, SIZE) / 2, normal(2, NODES, SIZE)
SENDERS = jnp.zeros(EDGES, jnp.int32)  # all edges at one node


def by_scan(h, senders):
    return lax.scan(lambda c, i: (c, h[i]), 0.0, senders)[1]


def by_slices(h, senders):
    def body(c, i):
        return c, jax.jit(lambda h: lax.dynamic_slice_in_dim(h, i, 1)[0])(h)

    return lax.scan(body, 0.0, senders)[1]


def by_vmap(h, senders):
    return jax.vmap(lambda i: lax.dynamic_index_in_dim(h, i))(senders)[:, 0]


READS = {
    "index": lambda h, i: h[i],
    "take": lambda h, i: jnp.take(h, i, axis=0),
    "take_clip": lambda h, i: jnp.take(h, i, axis=0, mode="clip"),
    "take_columns": lambda h, i: jnp.take(h.T, i, axis=1).T,
    "get": lambda h, i: h.at[i].get(mode="fill", fill_value=0.0),
    "vmapped_slice": by_vmap,
    "scan": by_scan,
    "scan_slice": by_slices,
    "map": lambda h, i: lax.map(lambda i: h[i], i),
}  # fmt: skip
OPERANDS = {
    "low": lambda w, x: x @ w,
    "low_elementwise": lambda w, x: jnp.tanh(x @ w) * x,
    "full": lambda w, x: jnp.exp(x @ w),
    "leaf": lambda w, x: x * w,
}


def with_jvp(fn):
    rebuilt = jax.custom_jvp(fn)
    rebuilt.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return rebuilt


def with_vjp(fn):
    rebuilt = jax.custom_vjp(fn)
    rebuilt.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, g: vjp(g))
    return rebuilt


def in_scan(fn):
    def twice(*args):
        return lax.scan(lambda c, _: (c + fn(*args), None), 0.0, None, length=2)[0]

    return twice


TRANSFORMS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "nested_jit": lambda fn: jax.jit(lambda *args: jax.jit(fn)(*args) * 1.0),
    "scan": in_scan,
    "vmap": lambda fn: (
        lambda w, x: jax.vmap(fn, (None, 0))(w, jnp.stack([x, -x])).sum()
    ),
    "checkpoint": jax.checkpoint,
    "cond": lambda fn: lambda w, x: lax.cond(w[0, 0] < 9, fn, lambda w, x: 0.0, w, x),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
}


def network(read, operand=OPERANDS["low"], edges=EDGES):
    def fn(w, x):
        senders = jnp.zeros(edges, jnp.int32)
        return jnp.mean(jnp.tanh(read(operand(w, x), senders) @ w) ** 2)

    return fn


def gradient_error(fn, dtype):
    scaled = lambda w, x: SCALE * amp(fn, compute_dtype=dtype)(w, x)  # noqa: E731
    actual = jit(jax.grad(scaled, (0, 1)))(W, X)
    expected = jit(jax.grad(lambda w, x: SCALE * fn(w, x), (0, 1)))(W, X)
    return relative_error(actual, expected)


def assert_sums_are_float32(fn, dtype):
    """Asserts that the cotangents that a gather sends back add up in float32."""
    grad = jax.grad(amp(fn, compute_dtype=dtype), (0, 1))
    found = [
        str(e.invars[0].aval.dtype)
        for _, e in equations(jax.make_jaxpr(grad)(W, X))
        if e.primitive.name in ("scatter-add", "dynamic_update_slice")
        and jnp.issubdtype(e.invars[0].aval.dtype, jnp.floating)
        and e.invars[0].aval.shape != (EDGES, SIZE)  # the results of a loop
    ]
    assert found and set(found) == {"float32"}


@both_halves
def test_sixty_thousand_edges_at_one_node(dtype):
    """Added up in half precision, the gradient is 98 % wrong."""
    fn = network(READS["index"], edges=65_536)
    assert gradient_error(fn, dtype) < 0.01


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("read", READS)
def test_reads(read, operand):
    """Whatever reads a value in parts, and whatever the value is."""
    dtype = (jnp.float16, jnp.bfloat16)[len(read + operand) % 2]
    fn = network(READS[read], OPERANDS[operand])
    assert_sums_are_float32(fn, dtype)
    if operand == "low":
        assert gradient_error(fn, dtype) < 0.02


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    """The same inside of each structured primitive."""
    dtype = (jnp.float16, jnp.bfloat16)[len(transform) % 2]
    fn = TRANSFORMS[transform](network(READS["index"]))
    assert_sums_are_float32(fn, dtype)
    assert gradient_error(fn, dtype) < 0.02


@both_halves
def test_the_result_is_what_is_read(dtype):
    """Cast up, read and rounded back: not a bit is lost."""
    h = lambda w, x: x @ w  # noqa: E731
    read = lambda w, x: h(w, x)[jnp.array([2, 0, 2])]  # noqa: E731
    whole = amp(h, compute_dtype=dtype)(W, X)
    actual = amp(read, compute_dtype=dtype)(W, X)
    assert_identical(actual, np.asarray(whole)[[2, 0, 2]])


ONCE = {
    "one_row": lambda h, i: h[i[0]],
    "one_of_each_row": lambda h, i: jnp.take_along_axis(h, i[:NODES, None], 1),
    "unique": lambda h, i: h.at[jnp.arange(3)].get(unique_indices=True),
    "static": lambda h, i: h[1:3] + h[::2],
}


@pytest.mark.parametrize("name", ONCE)
def test_what_is_read_once_stays_low(name):
    """No sum, no float32: the logits of the labels, one row, a slice."""
    fn = lambda w, x: ONCE[name](x @ w, SENDERS) @ jnp.ones((SIZE, 2))  # noqa: E731
    if name == "one_of_each_row":
        fn = lambda w, x: ONCE[name](x @ w, SENDERS) * 2  # noqa: E731
    jaxpr = jax.make_jaxpr(amp(fn))(W, X)
    reads = ("gather", "dynamic_slice", "slice")
    dtypes = {
        str(e.invars[0].aval.dtype)
        for _, e in equations(jaxpr)
        if e.primitive.name in reads
        and jnp.issubdtype(e.invars[0].aval.dtype, jnp.floating)
    }
    assert dtypes == {"float16"}
