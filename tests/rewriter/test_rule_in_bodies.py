"""Results of bodies: which are rounded, in every transform, for every reader.

A table of results x transforms x readers. Each reader returns the number that it reads,
so that its digits tell whether it was rounded to half precision.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import norm, normal, with_jvp, with_vjp
from flax_amp import amp, explain
from helpers import HALVES, equations, exact_jit

# The plan is made of jaxprs, which hardly differ between the versions of JAX.
pytestmark = pytest.mark.once

ROWS, SIZE = 8, 16
W, V, U = (normal(seed, SIZE, SIZE) / 4 for seed in range(3))
X = normal(3, ROWS, SIZE)
TIMES = 1000 + normal(4, ROWS, SIZE)  # a grid of 4 in bfloat16, of 0.5 in float16


# --- results: of a computed array `h` and an argument `t` ----------------------------

RESULTS = {
    "scalar": lambda h, t: 10 + jnp.mean(jnp.tanh(h @ W) ** 2),
    "sum": lambda h, t: jnp.tanh(h @ W).sum(-1, keepdims=True),
    "maximum": lambda h, t: jnp.sin(jnp.tanh(h @ W) ** 2 + 1).max(0, keepdims=True),
    "argument": lambda h, t: (t, jnp.tanh(h @ W))[0],
    "of arguments": lambda h, t: (jnp.sqrt(t), jnp.tanh(h @ W))[0],
    "state": lambda h, t: t + jnp.tanh(jnp.sin(t) @ W + h),
    "scaled state": lambda h, t: t * jnp.exp(0.1 * jnp.tanh(jnp.sin(t) @ W)),
    "recurrence": lambda h, t: (lambda y: y + jnp.tanh(y @ W))(h + jnp.tanh(h @ W)),
    "stream": lambda h, t: h + jnp.tanh(norm(h) @ W),
    "activation": lambda h, t: jnp.tanh(h @ W),
    "move": lambda h, t: jnp.flip((h @ W) + 0.0 * h.mean(), 1),
}
NEVER_ROUNDED = {
    *("scalar", "sum", "maximum", "argument", "of arguments"),
    *("state", "scaled state", "recurrence"),
}


# --- transforms ----------------------------------------------------------------------


def in_cond(f):
    return lambda h, t: lax.cond(t[0, 0] > 0, f, lambda h, t: f(-h, t), h, t)


def in_switch(f):
    branches = [f, lambda h, t: f(2 * h, t), f]
    return lambda h, t: lax.switch(jnp.int32(t[0, 0] > 0), branches, h, t)


def in_scan(f):
    def run(h, t):
        _, ys = lax.scan(lambda c, _: (c, f(h, t)), 0, None, length=2)
        return ys[1]

    return run


def in_while(f):
    def run(h, t):
        zeros = jnp.zeros_like(f(h, t))
        return lax.fori_loop(0, 2, lambda i, y: f(h, t), zeros)

    return run


def in_shard_map(f):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def nested(outer, inner):
    return lambda f: outer(inner(f))


TRANSFORMS = {
    "written out": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": in_cond,
    "switch": in_switch,
    "scan": in_scan,
    "while": in_while,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "shard_map": in_shard_map,
}
NESTED = {
    f"{outer} of {inner}": nested(TRANSFORMS[outer], TRANSFORMS[inner])
    for outer, inner in itertools.permutations(
        ("jit", "checkpoint", "cond", "scan", "custom_vjp", "shard_map"), 2
    )
}


# --- readers: the number that is read, and a matmul that comes later -----------------


def of_region(y):
    return 2 * y, (y * jnp.ones((ROWS, SIZE))) @ U


def of_later_region(y):
    later = jnp.tanh(jnp.tanh(jnp.tanh(X @ V) @ V) @ V) @ V
    read = y + 0.0 * later[: y.shape[0] if y.ndim else None]
    return read, (read * jnp.ones((ROWS, SIZE))) @ U


def of_result(y):
    return y, (y * jnp.ones((ROWS, SIZE))) @ U


READERS = {"its region": of_region, "a later one": of_later_region, "none": of_result}


def is_rounded(y, half):
    return bool(jnp.all(y == y.astype(half).astype(jnp.float32)))


def assert_read(transform, result, half):
    """Each reader is a function of its own: what it reads may be read by others."""

    def function(of_reader):
        return amp(
            lambda x, t: of_reader(transform(RESULTS[result])(x @ V, t)),
            compute_dtype=half,
        )

    fns = [function(of_reader) for of_reader in READERS.values()]
    # One program of all functions compiles in half of the time.
    found = exact_jit(lambda *args: [fn(*args) for fn in fns])(X, TIMES)
    for reader, (got, _) in zip(READERS, found, strict=True):
        asked = result == "move" or (
            reader == "a later one" and result not in NEVER_ROUNDED
        )
        assert is_rounded(got, half) == asked, reader
        if result == "argument":
            assert jnp.array_equal(got, 2 * TIMES if reader == "its region" else TIMES)


def every(n, transforms):
    """Every n-th pair of a result and a transform.

    A transform treats all sums, all arguments, all states and all other results alike.
    Every third result is at least a sum or an argument, a state, and a rounded result.
    """
    return [
        (result, transform)
        for i, result in enumerate(RESULTS)
        for k, transform in enumerate(transforms)
        if (i + k) % n == 0
    ]


@pytest.mark.parametrize("result, transform", every(3, TRANSFORMS))
def test_results(result, transform):
    half = HALVES[len(result + transform) % 2]
    assert_read(TRANSFORMS[transform], result, half)


@pytest.mark.slow
@pytest.mark.parametrize("result, transform", every(7, NESTED))
def test_results_of_nested_bodies(result, transform):
    assert_read(NESTED[transform], result, HALVES[len(transform) % 2])


@pytest.mark.parametrize("half", HALVES)
def test_a_result_is_half_only_if_it_is_in_every_branch(half):
    def fn(x, t):
        h = x @ V
        y = lax.cond(t[0, 0] < 0, lambda h, t: h @ W, lambda h, t: t, h, t)
        return y, y @ U

    got, _ = exact_jit(amp(fn, compute_dtype=half))(X, TIMES)
    assert jnp.array_equal(got, TIMES)


def test_constants_of_two_branches_are_two_roots():
    """Each branch numbers the roots that it makes from the same one on."""

    def fn(x):
        make = lambda *value: lambda x: jnp.full((ROWS, SIZE), *value)  # noqa: E731
        a = lax.cond(x[0, 0] > 9, make(1.0), make(2.0), x)
        b = lax.cond(x[0, 0] > 9, make(3.0), make(4.0), x)
        h = jnp.tanh((x @ V + b) @ W)
        return jnp.sum((a + h) @ U)

    rows = explain(fn, backward=False)(X).equations
    results = [row.result for row in rows if row.primitive == "add"]
    assert not [result for result in results if "state" in result]


@pytest.mark.parametrize("transform", {**TRANSFORMS, **NESTED})
def test_no_scalar_is_ever_half(transform):
    """Wherever it stands: a scalar of a body, and of bodies in it."""
    half = HALVES[len(transform) % 2]
    around = {**TRANSFORMS, **NESTED}[transform]

    def fn(x, t):
        scale = around(RESULTS["scalar"])(x @ V, t)
        h = jnp.tanh(((x @ V) @ V) * scale)
        return jnp.mean((h @ U) * around(RESULTS["scalar"])(h, t))

    closed = jax.make_jaxpr(amp(fn, compute_dtype=half, recompute=False))(X, TIMES)
    scalars = [v for _, e in equations(closed) for v in e.outvars if not v.aval.shape]
    assert half not in {v.aval.dtype for v in scalars}
