"""`custom_derivatives.linear_call`: its function and its transpose are rewritten."""

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import linear_call

import flax_amp
from _programs import W, X
from flax_amp import amp
from helpers import (
    HALVES,
    assert_all_in,
    assert_same_avals,
    equations_of,
    relative_error,
    rewritten_in_float32,
)


def from_residuals(w, x):
    return linear_call(lambda w, x: x @ w, lambda w, y: 2 * (y @ w.T), w, x)


def from_closure(w, x):
    h = jnp.sin(w)
    return linear_call(lambda _, x: x @ h, lambda _, y: 2 * (y @ h.T), (), x)


def of_layers(w, x):
    """Its operand was computed in half precision, and so is what reads its result."""
    return from_residuals(w, x @ w) @ w


def of_trees(w, x):
    return linear_call(
        lambda r, xs: {"y": xs[0] @ r["w"] + xs[1]},
        lambda r, y: [2 * (y["y"] @ r["w"].T), y["y"]],
        {"w": w},
        [x, x],
    )["y"]


FUNCTIONS = {f.__name__: f for f in (from_residuals, from_closure, of_layers, of_trees)}
TRANSFORMS = {
    "value": (lambda f: f, 1),
    "jit": (jax.jit, 1),
    "jvp": (lambda f: lambda w, x: jax.jvp(lambda x: f(w, x), (x,), (x,)), 2),
    "grad": (lambda f: jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2), 1), 2),
    "jit of grad": (
        lambda f: jax.jit(jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2), 1)),
        2,
    ),
    "transpose": (
        lambda f: lambda w, x: jax.linear_transpose(lambda x: f(w, x), x)(x)[0],
        1,
    ),
}


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_products_run_in_half(name, transform, dtype):
    """The user's transpose, twice the true one, is what is applied."""
    (wrap, count), fn = TRANSFORMS[transform], FUNCTIONS[name]
    lowered, plain = wrap(amp(fn, compute_dtype=dtype)), wrap(fn)
    count *= 3 if fn is of_layers else 1
    assert_all_in(lowered, W, X, dtype=dtype, count=count)
    actual, expected = lowered(W, X), plain(W, X)
    assert_same_avals(actual, expected)
    assert relative_error(actual, expected) < (2e-2 if dtype == jnp.bfloat16 else 2e-3)
    assert relative_error(wrap(rewritten_in_float32(fn))(W, X), expected) < 1e-6


def test_it_stays_a_linear_call():
    lowered = amp(from_residuals, compute_dtype=jnp.bfloat16)
    assert len(equations_of(lowered, W, X, primitive="linear_call")) == 1


def test_a_residual_has_no_derivative():
    """As in plain JAX; `explain` says of it what there is to say."""
    loss = amp(lambda w, x: from_residuals(w, x).mean(), compute_dtype=jnp.bfloat16)
    with pytest.raises(AssertionError):
        jax.grad(loss)(W, X)
    found = flax_amp.explain(
        lambda w, x: from_residuals(w, x).mean(), compute_dtype=jnp.bfloat16
    )(W, X)
    (note,) = [note for note in found.notes if "backward pass stores" in note]
    assert note.endswith("is not known: AssertionError")
