"""What XLA keeps beyond bfloat16 in one pass does not contradict the other pass."""

import functools

import jax
import jax.numpy as jnp
import pytest

from _programs import in_scan
from _twin_errors import normal
from flax_amp import amp
from helpers import assert_close, assert_identical, both_halves, relative_error

SHAPES = [(48, 16)] * 2 + [(16, 16)] * 3
X, TARGET, QUERY, KEY, VALUE = normal(0, *SHAPES)
KERNELS = [QUERY / 2, KEY / 2]
LABELS = jnp.argmax(TARGET, axis=1)


def attention(softmax, kernels, dtype=jnp.float32):
    """By hand in `dtype`, with a softmax in float32."""
    x, value, query, key = (a.astype(dtype) for a in (X, X @ VALUE, *kernels))
    logits = ((x @ query) @ (x @ key).T).astype(jnp.float32) / 4
    attended = softmax(logits).astype(dtype) @ value
    return jnp.mean((attended.astype(jnp.float32) - TARGET) ** 2)


def cross_entropy(softmax, kernels, dtype=jnp.float32):
    """Of probabilities, by hand in `dtype`."""
    x, query, key = (a.astype(dtype) for a in (X, *kernels))
    logits = ((x @ query) @ key).astype(jnp.float32)
    return -jnp.mean(jnp.log(softmax(logits)[jnp.arange(48), LABELS] + 1e-20))


def divided_by_sum(fn):
    """Returns a function that divides `fn(logits)` by its sum over each row."""
    return lambda logits: (x := fn(logits)) / x.sum(1, keepdims=True)


def fourth_power(x):
    return (x**2 + 1) ** 4


checkpointed = jax.checkpoint(jax.nn.softmax)
# name: (loss, softmax, around the loss, how much larger than by hand the error may be)
CASES = {
    "attention": (attention, jax.nn.softmax, jax.jit, 1.4),
    "attention, checkpoint": (attention, checkpointed, jax.jit, 1.4),
    "cross entropy, scan": (cross_entropy, jax.nn.softmax, in_scan, 1.4),
    # Nearly another function that is summed.
    "powers": (cross_entropy, divided_by_sum(fourth_power), jax.jit, 2.2),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """The error is that of a model cast by hand, some of whose roundings XLA skips.

    XLA compiles as for a user. The error was two to four times as large where the
    backward pass computed the softmax from logits as they were stored, and divided by a
    sum of exponentials of others.
    """
    loss, softmax, around, bound = CASES[name]
    fn = functools.partial(loss, softmax)
    by_hand = functools.partial(fn, dtype=jnp.bfloat16)
    expected, rounded, actual = (
        jax.jit(jax.grad(f))(KERNELS) for f in (fn, by_hand, amp(around(fn)))
    )
    bound *= relative_error(rounded, expected)
    assert relative_error(actual, expected) < bound


@both_halves
def test_a_traced_derivative_finds_it(dtype):
    """Both operands of the choice, and its result, are compared as they were chosen."""

    def fn(kernel):
        other = X[:, :1] @ kernel[:1] + TARGET
        return jnp.mean((jnp.maximum(X @ KEY, other) @ VALUE) ** 2)

    gradient = jax.grad(fn)
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


def test_maxima():
    """A derivative finds the operand that equals the maximum."""

    def gated(kernels):
        gates = X @ kernels[0]
        gates = gates / jnp.abs(gates).max(1, keepdims=True)
        return jnp.mean(jnp.sum(gates * (X @ kernels[1]), axis=1) ** 2)

    actual, expected = (jax.jit(jax.grad(f))(KERNELS) for f in (amp(gated), gated))
    assert_close(actual, expected, jnp.bfloat16, gradient=True)


def test_a_ref_enters_a_checkpoint():
    """It cannot be rounded, and needs not be: it is in the user's own dtype."""

    def fn(x):
        ref = jax.new_ref(jnp.zeros(3, jnp.bfloat16))

        def update(ref, x):
            ref[...] += x.astype(jnp.bfloat16)
            return 2 * x

        return jax.checkpoint(update)(ref, x) + ref[...].astype(jnp.float32)

    assert_identical(amp(fn)(jnp.ones(3)), fn(jnp.ones(3)))
