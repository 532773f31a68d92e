"""`recompute`: the same gradients, and nothing expensive twice."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _transformer import (
    CONTEXTS,
    MODES,
    bfloat16,
    block,
    exact_jit,
    inputs,
    keeps,
    layer,
    norm,
    scanned,
    unrolled,
    weights,
)
from flax_amp import amp, make_train_step
from helpers import MATMULS, equations, relative_error

# --- gradients -----------------------------------------------------------------------


@functools.cache
def gradients(context, mode):
    loss = bfloat16(CONTEXTS[context], recompute=mode)
    return exact_jit(jax.value_and_grad(loss, (0, 1)))(weights(), inputs())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_gradients_are_the_same(context, mode):
    """Value and gradients do not depend on what is stored, wherever a block runs."""
    actual, expected = gradients(context, mode), gradients(context, "never")
    assert relative_error(actual, expected) < 1e-6
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(actual))


def small(w, x):
    """A norm, a softmax and two products."""
    return jnp.mean(jnp.tanh(jax.nn.softmax(norm(x @ w)) @ w) ** 2)


def small_scan(w, x):
    return jnp.mean(lax.scan(lambda x, w: (norm(x @ w) + x, None), x, w[None])[0] ** 2)


TRANSFORMS = {
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian vector product": lambda f, w, x: jax.grad(
        lambda w: jnp.vdot(jax.grad(f)(w, x), jnp.cos(w))
    )(w),
    "forward over reverse": lambda f, w, x: jax.jvp(
        lambda w: jax.grad(f)(w, x), (w,), (jnp.cos(w),)
    )[1],
    "checkpoint": lambda f, w, x: jax.grad(jax.checkpoint(f))(w, x),
    "checkpoint of dots": lambda f, w, x: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    )(w, x),
    "vmap of grad": lambda f, w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[:, None]),
    "twice": lambda f, w, x: jax.grad(bfloat16(f))(w, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loss", [small, small_scan])
def test_transforms_of_the_transformed(loss, transform):
    """What JAX makes of the function does not depend on what is stored either."""
    w, x = weights()["out"][0], inputs()[0]

    def result(mode):
        apply = functools.partial(TRANSFORMS[transform], bfloat16(loss, recompute=mode))
        return exact_jit(apply)(w, x)

    # Second derivatives add up in another order.
    bound = (
        2e-2
        if transform in ("hessian vector product", "forward over reverse")
        else 1e-6
    )
    assert relative_error(result("always"), result("never")) < bound


# --- structure -----------------------------------------------------------------------


def count(fn, *args):
    """How often each primitive stands in a program."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return collections.Counter(eqn.primitive.name for _, eqn in equations(jaxpr))


def dropout(p, x):
    keep_mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return block(layer(p, 0), jnp.where(keep_mask, x / 0.5, 0)).sum()


def convolved(p, x):
    image = norm(x)[..., None]
    kernel = p["qkv"][0, :3, :6].reshape(3, 3, 1, 2)
    y = lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jax.nn.gelu(norm(y)) ** 2)


def routed(p, x):
    """Sorts, sums up, gathers and scatters between norms and activations."""
    h = jax.nn.gelu(norm(x @ p["out"][0]))
    h = jnp.exp(jnp.cumsum(jnp.sort(h, axis=-1), axis=1) / 100)
    rows = jnp.arange(len(h))[::-1]
    h = norm(h[rows]) * h
    h = jnp.zeros_like(h).at[rows].add(jnp.sin(h))
    return jnp.sum(norm(h) ** 2)


@jax.custom_vjp
def swish(x):
    return lax.erf_inv(x / 9)


swish.defvjp(lambda x: (swish(x), x), lambda x, g: (g * jnp.cos(x),))


def customized(p, x):
    return jnp.sum(norm(swish(norm(x @ p["out"][0]))) ** 2)


UNIQUE = {
    "dots": (scanned, MATMULS),
    "dots of straight code": (unrolled, MATMULS),
    "dots of a jitted block": (CONTEXTS["jit"], MATMULS),
    "convolutions": (convolved, MATMULS),
    "random numbers": (dropout, ("random_bits", "threefry2x32", "random_wrap")),
    "routing": (routed, ("cumsum", "sort", "gather", "scatter-add", "scatter")),
    "custom derivatives": (customized, ("erf_inv",)),
}


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("name", UNIQUE)
def test_nothing_expensive_twice(name, mode):
    """A gradient has as many expensive equations as one that stores everything."""
    loss, primitives = UNIQUE[name]

    def found(mode):
        counts = count(jax.grad(bfloat16(loss, recompute=mode)), weights(), inputs())
        return {primitive: counts[primitive] for primitive in primitives}

    assert sum(found("never").values()) > 0
    assert found(mode) == found("never")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_effects_run_once_and_in_order(mode, is_ordered):
    """Callbacks between regions run once each, as they stand in the program."""
    seen = []

    def loss(w, x):
        for i in range(3):
            x = norm(jnp.tanh(x @ w)) * 2
            jax.debug.callback(lambda x, i=i: seen.append(i), x, ordered=is_ordered)
        return jnp.sum(x**2)

    grad = jax.grad(bfloat16(loss, recompute=mode))
    jax.block_until_ready(exact_jit(grad)(weights()["out"][0], inputs()[0]))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]
    assert seen == [0, 1, 2] or not is_ordered


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", ["checkpoint", "while", "custom_vjp"])
def test_bodies_with_rules_of_their_own(mode, body):
    """What says itself what is stored, or has no backward pass, is left alone."""

    def loss(w, x):
        def run(x):
            return jnp.sin(norm(jnp.tanh(norm(x @ w)) @ w))

        if body == "checkpoint":
            x = jax.checkpoint(run)(x)
        elif body == "while":
            x = lax.fori_loop(0, jnp.int32(x.size), lambda _, x: run(x), x)
        else:
            f = jax.custom_vjp(run)
            f.defvjp(lambda x: (run(x), x), lambda x, g: (run(x) * g,))
            x = f(x)
        return x.sum()

    transformed = bfloat16(loss, recompute=mode)
    assert not keeps(transformed, weights()["out"][0], inputs()[0])


@pytest.mark.parametrize("mode", MODES)
def test_forward_values_do_not_depend_on_it(mode):
    """`never` leaves no trace in the program; the others mark what is stored."""
    args = weights(), inputs()
    assert bool(keeps(bfloat16(scanned, recompute=mode), *args)) == (mode != "never")
    assert bool(keeps(bfloat16(unrolled, recompute=mode), *args)) == (mode != "never")


# --- how much to compute again -------------------------------------------------------


def test_jitted_block_is_rewritten_once(count_traces):
    """A jitted block that is called 24 times is traced once and keeps one body."""
    body, traces = count_traces(block)
    jitted = jax.jit(body)

    def loss(p, x):
        for _ in range(24):
            x = jitted(layer(p, 0), x)
        return x.sum()

    jaxpr = jax.make_jaxpr(bfloat16(loss))(weights(), inputs())
    bodies = [
        e.params["jaxpr"] for e in jaxpr.eqns if e.params.get("name") == "counted"
    ]
    assert len(bodies) == 24
    # The first takes a float32 argument; how the last are read depends on what follows.
    assert len({id(body) for body in bodies}) <= 4
    assert len({id(body) for body in bodies[1:-2]}) == 1
    assert traces() == 1


@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.silu,
        jax.nn.gelu,
        jax.nn.elu,
        jax.nn.mish,
        jax.nn.softmax,
        jax.nn.softplus,
        jnp.exp,
    ],
)
def test_no_large_float32_between_loops(activation):
    """Of a layer in a loop no float32 array of the size of an activation is stored."""

    def loss(w, x):
        return lax.scan(lambda x, w: (activation(x @ w), None), x, w)[0].sum()

    args = weights(3)["out"], inputs()
    pullback = jax.eval_shape(functools.partial(jax.vjp, bfloat16(loss)), *args)[1]
    shape = (3, *inputs().shape)
    stacks = [a for a in jax.tree.leaves(pullback) if a.shape == shape]
    assert stacks and all(a.dtype == jnp.bfloat16 for a in stacks)


@pytest.mark.parametrize("value", ["sometimes", True, None, "AUTO", 1])
def test_unknown_mode(value):
    """The message says what was given and what is expected."""
    expected = f"recompute: got {value!r}; expected one of 'never', 'auto', 'always'"
    for make in (amp, make_train_step):
        with pytest.raises(ValueError, match=expected):
            make(lambda *args: None, recompute=value)
    with pytest.raises(ValueError, match=expected):
        amp(recompute=value)
