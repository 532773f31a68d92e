"""States of recurrences, which no scan may carry in half precision.

Found by outsiders: rounded, `.999 * s` is `s` again, and small updates are lost.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_amp import amp
from helpers import relative_error, run_all

ROWS = jnp.full((1000, 4), 0.01)
BATCHES = jax.random.normal(jax.random.key(3), (1000, 16, 8))


def decayed(x):
    """The decay of a state that a product of the same step reads."""

    def step(s, a):
        s = 0.999 * s + 0.001 * jnp.outer(a @ jnp.eye(4), a)
        return s, s @ a

    return lax.scan(step, jnp.ones((4, 4)), x)[0]


def decayed_and_read_later(x):
    def step(s, a):
        s = 0.999 * s + (0.001 * a) @ jnp.eye(4)
        return s, jnp.sum((s @ jnp.eye(4)) ** 2 * s)

    return lax.scan(step, jnp.ones(4), x)[0]


def trained(xs, start):
    """Steps of gradient descent: the carry is the weight, and what is scanned data."""

    def step(w, a):
        loss = lambda w: jnp.mean((a @ w - a[:, :1]) ** 2)  # noqa: E731
        return w - 1e-3 * jax.grad(loss)(w), None

    return lax.scan(step, start, xs)[0]


def gram(xs):
    """A sum of products that another product of the step reads."""
    step = lambda p, a: (p + 1e-3 * a.T @ a, (p @ a.T).sum())  # noqa: E731
    return lax.scan(step, jnp.eye(8), xs)[0]


STATES = {
    "decayed": (decayed, ROWS),
    "decayed and read later": (decayed_and_read_later, ROWS),
    "weights": (lambda xs: trained(xs, jnp.full((8, 1), 0.5)), BATCHES),
    "weights among the arguments": (trained, BATCHES, jnp.ones((8, 1))),
    "gram": (gram, BATCHES),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    fn, *args = STATES[name]
    expected, found = run_all(fn, amp(fn))(*args)
    assert relative_error(found, expected) < 1e-2
