"""Weights that are trained inside of a scan, and small steps, are states: float32.

The samples of a step look like the weights of a layer. They multiply twice, in the
prediction and in its gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import normal
from flax_amp import amp
from helpers import equations_of, relative_error

ROWS, WIDE, STEPS, BATCH = 3, 6, 100, 8
W, SAMPLES = normal(0, ROWS, WIDE), normal(1, STEPS, WIDE, BATCH)
LABELS = normal(2, STEPS, ROWS, BATCH)


# No small step in the sense of the rule: it is found in another way.
RATE = 0.05


def trained(predict, w, xs, ys):
    """Returns how far weights move that a scan over batches trains."""

    def step(v, batch):
        x, y = batch
        return v - RATE * jax.grad(lambda v: jnp.mean((predict(v, x) - y) ** 2))(
            v
        ), None

    return jnp.sum((lax.scan(step, w, (xs, ys))[0] - w) ** 2)


def columns(w, xs, ys):
    return trained(lambda w, x: w @ x, w, xs, ys)


def rows(w, xs, ys):
    return trained(
        lambda w, x: x @ w.T, w, jnp.swapaxes(xs, 1, 2), jnp.swapaxes(ys, 1, 2)
    )


def vector(w, xs, ys):
    return trained(lambda w, x: x @ w, w[0], jnp.swapaxes(xs, 1, 2), ys[:, 0])


def activated(w, xs, ys):
    return trained(lambda w, x: jnp.tanh(w) @ x, w, xs, ys)


def under_checkpoint(w, xs, ys):
    return trained(jax.checkpoint(lambda w, x: w @ x), w, xs, ys)


def two_layers(w, xs, ys):
    def step(w, batch):
        x, y = batch

        def loss(w):
            return jnp.mean((w["out"] @ jnp.tanh(w["in"] @ x) - y) ** 2)

        return jax.tree.map(lambda w, g: w - RATE * g, w, jax.grad(loss)(w)), None

    start = {"in": w, "out": w[:, :ROWS]}
    end = lax.scan(step, start, (xs, ys))[0]
    moved = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), end, start)
    return moved["in"] + moved["out"]


@pytest.mark.parametrize(
    "fn", [columns, rows, vector, activated, under_checkpoint, two_layers]
)
def test_trained_weights_are_states(fn):
    lowered = amp(fn)
    (scan,) = equations_of(lowered, W, SAMPLES, LABELS, primitive="scan")
    assert {v.aval.dtype for v in scan.outvars} == {np.dtype("float32")}
    got, exact = (
        jax.jit(jax.value_and_grad(f))(W, SAMPLES, LABELS) for f in (lowered, fn)
    )
    assert relative_error(got[0], exact[0]) < 1e-2
    assert relative_error(got[1], exact[1]) < 2e-2


def test_small_steps_are_a_state():
    def fn(c, stack):
        return jnp.mean(
            lax.scan(lambda c, a: (c + 0.01 * (c @ a), c), c, stack)[1] ** 2
        )

    c, stack = normal(3, 8, 4), normal(4, 200, 4, 4)
    (scan,) = equations_of(amp(fn), c, stack, primitive="scan")
    assert scan.outvars[0].aval.dtype == jnp.float32
    got, exact = (jax.jit(jax.grad(f, (0, 1)))(c, stack) for f in (amp(fn), fn))
    assert relative_error(got[0], exact[0]) < 5e-3
    assert relative_error(got[1], exact[1]) < 1e-2


SLICED = normal(5, 4, 3, 8, 8) / 8


def attention(x, w):  # of one stacked array for three projections
    q, k, v = (x @ w[i] for i in range(3))
    return x + jax.nn.softmax(q @ k.T) @ v


def test_a_stack_of_layers_is_a_stream():
    """Slices of one argument may multiply side by side."""

    def fn(x, stack):
        return jnp.mean(lax.scan(lambda x, w: (attention(x, w), None), x, stack)[0])

    (scan,) = equations_of(amp(fn), normal(6, 4, 8), SLICED, primitive="scan")
    assert scan.outvars[0].aval.dtype == jnp.bfloat16


def test_a_centring_is_no_small_step():
    """A mean is a sum times a small number, and the stream is read to subtract it."""

    def body(x, w):
        centred = x - jnp.sum(x, axis=-1, keepdims=True) / 64
        return x + jnp.tanh(centred @ w), None

    x, stack = normal(7, 4, 64), normal(8, 3, 64, 64) / 8
    (scan,) = equations_of(
        amp(lambda x, w: jnp.mean(lax.scan(body, x, w)[0])), x, stack, primitive="scan"
    )
    assert scan.outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.xfail(reason="arguments do not tell data from weights: docs/limits.md")
def test_weights_that_two_arrays_train():
    """An error by one array is multiplied by another one, as by a second layer."""

    def fn(w, xs, ys, instruments):
        def step(v, batch):
            x, y, z = batch
            return v - RATE * (v @ x - y) @ z.T / BATCH, None

        return jnp.sum((lax.scan(step, w, (xs, ys, instruments))[0] - w) ** 2)

    args = W, SAMPLES, LABELS, normal(9, STEPS, WIDE, BATCH)
    (scan,) = equations_of(amp(fn), *args, primitive="scan")
    assert scan.outvars[0].aval.dtype == jnp.float32
