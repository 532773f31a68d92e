"""Gradients that are differentiated again, checkpointed, transposed, batched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Recompute
from jax.test_util import check_grads

from _transformer import bfloat16, exact_jit, norm
from flax_amp import amp
from flax_amp._rewriter.casts import saturating_cast
from flax_amp._rewriter.recompute.residuals import is_stored
from flax_amp._rewriter.recompute.stored import EVERYWHERE, mark_stored, stored_p
from helpers import HALVES, both_halves, equations, jit, relative_error

stored = functools.partial(jax.checkpoint, policy=is_stored, prevent_cse=False)
dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)


def squares(tree):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


def again(function, wrap=lambda f: f):
    """The gradient of the size of a gradient, which runs inside of `wrap`."""
    return jax.grad(wrap(lambda *args: squares(jax.grad(function)(*args))))


def tuned(loss, wrap):
    """The gradient through two unrolled steps of gradient descent."""

    def outer(w, *args):
        for _ in range(2):
            w = w - 0.1 * wrap(jax.grad(loss))(w, *args)
        return loss(w, *args)

    return jax.grad(outer)


def tuned_in_scan(loss, wrap):
    """The same with the steps in a loop."""

    def outer(w, *args):
        def step(w, _):
            return w - 0.1 * jax.grad(loss)(w, *args), None

        return loss(lax.scan(wrap(step), w, length=2)[0], *args)

    return jax.grad(outer)


# What becomes of a loss; `vmap` maps over the last argument.
TRANSFORMS = {
    "grad of grad": again,
    "third order": lambda f: jax.grad(lambda *xs: squares(again(f)(*xs))),
    "checkpoint": lambda f: again(f, jax.checkpoint),
    "checkpoint of dots": lambda f: again(f, dots),
    "checkpoint that stores": lambda f: again(f, stored),
    "third order of checkpoints": lambda f: jax.grad(
        stored(lambda *xs: squares(again(stored(f), stored)(*xs)))
    ),
    "jit": lambda f: jax.jit(again(f, lambda f: stored(jax.jit(f)))),
    "jvp of grad": lambda f: lambda *xs: jax.jvp(jax.grad(f), xs, xs),
    "linearize": lambda f: lambda *xs: jax.linearize(jax.grad(f), *xs)[1](*xs),
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "steps": lambda f: tuned(f, lambda f: f),
    "checkpointed steps": lambda f: tuned(f, jax.checkpoint),
    "scan": lambda f: tuned_in_scan(f, lambda f: f),
    "checkpoint in scan": lambda f: tuned_in_scan(f, jax.checkpoint),
    "storing checkpoint in scan": lambda f: tuned_in_scan(f, stored),
    "vmap": lambda f: (
        lambda *xs: jax.vmap(again(f, jax.checkpoint), (*[None] * (len(xs) - 1), 0))(
            *xs[:-1], xs[-1][None]
        )
    ),
}

# --- the primitives ------------------------------------------------------------------


def marked(x):
    return jnp.sum(jnp.sin(mark_stored(jnp.cos(x) * 2, EVERYWHERE)))


def unmarked(x):
    return jnp.sum(jnp.sin(jnp.cos(x) * 2))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_keep(transform):
    """`mark_stored` under a checkpoint changes no number, however often it is split."""
    x = jnp.linspace(0.1, 1, 4)
    apply = TRANSFORMS[transform]
    actual, expected = jit(
        lambda x: (apply(stored(marked))(x), apply(stored(unmarked))(x))
    )(x)
    assert relative_error(actual, expected) < 1e-5


def test_keep_splits_again():
    """A gradient of a gradient hands the value out once more."""
    jaxpr = jax.make_jaxpr(again(stored(marked), stored))(jnp.ones(4))
    kept = [e for _, e in equations(jaxpr) if e.primitive is stored_p]
    assert {len(e.outvars) for e in kept} == {1, 2, 3}
    assert all(len(e.outvars) == e.params["copies"] for e in kept)


def test_keep_under_policies_that_do_not_store_it():
    """A policy says so by False or by JAX's constant."""

    def is_read_again(policy):
        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(marked, policy=policy)))(
            jnp.ones(4)
        )
        return any(e.params.get("in_backward") for _, e in equations(jaxpr))

    assert is_read_again(is_stored)
    assert not is_read_again(lambda *args, **params: False)
    assert not is_read_again(lambda *args, **params: Recompute)


def test_keep_is_transposed():
    """Its cotangents add up; those that are zero by their structure count for none."""

    def copies(x):
        params = {"platforms": (), "copies": 3, "in_backward": False}
        return stored_p.bind(x, **params)

    x = jnp.arange(4.0)
    for weights in ((1, 2, 4), (0, 2, 0), (1, None, None), (None, None, None)):

        def weighted(x, weights=weights):
            pairs = zip(copies(x), weights, strict=True)
            return sum((y * w for y, w in pairs if w is not None), jnp.zeros(4))

        (cotangent,) = jax.linear_transpose(weighted, x)(x)
        total = sum(w for w in weights if w is not None)
        np.testing.assert_array_equal(cotangent, total * x)
        check_grads(weighted, (x,), order=2, modes=("fwd", "rev"))


@both_halves
@pytest.mark.parametrize("headroom", [False, True])
def test_saturating_cast_is_transposed(dtype, headroom):
    """The transpose is that of the plain cast, batched or not."""
    x = jnp.arange(1.0, 5)

    def cast(x):
        return saturating_cast(x, dtype, headroom)

    y = x.astype(dtype)
    for function in (cast, jax.vmap(cast)):
        (cotangent,) = jax.linear_transpose(function, x)(y)
        assert cotangent.dtype == jnp.float32
        np.testing.assert_array_equal(cotangent, x)
    (cotangent,) = jax.linear_transpose(lambda x: (cast(x) * 0, x)[1], x)(x)
    np.testing.assert_array_equal(cotangent, x)


LINEAR = {
    "product": lambda w, x: x @ w,
    "sum": lambda w, x: jnp.sum(x * 2 + x[::-1] / 3, 0) - x[0] @ w,
    "scan": lambda w, x: lax.scan(lambda c, x: (c * 2 + x @ w, x / 2), x[0], x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: (x @ w) @ w * 2)(x),
    "jit": lambda w, x: jax.jit(lambda x: jnp.concatenate([x @ w, x]))(x * 2),
    "layers": lambda w, x: functools.reduce(lambda x, _: (x @ w) / 2, range(8), x),
}


@pytest.mark.parametrize("mode", ["never", "auto", "always"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_transposed(name, mode):
    """`jax.linear_transpose` of a transformed linear function, as of the plain one."""
    w, x = jnp.eye(4) / 2 + 0.25, jnp.arange(8.0).reshape(2, 4)
    f = functools.partial(LINEAR[name], w)
    y = f(x)
    for dtype in HALVES:
        lowered = amp(f, compute_dtype=dtype, recompute=mode)
        (actual,) = jax.linear_transpose(lowered, x)(y)
        (expected,) = jax.linear_transpose(f, x)(y)
        assert actual.dtype == jnp.float32
        assert relative_error(actual, expected) < 1e-2


# --- through amp ---------------------------------------------------------------------


def straight(w, x):
    return jnp.mean(jnp.tanh(jax.nn.softmax(norm(x @ w)) @ w) ** 2)


def looped(w, x):
    return jnp.mean(lax.scan(lambda x, w: (norm(x @ w) + x, None), x, w[None])[0] ** 2)


def checkpointed(w, x):
    return jax.checkpoint(straight)(w, x)


@functools.cache
def args():
    key = jax.random.key(0)
    return jax.random.normal(key, (4, 4)) * 0.3, jax.random.normal(key, (3, 4))


@functools.cache
def result(loss, transform, mode, is_outer=False):
    """What a transform makes of a loss under amp, and if asked amp of that."""
    function = TRANSFORMS[transform](bfloat16(loss, recompute=mode))
    if is_outer:
        function = bfloat16(function, recompute=mode)
    return exact_jit(function)(*args())


CHEAP = ("checkpoint", "checkpoint in scan")
CASES = [
    pytest.param(
        name,
        loss,
        marks=[] if name in CHEAP and loss is straight else pytest.mark.slow,
    )
    for name in TRANSFORMS
    for loss in (straight, looped, checkpointed)
]


@pytest.mark.parametrize("name, loss", CASES)
def test_modes_agree(name, loss):
    """What is recomputed changes higher derivatives by roundings only."""
    expected = result(loss, name, "never")
    for mode in ("auto", "always"):
        assert relative_error(result(loss, name, mode), expected) < 2e-2


@pytest.mark.parametrize("name", CHEAP)
def test_amp_of_a_gradient_of_amp(name):
    """The primitives of the inner transformation pass through the outer one."""
    expected = result(straight, name, "never")
    found = result(straight, name, "always", is_outer=True)
    assert relative_error(found, expected) < 2e-2


@pytest.mark.parametrize("name", CHEAP)
def test_float32_changes_nothing(name):
    apply = TRANSFORMS[name]
    lowered = amp(straight, compute_dtype=jnp.float32, recompute="always")
    actual, expected = (jit(apply(f))(*args()) for f in (lowered, straight))
    assert relative_error(actual, expected) < 1e-6
