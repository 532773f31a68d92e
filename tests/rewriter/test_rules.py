"""Structured primitives: what is inside them is rewritten, and nothing else changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _structured import (
    CASES,
    POLICIES,
    arguments,
    differentiate,
    layer,
    remat,
    scan,
    sharded,
    vjp_layer,
)
from flax_amp import amp
from helpers import (
    HALVES,
    assert_all_in,
    assert_close,
    assert_same_avals,
    dtypes_of,
    equations_of,
    jit,
)

# --- matmuls, values and gradients ---------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_matmuls_inside_are_low(name):
    """Every matmul is in the compute dtype, forward and backward, and right."""
    case, args, dtype = CASES[name], arguments(), HALVES[len(name) % 2]
    lowered = amp(case.fn, compute_dtype=dtype)
    assert_all_in(lowered, *args, dtype=dtype, count=case.forward)
    assert_same_avals(jax.eval_shape(lowered, *args), jax.eval_shape(case.fn, *args))
    whole = differentiate(lowered, case.both)
    original = differentiate(case.fn, case.both)
    count = case.both or len(dtypes_of(original, *args))
    assert len(dtypes_of(original, *args)) == count
    assert_all_in(whole, *args, dtype=dtype, count=count)
    value, grads = jit(whole)(*args)
    assert_same_avals((value, grads), jax.eval_shape(original, *args))
    with jax.enable_x64(True):
        expected, expected_grads = jit(original)(*arguments(np.float64))
    assert_close(value, expected, dtype)
    assert_close(grads, expected_grads, dtype, gradient=True)


# --- what is kept --------------------------------------------------------------------


def is_of_user(eqn):
    return eqn.params["name"] not in ("saturating_cast", "isinf", "_where")


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

    @functools.partial(
        jax.jit, donate_argnums=1, in_shardings=(None, rows), out_shardings=rows
    )
    def my_layer(w, x):
        return layer(w, x)

    def fn(w, x):
        x = my_layer(w, x)
        x = remat(layer, policy=POLICIES.dots_saveable, prevent_cse=False)(w, x)
        x = scan(layer, w, x, 4, reverse=True, unroll=2)
        return sharded(layer, check_vma=False)(w, x)

    def params_of(fn, primitive):
        found = equations_of(fn, *arguments(), primitive=primitive)
        return [
            tuple(eqn.params[name] for name in KEEPS[primitive])
            for eqn in found
            if primitive != "jit" or is_of_user(eqn)
        ]

    for primitive in KEEPS:
        expected = params_of(fn, primitive)
        assert expected
        assert params_of(amp(fn, recompute=False), primitive) == expected


SCOPED = {
    "straight": layer,
    "jit": jax.jit(layer),
    "scan": functools.partial(scan, layer),
    "remat": remat(layer),
    "custom_vjp": vjp_layer,
    "shard_map": sharded(layer),
}


@pytest.mark.parametrize("name", SCOPED)
def test_named_scopes_survive(name):
    """In the jaxpr and, as operation names, in what XLA gets; without doubling."""

    def fn(w, x):
        with jax.named_scope("outer"):
            return SCOPED[name](w, jnp.sin(x))

    def names(fn):
        text = jax.jit(fn).lower(*arguments()).as_text(debug_info=True)
        found = re.findall(r'"(?:([^"]*)/)?(?:dot_general|tanh|sin)"', text)
        of_jax = r"jit\([^)]*\)/?|checkpoint/?"
        return {re.sub(of_jax, "", path).strip("/") for path in found}

    assert any("outer" in path for path in names(fn))
    assert names(amp(fn)) == names(fn)
    (eqn,) = equations_of(amp(fn), *arguments(), primitive="sin")
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

    args = arguments()
    assert_all_in(jax.jit(amp(fn)), *args, dtype=jnp.bfloat16, count=2)
    assert_close(jax.jit(amp(fn))(*args), fn(*args), jnp.bfloat16)
