"""The twin rounds what goes into products and comes out of them, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_amp
from _programs import PROGRAMS, WITHIN, loss_of, with_jvp, with_vjp
from _programs import W as WEIGHT
from _programs import X as DATA
from benchmarks.exact import with_exact_products
from benchmarks.products import PRODUCTS
from benchmarks.twin import cast_products, count_cast
from flax_amp._rewriter.primitives import Kind, kind_of
from helpers import (
    HALVES,
    assert_identical,
    assert_same_avals,
    equations_of,
    jit,
    relative_error,
)

HIGHEST = (lax.Precision.HIGHEST,) * 2


def rounded(x, dtype):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)


def product(w, x):
    return x @ w


def test_a_product_and_its_derivatives_are_exact():
    """Operands, cotangents and results: compared with NumPy, in float64."""
    rng = np.random.default_rng(0)
    w, x, ct = (rng.normal(size=s).astype(np.float32) for s in ((5, 3), (4, 5), (4, 3)))
    for dtype in HALVES:
        out, pull = jit(
            lambda dtype=dtype: jax.vjp(cast_products(product, dtype), w, x)
        )()
        low_w, low_x, low_ct = (rounded(v, dtype) for v in (w, x, ct))
        found = (out, *jit(pull)(ct))
        wanted = (low_x @ low_w, low_x.T @ low_ct, low_ct @ low_w.T)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(a, np.float64), rounded(b, dtype))


NOT_CAST = {
    "a sum": lambda w, x: jnp.vdot(x[0], x[1]),
    "a sum for each row": lambda w, x: jnp.einsum("bi,bi->b", x, x).sum(),
    "a multiplication": lambda w, x: jnp.outer(x[0], w[0]).sum(),
    "of one term": lambda w, x: (x[:, :1] @ w[:1]).sum(),
    "a precise one": lambda w, x: jnp.matmul(x, w, precision="highest").sum(),
    "the user's own half": lambda w, x: (
        (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32).sum()
    ),
    "integers": lambda w, x: (x.astype(int) @ w.astype(int)).sum() * w.sum(),
}


@pytest.mark.parametrize("name", NOT_CAST)
def test_what_is_not_cast(name):
    fn = NOT_CAST[name]
    twin = cast_products(fn, jnp.bfloat16)
    assert count_cast(jax.make_jaxpr(fn)(WEIGHT, DATA)) == 0
    assert "bf16" not in str(jax.make_jaxpr(twin)(WEIGHT, DATA))
    found = jit(jax.grad(twin))(WEIGHT, DATA)
    assert_identical(found, jit(jax.grad(fn))(WEIGHT, DATA))


AROUND = (
    WITHIN
    | {"custom_jvp": with_jvp, "custom_vjp": with_vjp}
    | {
        "while": lambda fn: (
            lambda w, x: lax.while_loop(
                lambda c: c[0] < 1, lambda c: (c[0] + 1, fn(w, x)), (0, fn(w, x))
            )[1]
        ),
    }
)


@pytest.mark.parametrize("around", AROUND)
def test_products_in_other_code_are_cast(around):
    """They are the same bits as without it, and as many as in half under `amp`."""
    fn = loss_of(AROUND[around](PROGRAMS["mlp"]))
    twin = cast_products(fn, jnp.bfloat16)
    derivative = jax.value_and_grad if around != "while" else lambda fn: fn
    plain, found = (jit(derivative(f))(WEIGHT, DATA) for f in (fn, twin))
    assert_same_avals(found, plain)
    assert 1e-4 < relative_error(found, plain) < 2e-2
    made = jax.make_jaxpr(fn)(WEIGHT, DATA)
    explained = flax_amp.explain(fn, backward=False)(WEIGHT, DATA)
    products = [e for e in explained.equations if kind_of(e.primitive) is Kind.PRODUCT]
    low = [e.times for e in products if e.is_low]
    assert count_cast(made) == sum(low) > 0


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
def test_the_rule_of_the_user_is_kept_and_cast(rule):
    """It is that of another function here, with a product in it."""
    fn = rule(lambda w, x: x @ w)
    other = lambda w, x: jnp.sin(x @ w) @ w  # noqa: E731
    if rule is with_jvp:
        fn.defjvp(lambda p, t: (fn(*p), jax.jvp(other, p, t)[1]))
    else:
        fn.defvjp(lambda *a: (fn(*a), a), lambda a, g: jax.vjp(other, *a)[1](g))
    twin, wanted = (cast_products(f, jnp.bfloat16) for f in (fn, other))
    cotangent = jnp.cos(jnp.arange(float(DATA.size))).reshape(DATA.shape)
    found, wanted = (
        jit(lambda f=f: jax.vjp(f, WEIGHT, DATA)[1](cotangent))()
        for f in (twin, wanted)
    )
    assert_identical(found, wanted)


def test_a_rule_sees_what_nobody_differentiates_by():
    """Some refuse to run otherwise."""

    @jax.custom_vjp
    def fn(w, x):
        return x @ w

    def forward(w, x):
        assert w.perturbed and not x.perturbed
        return fn(w.value, x.value), x.value

    fn.defvjp(forward, lambda x, g: (x.T @ g, None), symbolic_zeros=True)
    twin = cast_products(loss_of(fn), jnp.bfloat16)
    wanted = cast_products(loss_of(lambda w, x: x @ w), jnp.bfloat16)
    found, wanted = (jit(jax.grad(f))(WEIGHT, DATA) for f in (twin, wanted))
    assert_identical(found, wanted)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("dtype", HALVES)
def test_exact_products(dtype, around):
    """Sums in float32, wherever they are; all other products are as they were."""

    def products(w, x):
        y, low_w = jnp.tanh(x.astype(dtype) @ w.astype(dtype)), w.astype(dtype)
        z = lax.conv_general_dilated(y.T[None], low_w[None], (1,), "SAME")
        return (y @ low_w + z[0].T).astype(jnp.float32) + x @ w

    fn = loss_of(AROUND[around](products))
    fn = jax.grad(fn) if around != "while" else fn
    exact = with_exact_products(fn)
    before, after = (
        equations_of(f, WEIGHT, DATA, primitive=PRODUCTS) for f in (fn, exact)
    )
    low = [eqn for eqn in before if eqn.invars[0].aval.dtype == dtype]
    summed = [eqn for eqn in after if eqn.params["precision"] == HIGHEST]
    assert len(before) - len(low) == len(after) - len(summed) > 0
    assert len(summed) == len(low) > 2
    assert {v.aval.dtype for eqn in after for v in eqn.invars} == {jnp.dtype("float32")}
    found, plain = (jit(f)(WEIGHT, DATA) for f in (exact, fn))
    assert_same_avals(found, plain)
    assert relative_error(found, plain) < 2 * jnp.finfo(dtype).eps


def test_an_exact_product_is_rounded_once():
    """Compared with NumPy, in float64; but for what lies between two halves."""
    w, x = np.random.default_rng(0).normal(size=(2, 64, 64))
    for dtype in HALVES:
        found = jit(with_exact_products(product))(
            *(jnp.asarray(v, dtype) for v in (w, x))
        )
        wanted = rounded(rounded(x, dtype) @ rounded(w, dtype), dtype)
        assert found.dtype == dtype
        assert np.mean(np.asarray(found, np.float64) != wanted) < 0.002
