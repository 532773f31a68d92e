"""Functions inside solvers, batching rules and linear calls, and precisions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import linear_call

from _programs import batched, squares
from flax_amp import amp, explain
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


def solve_with_aux(w):
    """With how often the map was applied, as the solvers of `jax.scipy` give it."""
    solve = lambda matvec, b: (_iterate(matvec, b), jnp.float32(60))  # noqa: E731
    return lax.custom_linear_solve(lambda v: w @ v, B, solve, solve, has_aux=True)[0]


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
    "vmap of grad": lambda f: batched(jax.grad(lambda w: squares(f(w)))),
    "grad of vmap": lambda f: jax.grad(lambda w: squares(batched(f)(w))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize(
    "solver",
    [linear_solve, direct_solve, solve_with_aux, root],
    ids=lambda f: f.__name__,
)
def test_solvers(solver, derivative):
    """Products run low, the vectors of the solver are float32; float32 is exact."""
    transform, dtype = DERIVATIVES[derivative], HALVES[len(derivative) % 2]
    run = transform(amp(solver, compute_dtype=dtype))
    in_float32 = transform(rewritten_in_float32(solver))
    expected, exact, found = run_all(transform(solver), in_float32, run)(W)
    np.testing.assert_allclose(exact, expected, 1e-5, 1e-6)
    assert_close(found, expected, dtype, gradient=True)
    if equations_of(solver, W, primitive="call_hi_primitive"):
        return  # custom_root since JAX 0.11: Python functions, left as they are
    low, found = (jnp.dtype(dtype).name,) * 2, set(dtypes_of(run, W))
    assert found == {low} or (solver is direct_solve and low in found)
    for eqn in equations_of(run, W, primitive=("custom_linear_solve", "while")):
        dtypes = {v.aval.dtype.name for v in eqn.outvars}
        assert dtypes <= {"float32", "int32"}


def test_conjugate_gradient_keeps_what_asks_for_precision():
    """Its inner products do, the user's map does not."""
    run = amp(
        lambda w: jax.scipy.sparse.linalg.cg(lambda v: w @ v, B)[0],
        compute_dtype="bfloat16",
    )
    found = set(dtypes_of(run, W))
    assert found == {("bfloat16", "bfloat16"), ("float32", "float32")}
    assert_close(run(W), jnp.linalg.solve(W, B), jnp.bfloat16)


@custom_vmap
def tenfold_when_batched(a, b):
    return jnp.tanh(a) @ b


@tenfold_when_batched.def_vmap
def _(size, in_batched, a, b):
    a, b = (
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip((a, b), in_batched, strict=True)
    )
    if not in_batched[0]:
        return 10 * jnp.tanh(a[0]) @ b[0], False
    return 10 * jnp.einsum("nij,njk->nik", jnp.tanh(a), b), True


@sequential_vmap
def one_by_one(a, b):
    return jnp.tanh(a) @ b


VMAPS = {
    "plain": lambda f, w: f(w, w.T),
    "both": lambda f, w: jax.vmap(f)(jnp.stack([w, w.T]), jnp.stack([w, w])),
    "first": lambda f, w: jax.vmap(f, (0, None))(jnp.stack([w, w.T]), w),
    "twice": lambda f, w: jax.vmap(jax.vmap(f))(w[None, None], w[None, None]),
    "jvp_of_vmap": lambda f, w: jax.jvp(
        lambda w: jax.vmap(f)(w[None], w[None]), (w,), (w.T,)
    )[1],
}


@pytest.mark.parametrize("where", ["inside", "outside"])  # of what amp transforms
@pytest.mark.parametrize(
    "function, name",
    [*itertools.product([tenfold_when_batched], VMAPS), (one_by_one, "both")],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
def test_custom_vmap(function, name, where):
    """The user's batching rule stays in force; all of it runs as written."""

    def program(w, dtype):
        if where == "inside":
            return amp(lambda w: VMAPS[name](function, w), compute_dtype=dtype)(w)
        return VMAPS[name](amp(function, compute_dtype=dtype), w)

    expected, exact, low = run_all(
        lambda w: VMAPS[name](function, w),
        lambda w: program(w, "float32"),
        lambda w: program(w, "bfloat16"),
    )(W)
    np.testing.assert_allclose(exact, expected, 1e-5, 1e-5)
    assert_close(low, expected, jnp.bfloat16, gradient=True)


def test_custom_vmap_rule_that_does_not_batch():
    """A result without a batch stays without: `out_axes=None` asks for it."""

    @custom_vmap
    def first(a):
        return a @ W

    first.def_vmap(lambda size, in_batched, a: (a[0] @ W, False))
    run = jax.vmap(rewritten_in_float32(first), out_axes=None)
    np.testing.assert_allclose(run(jnp.stack([W, W])), W @ W, 1e-6)


def test_custom_vmap_in_a_custom_vjp():
    """The one way to differentiate it in reverse."""

    @jax.custom_vjp
    def product(a, b):
        return tenfold_when_batched(a, b)

    product.defvjp(
        lambda a, b: (product(a, b), (a, b)),
        lambda res, ct: (ct @ res[1].T, res[0].T @ ct),
    )
    loss = lambda w: jax.vmap(product)(w[None], w[None]).sum()  # noqa: E731
    expected = jax.grad(loss)(W)
    np.testing.assert_allclose(jax.grad(rewritten_in_float32(loss))(W), expected, 1e-5)
    low = jax.grad(amp(loss, compute_dtype="bfloat16"))
    assert_close(low(W), expected, jnp.bfloat16, gradient=True)
    assert set(dtypes_of(low, W)) == {("bfloat16", "bfloat16")}


# --- linear calls --------------------------------------------------------------------


def from_residuals(w, x):
    return linear_call(lambda w, x: x @ w, lambda w, y: 2 * (y @ w.T), w, x)


def of_layers(w, x):
    """Its operand was computed in half precision, and so is what reads its result."""
    return from_residuals(w, x @ w) @ w


def of_trees(w, x):
    return linear_call(
        lambda r, xs: {"y": xs[0] @ r["w"] + xs[1]},
        lambda r, y: [2 * (y["y"] @ r["w"].T), y["y"]],
        {"w": w},
        [x, x],
    )["y"]


def gradient(f):
    return jax.jit(jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2), 1))


def transpose(f):
    return lambda w, x: jax.linear_transpose(lambda x: f(w, x), x)(x)[0]


@pytest.mark.parametrize("wrap", [gradient, transpose])
@pytest.mark.parametrize("fn", [from_residuals, of_layers, of_trees])
def test_linear_calls(fn, wrap):
    """The user's transpose, twice the true one, is applied; it runs as written."""
    lowered, args = wrap(amp(fn)), (W, W.T)
    actual, expected = lowered(*args), wrap(fn)(*args)
    assert_same_avals(actual, expected)
    assert relative_error(actual, expected) < 2e-2
    assert relative_error(wrap(rewritten_in_float32(fn))(*args), expected) < 1e-6
    called = equations_of(amp(fn), *args, primitive="linear_call")
    assert len(called) == 1


def test_a_residual_of_a_linear_call_has_no_derivative():
    """As in plain JAX; `explain` says of it what there is to say."""
    loss = lambda w, x: from_residuals(w, x).mean()  # noqa: E731
    with pytest.raises(AssertionError):
        jax.grad(amp(loss))(W, W)
    (note,) = [n for n in explain(loss)(W, W).notes if "backward pass stores" in n]
    assert note.endswith("is not known: AssertionError")


# --- precisions ----------------------------------------------------------------------


def test_precision_of_the_process_warns():
    """Once for a trace, with the number of products, wherever they stand."""

    def program(w):
        y = lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w, None), w, None, 2)[0]
        product = jax.jit(jnp.dot)
        return (product(y, w) + product(y, w)).sum()

    run = jax.jit(amp(program, compute_dtype="bfloat16"))
    with jax.default_matmul_precision("highest"):
        with pytest.warns(UserWarning, match="asks for precision.* .3.") as record:
            run(W)
        assert len(record) == 1
        run(W)  # traced already
        rewritten_in_float32(program)(W)
        amp(jnp.sum, compute_dtype="bfloat16")(W)  # no product
    with jax.default_matmul_precision("bfloat16"):
        amp(program, compute_dtype="bfloat16")(W)
    amp(program, compute_dtype="bfloat16")(W)
