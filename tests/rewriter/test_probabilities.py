"""Probabilities: float32 for a loss, rounded once where a matmul reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from helpers import (
    HALVES,
    assert_close,
    equations,
    jit,
    run_all,
)

SIZE, CLASSES = 4, 5
TARGET = jnp.roll(jnp.eye(SIZE, CLASSES), 1, axis=1)  # never the first class
SMOOTH = 0.9 * TARGET + 0.1 / CLASSES
GAP = 20.0  # of the logits: most probabilities are 2e-9, which float16 does not have
WEIGHT = jnp.zeros((SIZE, CLASSES)).at[:, 0].set(GAP)
softmax = jax.nn.softmax


def by_hand(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@jax.custom_vjp
def with_vjp(logits):
    return softmax(logits)


with_vjp.defvjp(
    lambda z: (softmax(z), softmax(z)),
    lambda p, ct: (p * (ct - (p * ct).sum(-1, keepdims=True)),),
)


def rows(fn):
    return lambda z: lax.scan(lambda c, row: (c, fn(row)), 0.0, z)[1]


SOFTMAXES = {
    "softmax": softmax,
    "by hand": by_hand,
    "jit": jax.jit(softmax),
    "checkpoint": jax.checkpoint(softmax),
    "custom_vjp": with_vjp,
    "cond": lambda z: lax.cond(z[0, 0] >= 0, softmax, jnp.zeros_like, z),
    "scan": rows(softmax),
}
LOSSES = {  # of the probabilities of each class
    "log": lambda p: -(TARGET * jnp.log(p)).sum(-1).mean(),
    "maximum": lambda p: -(TARGET * jnp.log(jnp.maximum(p, 1e-12))).sum(-1).mean(),
    "focal": lambda p: -(TARGET * (1 - p) ** 2 * jnp.log(p)).sum(-1).mean(),
    # Of small terms only, and scaled: float32 has no others at this gap.
    "entropy": lambda p: 2**20 * (TARGET * p * jnp.log(p)).sum(-1).mean(),
    "kl": lambda p: (SMOOTH * (jnp.log(SMOOTH) - jnp.log(p))).sum(-1).mean(),
    "chosen": lambda p: (
        -jnp.log(jnp.take_along_axis(p, TARGET.argmax(-1)[:, None], -1)).mean()
    ),
}
CASES = [("softmax", name) for name in LOSSES] + [
    (name, "maximum") for name in SOFTMAXES if name != "softmax"
]


def exponentials(fn, *args):
    """Returns the dtypes of the exponentials of a program."""
    found = equations(jax.make_jaxpr(fn)(*args))
    outs = [e.outvars[0] for _, e in found if e.primitive.name == "exp"]
    return {str(v.aval.dtype) for v in outs}


@pytest.mark.parametrize("name, loss", CASES)
def test_of_a_loss_alone(name, loss):
    """Its value and gradient are those of float64, however small what it reads."""
    dtype = HALVES[len(name) % 2]

    def fn(w):
        return LOSSES[loss](SOFTMAXES[name](jnp.eye(SIZE, dtype=w.dtype) @ w))

    lowered = jax.value_and_grad(amp(fn, compute_dtype=dtype))
    assert exponentials(lowered, WEIGHT) == {"float32"}
    value, gradient = jit(lowered)(WEIGHT)
    with jax.enable_x64(True):
        exact = jax.value_and_grad(fn)(np.asarray(WEIGHT, np.float64))
    assert np.isfinite(gradient).all()
    assert_close(value, exact[0], jnp.float32)
    assert_close(gradient, exact[1], dtype, gradient=True)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_returned_alone(name):
    """The result is a float32 one, and so are its digits."""
    fn = lambda w: SOFTMAXES[name](jnp.eye(SIZE) @ w)  # noqa: E731
    np.testing.assert_allclose(*run_all(amp(fn), fn)(WEIGHT), rtol=1e-5)


BETWEEN = {  # what stands between the softmax and the product
    "nothing": lambda p: p,
    "dropout": lambda p: jnp.where(jnp.tri(SIZE, dtype=bool), p / 0.9, 0.0),
    "float mask": lambda p: p * jnp.arange(1.0, 17.0).reshape(SIZE, SIZE),
    "transposes": lambda p: p.T.reshape(SIZE, SIZE).swapaxes(0, 1),
    "jit": lambda p: jax.jit(lambda p: p * 2.0)(p),
    # What a loss reads of the same probabilities changes nothing.
    "loss": lambda p: p + 0 * jnp.log(p).mean(),
}
PAIRS = [("softmax", between) for between in BETWEEN]
PAIRS += [(name, "nothing") for name in ("by hand", "jit", "checkpoint")]


@pytest.mark.parametrize("name, between", PAIRS)
def test_between_products(name, between):
    """Its exponentials are float32, whoever reads them."""
    dtype = HALVES[len(between) % 2]

    def attend(w, x):
        p = SOFTMAXES[name](x @ w)
        return jnp.tanh(BETWEEN[between](p) @ w).sum(), p

    w, x = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE))
    fn = amp(attend, compute_dtype=dtype)
    assert exponentials(fn, w, x) == {"float32"}
    loss = lambda f: jax.value_and_grad(lambda *args: f(*args)[0], (0, 1))  # noqa: E731
    actual, expected = (jit(loss(f))(w, x) for f in (fn, attend))
    assert_close(actual, expected, dtype, gradient=True)
