"""Custom derivatives: the user's rule decides, rewritten but never dropped."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import normal
from flax_amp import amp
from helpers import dtypes_of, jit, relative_error, rewritten_in_float32


def test_relu_has_no_gradient_at_zero():
    """Its rule says so, and so it does where `relu` stands in a loop or a batch."""

    def loss(x):
        step = lambda c, _: (jax.nn.relu(c @ jnp.eye(2)), None)  # noqa: E731
        return lax.scan(step, x, None, length=2)[0].sum()

    xs = jnp.array([[[0.0, 2.0]]])
    gradient = jit(jax.vmap(jax.grad(amp(loss))))(xs)
    np.testing.assert_array_equal(gradient, [[[0, 1]]])


def test_an_error_of_a_rule_is_its_own():
    def fails(x):
        raise ValueError("mine")

    @jax.custom_vjp
    def f(x):
        return 2 * x

    f.defvjp(fails, lambda _, ct: (ct,))
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        jax.grad(lambda x: amp(f)(x).sum()), mesh=mesh, in_specs=spec, out_specs=spec
    )
    for derivative in (jax.grad(lambda x: amp(f)(x).sum()), sharded):
        with pytest.raises(ValueError, match="mine"):
            derivative(jnp.ones(2))


def product_with_exact_vjp():
    product = jax.custom_vjp(lambda x, w: x @ w)

    def backward(operands, ct):
        x, w = operands
        return exact_dot(ct, w.T), exact_dot(x.T, ct)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return product


def product_with_exact_jvp():
    product = jax.custom_jvp(lambda x, w: x @ w)

    @product.defjvp
    def jvp(primals, tangents):
        (x, w), (tx, tw) = primals, tangents
        return x @ w, exact_dot(tx, w) + exact_dot(x, tw)

    return product


exact_dot = functools.partial(jnp.dot, precision="highest")


@pytest.mark.parametrize("make", [product_with_exact_vjp, product_with_exact_jvp])
def test_a_rule_that_asks_for_precision_gets_it(make):
    """Also where its function asks for the default, or the process does."""
    product = make()
    run = amp(lambda w, x: product(x, w).sum(), compute_dtype=jnp.bfloat16)
    args = jnp.ones((4, 4)), jnp.ones((2, 4))
    for precision in (None, "bfloat16"):
        with jax.default_matmul_precision(precision):
            if make is product_with_exact_vjp:
                found = dtypes_of(jax.grad(run), *args)
            else:
                found = dtypes_of(lambda *xs: jax.jvp(run, xs, xs), *args)
        assert sorted(found) == [("bfloat16",) * 2, *[("float32",) * 2] * 2]


def scaled_gradient(x, factor):
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, ct: (ct * factor,))
    return same(x)


def in_rule(x, factor):
    product = jax.custom_vjp(lambda x, y: scaled_gradient(x, y) @ y)
    product.defvjp(
        lambda x, y: (scaled_gradient(x, y) @ y, (x, y)),
        lambda xy, ct: (ct @ xy[1].T, xy[0].T @ ct),
    )
    return product(x, factor)


EAGER = {
    "call": in_rule,
    "scan": lambda x, y: lax.scan(lambda c, _: (in_rule(c, y), None), x, None, 2)[0],
}


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_shard_map(name, mesh):
    """It refuses symbolic zeros, also in the bodies and rules that it runs."""
    x = jnp.arange(9.0).reshape(3, 3) / 9
    spec = jax.sharding.PartitionSpec()

    def gradient(fn):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.grad(lambda x, y: mapped(x, y).sum(), argnums=(0, 1))(x, x / 2)

    expected = gradient(EAGER[name])
    exact = gradient(rewritten_in_float32(EAGER[name]))
    jax.tree.map(lambda *xs: np.testing.assert_allclose(*xs, 1e-5), exact, expected)


# --- rules that read and change anything while they are traced -----------------------


def _counting(kind, count):
    """A function whose rule counts the times that it is traced."""
    if kind == "jvp":
        f = jax.custom_jvp(jnp.sin)
        f.defjvp(lambda p, t: (p[0], t[0] * count()))
        return f
    f = jax.custom_vjp(jnp.sin)
    if kind == "forward":
        f.defvjp(lambda x: (x * count(), None), lambda _, ct: (ct,))
    else:
        f.defvjp(lambda x: (x, None), lambda _, ct: (ct * count(),))
    return f


@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
def test_rules_of_a_user_are_traced_for_each_call(kind):
    """As often as in plain JAX, also where the calls are equal."""
    w, x = jnp.eye(4) * 0.9, jnp.ones((2, 4))

    def gradient(transform):
        f = _counting(kind, functools.partial(next, itertools.count(1.0)))

        def loss(w, x):
            for _ in range(8):
                x = f(x @ w)
            return x.sum()

        return jax.jit(jax.grad(transform(loss), argnums=(0, 1)))(w, x)

    plain = gradient(jax.jit)
    lowered = gradient(rewritten_in_float32)
    jax.tree.map(np.testing.assert_allclose, lowered, plain)


# --- rules that close over what was computed under `amp` ------------------------------

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
