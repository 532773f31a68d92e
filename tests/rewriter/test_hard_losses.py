"""The errors of losses that lose digits easily, over all files of the rewriter.

Most of these programs were wrong once: a gate that is one in half precision has no
`log(1 - gate)`. The error of each value and gradient is at most 1.1 times that of the
twin, which is the same program with its matmuls cast.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.nn import log_softmax, sigmoid, softmax, softplus

from _programs import with_vjp
from benchmarks.matmuls import cast_matmuls, exact_matmuls
from flax_amp import amp
from helpers import HALVES, both_halves, exact_jit, jit

SIZE, ROWS, OUT, STEPS = 8, 6, 12, 2048
LABELS = np.arange(ROWS) % 4
norm = functools.partial(jnp.linalg.norm, axis=-1)

# --- errors, beside those of the twin ------------------------------------------------

# Sums of matmuls are exact in both, so that the errors are those of the roundings.
SCALE = 2.0**6  # of the loss: the cotangents of some are small for float16


def normal(seed, *shapes):
    """A normal array for each shape."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) for key, shape in pairs]


def errors(loss, draw, count, dtype):
    """Relative errors against float32: `[draw, value or gradient, amp or twin]`."""

    def both(fn):
        return jax.value_and_grad(lambda *args: SCALE * fn(*args), argnums=(0, 1, 2))

    fns = both(loss), both(amp(loss, compute_dtype=dtype))
    fns = [exact_matmuls(f) for f in fns] + [cast_matmuls(both(loss), dtype)]
    run = exact_jit(lambda *args: [f(*args) for f in fns])
    found = []
    for seed in range(count):
        results = run(*draw(seed))
        values = np.stack([np.ravel(value) for value, _ in results])
        grads = [jnp.concatenate([g.ravel() for g in grads]) for _, grads in results]
        for kind in (values, np.stack(grads)):
            finite = np.isfinite(kind).all(-1)
            assert finite.all(), f"float32, amp, twin: finite {finite} in draw {seed}"
            gaps = np.linalg.norm(kind[1:] - kind[0], axis=-1)
            found.append(gaps / np.linalg.norm(kind[0]))
    return np.reshape(found, (count, 2, 2))


# --- draws of two weights, and of the data between them -------------------------------


def matrices(seed):
    return normal(seed, *[(SIZE, SIZE)] * 3)


def wide(seed):
    """Logits up to ten: in bfloat16 the sigmoid of seven is one."""
    w, x, v = matrices(seed)
    return w, 1.2 * x, v


def times(seed):
    """A row for each step."""
    w, v, x = normal(seed, (SIZE, SIZE), (SIZE, SIZE), (STEPS, SIZE))
    return w / 3, x, v / 3


def layers(factor):
    """Two layers; by `factor` the last one is larger."""

    def draw(seed):
        w, x, v = normal(seed, (10, 16), (ROWS, 10), (16, OUT))
        return w / np.sqrt(10), x, factor * v / 4

    return draw


class Row(NamedTuple):
    loss: Callable[..., jax.Array]  # of (w, x, v)
    draw: Callable[[int], list[jax.Array]]
    count: int = 8


TABLE: dict[str, Row] = {}


def add(draw, *losses, count=8):
    TABLE.update({loss.__name__: Row(loss, draw, count) for loss in losses})


# --- a loss beside a matmul, behind something that is called -------------------------


@jax.custom_vjp
def bounded(t):
    """The identity, whose cotangents are bounded."""
    return t


bounded.defvjp(lambda t: (t, None), lambda _, ct: (jnp.clip(ct, -1e3, 1e3),))

MASK = np.arange(SIZE**2).reshape(SIZE, SIZE) % 5 > 0
BEHIND = {
    "nothing": lambda t: t,
    "where": lambda t: jnp.where(MASK, t, 0.5),
    "flip": lambda t: jnp.flip(t, 0),
    "gather": lambda t: t[np.arange(SIZE) // 2],
    "pad": lambda t: jnp.pad(t, ((0, 1), (0, 0))),
    "relu": jax.nn.relu,
    "nnx.jit": lambda t: nnx.jit(lambda t: t[::-1])(t),
    "optimization_barrier": lax.optimization_barrier,
    "custom_vjp": bounded,
    "checkpoint": jax.checkpoint(lambda t: jnp.sin(t) / jnp.sin(1.0)),
    "cond": lambda t: lax.cond(t.sum() < 1e6, lambda t: t, lambda t: t / 2, t),
}


def of_certain(t):
    """Minus the log-likelihood of zeros, which is infinite where `t` is one."""
    return -jnp.log(1 - t).mean()


def loss_behind(call):
    def loss(w, x, v):
        t = call(sigmoid(x @ w))
        return of_certain(t) + (t @ v).mean()

    return loss


TABLE |= {f"behind {name}": Row(loss_behind(BEHIND[name]), wide) for name in BEHIND}

# --- losses beside a call that has matmuls inside ------------------------------------


def actor(w, x, v):
    """Its own result is lost, and the loss is of what its matmul reads."""
    t, y = jax.jit(lambda x: ((t := sigmoid(x @ w)), t @ v))(x)
    return of_certain(t) + y.mean()


def head(w, x, v):
    """No matmul outside reads the number."""
    return of_certain(jax.jit(lambda x: sigmoid(jnp.tanh(x @ v) @ w))(x))


def head_and_matmul(w, x, v):
    """As above, with another result that a matmul outside reads."""
    t, y = jax.jit(lambda x: ((t := sigmoid(x @ w)), jnp.sin(t)))(x)
    return of_certain(t) + (y @ v).mean()


def log_density(w, x, v):
    """A policy's action and its log-density, of which large numbers cancel."""
    mean, logp = jax.jit(lambda x: ((m := x @ w), 500 + jnp.tanh(m).sum(-1)))(x)
    return (logp - logp.mean()).var() + (mean @ v).var()


add(wide, actor, head, head_and_matmul, log_density)

# --- more losses of what a matmul reads ----------------------------------------------


def moved(w, x, v):
    t = sigmoid(x @ w + 6).reshape(8, 2, 4).reshape(8, 8).T
    return ((t @ v) ** 2).mean() + 0.1 * of_certain(t)


def gate(x, w):
    return sigmoid(6 + x @ w)


CALLS = {
    "jit": jax.jit(gate),
    "moved jit": lambda x, w: jax.jit(gate)(x, w)[::-1],
    "checkpoint": jax.checkpoint(gate),
    "cond": lambda x, w: lax.cond(x.sum() > 0, gate, lambda x, w: gate(x, -w), x, w),
    "scan": lambda x, w: lax.scan(lambda c, x: (c, gate(x, w)), 0.0, x[None])[1][0],
    "custom_vjp": with_vjp(gate),
}


def of_call(call):
    """A loss and a matmul read what leaves a call with a matmul inside."""

    def loss(w, x, v):
        t = call(x, w)
        return 0.1 * of_certain(t) + (t @ v).mean()

    return loss


def mixture(w, x, v):
    """A sum that is moved."""
    g = sigmoid(x[:, :1])
    p = (g * sigmoid(3 + x @ w) + (1 - g) * sigmoid(4 + x @ w)).reshape(2, 4, SIZE)
    return 0.1 * of_certain(p) + (p @ v).mean()


TABLE |= {f"from {name}": Row(of_call(CALLS[name]), matrices, 16) for name in CALLS}
add(matrices, moved, mixture, count=16)

# --- a bias on the way to a loss is added in float32 -------------------------------


def logits(w, x, v):
    return -jax.nn.log_softmax(x @ w + v[0][None])[:, 0].mean()


def probabilities(w, x, v):
    return of_certain(0.99 * sigmoid(jnp.tanh(x @ w) @ w + v[0][None]))


add(matrices, logits, probabilities, count=32)


def unlikely(w, x, v):
    """Probabilities of 2e-9 and less, which float16 does not have."""
    p = softmax(x @ w + 20 * jnp.eye(SIZE)[:1])[:, 1:]
    return -jnp.log(p).mean()


add(matrices, unlikely, count=32)

# --- numbers of which most digits cancel ----------------------------------------------


def squashed(w, x, v):
    """The log-density of a squashed action (SAC), beside a matmul of it."""
    u = jnp.tanh(x @ w)
    return -jnp.log(1 - u**2 + 1e-6).mean() + (u @ v).mean()


def centred(w, x, v):
    """A temperature and its mean."""
    t = 300 + jnp.tanh(x @ w)
    return (((t - t.mean()) @ v) ** 2).mean()


def batch_norm(w, x, v):
    y = x @ w + 100
    return ((y - y.mean(0)[None]) * lax.rsqrt(y.var(0) + 1e-5)[None] @ v).var()


def log_weights(w, x, v):
    """Weights of log-densities around -500, which a matmul reads centred."""
    logp = -500 + jnp.tanh(x @ w)
    return (((logp - logp.mean(-1, keepdims=True)) @ v) ** 2).mean()


def vicreg(w, x, v):
    """Spread and covariance of features with an offset."""
    z = 3 + jnp.tanh(x @ w)
    z = z - z.mean(0)[None]
    covariance = z.T @ z / SIZE
    apart = jnp.sum(jnp.square(covariance * (1 - jnp.eye(SIZE))))
    spread = jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean()
    return spread + apart / SIZE + 0.1 * ((z @ v) ** 2).mean()


def second_moment(w, x, v):
    """`E[x**2] - E[x]**2`, and what it normalizes is read by a matmul."""
    y = 5 + jnp.tanh(x @ w)
    mean = y.mean(-1, keepdims=True)
    variance = (y**2).mean(-1, keepdims=True) - mean**2
    return (((y - mean) * lax.rsqrt(variance + 1e-3) @ v) ** 2).mean()


def survival(w, x, v):
    """What is left of a distribution behind each class, beside a matmul of it."""
    e = jnp.exp((y := x @ w) - y.max(-1, keepdims=True))
    passed = jnp.cumsum(e, -1) / e.sum(-1, keepdims=True)
    return -jnp.log(1 - passed[:, :-1] + 1e-6).mean() + (passed @ v).mean()


def forces(w, x, v):
    """A loss of a gradient by the data."""
    force = jax.grad(lambda x: (jnp.tanh(jnp.tanh(x @ w) @ v)).sum())(x)
    return ((force - 0.1) ** 2).mean()


def gates(w, x, v):
    """A derivative finds the operand that equals the maximum."""
    y = x @ w
    y = y / jnp.abs(y).max(1, keepdims=True)
    return ((y * (x @ v)).sum(1) ** 2).mean()


def forces_of_a_choice(w, x, v):
    """A traced derivative compares both operands and the result as they were chosen."""
    choose = lambda x: jnp.maximum(x @ w, x[:, :1] @ w[:1] + v)  # noqa: E731
    force = jax.grad(lambda x: ((choose(x) @ v) ** 2).mean())(x)
    return ((force - 0.1) ** 2).mean()


add(matrices, centred, batch_norm, log_weights, vicreg, second_moment, forces)
add(matrices, gates, forces_of_a_choice, count=64)
add(wide, squashed, survival)

# --- a loop without matmuls is arithmetic --------------------------------------------


def decays(w, x, v):
    """What a recurrence multiplies and adds. The decay is one in half precision."""
    dt = softplus(x @ w - 7)
    return jnp.exp(-dt), dt * (x @ v)


def recurrence(h, z):
    h = z[0] * h + z[1]
    return h, h


def scanned(w, x, v):
    return ((lax.scan(recurrence, jnp.zeros(SIZE), decays(w, x, v))[1] @ w) ** 2).mean()


def indexed(w, x, v):
    """The loop closes over the decays."""
    a, b = decays(w, x, v)
    step = lambda h, t: recurrence(h, (a[t], b[t]))  # noqa: E731
    return ((lax.scan(step, jnp.zeros(SIZE), np.arange(STEPS))[1] @ w) ** 2).mean()


def counted(w, x, v):
    a, b = decays(w, x, v)
    h = lax.fori_loop(0, STEPS, lambda t, h: a[t] * h + b[t], jnp.zeros(SIZE))
    return ((h[None] @ w) ** 2).mean()


def state_space(w, x, v):
    """Selective, and with the steps and the decays that Mamba starts with."""
    dt = softplus(x @ w + jnp.log(jnp.expm1(jnp.geomspace(1e-3, 1e-1, SIZE)))[None])
    b, c = jnp.split(x @ v, 2, -1)
    decay = jnp.exp(-dt[:, :, None] * jnp.arange(1.0, 5.0)[None, None])
    added = (dt * x)[:, :, None] * b[:, None]

    def step(h, z):
        h, _ = recurrence(h, z)
        return h, (h * z[2][None]).sum(-1)

    y = lax.scan(step, jnp.zeros((SIZE, 4)), (decay, added, c))[1]
    return ((y @ w) ** 2).mean()


def gated_unit(w, x, v):
    """RG-LRU: nothing is left of the square root if the decay is rounded to one."""
    a = jnp.exp(-0.016 * sigmoid(x @ w))
    b = jnp.sqrt(1 - a**2) * (x @ v)
    return ((lax.scan(recurrence, jnp.zeros(SIZE), (a, b))[1] @ w) ** 2).mean()


add(times, scanned, indexed, counted, state_space, gated_unit)

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


def policy_gradient(y):
    logp, value = log_softmax(y[:, :-1]), y[:, -1]
    chosen = jnp.take_along_axis(logp, LABELS[:, None], -1)[:, 0]
    ratio = jnp.exp(chosen + 2.0)
    gain = 0.7 * jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return (-gain + 0.5 * (value - 1) ** 2 - 0.01 * entropy).mean()


def projection(y):
    """Onto the unit ball, in a branch. Most of the two cotangents of `y` cancels."""
    size = norm(y.ravel())
    point = lax.cond(size <= 1, lambda: y, lambda: y / size)
    return (jnp.sqrt(OUT) * point**2 + 0.1 * point**3).sum()


def of_layers(loss):
    return lambda w, x, v: loss(jnp.tanh(x @ w) @ v)


# The cotangents of one value cancel where points are near the border of the ball, and
# where classes are unlikely.
for factor, losses in (
    (4, (poincare, ordinal, projection)),
    (0.5, (policy_gradient,)),
):
    for loss in losses:
        TABLE[loss.__name__] = Row(of_layers(loss), layers(factor), 64)


# One dtype of each is enough for the fast part.
CASES = [
    pytest.param(name, dtype, marks=pytest.mark.slow if (i + k) % 2 else ())
    for k, name in enumerate(TABLE)
    for i, dtype in enumerate(HALVES)
]


@pytest.mark.parametrize("name, dtype", CASES)
def test_hard_losses(name, dtype):
    squares = np.square(errors(*TABLE[name], dtype))
    ours, theirs = np.sqrt(squares.mean(0)).T
    text = f"value, gradient: {ours} under amp, {theirs} with matmuls cast"
    assert (ours <= 1.1 * theirs + 5e-5).all(), text


# --- numbers that are not losses -----------------------------------------------------


W, X, V = matrices(0)


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


@both_halves
def test_the_gradient_of_a_bias_is_a_sum_in_float32(dtype):
    """In float16 it would be infinite, and in bfloat16 stop at 256."""

    def loss(bias, x):
        return ((x @ jnp.eye(4) + bias[None]) @ jnp.eye(4)).sum()

    rows = 2**17
    grad = jit(jax.grad(amp(loss, compute_dtype=dtype)))
    np.testing.assert_allclose(grad(jnp.ones(4), jnp.ones((rows, 4))), rows, rtol=1e-2)
