"""Range and digits that half precision must not spoil, and the products that use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import SIZE, W, X, normal
from flax_amp import amp, default_amp_policy, use_compute_precision
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

KEY = jax.random.key(7)
EXACT = {  # name: (function, arguments); the result has the very bits of the original
    "int8_dot_float_result": (
        lambda a: lax.dot(a, a, preferred_element_type=jnp.float32),
        (jnp.full((16, 16), 120, jnp.int8),),
    ),
    "dropout_mask": (
        lambda k, w: jax.random.bernoulli(k, 0.9, (w @ w).shape), (KEY, W)
    ),
    "segment_sum": (
        lambda x: jax.ops.segment_sum(x, jnp.zeros(5000, int), 1), (jnp.ones(5000),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
def test_exact(name):
    """What amp has no business with keeps its dtypes and every bit."""
    fn, args = EXACT[name]
    lowered = amp(fn, compute_dtype=jnp.float16)
    actual, expected = jit(lowered)(*args), jit(fn)(*args)
    assert_same_avals(actual, expected)
    assert_identical(actual, expected)


# The same behind a matmul, where values arrive in half precision.
IN_HALF = {
    "square_of_300": lambda y: y**2 * 300.0**2,
    "sum_of_70000": lambda y: jnp.sum(jnp.broadcast_to(y[None], (70_000, *y.shape))),
    "norm": lambda y: jnp.linalg.norm(y * 300),
}


@pytest.mark.parametrize("name", IN_HALF)
def test_long_sums_of_half_values(name):
    """Sums, squares and norms of low-precision values are as in float32."""
    fn = lambda w: IN_HALF[name](w @ w)  # noqa: E731
    lowered = amp(fn, compute_dtype=HALVES[len(name) % 2])
    assert_close(*run_all(lowered, fn)(jnp.eye(2)), jnp.float32)


# --- range and guards ----------------------------------------------------------------

MASKS = {"finfo": float(jnp.finfo(jnp.float32).min), "inf": -jnp.inf}


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
@pytest.mark.parametrize("mask", MASKS)
def test_masks_give_no_nan(mask, rows, dtype):
    """Masked entries get probability 0; fully masked rows what float32 gives."""
    masked = jnp.tri(SIZE, k=-1, dtype=bool) | (rows == "all")
    x, leaf = X[:SIZE] * 20, jnp.where(masked, MASKS[mask], 0.0)
    fn = masked_rows(MASKS[mask], masked)
    actual, expected = run_all(amp(fn, compute_dtype=dtype), fn)(W, x, leaf)
    nans = lambda tree: [bool(jnp.isnan(v).any()) for v in jax.tree.leaves(tree)]  # noqa: E731
    assert nans(actual) == nans(expected)
    total = lambda w: sum(v.sum() for v in amp(fn, compute_dtype=dtype)(w, x, leaf)[2])  # noqa: E731
    grad = jit(jax.grad(total))(W)
    if mask != "inf":
        assert not nans(actual).count(True) and bool(jnp.isfinite(grad).all())
        zero = jnp.where(masked, actual[0][0], 0.0)
        assert rows == "all" or not zero.any()


GUARDS = {
    "divide": lambda y: y / (jnp.abs(y) + 1e-12),
    "rsqrt": lambda y: y * lax.rsqrt(y + 1e-12),
    "log": lambda y: y * jnp.log(y + 1e-12),
    "norm": lambda y: y / (jnp.linalg.norm(y) + 1e-12),
    "clip_log": lambda y: jnp.log(jnp.clip(y, 1e-12, 1.0)) * 1e-2,
}


@pytest.mark.parametrize("name", GUARDS)
def test_epsilons_still_guard(name):
    """A small constant that half precision rounds away still prevents 0 / 0."""
    fn = lambda w, x: GUARDS[name](x @ w)  # noqa: E731
    zeros, lowered = jnp.zeros((2, 2)), amp(fn, compute_dtype=jnp.float16)
    assert_close(*run_all(lowered, fn)(zeros, zeros), jnp.float16)


@both_halves
def test_what_overflows(dtype):
    """An infinity, a NaN and an overflow stay; a mask is the limit at most."""

    def matrix(number):
        return jnp.zeros((2, 2)).at[0, 0].set(number)

    one = matrix(1)
    dot = amp(lambda w, x: x @ w, compute_dtype=dtype)
    assert float(dot(matrix(jnp.inf), one)[0, 0]) == np.inf
    assert float(dot(matrix(-jnp.inf), one)[0, 0]) == -np.inf
    assert np.isnan(dot(matrix(jnp.nan), one)[0, 0])
    masked = amp(
        lambda w, x: jnp.where((y := x @ w) > 9, y, -3.4e38) @ w, compute_dtype=dtype
    )
    assert np.isfinite(masked(matrix(0.25), one)[0, 0])
    overflow = amp(lambda w, x: (x @ w) @ w, compute_dtype=dtype)
    root = 300.0 if dtype == jnp.float16 else 2e19
    assert float(overflow(matrix(root), one)[0, 0]) == np.inf


SCATTERS = {
    "segment_max": lambda y: jax.ops.segment_max(y, jnp.array([0, 1]), 2),
    "at_multiply": lambda y: y.at[0].multiply(0.5),
    "at_apply": lambda y: y.at[0].apply(jnp.sin),
}


@pytest.mark.parametrize("chosen", [None, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_of_low_values(name, chosen):
    """A scatter carries an update function that was traced in float32."""
    policies = default_amp_policy | ({"here": chosen} if chosen else {})

    def fn(w, x):
        y = x @ w
        with jax.named_scope("here"):
            return SCATTERS[name](y)

    lowered = amp(fn, compute_dtype=jnp.float16, amp_policy=policies)
    args = jnp.eye(2) * 0.3, jnp.array([[1.0, -2.0], [3.0, 0.5]])
    assert_close(*run_all(lowered, fn)(*args), jnp.bfloat16)
    if name != "at_apply":  # JAX has no derivative for it
        grads = jit(jax.grad(lambda *a: lowered(*a).sum()))(*args)
        assert bool(jnp.isfinite(grads).all())


# --- matrix products alone run in half precision -------------------------------------

COUNT = 3000  # bfloat16 has all integers up to 256, float16 up to 2048
FULL, HALF = ("float32",) * 2, None
FREQUENCIES = 1e4 ** (-jnp.arange(SIZE) / SIZE)


def positions():
    return jnp.arange(COUNT, dtype=jnp.float32)


def test_slots_of_a_mixture_of_experts():
    """A product of counts gives the index of a slot; two tokens must not share one."""

    def fullest(w, x):
        chosen = jax.nn.one_hot((x @ w).argmax(-1), 2)
        place = jnp.einsum("te,te->t", jnp.cumsum(chosen, 0) - 1, chosen)
        slots = jax.nn.one_hot(place.astype(jnp.int32), COUNT)
        return jnp.einsum("te,tc->ec", chosen, slots).max()

    x = normal(1, COUNT, SIZE)
    lowered = amp(fullest)
    assert lowered(W[:, :2], x) == 1
    found = dtypes_of(lowered, W[:, :2], x)
    assert found == [("bfloat16",) * 2, FULL, ("bfloat16",) * 2]


def rotated(w, x):
    angles = jnp.einsum("i,j->ij", positions(), FREQUENCIES)  # as rotary embeddings do
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


# name: function, dtypes of its products
FLOATS = {
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

    found = dtypes_of(amp(loss, compute_dtype=dtype), W, X)
    assert found == [dtypes or (dtype.__name__,) * 2 for dtypes in wanted]
    actual = jit(jax.value_and_grad(amp(loss, compute_dtype=dtype)))(W, X)
    expected = jit(jax.value_and_grad(loss))(W, X)
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype, gradient=True)


def test_a_constant_out_of_range():
    """It does not saturate, as it does not in a multiplication."""

    def fn(w, x):
        return jnp.einsum("i,j->ij", (x @ w)[0], jnp.full(3, 1e6))

    lowered = amp(fn, compute_dtype=jnp.float16)
    assert dtypes_of(lowered, W, X) == [("float16",) * 2, FULL]
    assert_close(lowered(W, X), fn(W, X), jnp.float16)


def test_a_scope_lowers_all_products():
    def fn(w, x):
        with jax.named_scope("half"):
            y = jnp.einsum("i,j->ij", positions(), jnp.arange(3.0))
            return jnp.vdot(y, y), jnp.vdot(w, w)

    policy = {"half": use_compute_precision}
    found = dtypes_of(amp(fn, amp_policy=policy), W, X)
    assert found == [("bfloat16",) * 2] * 3
