"""What XLA keeps beyond bfloat16 in one pass does not contradict the other pass."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_amp import amp
from helpers import assert_close, assert_identical, both_halves, relative_error

KEYS = jax.random.split(jax.random.key(0), 5)
X, TARGET = (jax.random.normal(key, (48, 16)) for key in KEYS[:2])
QUERY, KEY, VALUE = (jax.random.normal(key, (16, 16)) for key in KEYS[2:])
KERNELS = [QUERY / 2, KEY / 2]
LABELS = jnp.argmax(TARGET, axis=1)


def attention(kernels, dtype=jnp.float32, softmax=jax.nn.softmax):
    """By hand in `dtype`, with a softmax in float32."""
    x, value, query, key = (a.astype(dtype) for a in (X, X @ VALUE, *kernels))
    logits = ((x @ query) @ (x @ key).T).astype(jnp.float32) / 4
    attended = softmax(logits).astype(dtype) @ value
    return jnp.mean((attended.astype(jnp.float32) - TARGET) ** 2)


def cross_entropy(kernels, dtype=jnp.float32, softmax=jax.nn.softmax):
    """Of probabilities, by hand in `dtype`."""
    x, query, key = (a.astype(dtype) for a in (X, *kernels))
    logits = ((x @ query) @ key).astype(jnp.float32)
    return -jnp.mean(jnp.log(softmax(logits)[jnp.arange(48), LABELS] + 1e-20))


def once_in_scan(fn):
    def looped(kernels):
        return lax.scan(lambda sum_, _: (sum_ + fn(kernels), None), 0.0, length=1)[0]

    return looped


def divided_by_sum(fn):
    """Returns a function that divides `fn(logits)` by its sum over each row."""
    return lambda logits: (x := fn(logits)) / x.sum(1, keepdims=True)


def below_maximum(x):
    return jnp.exp(x - lax.stop_gradient(x.max(1, keepdims=True)))


def by_logarithms(logits):
    return jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def fourth_power(x):
    return (x**2 + 1) ** 4


ILL_CONDITIONED = {  # name: (softmax, how much larger than by hand the error may be)
    "logsumexp": (by_logarithms, 1.4),
    "exponentials in a jit": (divided_by_sum(jax.jit(below_maximum)), 1.4),
    "fourth power": (divided_by_sum(fourth_power), 2.2),
    "all in a jit": (jax.jit(divided_by_sum(fourth_power)), 2.2),
}

again = jax.checkpoint(jax.nn.softmax)
WAYS = {
    "straight": lambda fn: fn,
    "jit": jax.jit,
    "scan": once_in_scan,
    "checkpoint": lambda fn: functools.partial(fn, softmax=again),
}


@functools.cache
def gradients(fn, **options):
    return jax.jit(jax.grad(functools.partial(fn, **options)))(KERNELS)


def check(fn, way, bound=1.4):
    """Checks that the error is that of a model cast by hand.

    XLA skips some of the roundings of the latter.
    """
    step = jax.jit(jax.grad(amp(way(fn), compute_dtype=jnp.bfloat16)))
    expected = gradients(fn)
    by_hand = relative_error(gradients(fn, dtype=jnp.bfloat16), expected)
    assert relative_error(step(KERNELS), expected) < bound * by_hand


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", [attention, cross_entropy])
def test_gradients(fn, way):
    """XLA compiles as for a user.

    The error was two to four times as large where the backward pass computed the
    softmax from logits as they were stored, and divided by a sum of exponentials of
    others.
    """
    check(fn, WAYS[way])


@pytest.mark.parametrize("name", ILL_CONDITIONED)
def test_ill_conditioned_functions(name):
    """However exponentials are made, and nearly other functions that are summed."""
    softmax, bound = ILL_CONDITIONED[name]
    check(functools.partial(cross_entropy, softmax=softmax), jax.jit, bound)


def of_segments(reduce, x):
    segments = jnp.arange(x.shape[1]) % 4
    return reduce(x.T, segments, num_segments=4).T[:, segments]


def gated(kernels, softmax):
    gates = softmax(X @ kernels[0])
    return jnp.mean(jnp.sum(gates * (X @ kernels[1]), axis=1) ** 2)


MAXIMA = {
    "maximum": lambda x: x / jnp.abs(x).max(1, keepdims=True),
    "of segments": lambda x: x / of_segments(jax.ops.segment_max, jnp.abs(x)),
}


@both_halves
@pytest.mark.parametrize("choose", [jnp.maximum, jnp.minimum])
def test_a_traced_derivative_finds_it(choose, dtype):
    """Both operands of the choice, and its result, are compared as they were chosen."""

    def fn(kernel):
        return jnp.mean((choose(X @ KEY, X[:, :1] @ kernel[:1] + TARGET) @ VALUE) ** 2)

    def of_leaf(kernel):
        return jnp.mean((choose(X @ KEY, X + kernel[:1]) @ VALUE) ** 2)

    for loss in (fn, of_leaf):
        gradient = jax.grad(loss)
        actual = jax.jit(amp(gradient, compute_dtype=dtype))(QUERY)
        assert_close(actual, jax.jit(gradient)(QUERY), dtype, gradient=True)


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

    x = X.astype(dtype).astype(jnp.float32)
    gradient = jax.grad(attend)
    actual = jax.jit(amp(gradient, compute_dtype=dtype))(x)
    error = relative_error(actual, jax.jit(gradient)(x))
    assert error < 8 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("name", MAXIMA)
def test_maxima(name):
    """A derivative finds the operand that equals the maximum."""
    fn = functools.partial(gated, softmax=MAXIMA[name])
    lowered = amp(jax.jit(fn), compute_dtype=jnp.bfloat16)
    actual = jax.jit(jax.grad(lowered))(KERNELS)
    assert_close(actual, gradients(fn), jnp.bfloat16, gradient=True)


def test_a_ref_enters_a_checkpoint():
    """It cannot be rounded, and needs not be: it is in the user's own dtype."""

    def fn(x):
        ref = jax.new_ref(jnp.zeros(3, jnp.bfloat16))

        def update(ref, x):
            ref[...] += x.astype(jnp.bfloat16)
            return 2 * x

        return jax.checkpoint(update)(ref, x) + ref[...].astype(jnp.float32)

    assert_identical(amp(fn)(jnp.ones(3)), fn(jnp.ones(3)))
