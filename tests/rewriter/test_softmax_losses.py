"""A softmax that a logarithm reads stays in float32, one between products does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _softmaxes import CLASSES, SIZE, SMOOTH, TARGET, with_rule
from flax_amp import amp
from helpers import assert_close, both_halves, equations, jit


def by_hand(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def checkpointed(logits):
    return jax.checkpoint(jax.nn.softmax)(logits)


def in_branch(logits):
    double = lambda x: jax.nn.softmax(2 * x)  # noqa: E731
    return lax.cond(logits[0, 0] >= 0, jax.nn.softmax, double, logits)


SOFTMAXES = {
    "softmax": jax.nn.softmax,
    "by hand": by_hand,
    "jit": jax.jit(jax.nn.softmax),
    "checkpoint": checkpointed,
    "custom_jvp": with_rule,
}
IN_LOSSES = SOFTMAXES | {"vmap": jax.vmap(jax.nn.softmax), "cond": in_branch}
LOSSES = {  # of the probabilities of each class
    "log": lambda p: -(TARGET * jnp.log(p)).sum(-1).mean(),
    "maximum": lambda p: -(TARGET * jnp.log(jnp.maximum(p, 1e-12))).sum(-1).mean(),
    "eps": lambda p: -(TARGET * jnp.log(p + 1e-8)).sum(-1).mean(),
    "clip": lambda p: -(TARGET * jnp.log(jnp.clip(p, 1e-12, 1.0))).sum(-1).mean(),
    "focal": lambda p: -(TARGET * (1 - p) ** 2 * jnp.log(p)).sum(-1).mean(),
    "entropy": lambda p: (p * jnp.log(p)).sum(-1).mean(),
    "kl": lambda p: (SMOOTH * (jnp.log(SMOOTH) - jnp.log(p))).sum(-1).mean(),
    "sum of classes": lambda p: -jnp.log(p[:, 1:].sum(-1)).mean(),
    "chosen": lambda p: (
        -jnp.log(jnp.take_along_axis(p, TARGET.argmax(-1)[:, None], -1)).mean()
    ),
    # A mixture with a gate that was computed in half precision.
    "gated": lambda p: (
        -(TARGET * jnp.log(p * jax.nn.sigmoid(p @ SMOOTH.T @ SMOOTH))).sum(-1).mean()
    ),
    # A product reads it, too.
    "attended": lambda p: (p @ SMOOTH.T).mean() - (TARGET * jnp.log(p)).sum(-1).mean(),
    "attended and summed": lambda p: (
        (p @ SMOOTH.T).mean() - jnp.log((TARGET * p).sum(-1) + 1e-12).mean()
    ),
    "attended and summed up": lambda p: (
        (p @ SMOOTH.T).mean() - jnp.log(jnp.cumsum(p[:, 1:], -1) + 1e-12).mean()
    ),
}


def rounded_numerators(fn, *args):
    found = equations(jax.make_jaxpr(fn)(*args))
    return [eqn for _, eqn in found if eqn.params.get("name") == "rounded_exp"]


@functools.cache
def exactly(loss, softmax):
    """The loss of a weight, and what computes it and its gradient in float32."""
    fn = lambda w: LOSSES[loss](IN_LOSSES[softmax](jnp.eye(SIZE) @ w))  # noqa: E731
    return fn, jit(jax.value_and_grad(fn))


def check(loss, softmax, gaps, dtype):
    """The loss and its gradient are those of float32, whatever the first class has."""
    fn, exact = exactly(loss, softmax)
    lowered = amp(fn, compute_dtype=dtype)
    w = jnp.zeros((SIZE, CLASSES))
    assert not rounded_numerators(jax.grad(lowered), w)
    half = jit(jax.value_and_grad(lowered))
    for gap in gaps:
        w = w.at[:, 0].set(gap)
        value, gradient = half(w)
        expected, expected_gradient = exact(w)
        assert np.isfinite(gradient).all()
        assert_close(value, expected, dtype)
        # The gradient of an entropy is a difference of nearly equal numbers at this
        # gap, in float32 too.
        if not (loss == "entropy" and gap == 20):
            assert_close(gradient, expected_gradient, dtype, gradient=True)


@both_halves
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss, dtype):
    check(loss, "softmax", (4.0, 14.0, 20.0), dtype)


@both_halves
@pytest.mark.parametrize("softmax", [name for name in IN_LOSSES if name != "softmax"])
def test_where_the_softmax_stands(softmax, dtype):
    check("maximum", softmax, [20.0], dtype)


@both_halves
@pytest.mark.parametrize("softmax", [name for name in SOFTMAXES if name != "softmax"])
def test_where_the_softmax_that_a_product_reads_stands(softmax, dtype):
    check("attended and summed", softmax, [20.0], dtype)


@both_halves
def test_a_loss_in_a_loop(dtype):
    def fn(w):
        def step(total, x):
            return total + LOSSES["maximum"](jax.nn.softmax(x @ w)), None

        return lax.scan(step, 0.0, jnp.eye(SIZE)[None])[0]

    w = jnp.zeros((SIZE, CLASSES)).at[:, 0].set(20.0)
    actual, expected = (
        jit(jax.value_and_grad(f))(w) for f in (amp(fn, compute_dtype=dtype), fn)
    )
    assert_close(actual, expected, dtype, gradient=True)


# --- between products ----------------------------------------------------------------

KEEP = jnp.tri(SIZE, dtype=bool)
FLOATS = jnp.arange(1.0, SIZE**2 + 1).reshape(SIZE, SIZE)


def in_half(p, dtype):
    return p.astype(dtype).astype(jnp.float32)


BETWEEN = {  # what stands between the softmax and the product
    "nothing": lambda p, _: p,
    "dropout": lambda p, _: jnp.where(KEEP, p / 0.9, 0.0),
    "boolean mask": lambda p, _: p * KEEP,
    "float mask": lambda p, _: p * FLOATS,
    "transposes": lambda p, _: p.T.reshape(SIZE, SIZE).swapaxes(0, 1),
    "cast": in_half,
    "normalized again": lambda p, _: p / p.sum(-1, keepdims=True),
    "largest": lambda p, _: lax.top_k(p, SIZE)[0],
    "jit": lambda p, _: jax.jit(lambda p: p * 2.0)(p),
}


@both_halves
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("name", BETWEEN)
def test_between_products(name, softmax, dtype):
    """The numerator, the largest array of a transformer, is stored rounded."""

    def attend(w, x):
        p = BETWEEN[name](SOFTMAXES[softmax](x @ w), dtype)
        return jnp.tanh(p @ w).sum(), p  # to return it asks for nothing

    fn = functools.partial(amp, compute_dtype=dtype)(attend)
    assert rounded_numerators(fn, jnp.ones((SIZE, SIZE)), jnp.ones((SIZE, SIZE)))


@both_halves
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_returned_alone(softmax, dtype):
    """The result is a float32 one, and so are its digits."""
    fn = lambda w: SOFTMAXES[softmax](jnp.eye(SIZE) @ w)  # noqa: E731
    w = jnp.zeros((SIZE, CLASSES)).at[:, 0].set(20.0)
    lowered = amp(fn, compute_dtype=dtype)
    np.testing.assert_allclose(lowered(w), fn(w), rtol=1e-5)
