"""Structured primitives: what is inside them is rewritten, and nothing else changes."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from _structured_rows import LINE, SYMMETRIC, linear_solve
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec as P

from _programs import DERIVATIVES, WITHIN, W, X, layer, over_devices, squares
from flax_amp import amp
from helpers import (
    HALVES,
    assert_all_in,
    assert_close,
    assert_same_avals,
    dtypes_of,
    equations_of,
    relative_error,
    rewritten_in_float32,
    run_all,
)

POLICIES = jax.checkpoint_policies


# --- what is kept --------------------------------------------------------------------


KEEPS = {
    "jit": ("name", "donated_invars", "in_shardings", "out_shardings", "inline"),
    "remat2": ("policy", "prevent_cse"),
    "scan": ("reverse", "unroll", "length"),
    "shard_map": ("mesh", "in_specs", "out_specs", "check_vma"),
}


def test_parameters_are_kept():
    """Names, donation, shardings, policies, unrolling are those of the original."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    shardings = dict(in_shardings=(None, rows), out_shardings=rows)
    options = dict(policy=POLICIES.dots_saveable, prevent_cse=False)

    def fn(w, x):
        x = jax.jit(layer, donate_argnums=1, **shardings)(w, x)
        x = jax.checkpoint(layer, **options)(w, x)
        step = lambda x, _: (layer(w, x), None)  # noqa: E731
        x, _ = lax.scan(step, x, length=4, reverse=True, unroll=2)
        return over_devices(layer, (P(), P("data")), check_vma=False)(w, x)

    def params_of(fn, primitive):
        found = equations_of(fn, W, X, primitive=primitive)
        return [
            tuple(eqn.params[name] for name in KEEPS[primitive])
            for eqn in found
            if primitive != "jit" or eqn.params["name"] == "layer"
        ]

    for primitive in KEEPS:
        expected = params_of(fn, primitive)
        assert expected
        assert params_of(amp(fn, recompute=False), primitive) == expected


AROUND = {name: WITHIN[name] for name in ("jit", "scan", "checkpoint", "custom_vjp")}
AROUND["shard_map"] = lambda fn: over_devices(fn, (P(), P("data")))


@pytest.mark.parametrize("name", AROUND)
def test_named_scopes_survive(name):
    """In the jaxpr and, as operation names, in what XLA gets; without doubling."""

    def fn(w, x):
        with jax.named_scope("outer"):
            return AROUND[name](layer)(w, jnp.sin(x))

    def names(fn):
        text = jax.jit(fn).lower(W, X).as_text(debug_info=True)
        found = re.findall(r'"(?:([^"]*)/)?(?:dot_general|tanh|sin)"', text)
        of_jax = r"jit\([^)]*\)/?|checkpoint/?"
        return {re.sub(of_jax, "", path).strip("/") for path in found}

    assert any("outer" in path for path in names(fn))
    assert names(amp(fn)) == names(fn)
    (eqn,) = equations_of(amp(fn), W, X, primitive="sin")
    assert str(eqn.source_info.name_stack) == "outer"


def test_platform_dependent_branches_stay_apart():
    """A branch for another platform is never lowered for this one."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    def on_tpu(w, x):  # cannot be lowered for a CPU
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x) @ w

    def fn(w, x):
        return lax.platform_dependent(w, x, cpu=layer, tpu=on_tpu)

    args = W, X
    assert_all_in(jax.jit(amp(fn)), *args, dtype=jnp.float32, count=2)
    assert_close(jax.jit(amp(fn))(*args), fn(*args), jnp.float32)


# --- functions inside solvers, batching rules and linear calls ------------------------

# Some programs here run as written.
pytestmark = pytest.mark.filterwarnings("ignore:amp. no matmul")


@pytest.mark.parametrize("name", ["value", "grad", "jvp", "vmap"])
def test_solvers(name):
    """All of it runs as written."""
    dtype = HALVES[len(name) % 2]

    def transformed(lower):
        solve = lower(linear_solve)
        return DERIVATIVES[name](lambda w: squares(solve(w, LINE[:3])))

    run = transformed(functools.partial(amp, compute_dtype=dtype))
    plain, in_float32 = map(transformed, (jax.jit, rewritten_in_float32))
    expected, exact, found = run_all(plain, in_float32, run)(SYMMETRIC)
    assert_close((exact, found), (expected, expected), jnp.float32)
    assert set(dtypes_of(run, SYMMETRIC)) == {("float32",) * 2}


@custom_vmap
def tenfold_when_batched(a, b):
    return jnp.tanh(a) @ b


@tenfold_when_batched.def_vmap
def _(size, in_batched, a, b):
    assert in_batched == [True, False]
    return 10 * jnp.tanh(a) @ b, True


def test_custom_vmap():
    """The user's batching rule stays in force; all of it runs as written."""

    def program(w, lower):
        batch = jnp.stack([w, w.T])
        run = lambda w: jax.vmap(tenfold_when_batched, (0, None))(batch, w)  # noqa: E731
        over = jax.vmap(lower(tenfold_when_batched), (0, None))(batch, w)
        return lower(run)(w), over

    transforms = (jax.jit, rewritten_in_float32, amp)
    expected, exact, low = (program(SYMMETRIC, lower) for lower in transforms)
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
    lowered, args = wrap(amp(fn)), (SYMMETRIC, 2 * SYMMETRIC)
    actual, expected = lowered(*args), wrap(fn)(*args)
    assert_same_avals(actual, expected)
    assert relative_error(actual, expected) < 2e-2
    assert relative_error(wrap(rewritten_in_float32(fn))(*args), expected) < 1e-6
    assert len(equations_of(amp(fn), *args, primitive="linear_call")) == 1
