"""Range and digits that half precision must not spoil: constants, masks, counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import SIZE, W, X, normal
from flax_amp import amp, use_compute_precision
from flax_amp._rewriter.casts import cast_number, finfo
from helpers import (
    HALVES,
    assert_close,
    assert_identical,
    assert_same_avals,
    both_halves,
    dtypes_of,
    jit,
    run_all,
)

LOWEST = float(jnp.finfo(jnp.float32).min)
EXACT = {  # name: (function, arguments); the result has the very bits of the original
    "integers": (
        lambda a: lax.dot(a, a, preferred_element_type=jnp.float32),
        (jnp.full((16, 16), 120, jnp.int8),),
    ),
    "a quantized weight": (
        lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32),
        (X, jnp.full((SIZE, SIZE), 120, jnp.int8)),
    ),
    "a mask": (
        lambda w: jax.random.bernoulli(jax.random.key(7), 0.9, (w @ w).shape), (W,)
    ),
    "a sum": (
        lambda x: jax.ops.segment_sum(x, jnp.zeros(5000, int), 1), (jnp.ones(5000),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
def test_exact(name):
    """What amp has no business with keeps its dtypes and every bit."""
    fn, args = EXACT[name]
    actual, expected = run_all(amp(fn, precision="fp16"), fn)(*args)
    assert_same_avals(actual, expected)
    assert_identical(actual, expected)


# Sums, squares and norms of values that arrive in half precision are float32 ones, and
# a small constant that half precision rounds away still prevents 0 / 0.
BEHIND_A_MATMUL = {  # name: (function, what the matmul gives)
    "square of 300": (lambda y: y**2 * 300.0**2, jnp.eye(2)),
    "sum of 70000": (
        lambda y: jnp.sum(jnp.broadcast_to(y[None], (70_000, *y.shape))), jnp.eye(2)
    ),
    "norm": (lambda y: jnp.linalg.norm(y * 300), jnp.eye(2)),
    "divide": (lambda y: y / (jnp.abs(y) + 1e-12), jnp.zeros((2, 2))),
    "clip": (lambda y: jnp.log(jnp.clip(y, 1e-12, 1.0)) * 1e-2, jnp.zeros((2, 2))),
}  # fmt: skip


@both_halves
@pytest.mark.parametrize("name", BEHIND_A_MATMUL)
def test_arithmetic_on_half_values(name, dtype):
    of, y = BEHIND_A_MATMUL[name]
    fn = lambda w: of(w @ w)  # noqa: E731
    assert_close(*run_all(amp(fn, compute_dtype=dtype), fn)(y), jnp.float32)


# --- range ---------------------------------------------------------------------------


@both_halves
@pytest.mark.parametrize(
    "value", [-1e9, 1e30, -1e38, LOWEST, 3.0, -0.0, np.inf, -np.inf, np.nan]
)
def test_numbers_saturate(value, dtype):
    """What is finite stays so; the rest is itself."""
    limit = float(finfo(dtype).max)
    is_large = np.isfinite(value) and abs(value) > limit
    expected = np.copysign(limit / 2, value) if is_large else value
    cast = cast_number(np.float32(value), dtype)
    assert cast.dtype == dtype
    np.testing.assert_allclose(np.asarray(cast, np.float64), expected, rtol=1e-2)
    assert np.signbit(np.asarray(cast, np.float64)) == np.signbit(expected)


def masked_rows(mask, masked):
    """Softmax with the mask as a branch constant, a summand, a leaf array."""

    def fn(w, x, leaf):
        s = x @ w
        chosen = jnp.where(masked, mask, s)
        added = s + jnp.where(masked, mask, 0.0)
        soft = [jax.nn.softmax(v) for v in (chosen, added, s + leaf)]
        return soft, jax.nn.logsumexp(chosen, -1), [p @ w for p in soft]

    return fn


@both_halves
@pytest.mark.parametrize("rows", ["some", "all"])
@pytest.mark.parametrize("mask", [-1e9, LOWEST, -np.inf])
def test_masks_give_no_nan(mask, rows, dtype):
    """Masked entries get probability 0; fully masked rows what float32 gives."""
    masked = jnp.tri(SIZE, k=-1, dtype=bool) | (rows == "all")
    x, leaf = X[:SIZE] * 20, jnp.where(masked, mask, 0.0)
    fn = masked_rows(mask, masked)
    actual, expected = run_all(amp(fn, compute_dtype=dtype), fn)(W, x, leaf)
    nans = lambda tree: [bool(jnp.isnan(v).any()) for v in jax.tree.leaves(tree)]  # noqa: E731
    assert nans(actual) == nans(expected)
    total = lambda w: sum(v.sum() for v in amp(fn, compute_dtype=dtype)(w, x, leaf)[2])  # noqa: E731
    grad = jit(jax.grad(total))(W)
    if mask != -np.inf:
        assert not nans(actual).count(True) and bool(jnp.isfinite(grad).all())
        zeros = [jnp.where(masked, p, 0.0) for p in actual[0]]
        assert rows == "all" or not any(zero.any() for zero in zeros)


@both_halves
def test_what_overflows(dtype):
    """An infinity, a NaN and an overflow stay; a mask is the limit at most."""

    def matrix(number):
        return jnp.zeros((2, 2)).at[0, 0].set(number)

    def first(fn, number):
        return float(amp(fn, compute_dtype=dtype)(matrix(1), matrix(number))[0, 0])

    dot = lambda w, x: x @ w  # noqa: E731
    assert [first(dot, sign * jnp.inf) for sign in (1, -1)] == [np.inf, -np.inf]
    assert np.isnan(first(dot, jnp.nan))
    assert np.isfinite(
        first(lambda w, x: jnp.where((y := x @ w) > 9, y, -3.4e38) @ w, 0.25)
    )
    root = 300.0 if dtype == jnp.float16 else 2e19
    assert first(lambda w, x: (x @ x) @ w, root) == np.inf


def test_a_tangent_that_overflows_is_seen():
    def biased(b):
        return (jnp.ones((4, 4)) @ jnp.eye(4) + b[None]) @ jnp.eye(4)

    fn, b = amp(biased, precision="16-mixed"), jnp.ones(4)
    _, tangent = jax.jvp(fn, (b,), (1e5 * b,))
    assert not jnp.isfinite(tangent).any()


def test_a_comparison_reads_its_number_as_it_is():
    eye = jnp.eye(4)

    def limited(h, limit):
        return jnp.where(jnp.abs(h @ eye) < limit, h @ eye, 0) @ eye

    for precision, number, limit in (("fp16", 40000.0, 1e9), ("bf16", 256.0, 257.0)):
        h = jnp.full((4, 4), number)
        lowered = amp(functools.partial(limited, limit=limit), precision=precision)
        assert jnp.array_equal(lowered(h), h)


# --- inner and outer products of floats run in float32 -------------------------------

FULL, HALF = ("float32",) * 2, None


def fullest(w, x):
    """A matmul of counts gives the slot of an expert; no two tokens may share one."""
    chosen = jax.nn.one_hot((x @ w).argmax(-1), 2)
    place = jnp.einsum("te,te->t", jnp.cumsum(chosen, 0) - 1, chosen)
    slots = jax.nn.one_hot(place.astype(jnp.int32), len(x))
    return jnp.einsum("te,tc->ec", chosen, slots).max()


def test_slots_of_a_mixture_of_experts():
    args = W[:, :2], normal(1, 1000, SIZE)  # bfloat16 has all integers up to 256
    assert jit(amp(fullest))(*args) == 1
    half = ("bfloat16",) * 2
    assert dtypes_of(amp(fullest), *args) == [half, FULL, half]


def positions():
    return jnp.arange(3000, dtype=jnp.float32)


def rotated(w, x):
    frequencies = 1e4 ** (-jnp.arange(SIZE) / SIZE)
    angles = jnp.einsum("i,j->ij", positions(), frequencies)  # as rotary embeddings do
    return jnp.mean((jnp.sin(angles) @ w) ** 2) + jnp.mean((x @ w) ** 2)


def penalty(w, x):
    return jnp.vdot(w * 1e-4, w * 1e4) + jnp.vdot(x * 1e3, x * 1e-3)


def of_rows(w, x):
    y = x @ w
    return jnp.log(1 + jnp.einsum("bi,bi->b", y * 200, y))


def layers_with_one_input(w, x):
    first = x[:, :1] @ w[:1]
    narrow = (first @ w)[:, :1]
    return (narrow @ w[:1]) ** 2


FLOATS = {  # name: (function, dtypes of its matmuls)
    "angles": (rotated, [FULL, HALF, HALF]),
    "penalty of weights": (penalty, [FULL, FULL]),
    "of rows": (of_rows, [HALF, FULL]),
    "layers with one input": (layers_with_one_input, [FULL, HALF, FULL]),
}


@pytest.mark.parametrize("name", FLOATS)
def test_inner_and_outer_products_of_floats(name):
    (fn, wanted), dtype = FLOATS[name], HALVES[len(name) % 2]

    def loss(w, x):
        return jnp.sum(fn(w, x))

    lowered = amp(loss, compute_dtype=dtype)
    found = dtypes_of(lowered, W, X)
    assert found == [dtypes or (dtype.__name__,) * 2 for dtypes in wanted]
    actual, expected = run_all(*map(jax.value_and_grad, (lowered, loss)))(W, X)
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype, gradient=True)


def test_a_scope_lowers_all_matmuls():
    def fn(w, x):
        with jax.named_scope("half"):
            y = jnp.einsum("i,j->ij", positions(), jnp.arange(3.0))
            return jnp.vdot(y, y), jnp.vdot(w, w)

    policy = {"half": use_compute_precision}
    found = dtypes_of(amp(fn, amp_policy=policy), W, X)
    assert found == [("bfloat16",) * 2] * 3
