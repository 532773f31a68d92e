"""Rules of custom derivatives that close over what was computed under `amp`."""

import jax
import jax.numpy as jnp
import pytest

from _programs import normal
from flax_amp import amp
from helpers import relative_error

W, X = normal(0, 4, 4), normal(1, 3, 4)


def with_vjp(w, x, body):
    """The backward rule reads `h`, which the loss computed, and a number."""
    h, two = jax.lax.stop_gradient(jnp.tanh(x @ w)), jnp.float32(2)

    @jax.custom_vjp
    def f(y):
        return body(y)

    f.defvjp(lambda y: (f(y), jnp.cos(y)), lambda r, g: (g * r * two * h,))
    return (f(x @ w) @ w).sum()


def with_jvp(w, x, body):
    h, two = jax.lax.stop_gradient(jnp.tanh(x @ w)), jnp.float32(2)

    @jax.custom_jvp
    def f(y):
        return body(y)

    f.defjvp(lambda p, t: (f(p[0]), t[0] * h * two))
    return (f(x @ w) @ w).sum()


BODIES = {"light": jnp.sin, "matmul": lambda y: y @ jnp.eye(4)}
TRANSFORMS = {
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap(grad)": lambda f: lambda w: jax.vmap(jax.grad(f))(w[None])[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rule", [with_vjp, with_jvp])
def test_a_rule_that_closes_over_a_traced_value(rule, body, transform):
    def loss(w):
        return rule(w, X, BODIES[body])

    plain = jax.grad(loss)(W)
    found = TRANSFORMS[transform](amp(loss))(W)
    assert relative_error(found, plain) < 0.03


def test_in_a_jitted_layer():
    def loss(w):
        return with_vjp(w, X, jnp.sin)

    found = jax.grad(amp(lambda w: jax.jit(loss)(w)))(W)
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


@pytest.mark.parametrize("around", [jax.jit, lambda f: jax.vmap(f, (None, 0))])
def test_beside_a_value_of_the_function_around_amp(around):
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

        return around(run)(W, limits[0] if around is jax.jit else limits)

    assert relative_error(gradient(amp), gradient(lambda f: f)) < 0.03
