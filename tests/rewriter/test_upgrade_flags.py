"""Flags of JAX for hi-primitives, over _compat.py, transform.py, policy_warnings.py.

Programs are rewritten as without the flags.
"""

import contextlib
import functools
import inspect
import itertools
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import flax_amp
from _programs import normal
from flax_amp import PolicyWarning, amp, explain
from helpers import assert_all_in, dtypes_of, jit, relative_error

FLAGS = [
    flag
    for flag in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    if hasattr(jax.config, flag)
]
pytestmark = pytest.mark.skipif(not FLAGS, reason="this JAX has none of the flags")
each_set = pytest.mark.parametrize(
    "flags", [*((flag,) for flag in FLAGS), tuple(FLAGS)], ids="+".join
)


@contextlib.contextmanager
def turned_on(flags):
    """Turns flags on as a user does, for all threads."""
    for flag in flags:
        jax.config.update(flag, True)
    try:
        yield
    finally:
        for flag in flags:
            jax.config.update(flag, False)


# --- a program with all three, in all places ------------------------------------------


def new_vjp():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    # The rules have more of what the flags change.
    product.defvjp(
        lambda x, w: (jax.checkpoint(product)(x, w), (x, w)),
        lambda kept, g: (new_jvp()(g, kept[1].T), 2 * (kept[0].T @ g)),
    )
    return product


def new_jvp():
    @jax.custom_jvp
    def product(x, w):
        return x @ w

    @product.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return product(x, w), product(dx, w) + 2 * product(x, dw)

    return product


with_vjp, with_jvp = new_vjp(), new_jvp()


def layer(x, w, is_forward):
    """One layer; JAX has no forward mode for a `custom_vjp`."""
    first = with_jvp if is_forward else with_vjp

    def run(x, w):
        return with_jvp(jnp.tanh(first(x, w)), w)

    return jax.checkpoint(run)(jax.nn.silu(x @ w), w)


def in_scan(run, x, w):
    return jax.lax.scan(lambda x, _: (run(x, w), None), x, length=2)[0]


def in_cond(run, x, w):
    return jax.lax.cond(w[0, 0] > 0, run, lambda x, w: x @ w, x, w)


def in_linen(run, x, w):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return run(x, self.param("w", lambda _: jnp.zeros(w.shape)))

    return nn.remat(Layer)().apply({"params": {"w": w}}, x)


def in_nnx(run, x, w):
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)

        @nnx.remat
        def __call__(self, x):
            return run(x, self.w[...])

    return Layer()(x)


def nested(run, x, w):
    return jax.checkpoint(jax.jit(jax.checkpoint(run)))(run(x, w), w)


PLACES = {
    "plain": lambda run, x, w: run(x, w),
    "jit": lambda run, x, w: jax.jit(run)(x, w),
    "scan": in_scan,
    "cond": in_cond,
    "nn.remat": in_linen,
    "nnx.remat": in_nnx,
    "nested": nested,
}
TRANSFORMS = {
    "grad": jax.grad,
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (0, None)),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w + 1,)),
    "grad of jit": lambda f: jax.jit(jax.grad(f)),
    "grad of grad": lambda f: jax.grad(
        lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2), argnums=1
    ),
}
# The flags act before a place and a transform do: so each place runs under a transform
# of its own, and each transform runs in several places.
DIAGONAL = list(zip(PLACES, itertools.cycle(list(TRANSFORMS)[:4]), strict=False))
MATRIX = [
    *DIAGONAL,
    ("nested", "grad of jit"),
    ("nnx.remat", "jvp"),
    ("plain", "grad of grad"),
    ("scan", "grad of grad"),
]
# All flags together meet the whole matrix. A single flag meets each place.
PROGRAMS = [
    *((pair, tuple(FLAGS)) for pair in MATRIX),
    *((pair, (flag,)) for flag in FLAGS for pair in DIAGONAL),
]
X, W = normal(0, 4, 8), normal(1, 8, 8) / 3


def program(place, transform):
    run = functools.partial(layer, is_forward=transform == "jvp")

    def loss(w, x):
        return jnp.mean(PLACES[place](run, x, w) ** 2)

    w = jnp.stack([W, 2 * W]) if "vmap" in transform else W
    return TRANSFORMS[transform](amp(loss)), (w, X)


@functools.cache
def without_flags(place, transform):
    fn, args = program(place, transform)
    return dtypes_of(fn, *args)


@pytest.mark.parametrize(("pair", "flags"), PROGRAMS, ids=lambda names: "+".join(names))
def test_a_program_is_as_without_the_flags(pair, flags):
    expected = without_flags(*pair)
    with turned_on(flags):
        fn, args = program(*pair)
        assert dtypes_of(fn, *args) == expected
    assert {*itertools.chain(*expected)} == {"bfloat16"}


# A wrong rule gives wrong values under each transform: so each place runs once.
@pytest.mark.parametrize(
    ("place", "transform"), [*DIAGONAL[1:], ("plain", "grad of grad")]
)
def test_values_are_as_without_the_flags(place, transform):
    fn, args = program(place, transform)
    expected = jit(fn)(*args)
    with turned_on(FLAGS):
        fn, args = program(place, transform)
        assert relative_error(jit(fn)(*args), expected) < 1e-6


def checkpointed():
    fn = amp(lambda w: jnp.mean(layer(X, w, is_forward=False) ** 2))
    return jax.grad(jax.checkpoint(fn))


@functools.cache
def checkpointed_without_flags():
    return jit(checkpointed())(W)


@each_set
def test_a_checkpoint_around_is_that_of_the_flags(flags):
    expected = checkpointed_without_flags()
    with turned_on(flags):
        assert {*itertools.chain(*dtypes_of(checkpointed(), W))} == {"bfloat16"}
        assert relative_error(jit(checkpointed())(W), expected) < 1e-6


@functools.cache
def gradient_without_flags():
    fn, args = program("plain", "grad")
    return fn(*args)


@each_set
def test_a_gradient_outside_of_jit_is_as_without_the_flags(flags):
    expected = gradient_without_flags()
    with turned_on(flags):
        fn, args = program("plain", "grad")
        np.testing.assert_array_equal(fn(*args), expected)


@each_set
def test_what_was_traced_before_is_traced_again(flags):
    run = jax.jit(functools.partial(layer, is_forward=False))
    with turned_on(flags):
        jax.grad(lambda w: jnp.sum(run(X, w)))(W)
        assert_all_in(amp(lambda w: jnp.sum(run(X, w))), W, dtype=jnp.bfloat16, count=3)


@each_set
def test_the_flags_are_on_afterwards(flags):
    with turned_on(flags):
        jax.grad(amp(lambda w: jnp.sum(layer(X, w, is_forward=False))))(W)
        assert all(getattr(jax.config, flag) for flag in flags)


# --- hi-primitives that are left ------------------------------------------------------


# Until JAX 0.11 the flags count where a function is decorated.
NEW = {
    "checkpoint": lambda: jax.checkpoint(new_vjp()),
    "custom_vjp": new_vjp,
    "custom_jvp": new_jvp,
}


def from_outside(run, *args):
    """The function of a jaxpr that is traced with the flags on."""
    return jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(run)(*args))


@pytest.mark.parametrize("is_looped", [False, True], ids=["plain", "scan"])
@pytest.mark.parametrize("kind", NEW)
def test_a_jaxpr_from_outside_stays_in_float32_and_warns(kind, is_looped):
    if kind == "custom_jvp" and "jax_custom_jvp3" not in FLAGS:
        pytest.skip("this JAX has no such hi-primitive")

    def loss(w, run):
        x = X @ w
        if is_looped:
            x = jax.lax.scan(lambda x, _: (run(x, w)[0], None), x, length=2)[0]
        else:
            (x,) = run(x, w)
        return jnp.mean(x**2)

    with turned_on(FLAGS):
        outside = from_outside(NEW[kind](), X, W)
        rewritten = amp(functools.partial(loss, run=outside))
        with pytest.warns(PolicyWarning, match="hi-primitives of JAX stay in float32"):
            found = jax.grad(rewritten)(W)
    run = NEW[kind]()
    expected = jax.grad(loss)(W, lambda *args: (run(*args),))
    assert relative_error(found, expected) < 2e-2


def test_explain_shows_what_stays_in_float32():
    with turned_on(FLAGS):
        run = from_outside(jax.checkpoint(lambda x, w: x @ w), X, W)
        found = explain(lambda w, x: jnp.sum(run(x @ w, w)[0]))(W, X)
    assert found.low_share == 0.5
    inner = [row for row in found.equations if row.primitive == "dot_general"][1]
    assert inner.reason == "the hi-primitive RematTraced runs as written"
    policy, matmul = found.problems
    assert "stay in float32: RematTraced (1)" in policy.message
    assert "it stands inside of RematTraced" in matmul.message


def test_no_warning_where_the_user_has_chosen():
    with turned_on(FLAGS), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = from_outside(jax.checkpoint(lambda x, w: x @ w), X, W)
        amp(lambda w, x: flax_amp.amp_stop(run)(x @ w, w)[0])(W, X)


def test_no_warning_where_no_matmul_is_hidden():
    with turned_on(FLAGS), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = from_outside(jax.checkpoint(jnp.tanh), X)
        amp(lambda w, x: run(x @ w)[0] + jnp.searchsorted(x[0], x[1]).sum())(W, X)


HAS_GENERIC_BATCHING = (
    "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
)


@pytest.mark.skipif(not HAS_GENERIC_BATCHING, reason="not in this JAX")
def test_generic_batching_warns():
    run = jax.custom_vjp(lambda x, w: x @ w)
    run.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
        generic_batching=True,
    )
    with pytest.warns(PolicyWarning, match="CustomVJPTraced"):
        amp(lambda w, x: run(x @ w, w))(W, X)


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defremat"), reason="not in this JAX")
def test_a_rule_that_needs_a_flag_says_so():
    run = jax.custom_vjp(lambda x, w: x @ w)
    run.defremat(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, x, w: (x @ w, kept),
        lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
    )
    with turned_on(FLAGS), pytest.raises(NotImplementedError) as caught:
        amp(run)(X, W)
    assert "amp turns jax_custom_vjp3 off." in "".join(caught.value.__notes__)
