"""`mark_stored`: the identity under every transformation, and what it is marked for."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import Recompute

from _programs import FIRST_ORDER, again, squares
from _transformer import MODES, bfloat16, inputs, scanned, unrolled, weights
from flax_amp._rewriter.stored import EVERYWHERE, NOWHERE, ON_GPU, mark_stored, stored_p
from helpers import equations, jit, relative_error


def is_marked(primitive, *_, **__):
    return primitive is stored_p


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


@pytest.mark.parametrize(
    "policy, is_kept",
    [
        (is_marked, True),
        (jax.checkpoint_policies.nothing_saveable, False),
        (lambda *args, **params: Recompute, False),
    ],
)
def test_policies_decide_whether_it_is_stored(policy, is_kept):
    """What is not stored is computed again: by a second cosine."""
    grad = jax.grad(jax.checkpoint(marked, policy=policy))
    found = equations(jax.make_jaxpr(grad)(jnp.ones(16)))
    names = [eqn.primitive.name for path, eqn in found if path]
    # The derivative of sin is one cosine.
    assert names.count("cos") == (1 if is_kept else 2)


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


# --- barriers ------------------------------------------------------------------------


def barriers(fn, *args):
    """How many barriers there are in a function compiled for each platform."""
    traced = jax.jit(fn).trace(*args)
    lowered = {p: traced.lower(lowering_platforms=(p,)) for p in EVERYWHERE}
    return {p: x.as_text().count("optimization_barrier") for p, x in lowered.items()}


@pytest.mark.parametrize("platforms", [NOWHERE, ON_GPU, EVERYWHERE])
def test_barriers_of_a_marked_value(platforms):
    """The backward pass reads the value through a barrier, on some platforms."""
    fn = stored(functools.partial(marked, platforms=platforms))
    x = jnp.ones(16)
    assert set(EVERYWHERE) == {"cpu", "cuda", "rocm", "tpu"}
    assert barriers(fn, x) == dict.fromkeys(EVERYWHERE, 0)
    assert barriers(jax.grad(fn), x) == {p: int(p in platforms) for p in EVERYWHERE}


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_barriers_of_a_model(loss, recompute):
    """On accelerators in straight code; none in loops and in forward passes."""
    args = weights(), inputs()
    fn = bfloat16(loss, recompute=recompute)
    assert not any(barriers(fn, *args).values())
    found = {p for p, count in barriers(jax.grad(fn), *args).items() if count}
    is_straight = recompute and loss is unrolled
    assert found == ({"cuda", "rocm", "tpu"} if is_straight else set())
