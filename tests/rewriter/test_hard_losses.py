"""Losses that lose digits, or that read a number that a product reads rounded.

A gate that is one in half precision has no `log(1 - gate)`. The value and the gradient
are no farther from float32 than those of the twin, which casts products only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, sigmoid, softmax, softplus

from _twin_errors import assert_as_exact, normal
from flax_amp import amp
from helpers import HALVES, jit

ROWS, OUT = 6, 12
LABELS = np.arange(ROWS) % 4
W, X, V = normal(0, *[(8, 8)] * 3)
GATE = 6.0  # a sigmoid of it is one in bfloat16
norm = functools.partial(jnp.linalg.norm, axis=-1)

# --- losses of what a product reads, too ---------------------------------------------

# What a product reads, and its loss.
OF_BOTH = {
    "gate": (lambda y: sigmoid(y + GATE), lambda t: -0.1 * jnp.log(1 - t).mean()),
    "open gate": (
        lambda y: 1 / (1 + jnp.exp(-y - GATE)),
        lambda t: -0.1 * jnp.log1p(-t).mean(),
    ),
    "clipped": (
        lambda y: jnp.clip(sigmoid(3 * y), 1e-7, 1 - 1e-7),
        lambda t: -jnp.log1p(-t).mean(),
    ),
    "in ball": (
        lambda y: 0.97 * jnp.tanh(y) / (norm(jnp.tanh(y))[:, None] + 1e-3),
        lambda t: -jnp.log(1 - (t**2).sum(-1)).mean(),
    ),
    "moved": (
        lambda y: sigmoid(y + GATE).reshape(8, 2, 4).reshape(8, 8).T,
        lambda t: -0.1 * jnp.log(1 - t).mean(),
    ),
}
AROUND = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda fn: lambda *xs: jax.vmap(fn)(*(x[None] for x in xs))[0],
    "cond": lambda fn: lambda *xs: lax.cond(xs[0][0, 0] < 9, fn, lambda *_: 0.0, *xs),
    "scan": lambda fn: lambda *xs: lax.map(lambda _: fn(*xs), np.arange(2)).sum(),
}
CASES = [(name, "plain") for name in OF_BOTH]
CASES += [("open gate", around) for around in AROUND if around != "plain"]


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name, around", CASES)
def test_losses_of_what_a_product_reads(name, around, dtype):
    fn, of_it = OF_BOTH[name]

    @AROUND[around]
    def loss(w, x, v):
        t = fn(x @ w)
        return ((t @ v) ** 2).mean() + of_it(t)

    assert_as_exact(loss, dtype, lambda seed: normal(seed, *[(8, 8)] * 3), count=16)


# --- losses of a layer's result, which they read several times -----------------------


def points(y):
    """Two points of each row, in the unit ball."""
    return (z / (1 + norm(z)[:, None]) for z in jnp.split(y, 2, axis=-1))


def poincare(y):
    u, v = points(y)
    gap = norm(u - v) ** 2 / ((1 - norm(u) ** 2) * (1 - norm(v) ** 2))
    return jnp.arccosh(1 + 2 * gap).mean()


def ordinal(y):
    """Classes between ordered thresholds, and the square error of their mean."""
    ends = jnp.cumsum(softplus(y[:, 1:5]), -1) - 2
    below = [sigmoid(ends[:, k] - y[:, 0]) for k in range(4)]
    between = [right - left for left, right in zip(below, below[1:], strict=False)]
    p = jnp.stack([below[0], *between, 1 - below[-1]], -1)
    likely = jnp.take_along_axis(p, LABELS[:, None], -1)
    mean = (p * jnp.arange(5.0)[None]).sum(-1)
    return -jnp.log(likely + 1e-6).mean() + ((mean - 2) ** 2).mean()


def jensen_shannon(y):
    """Between the classes of neighbouring rows."""
    p = softmax(y)
    q = jnp.roll(p, 1, axis=0)
    of_p, of_q, of_both = ((a * jnp.log(a)).sum(-1) for a in (p, q, (p + q) / 2))
    return ((of_p + of_q) / 2 - of_both).mean()


def policy_gradient(y):
    logp, value = log_softmax(y[:, :-1]), y[:, -1]
    chosen = jnp.take_along_axis(logp, LABELS[:, None], -1)[:, 0]
    ratio = jnp.exp(chosen + 2.0)
    gain = 0.7 * jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return (-gain + 0.5 * (value - 1) ** 2 - 0.01 * entropy).mean()


def quantile(y):
    middle = y[:, 4:5]
    apart = jnp.linspace(-1.0, 1.0, ROWS)[:, None] - jnp.sort(y, -1) - 0.1 * middle
    levels = jnp.linspace(0.05, 0.95, OUT)[None]
    return jnp.maximum(levels * apart, (levels - 1) * apart).mean()


def spread_and_covariance(y):
    a, b = jnp.split(y, 2, axis=-1)
    centered = [z - z.mean(0, keepdims=True) for z in (a, b)]
    spread = sum(jax.nn.relu(2 - jnp.sqrt(z.var(0) + 1e-4)).mean() for z in (a, b))
    moved = sum((z[:, 1:] * z[:, :-1]).mean(0) ** 2 for z in centered).sum()
    return ((a - b) ** 2).mean() + spread + moved


def projection(y):
    """Onto the unit ball, in a branch. Most of the two cotangents of `y` cancels."""
    size = norm(y.ravel())
    point = lax.cond(size <= 1, lambda: y, lambda: y / size)
    return (jnp.sqrt(OUT) * point**2 + 0.1 * point**3).sum()


# By how much the last layer is larger. The cotangents of one value cancel where points
# are near the border of the ball, and where classes are unlikely.
OF_LAYERS = dict.fromkeys([poincare, ordinal, jensen_shannon, projection], 4)
OF_LAYERS |= dict.fromkeys([policy_gradient, quantile, spread_and_covariance], 0.5)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("loss", OF_LAYERS, ids=lambda loss: loss.__name__)
def test_losses_of_a_layer(loss, dtype):
    def of_layers(w, x, v):
        return loss(jnp.tanh(x @ w) @ v)

    def draw(seed):
        w, x, v = normal(seed, (10, 16), (ROWS, 10), (16, OUT))
        return w / np.sqrt(10), x, OF_LAYERS[loss] * v / 4

    assert_as_exact(of_layers, dtype, draw, count=64)


# --- numbers that are not losses -----------------------------------------------------


def test_indices_that_are_returned():
    """In bfloat16 most of these numbers are equal."""

    def fn(w, x, v):
        z = 1 + 1e-3 * jnp.sin(x @ w)
        return z @ v, jnp.argmax(z, -1), jnp.argsort(z, -1), lax.top_k(z, 2)[1]

    (many,) = normal(1, (64, 8))
    expected, found = fn(W, many, V)[1:], jax.jit(amp(fn))(W, many, V)[1:]
    for indices, others in zip(found, expected, strict=True):
        assert (np.asarray(indices) != np.asarray(others)).mean() < 0.05


def unrolled(y, v):
    for step in (1e-3, 2e-3, 3e-3):
        y = y + step * jnp.tanh(y @ v)
    return y


def small_step(y, _):
    return y + 1e-3 * jnp.tanh(y), None


MOVES = {
    "unrolled": unrolled,
    "loop": lambda y, v: lax.scan(small_step, y, None, length=3)[0],
    "checkpoint": lambda y, v: jax.checkpoint(small_step)(y, None)[0],
}


@pytest.mark.parametrize("name", MOVES)
def test_small_steps(name):
    """How far a state moves, in steps that its rounding would lose."""

    def loss(w, x, v):
        start = jnp.sin(10 * (x @ w))
        gap = MOVES[name](start, v) - start
        return (gap**2).sum() + 1e-9 * ((start @ v) ** 2).sum()

    found = jax.jit(amp(loss))(W, X, V)
    np.testing.assert_allclose(found, loss(W, X, V), rtol=0.05)


def test_a_logged_cast_changes_nothing():
    """A cast that leads to no product rounds for itself alone."""

    def loss(w, x, v):
        s = 0.3 * (x @ w)
        return (softmax(s) @ v).mean(), lax.stop_gradient(s).astype(jnp.bfloat16)

    with_log, _ = jax.jit(amp(loss))(W, X, V)
    assert with_log == jax.jit(amp(lambda *args: loss(*args)[0]))(W, X, V)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
def test_the_gradient_of_a_bias_is_a_sum_in_float32(dtype):
    """In float16 it would be infinite, and in bfloat16 stop at 256."""

    def loss(bias, x):
        return ((x @ jnp.eye(4) + bias[None]) @ jnp.eye(4)).sum()

    rows = 2**17
    grad = jit(jax.grad(amp(loss, compute_dtype=dtype)))
    np.testing.assert_allclose(grad(jnp.ones(4), jnp.ones((rows, 4))), rows, rtol=1e-2)
