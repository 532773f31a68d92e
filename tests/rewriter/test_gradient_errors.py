"""The gradient is no farther from float32 than that of a model cast by hand.

Each loss reads what the last layer gives several times: by slices, in functions of JAX
that are jitted, on both sides of an operation. By hand, the layers have a `dtype`, and
what the last one gives is cast to float32 once.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.nn import log_softmax, sigmoid, softmax, softplus

from benchmarks.exact import with_exact_products
from flax_amp import amp
from flax_amp._rewriter.casts import rounded
from helpers import HALVES, jit

ROWS, OUT, DRAWS = 6, 12, 128
LABELS = jnp.arange(ROWS) % 4
norm = functools.partial(jnp.linalg.norm, axis=-1)


class Net(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(16, dtype=self.dtype)(x))
        return nn.Dense(OUT, dtype=self.dtype)(x)


# --- losses of a layer's result ------------------------------------------------------


def in_ball(y):
    """Two points of each row, in the unit ball."""
    return (z / (1 + norm(z)[:, None]) for z in jnp.split(y, 2, axis=-1))


def poincare(y):
    u, v = in_ball(y)
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
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * 0.7, clipped * 0.7)
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
    point = jax.lax.cond(size <= 1, lambda: y, lambda: y / size)
    return (jnp.sqrt(OUT) * point**2 + 0.1 * point**3).sum()


# By how much the last layer is larger than at first. The cotangents of one value cancel
# where points are near the border of the ball, and where classes are unlikely.
LOSSES = dict.fromkeys([poincare, ordinal, jensen_shannon, projection], 8)
LOSSES |= dict.fromkeys([policy_gradient, quantile, spread_and_covariance], 1)


# --- errors --------------------------------------------------------------------------


@functools.cache
def draws(gain):
    """Parameters and data, many of each."""

    def draw(key):
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (ROWS, 10))
        noisy = lambda v: v + 0.1 * jax.random.normal(keys[2], v.shape)  # noqa: E731
        layers = jax.tree.map(noisy, Net().init(keys[1], x)["params"])
        last = jax.tree.map(lambda v: gain * v, layers["Dense_1"])
        return {"params": layers | {"Dense_1": last}}, x

    return jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), DRAWS))


def gradients(loss, dtype):
    """Those in float32, under `amp`, and by hand, one of each draw."""

    def plain(params, x):
        return loss(Net().apply(params, x))

    def by_hand(params, x):
        # Without it, XLA skips the rounding of the last sum.
        y = rounded(Net(dtype).apply(params, x))
        return loss(y.astype(jnp.float32))

    def gradient(fn):
        scale = 2.0**6  # the cotangents of some are small for float16
        return jax.vmap(jax.grad(lambda params, x: scale * fn(params, x)))

    fns = [gradient(f) for f in (plain, amp(plain, compute_dtype=dtype), by_hand)]
    together = with_exact_products(lambda *args: [f(*args) for f in fns])
    return jit(together)(*draws(LOSSES[loss]))


def flat(grads):
    leaves = [
        np.asarray(x, np.float64).reshape(DRAWS, -1) for x in jax.tree.leaves(grads)
    ]
    return np.concatenate(leaves, -1)


def compare(loss, dtype):
    """Returns the ratio of the errors under `amp` and by hand, a geometric mean."""
    expected, *both = map(flat, gradients(loss, dtype))
    ours, theirs = (np.linalg.norm(g - expected, axis=-1) for g in both)
    return float(np.exp(np.mean(np.log(ours / theirs))))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(HALVES[0], marks=pytest.mark.slow), HALVES[1]],
    ids=["float16", "bfloat16"],
)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_farther_than_by_hand(loss, dtype):
    ratio = compare(loss, dtype)
    assert ratio <= 1.1, f"{ratio:.2f} times the error of a model cast by hand"


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_the_gradient_of_a_bias_is_a_sum_in_float32(dtype):
    """It was one in float16: 1.7e-3 from float32, and infinite for large batches.

    XLA adds up bfloat16 in float32, and does what it is told with float16.
    """

    def loss(bias, y):
        return jnp.sum((y @ jnp.eye(4) + bias[None]) ** 2)

    def sums(fn):
        text = str(jax.make_jaxpr(jax.grad(amp(fn, compute_dtype=dtype)))(*args))
        return set(re.findall(r":(\w+)\[\S*\] = reduce_sum", text))

    args = jnp.ones(4), jnp.ones((8, 4))
    assert ("bf16" in sums(loss)) == (dtype == jnp.bfloat16)
    assert "f16" not in sums(loss)
