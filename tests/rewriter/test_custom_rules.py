"""Custom derivatives: the user's rule decides, rewritten but never dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from flax_amp._rewriter import emit, transform
from helpers import HALVES, dtypes_of, jit, rewritten_in_float32

clipped = jax.custom_vjp(lambda x: x * 1.0)
clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))
wrong = jax.custom_jvp(lambda x: x * 1.0)
wrong.defjvp(lambda p, t: (wrong(p[0]), 7.0 * t[0]))

RULE_CASES = {  # x -> scalar, x, what the user's own rule says
    "clipped": (lambda w, x: 100.0 * clipped((x * w).sum()), 0.0, 1e-3),
    "clipped_low": (lambda w, x: 100.0 * clipped((x @ w).sum()), 0.0, 1e-3),
    "relu_at_0": (lambda w, x: jax.nn.relu((x @ w).sum()), 0.0, 0.0),
    "relu_above_0": (lambda w, x: jax.nn.relu((x @ w).sum()), 2.0, 1.0),
    "wrong": (lambda w, x: wrong((x @ w).sum()), 2.0, 7.0),
}


@pytest.mark.parametrize("name", RULE_CASES)
def test_user_rule_decides_the_gradient(name):
    """Under grad, jit, scan and vmap of grad: the user's number, not the true one."""
    fn, at, slope = RULE_CASES[name]
    dtype = HALVES[len(name) % 2]
    w, x = jnp.ones((1, 1)), jnp.full((1, 1), at)
    lowered = amp(functools.partial(fn, w), compute_dtype=dtype)
    slope = float(jnp.asarray(slope, dtype)) if "low" in name else slope
    twice = amp(lambda x: lax.scan(lambda c, _: (c, lowered(c)), x, None, 2)[1].sum())
    for found, expected in (
        (jax.grad(lowered)(x), [[slope]]),
        (jit(jax.grad(twice))(x), [[2 * slope]]),
        (jit(jax.vmap(jax.grad(lowered)))(jnp.stack([x, x])), [[[slope]], [[slope]]]),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_what_jax_shows_of_a_function_is_short():
    """JAX writes the repr of callables into its debug information, at every call."""
    shown = []

    class Recorder(emit.Emitter):
        def emit(self, plan, operands, **options):
            shown.extend(map(repr, (self, plan)))
            return super().emit(plan, operands, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "Emitter", Recorder)
        jax.make_jaxpr(jax.grad(amp(lambda x: jax.nn.relu(x * 2).sum())))(jnp.ones(3))

    assert len(shown) > 2
    assert max(map(len, shown)) < 200


def test_a_rule_may_close_over_a_large_object():
    """The search for what a rule closes over goes past it, to the traced value."""
    table = {f"key {i}": i for i in range(20_000)}

    def f(w, x):
        total = jnp.sum(x)

        @jax.custom_vjp
        def scaled(w):
            return 2 * w

        scaled.defvjp(lambda w: (2 * w, None), lambda _, ct: (ct * total * len(table),))
        return scaled(w).sum()

    args = jnp.ones(2), jnp.ones(3)
    grad = jax.grad(rewritten_in_float32(f))(*args)
    np.testing.assert_array_equal(grad, jax.grad(f)(*args))


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("number", [jnp.float32, jnp.int32])
def test_a_rule_may_close_over_a_number(kind, number):
    """Such a number is a tracer without a variable. It died with its trace."""

    def f(x):
        factor = number(3)
        rule = getattr(jax, kind)(lambda x: x @ x)
        if kind == "custom_vjp":
            rule.defvjp(lambda x: (x @ x * factor, x), lambda x, ct: (ct @ x * factor,))
        else:
            rule.defjvp(lambda p, t: (p[0] @ p[0], t[0] @ p[0] * factor))
        return rule(x).sum()

    x = jnp.ones((2, 2))
    for dtype in (jnp.float32, jnp.bfloat16):
        grad = jax.grad(amp(f, compute_dtype=dtype))
        assert not any(
            isinstance(const, jax.core.Tracer)
            for const in jax.make_jaxpr(grad)(x).consts
        )
        again = jax.jit(grad)
        for _ in range(2):  # the second call takes another way
            np.testing.assert_array_equal(again(x), jax.grad(f)(x))


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


def test_wide_gradients_leave_jvp_rules_alone():
    """JAX transposes the rule of a `custom_jvp`, whose products must then allow it."""

    @jax.custom_jvp
    def product(x, w):
        return x @ w

    product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
    x, w = jnp.ones((2, 4)), jnp.eye(4)
    lowered = amp(
        lambda w: (product(x, w) ** 2).sum(),
        compute_dtype=jnp.bfloat16,
        reduce_dtype=jnp.float32,
    )
    np.testing.assert_allclose(jax.grad(lowered)(w), 4 * jnp.ones((4, 4)), rtol=1e-2)


def test_calls_of_one_rule_share_their_rewritten_body():
    """Otherwise each ReLU of a network would be rewritten and lowered anew."""

    def network(w, x):
        for i in range(5):
            x = jax.nn.relu(x @ w[i])
        return x.sum()

    grad = jax.jit(jax.grad(amp(network, compute_dtype=jnp.bfloat16)))
    text = grad.lower(jnp.ones((5, 4, 4)), jnp.ones((2, 4))).as_text()
    # One for the function, one with what its derivative reads.
    assert text.count("func.func private @relu") <= 2


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
    "checkpoint": jax.checkpoint(in_rule),
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
