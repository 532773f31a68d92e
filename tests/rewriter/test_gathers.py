"""Gathers: what they read is exact, and their gradients are summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from _programs import WITHIN, normal, squares
from benchmarks.exact import with_exact_products
from flax_amp import amp
from helpers import (
    HALVES,
    assert_identical,
    both_halves,
    equations_of,
    jit,
    relative_error,
)

NODES, SIZE, EDGES = 4, 4, 2048
SCALE = 2.0**10  # for float16
W, X = normal(0, SIZE, SIZE) / 2, normal(2, NODES, SIZE)
SENDERS = jnp.zeros(EDGES, jnp.int32)  # all edges at one node


def by_slices(h, senders):
    def body(c, i):
        return c, jax.jit(lambda h: lax.dynamic_slice_in_dim(h, i, 1)[0])(h)

    return lax.scan(body, 0.0, senders)[1]


ONE_GATHER = {  # of rows
    "index": lambda h, i: h[i],
    "take": lambda h, i: jnp.take(h, i, axis=0),
    "take_clip": lambda h, i: jnp.take(h, i, axis=0, mode="clip"),
    "get": lambda h, i: h.at[i].get(mode="fill", fill_value=0.0),
    "vmapped": lambda h, i: jax.vmap(lambda i: jnp.take(h, i, axis=0))(i),
    "jit_in_jit": jax.jit(lambda h, i: jax.jit(lambda i, h: h[i])(i, h)),
}
READS = ONE_GATHER | {
    "take_columns": lambda h, i: jnp.take(h.T, i, axis=1).T,
    "vmapped_slice": lambda h, i: jax.vmap(
        lambda i: lax.dynamic_index_in_dim(h, i)
    )(i)[:, 0],
    "scan": lambda h, i: lax.scan(lambda c, i: (c, h[i]), 0.0, i)[1],
    "scan_slice": by_slices,
    "map": lambda h, i: lax.map(lambda i: h[i], i),
}  # fmt: skip

# --- sums of cotangents --------------------------------------------------------------

OPERANDS = {
    "low": lambda w, x: x @ w,
    "low_elementwise": lambda w, x: jnp.tanh(x @ w) * x,
    "full": lambda w, x: jnp.exp(x @ w),
    "argument": lambda w, x: x * w,
}


def network(read, operand=OPERANDS["low"]):
    def fn(w, x):
        return jnp.mean(jnp.tanh(read(operand(w, x), SENDERS) @ w) ** 2)

    return fn


CASES = {name: network(read) for name, read in READS.items()}
CASES |= {name: network(READS["index"], OPERANDS[name]) for name in OPERANDS}
CASES |= {f"in {k}": wrap(network(READS["index"])) for k, wrap in WITHIN.items()}


@pytest.mark.parametrize("name", CASES)
def test_cotangents_are_summed_in_float32(name):
    """Whatever reads in parts, whatever is read, and inside of each primitive."""
    fn, dtype = CASES[name], HALVES[len(name) % 2]
    grad = jax.grad(amp(fn, compute_dtype=dtype), (0, 1))
    sums = equations_of(grad, W, X, primitive="scatter-add")
    assert {str(e.outvars[0].aval.dtype) for e in sums} <= {"float32"}
    # XLA for the CPU adds up some products of halves in half. What replaces them knows
    # no functions with a jvp rule.
    lowered = amp(fn, compute_dtype=dtype)
    if name != "in custom_jvp":
        lowered = with_exact_products(lowered)
    scaled = lambda f: jit(jax.grad(lambda *a: SCALE * f(*a), (0, 1)))(W, X)  # noqa: E731
    assert relative_error(scaled(lowered), scaled(fn)) < 0.03


@both_halves
def test_the_result_is_what_is_read(dtype):
    """Not a bit is lost."""
    whole = amp(lambda w, x: x @ w, compute_dtype=dtype)(W, X)
    read = amp(lambda w, x: (x @ w)[jnp.array([2, 0, 2])], compute_dtype=dtype)
    assert_identical(read(W, X), np.asarray(whole)[[2, 0, 2]])


# --- tables --------------------------------------------------------------------------

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
INDICES = jnp.array([[1, 1, 4], [5, 9, -1]])
# The cotangent of what it takes is a symbolic zero.
dropped = jax.custom_vjp(lambda x: 2 * x)
dropped.defvjp(lambda x: (2 * x, None), lambda _, ct: (None,))
LOOKUPS = ONE_GATHER | {
    "dropped": lambda t, i: dropped(t[i]) + 1,
    "take_columns": lambda t, i: jnp.take(t, i[0] % 3, axis=1),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_alone(name):
    """Bit for bit what the gather computes, and its gradient."""

    def gradient(read):
        return jax.value_and_grad(lambda t: squares(read(t, INDICES)))

    actual, expected = (
        jit(gradient(f))(TABLE) for f in (amp(LOOKUPS[name]), LOOKUPS[name])
    )
    assert_identical(actual, expected)


def test_popular_rows():
    """Half of the lookups read 26 rows, whose gradients are sums of 600 terms."""
    rng = np.random.default_rng(0)
    count, rows = 2**15, 2**18
    popular, others = rng.integers(0, 26, count), rng.integers(0, rows, count)
    indices = np.where(rng.random(count) < 0.5, popular, others)
    table, w = (rng.normal(size=(n, 16)).astype(np.float32) for n in (rows, 16))
    loss = lambda t: 1024 * jnp.mean(jnp.tanh(t[indices] @ w) ** 2)  # noqa: E731
    found, expected = (jit(jax.grad(f))(table) for f in (amp(loss), loss))
    assert relative_error(found, expected) < 0.03


def scanned(x):
    return lax.scan(lambda c, x: (c, x.T), 0.0, x)[1]


LARGE, MIX = (
    jnp.asarray(np.random.default_rng(1).integers(-4, 5, shape), jnp.float32)
    for shape in ((64, 16), (16, 16))
)
RETURNED = {  # what is made of rows
    "rows": lambda x: x,
    "transposed": jnp.transpose,
    "scan": scanned,
    "scan in jit": jax.jit(scanned),
    "cond": lambda x: lax.cond(x[0, 0, 0] > 9, jnp.copy, lambda x: x[::-1], x),
    "checkpoint": jax.checkpoint(jnp.transpose),
}


@pytest.mark.parametrize("name", RETURNED)
def test_results_are_not_rounded(name):
    """A reader outside may need a float32 gradient, even if a matmul reads the rows.

    Here the loss outside is so small that float16 would lose the gradient.
    """

    def fn(table):
        rows = jnp.take(table, jnp.array([[1, 1, 4], [5, 99, -1]]), axis=0)
        return RETURNED[name](rows), rows @ MIX

    def gradient(fn):
        return jit(jax.grad(lambda t: 0.777e-9 * jnp.sum(fn(t)[0])))(LARGE)

    assert_identical(gradient(amp(fn, compute_dtype=jnp.float16)), gradient(fn))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_table_per_device(mesh, check_vma):
    """Zeros are the same on all devices; what is added to them is not."""
    tables = jnp.concatenate([TABLE * (1 + k) for k in range(8)])
    indices = jnp.tile(INDICES, (8, 1)) % 6

    def loss(table, indices):
        return jnp.sum((table.at[indices].get() @ (jnp.eye(3) / 2)) ** 2)

    def gradient(fn):
        spec = PartitionSpec("data")
        options = dict(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return jit(jax.shard_map(jax.grad(fn), **options))(tables, indices)

    assert relative_error(gradient(amp(loss)), gradient(loss)) < 4e-3


def test_explicit_shardings():
    """The gradient of a table has its sharding, which is a part of its type."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def fn(table, indices):
        return jnp.sum(table[indices] ** 2)

    for columns in (None, "x"):
        with jax.set_mesh(mesh):
            table = jax.device_put(jnp.ones((6, 4)), PartitionSpec(None, columns))
            args = table, jnp.arange(4) % 3
            found, expected = (jit(jax.grad(f))(*args) for f in (amp(fn), fn))
        assert found.sharding.spec == expected.sharding.spec
        assert_identical(found, expected)
