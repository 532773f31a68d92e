"""Range and digits that halves must not spoil, over casts.py, roles.py, primitives.py.

The programs have constants, masks and counts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import SIZE, W, X, in_scan, normal
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
    relative_error,
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


# --- what XLA keeps beyond bfloat16 in one pass does not contradict the other pass ---

SHAPES = [(48, 16)] * 2 + [(16, 16)] * 3
DRAWS = zip(jax.random.split(jax.random.key(0), 5), SHAPES, strict=True)
DATA, TARGET, QUERY, KEY, VALUE = (jax.random.normal(*draw) for draw in DRAWS)
KERNELS = [QUERY / 2, KEY / 2]
LABELS = jnp.argmax(TARGET, axis=1)


def attention(softmax, kernels, dtype=jnp.float32):
    """By hand in `dtype`, with a softmax in float32."""
    x, value, query, key = (a.astype(dtype) for a in (DATA, DATA @ VALUE, *kernels))
    logits = ((x @ query) @ (x @ key).T).astype(jnp.float32) / 4
    attended = softmax(logits).astype(dtype) @ value
    return jnp.mean((attended.astype(jnp.float32) - TARGET) ** 2)


def cross_entropy(softmax, kernels, dtype=jnp.float32):
    """Of probabilities, by hand in `dtype`."""
    x, query, key = (a.astype(dtype) for a in (DATA, *kernels))
    logits = ((x @ query) @ key).astype(jnp.float32)
    return -jnp.mean(jnp.log(softmax(logits)[jnp.arange(48), LABELS] + 1e-20))


def divided_by_sum(fn):
    """Returns a function that divides `fn(logits)` by its sum over each row."""
    return lambda logits: (x := fn(logits)) / x.sum(1, keepdims=True)


checkpointed = jax.checkpoint(jax.nn.softmax)
# name: (loss, softmax, around the loss, how much larger than by hand the error may be)
SOFTMAXES = {
    "attention": (attention, jax.nn.softmax, jax.jit, 1.4),
    "attention, checkpoint": (attention, checkpointed, jax.jit, 1.4),
    "cross entropy, scan": (cross_entropy, jax.nn.softmax, in_scan, 1.4),
    # Nearly another function that is summed.
    "powers": (cross_entropy, divided_by_sum(lambda x: (x**2 + 1) ** 4), jax.jit, 2.2),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_gradients(name):
    """The error is that of a model cast by hand, some of whose roundings XLA skips.

    XLA compiles as for a user. The error was two to four times as large where the
    backward pass computed the softmax from logits as they were stored, and divided by a
    sum of exponentials of others.
    """
    loss, softmax, around, bound = SOFTMAXES[name]
    fn = functools.partial(loss, softmax)
    by_hand = functools.partial(fn, dtype=jnp.bfloat16)
    expected, rounded, actual = (
        jax.jit(jax.grad(f))(KERNELS) for f in (fn, by_hand, amp(around(fn)))
    )
    bound *= relative_error(rounded, expected)
    assert relative_error(actual, expected) < bound


@both_halves
def test_a_traced_derivative_of_a_softmax(dtype):
    """It is a difference, of which both terms divide by the same sums.

    What the one term reads is rounded at the border of its region, the sums are not.
    """
    score = 16 + jnp.sign(KEY[:, :1])  # exact in half precision

    def attend(x):
        e = jnp.exp(x @ jnp.eye(16))
        attended = e / e.sum(-1, keepdims=True) @ score
        return jnp.sum(attended + 2.0**-20 * attended**2)  # the cotangent is computed

    x = DATA.astype(dtype).astype(jnp.float32)
    gradient = jax.grad(attend)
    actual = jax.jit(amp(gradient, compute_dtype=dtype))(x)
    error = relative_error(actual, jax.jit(gradient)(x))
    assert error < 8 * float(jnp.finfo(dtype).eps)


def test_a_ref_enters_a_checkpoint():
    """It cannot be rounded, and needs not be: it is in the user's own dtype."""

    def fn(x):
        ref = jax.new_ref(jnp.zeros(3, jnp.bfloat16))

        def update(ref, x):
            ref[...] += x.astype(jnp.bfloat16)
            return 2 * x

        return jax.checkpoint(update)(ref, x) + ref[...].astype(jnp.float32)

    assert_identical(amp(fn)(jnp.ones(3)), fn(jnp.ones(3)))
