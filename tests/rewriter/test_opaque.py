"""Functions inside solvers, batching rules and linear calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call

from _programs import batched, squares
from flax_amp import amp
from helpers import (
    HALVES,
    assert_close,
    assert_same_avals,
    dtypes_of,
    equations_of,
    relative_error,
    rewritten_in_float32,
    run_all,
)

# Some programs here run as written.
pytestmark = pytest.mark.filterwarnings("ignore:amp. no matrix product")

B = jnp.arange(1.0, 4.0)
COUNTS = jnp.arange(9.0).reshape(3, 3)
W = 2 * jnp.eye(3) + 0.1 * (COUNTS + COUNTS.T)


def _iterate(matvec, b):
    return lax.fori_loop(0, 60, lambda _, y: y + 0.2 * (b - matvec(y)), b)


def linear_solve(w):
    return lax.custom_linear_solve(lambda v: w @ v, B, _iterate, _iterate)


def direct_solve(w):
    """Solved by linear algebra, of which no part runs low."""
    solve = lambda _, b: jnp.linalg.solve(w, b)  # noqa: E731
    transpose_solve = lambda _, b: jnp.linalg.solve(w.T, b)  # noqa: E731
    return lax.custom_linear_solve(lambda v: w @ v, B, solve, transpose_solve)


def root(w):
    return lax.custom_root(
        lambda y: y + jnp.tanh(w @ y) - B,
        jnp.zeros(3),
        lambda f, y: lax.fori_loop(0, 60, lambda _, y: y - 0.2 * f(y), y),
        lambda g, y: lax.custom_linear_solve(g, y, _iterate, _iterate),
    )


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(lambda w: squares(f(w))),
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w.T,))[1],
    "vmap": batched,
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("solver", [linear_solve, direct_solve, root])
def test_solvers(solver, derivative):
    """Matmuls run low, the vectors of the solver are float32; float32 is exact."""
    transform, dtype = DERIVATIVES[derivative], HALVES[len(derivative) % 2]
    run = transform(amp(solver, compute_dtype=dtype))
    in_float32 = transform(rewritten_in_float32(solver))
    expected, exact, found = run_all(transform(solver), in_float32, run)(W)
    np.testing.assert_allclose(exact, expected, 1e-5, 1e-6)
    assert_close(found, expected, dtype, gradient=True)
    if equations_of(solver, W, primitive="call_hi_primitive"):
        return  # custom_root since JAX 0.11: Python functions, left as they are
    low, found = (dtype.__name__,) * 2, set(dtypes_of(run, W))
    assert found == {low} or (solver is direct_solve and low in found)
    for eqn in equations_of(run, W, primitive=("custom_linear_solve", "while")):
        assert {v.aval.dtype.name for v in eqn.outvars} <= {"float32", "int32"}


@custom_vmap
def tenfold_when_batched(a, b):
    return jnp.tanh(a) @ b


@tenfold_when_batched.def_vmap
def _(size, in_batched, a, b):
    assert in_batched == [True, False]
    return 10 * jnp.tanh(a) @ b, True


@pytest.mark.parametrize("where", ["inside", "outside"])  # of what amp transforms
def test_custom_vmap(where):
    """The user's batching rule stays in force; all of it runs as written."""

    def program(w, lower=lambda fn: fn):
        fn = lower(tenfold_when_batched) if where == "outside" else tenfold_when_batched
        run = lambda w: (fn(w, w), jax.vmap(fn, (0, None))(jnp.stack([w, w.T]), w))  # noqa: E731
        return (lower(run) if where == "inside" else run)(w)

    expected, exact, low = run_all(
        program,
        lambda w: program(w, rewritten_in_float32),
        lambda w: program(w, amp),
    )(W)
    assert relative_error(exact, expected) < 1e-5
    assert_close(low, expected, jnp.bfloat16, gradient=True)


def from_residuals(w, x):
    return linear_call(lambda w, x: x @ w, lambda w, y: 2 * (y @ w.T), w, x)


def of_layers(w, x):
    """Its operand was computed in half precision, and so is what reads its result."""
    return from_residuals(w, x @ w) @ w


def gradient(f):
    return jax.jit(jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2), 1))


def transpose(f):
    return lambda w, x: jax.linear_transpose(lambda x: f(w, x), x)(x)[0]


@pytest.mark.parametrize("wrap", [gradient, transpose])
@pytest.mark.parametrize("fn", [from_residuals, of_layers])
def test_linear_calls(fn, wrap):
    """The user's transpose, twice the true one, is applied; it runs as written."""
    lowered, args = wrap(amp(fn)), (W, W.T)
    actual, expected = lowered(*args), wrap(fn)(*args)
    assert_same_avals(actual, expected)
    assert relative_error(actual, expected) < 2e-2
    assert relative_error(wrap(rewritten_in_float32(fn))(*args), expected) < 1e-6
    assert len(equations_of(amp(fn), *args, primitive="linear_call")) == 1
