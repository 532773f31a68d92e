"""Tables that one gather reads: on a GPU their gradients wait for what is added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.sharding import PartitionSpec

from flax_amp import amp
from helpers import HALVES, assert_identical, equations, jit, relative_error

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
WEIGHT = jnp.eye(3) / 2
INDICES = jnp.array([[1, 1, 4], [5, 9, -1]])

READS = {
    "index": lambda t, i: t[i],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "take_clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "take_columns": lambda t, i: jnp.take(t, i[0] % 3, axis=1),
    "get": lambda t, i: t.at[i].get(mode="fill", fill_value=0.0),
    "jit_in_jit": jax.jit(lambda t, i: jax.jit(lambda i, t: t[i])(i, t)),
    "vmapped": lambda t, i: jax.vmap(lambda i: jnp.take(t, i, axis=0))(i),
}


def lookups(fn, *args, dtype=jnp.bfloat16):
    jaxpr = jax.make_jaxpr(amp(fn, compute_dtype=dtype))(*args)
    return sum(e.primitive.name == "flax_amp_lookup" for _, e in equations(jaxpr))


# --- where there is one --------------------------------------------------------------


@pytest.mark.parametrize("read", READS)
def test_read_once(read):
    """By one gather, however deep in calls; a float32 program stays as it is."""
    read = READS[read]
    for dtype in HALVES:
        assert lookups(read, TABLE, INDICES, dtype=dtype) == 1
    assert lookups(read, TABLE, INDICES, dtype=jnp.float32) == 0


def in_scan(table, indices):
    return lax.scan(lambda c, i: (c, table[i]), 0.0, indices)[1]


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
    "scan": in_scan,
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
    grad = jax.jit(jax.grad(lambda *xs: jnp.sum(amp(READS["take"])(*xs))))
    texts = {
        platform: grad.trace(TABLE, INDICES)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "cuda", "rocm", "tpu")
    }
    found = {name for name, text in texts.items() if "optimization_barrier" in text}
    assert found == {"cuda", "rocm"}


# --- what it computes ----------------------------------------------------------------


def squares(read, indices):
    return lambda t: jnp.sum(read(t, indices) ** 2)


def series(read, t, i):
    return jet.jet(lambda t: read(t, i), (t,), ((t, t * 2),))


TRANSFORMS = {
    "value": lambda read, t, i: read(t, i),
    "grad": lambda read, t, i: jax.grad(squares(read, i))(t),
    "jvp": lambda read, t, i: jax.jvp(lambda t: read(t, i), (t,), (t * 2,)),
    "linearize": lambda read, t, i: jax.linearize(lambda t: read(t, i), t)[1](t),
    "transpose": lambda read, t, i: jax.linear_transpose(lambda t: read(t, i), t)(
        read(t, i)
    ),
    "hessian": lambda read, t, i: jax.hessian(squares(read, i))(t),
    "reverse_twice": lambda read, t, i: jax.jacrev(jax.grad(squares(read, i)))(t),
    "checkpoint": lambda read, t, i: jax.grad(jax.checkpoint(squares(read, i)))(t),
    "vmap_tables": lambda read, t, i: jax.vmap(jax.grad(squares(read, i)))(
        jnp.stack([t, -t])
    ),
    "vmap_indices": lambda read, t, i: jax.vmap(
        lambda i: jax.grad(squares(read, i))(t)
    )(jnp.stack([i, i + 1])),
    "vmap_both": lambda read, t, i: jax.vmap(
        lambda t, i: jax.grad(squares(read, i))(t)
    )(jnp.stack([t, -t]), jnp.stack([i, i + 1])),
    "vmap_of_gradient": lambda read, t, i: jax.grad(
        lambda t: jnp.sum(jax.vmap(lambda i: squares(read, i)(t))(i))
    )(t),
    "unused": lambda read, t, i: jax.grad(
        lambda t: jnp.sum(lax.stop_gradient(read(t, i)))
    )(t),
    "scan": lambda read, t, i: jax.grad(
        lambda t: lax.scan(lambda c, i: (c + squares(read, i)(t), None), 0.0, i)[0]
    )(t),
    "jet": series,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    """Bit for bit what the gather computes: a table is never rounded."""
    apply = TRANSFORMS[transform]
    for read in (READS["take"], READS["take_clip"]):
        # A region is a checkpoint, for which `jet` has no rule.
        rewritten = amp(read, recompute="never")
        actual, expected = jit(
            lambda t, i, read=read, rewritten=rewritten: (
                apply(rewritten, t, i),
                apply(read, t, i),
            )
        )(TABLE, INDICES)
        assert_identical(actual, expected)


@pytest.mark.parametrize("read", READS)
def test_gradients(read):
    """The same for every way to read, in regions, too."""
    apply = TRANSFORMS["grad"]
    actual, expected = jit(
        lambda t, i: (apply(amp(READS[read]), t, i), apply(READS[read], t, i))
    )(TABLE, INDICES)
    assert_identical(actual, expected)


# --- over devices --------------------------------------------------------------------


def loss(table, indices, **options):
    return jnp.sum((table.at[indices].get(**options) @ WEIGHT) ** 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_table_per_device(mesh, check_vma):
    """Zeros are the same on all devices; what is added to them is not."""
    tables = jnp.concatenate([TABLE * (1 + k) for k in range(8)])
    indices = jnp.tile(INDICES, (8, 1)) % 6

    def gradient(fn):
        body = jax.shard_map(
            jax.grad(fn),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            check_vma=check_vma,
        )
        return jit(body)(tables, indices)

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
