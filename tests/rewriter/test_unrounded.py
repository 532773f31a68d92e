"""What leads to no product reads numbers as they were before they were rounded.

A product rounds what it reads. A loss beside it, a returned array or an index must not
read the rounded number: a gate that is one in half precision has no `log(1 - gate)`.
The gradient is no farther from float32 than that of a twin: the same program with its
products cast and all else in float32.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_softmax, sigmoid, softmax, softplus

from benchmarks.exact import with_exact_products
from benchmarks.twin import cast_products
from flax_amp import amp
from helpers import HALVES, equations, jit

ROWS, OUT, DRAWS = 6, 12, 64
KEYS = jax.random.split(jax.random.key(0), 3)
W, X, V = (jax.random.normal(key, (8, 8)) for key in KEYS)
LABELS = jnp.arange(ROWS) % 4
GATE = 6.0  # a sigmoid of it is one in bfloat16
norm = functools.partial(jnp.linalg.norm, axis=-1)

# --- losses of what a product reads, too ---------------------------------------------


def gate(y):
    return sigmoid(y + GATE)


def open_gate(y):
    return 1 / (1 + jnp.exp(-y - GATE))


def clipped(y):
    return jnp.clip(sigmoid(3 * y), 1e-7, 1 - 1e-7)


def in_ball(y):
    return 0.97 * jnp.tanh(y) / (norm(jnp.tanh(y))[:, None] + 1e-3)


def moved(y):
    return jnp.reshape(gate(y), (8, 2, 4)).reshape(8, 8).T


OF_BOTH = {
    gate: lambda t: -0.1 * jnp.log(1 - t).mean(),
    open_gate: lambda t: -0.1 * jnp.log1p(-t).mean(),
    clipped: lambda t: -jnp.log1p(-t).mean(),
    in_ball: lambda t: -jnp.log(1 - (t**2).sum(-1)).mean(),
    moved: lambda t: -0.1 * jnp.log(1 - t).mean(),
}


def with_product(fn):
    """A loss of some numbers that a product reads, too."""

    def loss(w, x, v):
        t = fn(x @ w)
        return ((t @ v) ** 2).mean() + OF_BOTH[fn](t)

    return loss


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


# By how much the last layer is larger. The cotangents of one value cancel where points
# are near the border of the ball, and where classes are unlikely.
OF_LAYERS = dict.fromkeys([poincare, ordinal, jensen_shannon, projection], 4)
OF_LAYERS |= dict.fromkeys([policy_gradient, quantile, spread_and_covariance], 0.5)


def flat(grads):
    return np.concatenate([np.reshape(g, (len(g), -1)) for g in grads], -1)


def errors(loss, dtype, *args):
    """The errors of the gradients under `amp` and of the twin, one of each draw."""

    def gradients(fn):
        scale = 2.0**6  # the cotangents of some are small for float16
        return jax.vmap(jax.grad(lambda *xs: scale * fn(*xs), argnums=(0, 1, 2)))

    fns = loss, amp(loss, compute_dtype=dtype), cast_products(loss, dtype)
    together = with_exact_products(lambda *xs: [gradients(f)(*xs) for f in fns])
    expected, *both = map(flat, jit(together)(*args))
    assert np.isfinite(both).all()
    floor = 1e-4 * np.linalg.norm(expected, axis=-1)
    return [np.linalg.norm(g - expected, axis=-1) + floor for g in both]


@pytest.mark.parametrize("loss", OF_LAYERS, ids=lambda loss: loss.__name__)
def test_losses_of_a_layer(loss):
    """On average over many draws of weights and data."""

    def of_layers(w, x, v):
        return loss(jnp.tanh(x @ w) @ v)

    shapes = (10, 16), (ROWS, 10), (16, OUT)
    args = [
        jax.random.normal(key, (DRAWS, *shape)) / np.sqrt(shape[0])
        for key, shape in zip(KEYS, shapes, strict=True)
    ]
    args[1], args[2] = args[1] * np.sqrt(ROWS), args[2] * OF_LAYERS[loss]
    ours, theirs = errors(of_layers, HALVES[len(loss.__name__) % 2], *args)
    ratio = np.exp(np.mean(np.log(ours / theirs)))
    assert ratio <= 1.1, f"{ratio:.2f} times the error of the twin"


TRANSFORMS = {
    "plain": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda loss: (
        lambda w, *rest: jax.vmap(loss, (0, None, None))(w[None], *rest)[0]
    ),
    "cond": lambda loss: (
        lambda *args: jax.lax.cond(args[0].sum() < 1e6, loss, lambda *args: 0.0, *args)
    ),
    "scan": lambda loss: (
        lambda *args: jax.lax.scan(
            lambda total, _: (total + loss(*args), None), 0.0, None, length=2
        )[0]
    ),
}


CASES = [(fn, "plain") for fn in OF_BOTH]
CASES += [(open_gate, transform) for transform in TRANSFORMS if transform != "plain"]


@pytest.mark.parametrize("fn, transform", CASES)
def test_losses_of_what_a_product_reads(fn, transform):
    loss, dtype = TRANSFORMS[transform](with_product(fn)), HALVES[len(transform) % 2]
    ours, theirs = errors(loss, dtype, W[None], X[None], V[None])
    assert ours <= 1.25 * theirs


def shown(fn):
    """The dtypes that the functions of a loss read, in the program under `amp`."""
    found = equations(jax.make_jaxpr(amp(fn))(W, X, V))
    return {
        eqn.primitive.name: eqn.invars[0].aval.dtype.name
        for _, eqn in found
        if eqn.primitive.name in ("log", "dot_general", "argmax", "top_k", "sort")
    }


def test_the_product_reads_a_half_and_the_loss_does_not():
    assert shown(with_product(gate)) == {"log": "float32", "dot_general": "bfloat16"}


@pytest.mark.parametrize(
    "choose",
    [
        lambda z: jnp.argmax(z, -1),
        lambda z: jnp.argsort(z, -1),
        lambda z: jax.lax.top_k(z, 2)[1],
    ],
    ids=["argmax", "argsort", "top_k"],
)
def test_indices_that_are_returned(choose):
    """In bfloat16 most of these numbers are equal."""

    def fn(w, x, v):
        z = 1 + 1e-3 * jnp.sin(x @ w)
        return z @ v, choose(z)

    many = jax.random.normal(KEYS[0], (64, 8))
    expected = fn(W, many, V)[1]
    found = jax.jit(amp(fn))(W, many, V)[1]
    assert (np.asarray(found) != np.asarray(expected)).mean() < 0.05


def test_all_arithmetic_reads_one_number():
    """Small steps are not lost in the difference between two forms of one number."""

    def loss(w, x, v):
        start = y = jnp.sin(10 * (x @ w))
        for step in (1e-3, 2e-3, 3e-3):
            y = y + step * jnp.tanh(y @ v)
        return ((y - start) ** 2).sum()

    expected = loss(W, X, V)
    np.testing.assert_allclose(jax.jit(amp(loss))(W, X, V), expected, rtol=0.05)


def test_a_logged_cast_changes_nothing():
    """A cast that leads to no product rounds for itself alone."""

    def loss(w, x, v, *, logs):
        s = 0.3 * (x @ w)
        value = (jax.nn.softmax(s) @ v).mean()
        logged = jax.lax.stop_gradient(s).astype(jnp.bfloat16) if logs else None
        return value, logged

    with_log, without = (
        jax.jit(amp(functools.partial(loss, logs=logs)))(W, X, V)[0]
        for logs in (True, False)
    )
    assert with_log == without


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_across_what_is_recomputed(recompute):
    """The loss reads the number in another region than the one that computes it."""

    def loss(w, x, v):
        t = open_gate(x @ w / 4)
        y = jax.lax.scan(lambda y, _: (jnp.tanh(y @ v), None), t, None, length=2)[0]
        s = jnp.sin(y) * jnp.log(1 - t * jnp.where(y > 5, y, 1.0))
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return (y**2).mean() - 0.1 * (e / e.sum(-1, keepdims=True) * s).mean()

    value, grads = jax.jit(jax.value_and_grad(amp(loss, recompute=recompute)))(W, X, V)
    np.testing.assert_allclose(value, loss(W, X, V), rtol=0.02)
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("around", ["loop", "checkpoint"])
def test_a_loop_without_products_reads_the_same_number(around):
    """The loop reads the rounded number, and so does the loss beside it."""

    def loss(w, x, v):
        start = jnp.sin(10 * (x @ w))
        step = lambda y, _: (y + 1e-3 * jnp.tanh(y), None)  # noqa: E731
        steps = lambda y: jax.lax.scan(step, y, None, length=3)[0]  # noqa: E731
        move = steps if around == "loop" else jax.checkpoint(step_once)
        return ((move(start) - start) ** 2).sum() + 1e-9 * ((start @ v) ** 2).sum()

    def step_once(y):
        return y + 1e-3 * jnp.tanh(y)

    expected = loss(W, X, V)
    np.testing.assert_allclose(jax.jit(amp(loss))(W, X, V), expected, rtol=0.05)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
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
