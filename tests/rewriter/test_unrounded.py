"""What leads to no product reads numbers as they were before they were rounded.

A product rounds what it reads. A loss beside it, a returned array or an index must not
read the rounded number: a gate that is one in half precision has no `log(1 - gate)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.twin import cast_products
from flax_amp import amp
from helpers import HALVES, equations

KEYS = jax.random.split(jax.random.key(0), 3)
W, X, V = (jax.random.normal(key, (8, 8)) for key in KEYS)
GATE = 6.0  # a sigmoid of it is one in bfloat16


def norm(a):
    return jnp.linalg.norm(a, axis=-1, keepdims=True)


def with_product(fn):
    """A loss of some numbers that a product reads, too."""

    def loss(w, x, v):
        t = fn(x @ w)
        return ((t @ v) ** 2).mean() + t_loss(t)

    t_loss = LOSSES[fn]
    return loss


def gate(y):
    return jax.nn.sigmoid(y + GATE)


def open_gate(y):
    return 1 / (1 + jnp.exp(-y - GATE))


def clipped(y):
    return jnp.clip(jax.nn.sigmoid(3 * y), 1e-7, 1 - 1e-7)


def in_ball(y):
    return 0.97 * jnp.tanh(y) / (norm(jnp.tanh(y)) + 1e-3)


def moved(y):
    return jnp.reshape(jax.nn.sigmoid(y + GATE), (8, 2, 4)).reshape(8, 8).T


LOSSES = {
    gate: lambda t: -0.1 * jnp.log(1 - t).mean(),
    open_gate: lambda t: -0.1 * jnp.log1p(-t).mean(),
    clipped: lambda t: -jnp.log1p(-t).mean(),
    in_ball: lambda t: -jnp.log(1 - (t**2).sum(-1)).mean(),
    moved: lambda t: -0.1 * jnp.log(1 - t).mean(),
}
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


CASES = [(fn, "plain") for fn in LOSSES]
CASES += [(open_gate, transform) for transform in TRANSFORMS if transform != "plain"]


@pytest.mark.parametrize("fn, transform", CASES)
def test_no_farther_than_products_alone(fn, transform):
    plain, dtype = TRANSFORMS[transform](with_product(fn)), HALVES[len(transform) % 2]

    def run(loss):
        scaled = lambda *args: 64 * loss(*args)  # noqa: E731 - for float16
        value, grads = jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 2)))(W, X, V)
        return value, np.concatenate([np.ravel(g) for g in grads])

    by_hand = cast_products(plain, dtype)
    losses = plain, amp(plain, compute_dtype=dtype), by_hand
    (value, grads), (_, ours), (_, theirs) = map(run, losses)
    assert np.isfinite(value) and np.isfinite(ours).all()
    floor = 1e-4 * np.linalg.norm(grads)
    error, allowed = (np.linalg.norm(g - grads) for g in (ours, theirs))
    assert error <= 1.25 * allowed + floor


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
        jax.jit(amp(lambda *args, logs=logs: loss(*args, logs=logs)[0]))(W, X, V)
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
