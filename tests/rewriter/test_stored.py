"""`mark_stored`: no other result; roundings, barriers and maxima of each platform."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import FIRST_ORDER, again, normal, squares
from flax_amp import amp
from flax_amp._rewriter import stored as stored_marks
from flax_amp._rewriter.stored import EVERYWHERE, NOWHERE, ON_GPU, mark_stored, stored_p
from helpers import barriers, equations_of, exact_jit, jit, relative_error

W, X = (normal(0, 2, 32, 8) * 0.3)[0, 24:], normal(7, 8, 4, 8)[0]


# --- `mark_stored`: the identity under every transformation ---------------------------


is_marked = lambda primitive, *_, **__: primitive is stored_p  # noqa: E731
# A checkpoint as `amp` writes it.
stored = functools.partial(jax.checkpoint, policy=is_marked, prevent_cse=False)


def marked(x, platforms=EVERYWHERE):
    return jnp.sum(jnp.sin(mark_stored(jnp.cos(x) * 2, platforms, is_rounded=False)))


def unmarked(x):
    return jnp.sum(jnp.sin(jnp.cos(x) * 2))


TRANSFORMS = FIRST_ORDER | {
    "third order of checkpoints": lambda f: jax.grad(
        stored(lambda x: squares(again(stored(f), stored)(x)))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_changes_no_number(transform):
    """On every platform, in a checkpoint or not, and however often it is split."""
    apply = TRANSFORMS[transform]
    functions = [unmarked]
    for platforms in (NOWHERE, ON_GPU, EVERYWHERE):
        function = functools.partial(marked, platforms=platforms)
        functions += [function, stored(function)]
    x = jnp.linspace(0.1, 1, 4)
    expected, *found = jit(lambda x: [apply(f)(x) for f in functions])(x)
    assert max(relative_error(actual, expected) for actual in found) < 1e-5


@pytest.mark.parametrize("is_rounded", [False, True])
def test_the_forward_pass_rounds(is_rounded):
    """It does so where a backward pass follows."""

    def fn(x):
        y = mark_stored(2 * x, NOWHERE, is_rounded=is_rounded)
        return jnp.sum(jnp.sin(y).astype(jnp.float32))

    fn, x = stored(fn), jnp.ones(4, jnp.bfloat16)
    alone, with_gradient = (jit(f).lower(x).as_text() for f in (fn, jax.grad(fn)))
    assert "reduce_precision" not in alone
    assert ("reduce_precision" in with_gradient) == is_rounded


@pytest.mark.parametrize("platforms", [NOWHERE, ON_GPU, EVERYWHERE])
def test_barriers_of_a_marked_value(platforms):
    """The backward pass reads the value through a barrier, on some platforms."""
    fn = stored(functools.partial(marked, platforms=platforms))
    x = jnp.ones(16)
    assert set(EVERYWHERE) == {"cpu", "cuda", "rocm", "tpu"}
    assert barriers(fn, x) == dict.fromkeys(EVERYWHERE, 0)
    assert barriers(jax.grad(fn), x) == {p: int(p in platforms) for p in EVERYWHERE}


# --- maxima --------------------------------------------------------------------------


def shifted(reduce):
    return lambda s: jnp.exp(s - lax.stop_gradient(reduce(s)))


# Functions of scores, with maxima that have a derivative and others that have none.
MAXIMA = {
    "softmax": lambda s: jax.nn.softmax(2 * s),
    "masked softmax": lambda s: jax.nn.softmax(jnp.where(s > 0, s, -jnp.inf)),
    "logsumexp": lambda s: s - jax.nn.logsumexp(s, axis=-1, keepdims=True),
    "maximum": lambda s: jnp.tanh(s - jnp.max(jnp.sin(s), -1, keepdims=True)),
    "minimum": lambda s: jnp.tanh(s - jnp.min(jnp.sin(s), 0, keepdims=True)),
    "of all": shifted(jnp.max),
    "of two axes": shifted(lambda s: jnp.max(s, axis=(0, 1), keepdims=True)),
    "twice": lambda s: jax.nn.softmax(jax.nn.softmax(s) + s, axis=0),
}


def of_maxima(name):
    """Returns a loss of a weight and an array, with a maximum between two matmuls."""
    return lambda w, x: jnp.mean((MAXIMA[name](jnp.tanh(x @ w) * 3) @ w) ** 2)


def over_two(fn):
    """Returns the sum of a loss over two arrays, under `vmap`."""
    return lambda w, x: jax.vmap(fn, (None, 1))(w, jnp.stack([x, 2 * x], 1)).sum()


WAYS_TO_A_MAXIMUM = {
    "straight": lambda fn: fn,
    "vmap": over_two,
    "checkpoint": jax.checkpoint,
    "scan": lambda fn: (
        lambda w, x: lax.scan(
            lambda c, x: (c + fn(w, x), None), 0.0, jnp.stack([x, 2 * x])
        )[0]
    ),
    "twice vmap": lambda fn: over_two(over_two(fn)),
}


# Each maximum in one way, and each way with two maxima: a way sees the marks of the
# maxima, which are alike.
OF_MAXIMA = [
    *zip(MAXIMA, itertools.cycle(WAYS_TO_A_MAXIMUM), strict=False),
    ("softmax", "scan"),
    ("maximum", "twice vmap"),
]


@pytest.mark.parametrize("name, way", OF_MAXIMA)
def test_gradients_through_maxima(name, way, monkeypatch):
    """They are those of a backward pass that stores everything."""
    monkeypatch.setattr(stored_marks, "ON_GPU", ("cpu",))  # computed again here, too
    around = WAYS_TO_A_MAXIMUM[way]
    ours, stored = (
        around(amp(of_maxima(name), recompute=recompute)) for recompute in (True, False)
    )
    # One program of all derivatives compiles in half of the time.
    run = exact_jit(
        lambda *args: [
            order(f)(*args) for order in (jax.grad, again) for f in (ours, stored)
        ]
    )
    first, first_stored, second, second_stored = run(W, X)
    assert relative_error(first, first_stored) < 1e-5
    # In a second derivative, cotangents of halves add up in another order.
    assert relative_error(second, second_stored) < 3e-2


@pytest.mark.parametrize("name", ["softmax", "maximum"])
def test_maxima_of_each_platform(name):
    """The backward pass of GPUs computes a maximum again.

    For a derivative, which compares it with the array, all platforms do.
    """
    grad = jax.jit(jax.grad(amp(of_maxima(name)))).trace(W, X)
    lowered = {p: grad.lower(lowering_platforms=(p,)).as_text() for p in EVERYWHERE}
    counts = {p: text.count("stablehlo.maximum across") for p, text in lowered.items()}
    once = 1 if name == "softmax" else 2
    assert counts == {"cpu": once, "cuda": once + 1, "rocm": once + 1, "tpu": once}


def test_a_maximum_of_what_is_stored_is_stored():
    """No array is stored, or read again, for the sake of its maximum."""
    fn = amp(lambda w, x: jnp.sum(jnp.exp(-jnp.max(jnp.cumsum(x @ w, 0), 0)) @ w))
    backward = [
        eqn
        for eqn in equations_of(jax.grad(fn), W, X, primitive="flax_amp_stored")
        if eqn.params["in_backward"] and eqn.invars[0].aval.dtype == jnp.float32
    ]
    assert backward and all(len(eqn.invars) == 1 for eqn in backward)
