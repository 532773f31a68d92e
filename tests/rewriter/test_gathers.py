"""Gathers: gradients are summed in float32, and those of tables take less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.sharding import PartitionSpec

from _programs import DERIVATIVES, FIRST_ORDER, WITHIN, normal, squares
from flax_amp import amp, default_amp_policy, use_compute_precision
from helpers import (
    HALVES,
    assert_identical,
    both_halves,
    equations_of,
    gradient_error,
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
    "leaf": lambda w, x: x * w,
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
    sums = equations_of(grad, W, X, primitive=("scatter-add", "dynamic_update_slice"))
    found = {
        str(e.invars[0].aval.dtype)
        for e in sums
        if jnp.issubdtype(e.invars[0].aval.dtype, jnp.floating)
        and e.invars[0].aval.shape != (EDGES, SIZE)  # the results of a loop
    }
    assert found == {"float32"}
    if name in ("index", "scan_slice", "low_elementwise"):
        assert gradient_error(fn, dtype, W, X, argnums=(0, 1), scale=SCALE) < 0.02


@both_halves
def test_the_result_is_what_is_read(dtype):
    """Cast up, read and rounded back: not a bit is lost."""
    whole = amp(lambda w, x: x @ w, compute_dtype=dtype)(W, X)
    read = amp(lambda w, x: (x @ w)[jnp.array([2, 0, 2])], compute_dtype=dtype)
    assert_identical(read(W, X), np.asarray(whole)[[2, 0, 2]])


ONCE = {
    "one_row": lambda h, i: h[i[0]],
    "one_of_each_row": lambda h, i: jnp.take_along_axis(h, i[:NODES, None], 1) * 2,
    "unique": lambda h, i: h.at[jnp.arange(3)].get(unique_indices=True),
    "static": lambda h, i: h[1:3],
}


@pytest.mark.parametrize("name", ONCE)
def test_what_is_read_once_stays_low(name):
    """On the way to a product, no sum, no float32: of labels, of a row, of slices."""

    def fn(w, x):
        read = ONCE[name](x @ w, SENDERS).reshape(1, -1)
        return read @ jnp.ones((read.size, 2))

    reads = equations_of(amp(fn), W, X, primitive=("gather", "dynamic_slice", "slice"))
    dtypes = {e.invars[0].aval.dtype for e in reads}
    floats = {d.name for d in dtypes if jnp.issubdtype(d, jnp.floating)}
    assert floats == {"bfloat16"}


# --- tables that one gather reads ----------------------------------------------------

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
WEIGHT = jnp.eye(3) / 2
INDICES = jnp.array([[1, 1, 4], [5, 9, -1]])
# The cotangent of what it takes is a symbolic zero.
dropped = jax.custom_vjp(lambda x: 2 * x)
dropped.defvjp(lambda x: (2 * x, None), lambda _, ct: (None,))
LOOKUPS = ONE_GATHER | {
    "dropped": lambda t, i: dropped(t[i]) + 1,
    "take_columns": lambda t, i: jnp.take(t, i[0] % 3, axis=1),
}


def lookups(fn, *args, dtype=jnp.bfloat16):
    fn = amp(fn, compute_dtype=dtype)
    return len(equations_of(fn, *args, primitive="flax_amp_lookup"))


@pytest.mark.parametrize("read", LOOKUPS)
def test_read_once(read):
    """By one gather, however deep in calls; a float32 program stays as it is."""
    read = LOOKUPS[read]
    for dtype in HALVES:
        assert lookups(read, TABLE, INDICES, dtype=dtype) == 1
    assert lookups(read, TABLE, INDICES, dtype=jnp.float32) == 0


def called_twice(table, indices):
    read = jax.jit(lambda t: t[indices])
    return read(table) + read(table)


OTHERS = {
    "tied": lambda t, i: t[i] @ WEIGHT @ t.T,
    "tied_in_jit": lambda t, i: jax.jit(lambda t: t[i] @ WEIGHT @ t.T)(t),
    "twice": lambda t, i: t[i] + t[i + 1],
    "called_twice": called_twice,
    "decayed": lambda t, i: jnp.sum(t[i]) + jnp.sum(t**2),
    "returned": lambda t, i: (t[i], t),
    "returned_by_jit": lambda t, i: jax.jit(lambda t: (t[i], t))(t),
    "scan": READS["scan"],
    "checkpoint": jax.checkpoint(READS["index"]),
    "computed": lambda t, i: (t @ WEIGHT)[i],
    "moved": lambda t, i: t.reshape(3, 6)[i] + t.reshape(3, 6)[i + 1],
    "constant": lambda t, i: TABLE[i],
}


@pytest.mark.parametrize("other", OTHERS)
def test_read_otherwise(other):
    """A second reader, a loop, a checkpoint: the gather stays a gather."""
    assert lookups(OTHERS[other], TABLE, INDICES) == 0


def test_each_call_by_itself():
    """Of two calls of one function, one may read a table that is read again."""
    read = jax.jit(lambda t, i: t[i])

    def fn(tied, alone, i):
        return read(tied, i) @ tied.T, read(alone, i)

    assert lookups(fn, TABLE, TABLE, INDICES) == 1


def test_barrier_on_gpus_only():
    """What is lowered for another platform has none."""
    grad = jax.jit(jax.grad(lambda *xs: jnp.sum(amp(LOOKUPS["take"])(*xs))))
    few = jax.jit(jax.grad(amp(lambda *xs: read_low(LOOKUPS["take"], *xs))))
    assert_barrier_on_gpus_only(grad.trace(TABLE, INDICES))
    assert_barrier_on_gpus_only(few.trace(LARGE, SIX))


def assert_barrier_on_gpus_only(traced):
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) == (platform in ("cuda", "rocm"))


# What becomes of `read(table, indices)`.
TRANSFORMS = {
    "grad": lambda read, t, i: jax.grad(lambda t: squares(read(t, i)))(t),
    "jvp": lambda read, t, i: jax.jvp(lambda t: read(t, i), (t,), (t * 2,)),
    "transpose": lambda read, t, i: jax.linear_transpose(lambda t: read(t, i), t)(
        read(t, i)
    ),
    "vmap_indices": lambda read, t, i: jax.vmap(
        lambda i: jax.grad(lambda t: squares(read(t, i)))(t)
    )(jnp.stack([i, i + 1])),
    "vmap_both": lambda read, t, i: jax.vmap(
        lambda t, i: jax.grad(lambda t: squares(read(t, i)))(t)
    )(jnp.stack([t, -t]), jnp.stack([i, i + 1])),
    "unused": lambda read, t, i: jax.grad(
        lambda t: jnp.sum(lax.stop_gradient(read(t, i)))
    )(t),
    "scan": lambda read, t, i: jax.grad(
        lambda t: lax.scan(lambda c, i: (c + squares(read(t, i)), None), 0.0, i)[0]
    )(t),
    "jet": lambda read, t, i: jet.jet(lambda t: read(t, i), (t,), ((t, t * 2),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_lookups(transform):
    """Bit for bit what the gather computes: a table is never rounded."""
    apply = TRANSFORMS[transform]
    reads = LOOKUPS if transform == "grad" else ("take", "take_clip")
    # A region is a checkpoint, for which `jet` has no rule.
    mode = "auto" if transform == "grad" else "never"
    plain = [LOOKUPS[name] for name in reads]
    rewritten = [amp(read, recompute=mode) for read in plain]
    actual, expected = jit(
        lambda t, i: [[apply(f, t, i) for f in fs] for fs in (rewritten, plain)]
    )(TABLE, INDICES)
    assert_identical(actual, expected)


# --- tables of which a batch reads few rows ------------------------------------------

ROWS, WIDTH = 64, 16  # spares memory up to 14 lookups
LARGE, MIX = (
    jnp.asarray(np.random.default_rng(1).integers(-4, 5, shape), jnp.float32)
    for shape in ((ROWS, WIDTH), (WIDTH, WIDTH))
)
SIX = jnp.array([[1, 1, 4], [5, 99, -1]])  # lookups, one out of bounds
READS_OF_ROWS = {k: read for k, read in ONE_GATHER.items() if k != "take_clip"}
index = READS["index"]


def read_low(read, table, indices):
    """Whole numbers: the sums are exact in float32, but not in half precision."""
    return (read(table, indices) @ MIX * 1001).sum()


def dtypes_of_gradient(fn, table, *args, dtype=jnp.bfloat16, **options):
    """Returns the dtypes in which the gradient of a table is made."""
    grad = jax.grad(amp(fn, compute_dtype=dtype, **options))
    made = equations_of(grad, table, *args, primitive=("scatter", "scatter-add"))
    avals = [eqn.outvars[0].aval for eqn in made]
    return [str(aval.dtype) for aval in avals if aval.shape == table.shape]


@both_halves
@pytest.mark.parametrize("read", READS_OF_ROWS)
def test_few_rows(read, dtype):
    """Their gradients have the compute dtype: those of float32, rounded once."""
    fn = functools.partial(read_low, READS_OF_ROWS[read])
    assert dtypes_of_gradient(fn, LARGE, SIX, dtype=dtype) == [jnp.dtype(dtype).name]
    found = jit(jax.grad(amp(fn, compute_dtype=dtype)))(LARGE, SIX)
    factor = jnp.float32(1001).astype(dtype).astype(jnp.float32)
    expected = jax.grad(fn)(LARGE, SIX) / 1001 * factor
    assert_identical(found, expected.astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("shape", [(14,), (1, 2, 7)])
def test_shapes_of_indices(shape):
    indices = jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 5
    fn = functools.partial(read_low, index)
    assert dtypes_of_gradient(fn, LARGE, indices) == ["bfloat16"]
    found = jit(jax.grad(amp(fn, compute_dtype=jnp.bfloat16)))(LARGE, indices)
    assert relative_error(found, jax.grad(fn)(LARGE, indices)) < 0.01


def test_popular_rows():
    """Half of the lookups read 26 rows: the figures of `docs/performance.md`."""
    rng = np.random.default_rng(0)
    count, rows = 2**15, 2**18
    popular, others = rng.integers(0, 26, count), rng.integers(0, rows, count)
    indices = np.where(rng.random(count) < 0.5, popular, others)
    table, w = (rng.normal(size=(n, 16)).astype(np.float32) for n in (rows, 16))
    loss = lambda t: 1024 * jnp.mean(jnp.tanh(t[indices] @ w) ** 2)  # noqa: E731
    summed_low = default_amp_policy | {lax.gather_p: use_compute_precision}

    def error(**options):
        grad = jit(jax.grad(amp(loss, compute_dtype=jnp.bfloat16, **options)))
        return relative_error(grad(table), expected)

    expected = jit(jax.grad(loss))(table)
    assert error() < 1.02 * error(reduce_dtype=jnp.float32) < 0.03
    assert error(amp_policy=summed_low) > 0.3


def by_int8(table, indices):
    dims = lax.GatherDimensionNumbers((2,), (0,), (0,))
    indices = indices.astype(jnp.int8)[..., None]
    return lax.gather(table, indices, dims, (1, table.shape[1]))


def with_batching_dimension(table, indices):
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,), (1,), (0,))
    table = table.reshape(-1, 1, WIDTH)
    return lax.gather(table, indices[:1, :1], dims, (1, 1, WIDTH))


IN_FLOAT32 = {  # how the table is read
    "a lookup more": lambda t, i: t[jnp.tile(i[0], 5)],
    "clipped": ONE_GATHER["take_clip"],
    "columns": lambda t, i: jnp.take(t, i[0], axis=1) @ jnp.ones((3, WIDTH)),
    "parts of rows": lambda t, i: t[i, :1] @ jnp.ones((1, WIDTH)),
    "narrow": lambda t, i: t.reshape(-1)[i] @ jnp.ones((3, WIDTH)),
    "small indices": by_int8,
    "batching dimension": with_batching_dimension,
    "in a loss, too": lambda t, i: (lambda x: x + jnp.exp(x) / 1001)(t[i]),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_tables_whose_gradient_stays_float32(name):
    """Where float32 code reads the rows, lookups are many, or the gather is another."""
    read = functools.partial(read_low, IN_FLOAT32[name])
    made = equations_of(
        jax.grad(amp(read)), LARGE, SIX, primitive=("scatter", "scatter-add")
    )
    assert {str(eqn.outvars[0].aval.dtype) for eqn in made} == {"float32"}


def scanned(x):
    return lax.scan(lambda c, x: (c, x.T), 0.0, x)[1]


RETURNED = {  # what is made of rows
    "rows": lambda x: x,
    "transposed": jnp.transpose,
    "jit": jax.jit(jnp.transpose),
    "scan": scanned,
    "scan in jit": jax.jit(scanned),
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, x: x[::-1], x),
    "cond": lambda x: lax.cond(x[0, 0, 0] > 9, jnp.copy, lambda x: x[::-1], x),
    "checkpoint": jax.checkpoint(jnp.transpose),
}


@pytest.mark.parametrize("is_read_low", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_results_are_not_rounded(name, is_read_low):
    """A reader outside may need a float32 gradient, even if a product reads the rows.

    Here the loss outside is so small that float16 would lose the gradient.
    """

    def fn(table):
        rows = jnp.take(table, SIX, axis=0)
        return RETURNED[name](rows), rows @ MIX if is_read_low else 0.0

    def gradient(fn):
        return jit(jax.grad(lambda t: 0.777e-9 * jnp.sum(fn(t)[0])))(LARGE)

    assert_identical(gradient(amp(fn, compute_dtype=jnp.float16)), gradient(fn))


def test_wide_gradients_of_tables():
    fn = functools.partial(read_low, index)
    assert dtypes_of_gradient(fn, LARGE, SIX, reduce_dtype=jnp.float32) == ["float32"]


@pytest.mark.parametrize("transform", [*FIRST_ORDER, "grad of grad"])
def test_transforms_of_few_rows(transform):
    """Each transform gives what it gives of a gather, rounded once."""
    fn = functools.partial(read_low, READS_OF_ROWS["take"])
    squared = lambda f: lambda t: f(t, SIX % ROWS) ** 2 / 2**30  # noqa: E731
    found = jit(DERIVATIVES[transform](squared(amp(fn, recompute="never"))))(LARGE)
    expected = jit(DERIVATIVES[transform](squared(fn)))(LARGE)
    assert relative_error(found, expected) < 0.02


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_table_per_device(mesh, check_vma):
    """Zeros are the same on all devices; what is added to them is not."""
    tables = jnp.concatenate([TABLE * (1 + k) for k in range(8)])
    indices = jnp.tile(INDICES, (8, 1)) % 6

    def loss(table, indices):
        return jnp.sum((table.at[indices].get() @ WEIGHT) ** 2)

    def gradient(fn):
        spec = PartitionSpec("data")
        options = dict(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return jit(jax.shard_map(jax.grad(fn), **options))(tables, indices)

    assert lookups(loss, TABLE, INDICES) == 1
    assert relative_error(gradient(amp(loss)), gradient(loss)) < 2e-3


def test_explicit_shardings():
    """The gradient of a table has its sharding, which is a part of its type."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def fn(table, indices):
        return jnp.sum(table[indices] ** 2)

    for columns in (None, "x"):
        with jax.set_mesh(mesh):
            table = jax.device_put(jnp.ones((6, 4)), PartitionSpec(None, columns))
            args = table, jnp.arange(4) % 3
            assert lookups(fn, *args) == 1
            found = jit(jax.grad(amp(fn)))(*args)
            expected = jit(jax.grad(fn))(*args)
        assert found.sharding.spec == expected.sharding.spec
        assert_identical(found, expected)
