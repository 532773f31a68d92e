"""Rules that close over values computed under `amp`: as in plain JAX, or an error."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import normal
from flax_amp import amp
from helpers import relative_error

W, DATA = normal(0, 4, 4), normal(1, 3, 4)


def with_rule(kind, body, stop=lax.stop_gradient):
    """A loss whose rule reads `h`, which the loss computed, and a number."""

    def loss(w):
        h, two = stop(jnp.tanh(DATA @ w)), jnp.float32(2)
        if kind == "vjp":
            f = jax.custom_vjp(body)
            f.defvjp(lambda y: (f(y), jnp.cos(y)), lambda r, g: (g * r * two * h,))
        else:
            f = jax.custom_jvp(body)
            f.defjvp(lambda p, t: (f(p[0]), t[0] * h * two))
        return (f(DATA @ w) @ w).sum()

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
    loss = with_rule("vjp", BODIES[body], stop=lambda h: h)
    with pytest.raises(TypeError, match="closes over a value that is differentiated"):
        jax.grad(amp(loss))(W)


def test_beside_a_value_of_the_function_around_amp():
    """That tracer is alive, and belongs to no jaxpr of `amp`."""
    limits = jnp.full((2, 1, 1), 0.5)

    def gradient(transform):
        def run(w, limit):
            def loss(w):
                h = jax.lax.stop_gradient(jnp.tanh(DATA @ w))
                f = jax.custom_vjp(lambda y: y @ jnp.eye(4))
                bounded = lambda _, g: (jnp.clip(g * h, -limit, limit),)  # noqa: E731
                f.defvjp(lambda y: (f(y), None), bounded)
                return (f(DATA @ w) @ w).sum()

            return jax.grad(transform(loss))(w)

        return jax.vmap(run, (None, 0))(W, limits)

    assert relative_error(gradient(amp), gradient(lambda f: f)) < 0.03
