"""What is emitted: its size, what is rounded, what is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from _programs import normal
from flax_amp import amp, default_amp_policy
from helpers import equations, relative_error

SIZE = 8
W, X = normal(0, SIZE, SIZE), normal(1, SIZE, SIZE)

# --- the size of what is emitted ------------------------------------------------------


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x * 16) / 16


def dense(x, w):
    return jnp.tanh(x @ w)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))
by_vjp, by_jvp = jax.custom_vjp(dense), jax.custom_jvp(dense)
by_vjp.defvjp(lambda *xs: (dense(*xs), xs), lambda xs, ct: jax.vjp(dense, *xs)[1](ct))
by_jvp.defjvp(lambda xs, tangents: jax.jvp(dense, xs, tangents))
LAYERS = {  # from the results of all former layers, and a weight
    "plain": lambda xs, w: dense(xs[-1], w),
    "residual": lambda xs, w: xs[-1] + dense(xs[-1], w),
    "straight through": lambda xs, w: dense(rounded(xs[-1]), rounded(w)),
    "custom_vjp": lambda xs, w: by_vjp(xs[-1], w),
    "custom_jvp": lambda xs, w: by_jvp(xs[-1], w),
    "sum over all former layers": lambda xs, w: dense(sum(xs), w),
    "jit": lambda xs, w: jax.jit(dense)(xs[-1], w),
}


def size(fn, layer, depth):
    """The number of equations of value and gradient."""

    def loss(w, x):
        xs = [x]
        for _ in range(depth):
            xs.append(layer(xs, w))
        return (xs[-1] ** 2).mean()

    traced = jax.make_jaxpr(jax.value_and_grad(fn(loss)))(W, X)
    return sum(1 for _ in equations(traced))


@pytest.mark.parametrize("name", LAYERS)
def test_the_program_grows_as_the_users_does(name):
    """What layers add is in proportion to what they add to the user's program."""
    layer, depths = LAYERS[name], (15, 30, 60)
    ours, plain = (
        np.diff([size(fn, layer, depth) for depth in depths])
        for fn in (amp, lambda fn: fn)
    )
    ratios = ours / plain
    assert ratios[1] <= 1.1 * ratios[0], ratios
    assert ratios.max() <= 4, ratios


def test_nested_calls():
    def fn(x):
        return jnp.tanh(x @ W).sum()

    for _ in range(60):
        fn = jax.jit(functools.partial(lambda fn, x: fn(x), fn))
    jax.make_jaxpr(jax.grad(amp(fn)))(X)


# --- found by a reader ---------------------------------------------------------------


@pytest.mark.parametrize("steps", [16, 512])
@pytest.mark.parametrize("read", ["arithmetic", "matmul"])
def test_a_scan_adds_up_the_cotangents_of_what_it_closes_over(read, steps):
    """In float32: a half would lose the small terms of many steps."""
    w0, w, x = (
        jax.random.normal(k, (16, 16)) / 4
        for k in jax.random.split(jax.random.key(0), 3)
    )

    def loss(w0):
        h = x @ w0

        def step(c, _):
            seen = jnp.sin(h) if read == "arithmetic" else jax.nn.softmax(c @ h) @ h
            return c + (jnp.tanh(c @ w) * 0.1 + seen) / steps, None

        return (jax.lax.scan(step, jnp.zeros_like(h), length=steps)[0] ** 2).mean()

    assert relative_error(jax.grad(amp(loss))(w0), jax.grad(loss)(w0)) < 0.012


def test_a_comparison_reads_its_number_as_it_is():
    eye = jnp.eye(4)

    def limited(h, limit):
        return jnp.where(jnp.abs(h @ eye) < limit, h @ eye, 0) @ eye

    big = jnp.full((4, 4), 40000.0)
    found = amp(lambda h: limited(h, 1e9), precision="16-mixed")(big)
    assert jnp.array_equal(found, big)
    h = jnp.full((4, 4), 256.0)
    assert jnp.array_equal(amp(lambda h: limited(h, 257.0))(h), h)


def test_a_mask_is_finite_under_vmap():
    """The rank of a mask does not matter."""
    mask, q = jnp.full((2, 4), -1e9), jnp.ones((4, 4))
    masked = lambda m: jax.nn.softmax(q @ q.T + m[None]) @ q  # noqa: E731
    attention = amp(masked, precision="16-mixed")
    found = jax.vmap(attention)(mask)
    assert jnp.array_equal(found, jnp.stack([attention(mask[0])] * 2))
    assert jnp.array_equal(found[0], q)


def test_a_tangent_that_overflows_is_seen():
    def biased(b):
        return (jnp.ones((4, 4)) @ jnp.eye(4) + b[None]) @ jnp.eye(4)

    fn, b = amp(biased, precision="16-mixed"), jnp.ones(4)
    _, tangent = jax.jvp(fn, (b,), (1e5 * b,))
    assert not jnp.isfinite(tangent).any()


def test_bits_are_those_of_float32():
    def bits(h):
        return jax.lax.bitcast_convert_type(h @ jnp.eye(4), jnp.uint32)

    policy = default_amp_policy | {"amp_default": jnp.bfloat16}
    assert amp(bits, amp_policy=policy)(jnp.ones((4, 4))).shape == (4, 4)


@pytest.mark.parametrize("last", [lambda x: x + 64.0 / (1 + x * x), None])
def test_what_is_no_small_step_is_rounded(last):
    """A numerator is no factor, and one small step says nothing of those before."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        x = last(x) if last else x + 0.01 * jnp.sin(x)
        return (x @ ws[0]).sum()

    ws = [jnp.eye(4)] * 3
    found = jax.make_jaxpr(amp(loss))(ws, jnp.ones((2, 4)))
    halves = [e for _, e in equations(found) if e.primitive.name == "flax_amp_stored"]
    adds = [v for e in halves for v in e.outvars if v.aval.shape == (2, 4)]
    assert {str(v.aval.dtype) for v in adds} == {"bfloat16"}
