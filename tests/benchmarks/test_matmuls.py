"""What is replaced are matmuls, wherever they stand, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_amp
from _programs import PROGRAMS, WITHIN, in_while, loss_of
from _programs import W as WEIGHT
from _programs import X as DATA
from benchmarks.matmuls import cast_matmuls, count_cast, exact_matmuls
from helpers import (
    HALVES,
    MATMULS,
    assert_identical,
    assert_same_avals,
    equations_of,
    jit,
    relative_error,
)

HIGHEST = (lax.Precision.HIGHEST,) * 2


def rounded(x, dtype):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [(4,), ()])
def test_a_matmul_and_its_derivatives_are_rounded_once(dtype, rows):
    """Operands, cotangents and results, of vectors too: with NumPy, in float64."""

    def all_of(w, x, ct):
        out, pull = jax.vjp(lambda w, x: x @ w, w, x)
        return out, *pull(ct)

    rng = np.random.default_rng(0)
    shapes = (5, 3), (*rows, 5), (*rows, 3)
    args = [rng.normal(size=s).astype(np.float32) for s in shapes]
    low_w, low_x, low_ct = (rounded(v, dtype) for v in args)
    by_w = np.atleast_2d(low_x).T @ np.atleast_2d(low_ct)
    wanted = (low_x @ low_w, by_w, low_ct @ low_w.T)
    for a, b in zip(jit(cast_matmuls(all_of, dtype))(*args), wanted, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(a, np.float64), rounded(b, dtype))


NOT_CAST = {
    "a sum": lambda w, x: jnp.vdot(x[0], x[1]),
    "a sum for each row": lambda w, x: jnp.einsum("bi,bi->b", x, x).sum(),
    "a multiplication": lambda w, x: jnp.outer(x[0], w[0]).sum(),
    "a precise one": lambda w, x: jnp.matmul(x, w, precision="highest").sum(),
    "the user's own half": lambda w, x: (
        (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32).sum()
    ),
    "integers": lambda w, x: (x.astype(int) @ w.astype(int)).sum() * w.sum(),
}


@pytest.mark.parametrize("name", NOT_CAST)
def test_what_is_not_cast(name):
    fn = NOT_CAST[name]
    cast = cast_matmuls(jax.grad(fn), jnp.bfloat16)
    assert count_cast(jax.make_jaxpr(fn)(WEIGHT, DATA)) == 0
    assert "bf16" not in str(jax.make_jaxpr(cast)(WEIGHT, DATA))
    assert_identical(jit(cast)(WEIGHT, DATA), jit(jax.grad(fn))(WEIGHT, DATA))


AROUND = WITHIN | {"while": in_while}


def derivative(around, fn):
    return fn if around == "while" else jax.value_and_grad(fn)


@pytest.mark.parametrize("around", AROUND)
def test_matmuls_in_other_code_are_cast(around):
    """As many of them as are in half under `amp`."""
    fn = loss_of(AROUND[around](PROGRAMS["mlp"]))
    whole = derivative(around, fn)
    plain, found = (
        jit(f)(WEIGHT, DATA) for f in (whole, cast_matmuls(whole, jnp.bfloat16))
    )
    assert_same_avals(found, plain)
    assert 1e-4 < relative_error(found, plain) < 2e-2
    explained = flax_amp.explain(fn, backward=False)(WEIGHT, DATA)
    matmuls = [e for e in explained.equations if e.primitive in MATMULS]
    low = sum(e.times for e in matmuls if e.is_low)
    assert count_cast(jax.make_jaxpr(fn)(WEIGHT, DATA)) == low > 0


# Both dtypes in turn: the walk through the code around a matmul does not see the dtype.
@pytest.mark.parametrize(
    "around, dtype", [(around, HALVES[i % 2]) for i, around in enumerate(AROUND)]
)
def test_exact_matmuls(around, dtype):
    """Sums in float32, wherever they are; all other matmuls are as they were."""

    def matmuls(w, x):
        y, low_w = jnp.tanh(x.astype(dtype) @ w.astype(dtype)), w.astype(dtype)
        z = lax.conv_general_dilated(y.T[None], low_w[None], (1,), "SAME")
        return (y @ low_w + z[0].T).astype(jnp.float32) + x @ w

    fn = derivative(around, loss_of(AROUND[around](matmuls)))
    exact = exact_matmuls(fn)
    before, after = (
        equations_of(f, WEIGHT, DATA, primitive=MATMULS) for f in (fn, exact)
    )
    low = [eqn for eqn in before if eqn.invars[0].aval.dtype == dtype]
    summed = [eqn for eqn in after if eqn.params["precision"] == HIGHEST]
    assert len(before) - len(low) == len(after) - len(summed) > 0
    assert len(summed) == len(low) > 2
    assert {v.aval.dtype for eqn in after for v in eqn.invars} == {jnp.dtype("float32")}
    found, plain = (jit(f)(WEIGHT, DATA) for f in (exact, fn))
    assert_same_avals(found, plain)
    assert relative_error(found, plain) < 2 * jnp.finfo(dtype).eps
