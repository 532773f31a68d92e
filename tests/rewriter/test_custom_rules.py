"""Custom derivatives: the user's rule decides, rewritten but never dropped."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import normal, over_devices, with_vjp
from flax_amp import amp
from helpers import dtypes_of, relative_error, rewritten_in_float32


def test_an_error_of_a_rule_is_its_own():
    def fails(x):
        raise ValueError("mine")

    f = jax.custom_vjp(jnp.sin)
    f.defvjp(fails, lambda _, ct: (ct,))
    gradient = jax.grad(lambda x: amp(f)(x).sum())
    for derivative in (gradient, over_devices(gradient, P(), P())):
        with pytest.raises(ValueError, match="mine"):
            derivative(jnp.ones(2))


exact_dot = functools.partial(jnp.dot, precision="highest")
exact_vjp, exact_jvp = jax.custom_vjp(jnp.dot), jax.custom_jvp(jnp.dot)
exact_vjp.defvjp(
    lambda x, w: (jnp.dot(x, w), (x, w)),
    lambda xw, ct: (exact_dot(ct, xw[1].T), exact_dot(xw[0].T, ct)),
)
exact_jvp.defjvp(
    lambda xw, ts: (jnp.dot(*xw), exact_dot(ts[0], xw[1]) + exact_dot(xw[0], ts[1]))
)


@pytest.mark.parametrize("dot", [exact_vjp, exact_jvp], ids=["vjp", "jvp"])
def test_a_rule_that_asks_for_precision_gets_it(dot):
    """Also where its function asks for the default, or the process does."""
    run = amp(lambda x, w: dot(x, w).sum())
    along = lambda *xs: jax.jvp(run, xs, xs)  # noqa: E731
    derivative = jax.grad(run) if dot is exact_vjp else along
    for precision in (None, "bfloat16"):
        with jax.default_matmul_precision(precision):
            found = dtypes_of(derivative, jnp.ones((2, 4)), jnp.ones((4, 4)))
        assert sorted(found) == [("bfloat16",) * 2, *[("float32",) * 2] * 2]


in_rule = with_vjp(lambda x, y: with_vjp(jnp.sin)(x) @ y)


def test_an_eager_shard_map():
    """It refuses symbolic zeros, also in the bodies and rules that it runs."""
    x = jnp.arange(9.0).reshape(3, 3) / 9

    def fn(x, y):
        return lax.scan(lambda c, _: (in_rule(c, y), None), in_rule(x, y), None, 2)[0]

    def gradient(fn):
        mapped = over_devices(fn, P(), P())
        return jax.grad(lambda x, y: mapped(x, y).sum(), argnums=(0, 1))(x, x / 2)

    assert relative_error(gradient(rewritten_in_float32(fn)), gradient(fn)) < 1e-5


def test_rules_of_a_user_are_traced_for_each_call():
    """As often as in plain JAX, also where the calls are equal."""
    w, x = jnp.eye(4) * 0.9, jnp.ones((2, 4))

    def gradient(transform):
        count = functools.partial(next, itertools.count(1.0))
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(lambda x: (x * count(), None), lambda _, ct: (ct * count(),))

        def loss(w, x):
            for _ in range(8):
                x = f(x @ w)
            return x.sum()

        return jax.jit(jax.grad(transform(loss), argnums=(0, 1)))(w, x)

    lowered = gradient(rewritten_in_float32)
    jax.tree.map(np.testing.assert_allclose, lowered, gradient(jax.jit))


# --- rules that close over what was computed under `amp` ------------------------------

W, X = normal(0, 4, 4), normal(1, 3, 4)


def with_rule(kind, body):
    """A loss whose rule reads `h`, which the loss computed, and a number."""

    def loss(w):
        h, two = lax.stop_gradient(jnp.tanh(X @ w)), jnp.float32(2)
        if kind == "vjp":
            f = jax.custom_vjp(body)
            f.defvjp(lambda y: (f(y), jnp.cos(y)), lambda r, g: (g * r * two * h,))
        else:
            f = jax.custom_jvp(body)
            f.defjvp(lambda p, t: (f(p[0]), t[0] * h * two))
        return (f(X @ w) @ w).sum()

    return loss


BODIES = {"light": jnp.sin, "matmul": lambda y: y @ jnp.eye(4)}
TRANSFORMS = {
    "grad": jax.grad,
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap(grad)": lambda f: lambda w: jax.vmap(jax.grad(f))(w[None])[0],
}


@pytest.mark.parametrize(
    "body, transform", [*zip(2 * [*BODIES], TRANSFORMS, strict=True)]
)
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_rule_that_closes_over_a_traced_value(kind, body, transform):
    loss = with_rule(kind, BODIES[body])
    found = TRANSFORMS[transform](amp(loss))(W)
    assert relative_error(found, jax.grad(loss)(W)) < 0.03


@pytest.mark.parametrize("body", BODIES)
def test_what_it_closes_over_has_no_derivative(body):
    """Plain JAX raises errors of several kinds."""

    def loss(w):
        h = jnp.tanh(X @ w)
        f = jax.custom_vjp(BODIES[body])
        f.defvjp(lambda y: (f(y), None), lambda _, g: (g * h,))
        return (f(X @ w) @ w).sum()

    with pytest.raises(TypeError, match="closes over a value that is differentiated"):
        jax.grad(amp(loss))(W)


def test_beside_a_value_of_the_function_around_amp():
    """That tracer is alive, and belongs to no jaxpr of `amp`."""
    limits = jnp.full((2, 1, 1), 0.5)

    def gradient(transform):
        def run(w, limit):
            def loss(w):
                h = jax.lax.stop_gradient(jnp.tanh(X @ w))
                f = jax.custom_vjp(lambda y: y @ jnp.eye(4))
                bounded = lambda _, g: (jnp.clip(g * h, -limit, limit),)  # noqa: E731
                f.defvjp(lambda y: (f(y), None), bounded)
                return (f(X @ w) @ w).sum()

            return jax.grad(transform(loss))(w)

        return jax.vmap(run, (None, 0))(W, limits)

    assert relative_error(gradient(amp), gradient(lambda f: f)) < 0.03
