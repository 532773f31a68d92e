"""Gathers: what they read is exact, and their gradients are summed in float32."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import WITHIN, normal, over_devices
from benchmarks.exact import with_exact_products
from flax_amp import amp
from helpers import HALVES, assert_identical, equations_of, jit, relative_error

SIZE, EDGES = 4, 2048
SCALE = 2.0**10  # for float16
W, X = normal(0, SIZE, SIZE) / 2, normal(2, SIZE, SIZE)
SENDERS = jnp.zeros(EDGES, jnp.int32)  # all edges at one node


def by_slices(h, senders):
    def body(c, i):
        return c, jax.jit(lambda h: lax.dynamic_slice_in_dim(h, i, 1)[0])(h)

    return lax.scan(body, 0.0, senders)[1]


READS = {  # of rows
    "index": lambda h, i: h[i],
    "get": lambda h, i: h.at[i].get(mode="fill", fill_value=0.0),
    "jit_in_jit": jax.jit(lambda h, i: jax.jit(lambda i, h: h[i])(i, h)),
    "scan": lambda h, i: lax.scan(lambda c, i: (c, h[i]), 0.0, i)[1],
    "scan_slice": by_slices,
    "map": lambda h, i: lax.map(lambda i: h[i], i),
}
OPERANDS = {
    "half": lambda w, x: x @ w,
    "elementwise": lambda w, x: jnp.tanh(x @ w) * x,
    "argument": lambda w, x: x * w,
}


def network(read, operand=OPERANDS["half"]):
    def fn(w, x):
        return jnp.mean(jnp.tanh(read(operand(w, x), SENDERS) @ w) ** 2)

    return fn


AROUND = ("scan", "cond", "vmap", "checkpoint", "custom_jvp")
CASES = {name: network(read) for name, read in READS.items()}
CASES |= {name: network(READS["index"], OPERANDS[name]) for name in OPERANDS}
CASES |= {f"in {name}": WITHIN[name](network(READS["index"])) for name in AROUND}


@pytest.mark.parametrize("name", CASES)
def test_cotangents_are_summed_in_float32(name):
    """Whatever reads in parts, whatever is read, and inside of each primitive."""
    fn, dtype = CASES[name], HALVES[len(name) % 2]
    lowered = amp(fn, compute_dtype=dtype)
    sums = equations_of(jax.grad(lowered, (0, 1)), W, X, primitive="scatter-add")
    assert {str(e.outvars[0].aval.dtype) for e in sums} <= {"float32"}

    def scaled(f):
        # XLA for the CPU adds up some products of halves in half.
        grad = jax.grad(lambda *a: SCALE * f(*a), (0, 1))
        return jit(with_exact_products(grad))(W, X)

    assert relative_error(scaled(lowered), scaled(fn)) < 0.03


TABLE, INDICES = normal(3, 6, 3), jnp.array([[1, 1, 4], [5, 9, -1]])
# The cotangent of what it takes is a symbolic zero.
dropped = jax.custom_vjp(lambda x: 2 * x)
dropped.defvjp(lambda x: (2 * x, None), lambda _, ct: (None,))


def test_what_another_reads_is_not_rounded():
    """A loss outside reads the rows, so small that float16 would lose its gradient."""
    mix = jnp.round(4 * normal(4, 3, 3))

    def fn(table):
        rows = jnp.take(table, INDICES, axis=0)
        return rows, rows @ mix, dropped(rows) + 1

    def gradient(fn):
        return jit(jax.grad(lambda t: 0.777e-9 * sum(map(jnp.sum, fn(t)[::2]))))(TABLE)

    assert_identical(gradient(amp(fn, compute_dtype=jnp.float16)), gradient(fn))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_table_per_device(check_vma):
    """Zeros are the same on all devices; what is added to them is not."""
    tables = jnp.concatenate([TABLE * (1 + k) for k in range(8)])

    def loss(table):
        return jnp.sum((table.at[INDICES % 6].get() @ (jnp.eye(3) / 2)) ** 2)

    def gradient(fn):
        options = dict(in_specs=P("data"), check_vma=check_vma)
        return jit(over_devices(jax.grad(fn), **options))(tables)

    assert relative_error(gradient(amp(loss)), gradient(loss)) < 4e-3
