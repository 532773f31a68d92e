"""`mark_stored`: the identity under every transformation, and what it is marked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Recompute
from jax.experimental import jet
from jax.test_util import check_grads

from _programs import FIRST_ORDER, again, squares, stored
from _transformer import bfloat16, inputs, scanned, unrolled, weights
from flax_amp._rewriter.recompute.residuals import is_stored
from flax_amp._rewriter.recompute.stored import (
    EVERYWHERE,
    NOWHERE,
    ON_GPU,
    mark_stored,
    stored_p,
)
from helpers import equations, equations_of, jit, relative_error


def marked(x, platforms=EVERYWHERE):
    return jnp.sum(jnp.sin(mark_stored(jnp.cos(x) * 2, platforms, is_rounded=False)))


def unmarked(x):
    return jnp.sum(jnp.sin(jnp.cos(x) * 2))


TRANSFORMS = FIRST_ORDER | {
    "third order of checkpoints": lambda f: jax.grad(
        stored(lambda x: squares(again(stored(f), stored)(x)))
    ),
    "scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda c, x: (c + f(x), c * f(x)), 0.0, x)[1].sum()
    ),
    "checkpoint in scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda c, x: (stored(f)(x + c), c), 0.0, x)[0]
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


def test_jet_of_a_split_function():
    """Where the value leaves the forward pass, it has no checkpoint around it."""
    x = jnp.linspace(0.1, 1, 4)
    actual, expected = (
        jet.jet(lambda x, f=f: jax.linearize(f, x)[0], (x,), ((x, x),))
        for f in (marked, unmarked)
    )
    jax.tree.map(lambda *xs: np.testing.assert_allclose(*xs, 1e-5), actual, expected)


def test_it_splits_again():
    """A gradient of a gradient hands the value out once more."""
    jaxpr = jax.make_jaxpr(again(stored(marked), stored))(jnp.ones(4))
    kept = [e for _, e in equations(jaxpr) if e.primitive is stored_p]
    assert {len(e.outvars) for e in kept} == {1, 2, 3}
    assert all(len(e.outvars) == e.params["copies"] for e in kept)


@pytest.mark.parametrize(
    "policy, is_kept",
    [
        (is_stored, True),
        (jax.checkpoint_policies.nothing_saveable, False),
        (lambda *args, **params: False, False),
        (lambda *args, **params: Recompute, False),
    ],
    ids=["is_stored", "nothing", "False", "Recompute"],
)
def test_policies_decide_whether_it_is_stored(policy, is_kept):
    """What is not stored is computed again: by a second cosine."""
    grad = jax.grad(jax.checkpoint(marked, policy=policy))
    found = equations(jax.make_jaxpr(grad)(jnp.ones(16)))
    again = [e for path, e in found if path]
    # The derivative of sin is one cosine.
    assert [e.primitive.name for e in again].count("cos") == (1 if is_kept else 2)
    kept = [e.params["in_backward"] for e in again if e.primitive is stored_p]
    assert kept == [is_kept]


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


def test_it_is_transposed():
    """Its cotangents add up; those that are zero by their structure count for none."""

    def copies(x):
        options = dict(platforms=(), is_rounded=False, copies=3, in_backward=False)
        return stored_p.bind(x, **options)

    x = jnp.arange(4.0)
    for factors in ((1, 2, 4), (0, 2, 0), (1, None, None), (None, None, None)):

        def weighted(x, factors=factors):
            pairs = zip(copies(x), factors, strict=True)
            return sum((y * w for y, w in pairs if w is not None), jnp.zeros(4))

        (cotangent,) = jax.linear_transpose(weighted, x)(x)
        total = sum(w for w in factors if w is not None)
        np.testing.assert_array_equal(cotangent, total * x)
        check_grads(weighted, (x,), order=2, modes=("fwd", "rev"))


# --- barriers ------------------------------------------------------------------------

GPUS = ("cuda", "rocm")


def barriers(fn, *args):
    """How many barriers there are in a function compiled for each platform."""
    traced = jax.jit(fn).trace(*args)
    return {
        platform: traced.lower(lowering_platforms=(platform,))
        .as_text()
        .count("optimization_barrier")
        for platform in EVERYWHERE
    }


@pytest.mark.parametrize(
    "platforms, expected", [(NOWHERE, ()), (ON_GPU, GPUS), (EVERYWHERE, EVERYWHERE)]
)
def test_barriers_of_a_marked_value(platforms, expected):
    """The backward pass reads the value through a barrier, on some platforms."""
    fn = stored(functools.partial(marked, platforms=platforms))
    x = jnp.ones(16)
    assert set(EVERYWHERE) == {"cpu", *GPUS, "tpu"}
    assert barriers(fn, x) == dict.fromkeys(EVERYWHERE, 0)
    assert barriers(jax.grad(fn), x) == {p: int(p in expected) for p in EVERYWHERE}


@pytest.mark.parametrize(
    "mode, loss, layers, expected",
    [
        ("never", unrolled, 1, ()),
        ("auto", unrolled, 1, GPUS),
        ("auto", unrolled, 8, (*GPUS, "tpu")),
        pytest.param("always", unrolled, 8, EVERYWHERE, marks=pytest.mark.once),
        pytest.param("auto", scanned, 1, (), marks=pytest.mark.once),
        ("always", scanned, 1, ()),
    ],
)
def test_barriers_of_a_model(mode, loss, layers, expected):
    """None in loops and forward passes; in straight code as the mode says.

    Equal layers, which are calls of one function, have them on a TPU, too.
    """
    args = weights(layers), inputs()
    fn = bfloat16(loss, recompute=mode)
    assert not any(barriers(fn, *args).values())
    found = {p for p, count in barriers(jax.grad(fn), *args).items() if count}
    assert found == set(expected)


@pytest.mark.parametrize("also_read, expected", [(False, 5), (True, 9)])
def test_no_barriers_at_what_only_products_read(also_read, expected):
    """Nothing is computed again from it, as there is from what others read, too."""

    def layers(x, w):
        total = 0
        for _ in range(6):
            x = jnp.sin(jnp.cos(jnp.sin(x @ w)))
            total += jnp.sum(jnp.exp2(x)) if also_read else 0
        return total + jnp.sum(x)

    x = jnp.ones((16, 16))
    fn = jax.grad(bfloat16(layers, merge_layers=False), 1)
    marks = [
        eqn.params["platforms"]
        for eqn in equations_of(fn, x, x, primitive=stored_p.name)
        if eqn.params["in_backward"]
    ]
    # From the last product but one on comes the head, which has no barriers.
    assert marks.count(ON_GPU) == expected
    assert marks.count(NOWHERE) == 11 - expected
