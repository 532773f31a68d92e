"""Structured primitives keep names, parameters, effects and constants."""

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
    MATMULS,
    assert_all_in,
    assert_close,
    assert_identical,
    dtypes_of,
    equations,
    jit,
)


def equations_named(fn, *args, primitive):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [e for _, e in equations(jaxpr) if e.primitive.name == primitive]


def params_of(fn, primitive, *names, pick=lambda eqn: True):
    found = equations_named(fn, *arguments(), primitive=primitive)
    return [tuple(e.params[n] for n in names) for e in found if pick(e)]


def named(eqn):
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

    for primitive, names in KEEPS.items():
        pick = named if primitive == "jit" else lambda eqn: True
        expected = params_of(fn, primitive, *names, pick=pick)
        assert expected
        assert params_of(amp(fn), primitive, *names, pick=pick) == expected


def test_repeated_block_is_rewritten_once():
    """24 calls of one jitted block hold one and the same rewritten jaxpr."""
    block = jax.jit(layer)

    def fn(ws, x):
        for i in range(24):
            x = block(ws[i], x)
        return x

    ws = jnp.stack([arguments()[0]] * 24)
    calls = [
        e
        for e in equations_named(amp(fn), ws, arguments()[1], primitive="jit")
        if e.params["name"] == "layer"
    ]
    assert len(calls) == 24
    # The first call reads a leaf, the others what the call before has computed.
    assert len({id(e.params["jaxpr"]) for e in calls}) <= 2
    assert len({id(e.params["jaxpr"]) for e in calls[1:]}) == 1


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
        found = re.findall(r'"([^"]*)/(?:dot_general|tanh|sin)"', text)
        return {re.sub(r"jit\([^)]*\)/?|checkpoint/", "", path) for path in found}

    assert any("outer" in path for path in names(fn))
    assert names(amp(fn)) == names(fn)
    stacks = [
        str(e.source_info.name_stack)
        for e in equations_named(amp(fn), *arguments(), primitive="sin")
    ]
    assert stacks == ["outer"]


def test_callbacks_run_once_with_float32():
    """Inside jit and scan too, callbacks see float32, once per original call."""
    seen = []

    def note(x):
        seen.append(np.asarray(x).dtype)

    def pure(x):
        note(x)
        return np.asarray(x) * 2

    def fn(w, x):
        y = x @ w
        jax.debug.callback(note, y)
        y = jax.pure_callback(pure, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        y = jax.experimental.io_callback(pure, y, y @ w, ordered=True)
        return y @ w

    for wrap, count in ((fn, 3), (jax.jit(fn), 3), (functools.partial(scan, fn), 9)):
        seen.clear()
        out = jit(amp(wrap))(*arguments())
        jax.block_until_ready(out)
        jax.effects_barrier()
        assert [str(d) for d in seen] == ["float32"] * count


def test_branches_agree():
    """One branch low, one float32, one a constant: one dtype, and the same values."""
    branches = [lambda w, x: x @ w, lambda w, x: jnp.exp(x), lambda w, x: x * 0 + 3.0]

    def fn(i, w, x):
        return lax.switch(i, branches, w, x)

    for i in range(3):
        assert_close(amp(fn)(i, *arguments()), fn(i, *arguments()), jnp.float16)


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
    assert_all_in(jax.jit(amp(fn)), *args, dtype=jnp.float16, count=2)
    assert_close(jax.jit(amp(fn))(*args), fn(*args), jnp.float16)


def test_ppermute_fills_with_zeros():
    """A constant is no constant any more once devices without a sender hold zero."""

    def shifted(w, x):
        one = lax.ppermute(lax.full((), 1.0), "data", [(i, i + 1) for i in range(7)])
        return (x @ w) * one

    fn = sharded(shifted, check_vma=False)
    assert not np.asarray(fn(*arguments()))[0].any()
    assert_close(amp(fn)(*arguments()), fn(*arguments()), jnp.float16)


def test_float32_policy_rebuilds_custom_rules_exactly():
    """With compute_dtype=float32 every case gives the very same bits."""
    for name in ("custom_jvp", "custom_vjp_tree", "scan_of_remat_of_jit", "cond"):
        original = differentiate(CASES[name].fn, True)
        rebuilt = differentiate(amp(CASES[name].fn, compute_dtype=jnp.float32), True)
        args = arguments()
        assert_identical(jit(rebuilt)(*args), jit(original)(*args))
        found = {d for row in dtypes_of(rebuilt, *args, primitive=MATMULS) for d in row}
        assert found == {"float32"}
