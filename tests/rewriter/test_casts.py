"""Copies, and sums of biases: cotangents of halves add up in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import normal, over_devices
from benchmarks.matmuls import cast_matmuls, exact_matmuls
from flax_amp import amp
from flax_amp._rewriter.casts import (
    _collect,
    _collect_by_bits,
    add_copies_p,
    copies,
)
from helpers import HALVES, both_halves, equations_of, exact_jit, relative_error

SIZE = 16
W, V, X = normal(0, SIZE, SIZE) / 4, normal(1, SIZE, SIZE) / 4, normal(2, 24, SIZE)
LARGE = 2.0**6  # what is added to it in half precision is lost


def sums(fn, *args):
    """How many cotangents each sum of copies has."""
    found = equations_of(fn, *args, primitive="flax_amp_add_copies")
    return sorted(len(eqn.invars) for eqn in found)


def many(mm, v, n):
    return sum(jax.nn.sigmoid(mm(jnp.roll(v, i, 0)) + 1) for i in range(n))


# Functions of a half and a weight, in which the half has many readers.
READERS = {
    "matmuls": lambda h, v: many(lambda u: h @ u, v, 16),
    "moves": lambda h, v: jax.nn.sigmoid(
        jnp.concatenate([jnp.roll(h, i, 1) for i in range(16)]) @ v
    ),
    "a tile": lambda h, v: jax.nn.sigmoid(jnp.tile(h, (16, 1)) @ v),
    "a gather": lambda h, v: jax.nn.sigmoid(
        jnp.take(h, jnp.arange(320) % 3, axis=0) @ v
    ),
    "checkpoints": lambda h, v: many(
        lambda u: jax.checkpoint(lambda h, u: h @ u)(h, u), v, 16
    ),
    "branches": lambda h, v: many(
        lambda u: lax.cond(u[0, 0] < 9, jnp.matmul, lambda h, u: -(h @ u), h, u), v, 16
    ),
    "loops": lambda h, v: many(
        lambda u: lax.scan(lambda c, _: (c, h @ u), 0, None, length=1)[1][0], v, 16
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_the_cotangents_of_many_readers_add_up_in_float32(name):
    def loss(w, v, x):
        return jnp.mean(READERS[name](x @ w, v) ** 2)

    half = HALVES[len(name) % 2]
    grad = jax.grad(loss)
    ours = exact_matmuls(jax.grad(amp(loss, compute_dtype=half)))
    twin = cast_matmuls(grad, half)
    run = exact_jit(lambda *args: [f(*args) for f in (grad, ours, twin)])
    gaps = []
    for seed in range(4):
        exact, *found = run(W + normal(seed, SIZE, SIZE) / 8, V, X)
        gaps.append([relative_error(g, exact) for g in found])
    error, of_twin = np.sqrt(np.square(gaps).mean(0))
    assert error <= 1.3 * of_twin


@both_halves
def test_only_four_readers_or_more_get_copies(dtype):
    """Two cotangents are rounded once, whoever adds them."""

    def loss(n):
        def fn(w, v, x):
            h = x @ w
            return sum(jnp.sum((h @ (v * i)) ** 2) for i in range(1, n + 1))

        return jax.grad(amp(fn, compute_dtype=dtype))

    assert [sums(loss(n), W, V, X) for n in (1, 2, 3, 4, 6)] == [
        *([], [], []),
        *([4], [6]),
    ]


@pytest.mark.parametrize("half", HALVES)
def test_copies_under_each_transform(half):
    x = jnp.arange(6.0, dtype=half).reshape(2, 3)

    def fn(x):
        a, b, c, d = copies(x, 4)
        return a * LARGE + b + c + d

    def plain(x):
        return x * LARGE + x + x + x

    tangent = jnp.ones_like(x)
    for run in (
        lambda f: f(x),
        lambda f: jax.jit(f)(x),
        lambda f: jax.vmap(f)(x),
        lambda f: jax.vmap(f, in_axes=1, out_axes=1)(x),
        lambda f: jax.jvp(f, (x,), (tangent,)),
        lambda f: jax.linearize(f, x)[1](tangent),
        lambda f: jax.vmap(jax.grad(lambda row: f(row).sum()))(x),
        lambda f: jax.grad(lambda x: jax.grad(lambda x: (f(x) ** 2).sum())(x).sum())(x),
    ):
        for got, asked in zip(
            jax.tree.leaves(run(fn)), jax.tree.leaves(run(plain)), strict=True
        ):
            assert got.dtype == asked.dtype
            np.testing.assert_allclose(
                got.astype(jnp.float32), asked.astype(jnp.float32), rtol=1e-2
            )
    # 64 + 1/4 + 1/4 + 1/4 is 64 in bfloat16, one after the other
    parts = [jnp.asarray(c, jnp.bfloat16) for c in (64, 0.25, 0.25, 0.25)]
    assert add_copies_p.bind(*parts) == jnp.asarray(64.75, jnp.bfloat16) == 65


@pytest.mark.parametrize("check_vma", [False, True])
def test_copies_over_devices(check_vma):
    def loss(w, v, x):
        h = x @ w
        return sum(jnp.sum((h @ (v * i)) ** 2, keepdims=True) for i in range(1, 6))

    run = over_devices(amp(loss), (P(), P(), P("data")), check_vma=check_vma)
    grad = jax.jit(jax.grad(lambda *args: run(*args).sum()))(W, V, X)
    exact = jax.grad(lambda *args: loss(*args).sum())(W, V, X)
    assert relative_error(grad, exact) < 2e-2


# --- sums of biases ------------------------------------------------------------------


# Shapes of cotangents, the axes of their sums, and whether these have parts.
SUMS = {
    "a batch of sequences": ((16, 40, 8), (0, 1), True),
    "images": ((16, 8, 4, 8), (0, 1, 2), True),
    "few examples": ((4, 160, 8), (0, 1), False),
    "short examples": ((40, 16, 8), (0, 1), False),
    "rows": ((640, 8), (0,), False),
    "not the first axes": ((8, 16, 40), (1, 2), False),
    "all axes": ((16, 40), (0, 1), True),
    "no axes": ((16, 40), (), False),
    "a long sum": ((16, 320, 2), (0, 1), False),
}


@pytest.mark.parametrize("collect", [_collect, _collect_by_bits])
@pytest.mark.parametrize("name", SUMS)
def test_the_float32_sum_of_each_platform(name, collect):
    """The one of TPUs relies on their hardware, which adds up in float32."""
    shape, axes, _ = SUMS[name]
    c = normal(3, *shape).astype(jnp.bfloat16)
    exact = np.sum(np.asarray(c, np.float64), axes)
    found = jax.jit(functools.partial(collect, axes=axes))(c)
    assert relative_error(found, exact) < 1e-6 and found.dtype == jnp.float32


@pytest.mark.parametrize("name", SUMS)
def test_a_gpu_adds_up_a_batch_by_examples(name):
    shape, axes, has_parts = SUMS[name]
    fn = functools.partial(_collect_by_bits, axes=axes)
    c = jnp.ones(shape, jnp.bfloat16)
    sums = equations_of(fn, c, primitive="reduce_sum")
    assert len(sums) == 1 + has_parts
    barriers = equations_of(fn, c, primitive="optimization_barrier")
    assert len(barriers) == has_parts


def test_a_bias_of_full_size_for_each_platform():
    """Its cotangent is cast, and added up over no axes."""

    def fn(w, bias, x):
        return jnp.sum((x @ w + bias) @ w)

    bias = normal(5, *X.shape)
    traced = jax.jit(jax.grad(amp(fn), 1)).trace(W, bias, X)
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        assert traced.lower(lowering_platforms=(platform,)).as_text()
    assert (
        relative_error(jax.grad(amp(fn), 1)(W, bias, X), jax.grad(fn, 1)(W, bias, X))
        < 0.01
    )


def test_a_batch_of_symbolic_size():
    """`jax.export` for a GPU, of a program whose batch has no size yet."""
    b, s = jax.export.symbolic_shape("b, s")
    x = jax.ShapeDtypeStruct((b, s, SIZE), jnp.float32)
    grad = jax.jit(
        jax.grad(
            lambda w, x: amp(
                lambda w, x: jnp.sum((jnp.tanh(x @ w + w[None, :1]) @ w) ** 2)
            )(w, x)
        )
    )
    exported = jax.export.export(grad, platforms=("cuda", "cpu"))(W, x)
    assert exported.call(W, jnp.ones((3, 5, SIZE))).shape == W.shape
