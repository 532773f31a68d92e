"""Matmuls of rows: on a CPU, derivatives of any order add up in float32."""

import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from _programs import DERIVATIVES, WITHIN, P, normal, over_devices, squares
from flax_amp import _compat, amp, default_amp_policy, use_float32_result
from flax_amp._rewriter import row_matmuls
from helpers import (
    assert_all_in,
    assert_close,
    equations_of,
    jit,
    relative_error,
    run_all,
)

# The rounding of a result to bfloat16. Sums in bfloat16 have errors from 0.01 on.
ROUNDING = 0.0025
SIZES = dict(a=2, b=4, c=4, h=4, s=64, q=64, k=64, d=64, e=64)

# What XLA adds up in bfloat16 somewhere, with JAX 0.11 and 0.12.
AFFECTED = """
    bsd,de->bse abcd,de->abce bsd,ed->bse ed,bds->bes bqhd,bkhd->bhqk bsd,bse->de
    dbs,de->bse bds,de->bse ds,ed->se
""".split()
# What it adds up in float32, but has the axes of a batch elsewhere.
MOVED = "bhqk,bkhd->bqhd qdb,kdb->qkb qbd,kbd->qkb sdb,deb->seb bsd,edb->bse".split()
KEPT = """
    sd,de->se sd,ed->se ds,de->se bhqd,bhkd->bhqk bhqk,bhkd->bhqd bsd,d->bs sd,d->s
    d,de->e bsd,bd->bs bsd,dhe->bshe bshe,hed->bsd abcd,cde->abe
""".split()


def rounded(seed, *shape):
    return normal(seed, *shape).astype(jnp.bfloat16).astype(jnp.float32)


def form(spec):
    """The function of an einsum, and its two operands."""
    subscripts = spec.partition("->")[0].split(",")
    shapes = [[SIZES[axis] for axis in axes] for axes in subscripts]
    x, w = (rounded(i, *shape) for i, shape in enumerate(shapes))
    return lambda x, w: jnp.einsum(spec, x, w), x, w


def derivatives(fn, x, w, g, x_other, w_other):
    """The product, and its derivatives of the first and the second order."""

    def by_x(g, w):
        return jax.vjp(lambda x: fn(x, w), x)[1](g)[0]

    def by_w(g, x):
        return jax.vjp(lambda w: fn(x, w), w)[1](g)[0]

    return {
        "product": fn(x, w),
        "by x": by_x(g, w),
        "by w": by_w(g, x),
        "by x, by w": jax.vjp(lambda w: by_x(g, w), w)[1](x_other)[0],
        "by w, by x": jax.vjp(lambda x: by_w(g, x), x)[1](w_other)[0],
        "by w, by g": jax.vjp(lambda g: by_w(g, x), g)[1](w_other)[0],
    }


def errors(fn, x, w, **options):
    """The error of the product and of each derivative."""
    shape = jax.eval_shape(fn, x, w).shape
    args = x, w, rounded(2, *shape), rounded(3, *x.shape), rounded(4, *w.shape)
    fns = amp(fn, **options), fn
    found, exact = jit(lambda *args: [derivatives(f, *args) for f in fns])(*args)
    return {name: relative_error(found[name], exact[name]) for name in exact}


# XLA alone decides how it adds up what is kept: half of these forms show it.
@pytest.mark.parametrize("spec", AFFECTED + MOVED + KEPT[::2])
def test_sums_are_float32(spec):
    found = errors(*form(spec))
    assert all(error < ROUNDING for error in found.values()), found


FLOAT32_RESULT = default_amp_policy | {lax.dot_general_p: use_float32_result}


@pytest.mark.parametrize("spec", ["bsd,de->bse", "bqhd,bkhd->bhqk"])
def test_with_a_float32_result(spec):
    found = errors(*form(spec), amp_policy=FLOAT32_RESULT)
    assert all(error < ROUNDING for error in found.values()), found
    assert found["product"] < 1e-5


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_the_weight_gradient_within_other_code(within):
    fn = within(lambda w, x: jnp.einsum("bsd,de->bse", x, w))
    _, x, w = form("bsd,de->bse")
    g = rounded(2, *jax.eval_shape(fn, w, x).shape)

    def gradient(fn):
        return jax.vjp(lambda w: fn(w, x), w)[1](g)[0]

    found, exact = jit(lambda: (gradient(amp(fn)), gradient(fn)))()
    assert relative_error(found, exact) < 2 * ROUNDING


def of_rows(fn, *args, **options):
    """Whether the matmul of a function is one of rows."""
    (eqn,) = equations_of(amp(fn, **options), *args, primitive="dot_general")
    return max(v.aval.ndim for v in eqn.invars) == 2


# --- what it changes -----------------------------------------------------------------


@pytest.mark.parametrize("spec", AFFECTED + MOVED)
def test_the_matmul_is_one_of_rows_and_columns(spec):
    fn, x, w = form(spec)
    assert_all_in(amp(fn), x, w, dtype=jnp.bfloat16, count=1)
    (eqn,) = equations_of(amp(fn), x, w, primitive="dot_general")
    ((a,), (b,)), (batch, other) = eqn.params["dimension_numbers"]
    n = len(batch)
    assert batch == other == tuple(range(n)) and (a, b) == (n + 1, n)
    assert [v.aval.ndim for v in eqn.invars] == [n + 2, n + 2]


def plain(monkeypatch, fn, *args, **options):
    """The program of a device that needs no other form."""
    with monkeypatch.context() as patch:
        patch.setattr(row_matmuls, "_is_affected", lambda eqn, factors: False)
        return str(jax.make_jaxpr(amp(fn, **options))(*args))


@pytest.mark.parametrize("spec", KEPT)
def test_other_forms_stay_as_they_are(spec, monkeypatch):
    fn, x, w = form(spec)
    assert str(jax.make_jaxpr(amp(fn))(x, w)) == plain(monkeypatch, fn, x, w)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_other_dtypes_stay_as_they_are(dtype, monkeypatch):
    fn, x, w = form("bsd,de->bse")
    options = dict(compute_dtype=dtype)
    found = str(jax.make_jaxpr(amp(fn, **options))(x, w))
    assert found == plain(monkeypatch, fn, x, w, **options)


def test_an_outer_product_stays_as_it_is():
    def fn(x, w):
        with jax.named_scope("outer"):
            return jnp.einsum("bs,d->bsd", x, w)

    policy = default_amp_policy | {"outer": jnp.bfloat16}
    x, w = rounded(0, 2, 3), rounded(1, 4)
    (eqn,) = equations_of(amp(fn, amp_policy=policy), x, w, primitive="dot_general")
    assert [v.aval.shape for v in eqn.invars] == [(2, 3), (4,)]


def test_other_devices_get_the_matmul_as_it_is(monkeypatch):
    fn, x, w = form("bsd,de->bse")
    assert of_rows(fn, x, w)
    with jax.default_device("cpu"):
        assert of_rows(fn, x, w)
    assert "bf16[256,64]" not in plain(monkeypatch, fn, x, w)
    accelerator = types.SimpleNamespace(platform="tpu")
    monkeypatch.setattr(_compat, "default_device", lambda: accelerator)
    assert not of_rows(fn, x, w)


def test_scopes_and_lines_are_those_of_the_matmul():
    def fn(x, w):
        with jax.named_scope("head"):
            return x @ w

    _, x, w = form("bsd,de->bse")
    found = equations_of(amp(fn), x, w, primitive=("reshape", "dot_general"))
    assert len(found) == 3
    assert {str(eqn.source_info.name_stack) for eqn in found} == {"head"}
    lines = {eqn.source_info.traceback and str(eqn.source_info) for eqn in found}
    assert len(lines) == 1


# --- transforms, shapes, devices -----------------------------------------------------


@pytest.mark.parametrize("derive", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives(derive):
    def fn(w, x):
        return squares(jnp.einsum("bsd,de->bse", jnp.tanh(x @ w), w)) / 100

    w, x = normal(0, 4, 4), normal(1, 2, 3, 4)
    found, expected = run_all(derive(amp(fn)), derive(fn))(w, x)
    assert_close(found, expected, jnp.bfloat16, gradient=True)


def test_no_elements():
    fn, x, w = form("bsd,de->bse")
    found = amp(fn)(x[:0], w)
    assert found.shape == (0, 64, 64)
    assert (amp(fn)(x[..., :0], w[:0]) == 0).all()


def test_symbolic_sizes():
    fn, x, w = form("bsd,de->bse")
    b, s = jax.export.symbolic_shape("b, s")
    struct = jax.ShapeDtypeStruct((b, s, 64), jnp.float32)
    gradient = jax.grad(lambda x, w: squares(amp(fn)(x, w)))
    exported = jax.export.export(jax.jit(gradient))(struct, w)
    found = exported.call(x[:3, :5], w)
    expected = jax.grad(lambda x, w: squares(fn(x, w)))(x[:3, :5], w)
    assert_close(found, expected, jnp.bfloat16, gradient=True)


def loss(x, w):
    return squares(x @ w)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_an_axis_on_several_devices_is_not_merged(mesh, spec, monkeypatch):
    _, x, w = form("bsd,de->bse")
    x = jax.device_put(jnp.concatenate([x, x]), NamedSharding(mesh, spec))
    assert not of_rows(lambda x, w: x @ w, x, w)
    compiled = jax.jit(jax.grad(amp(loss), 1)).lower(x, w).compile().as_text()
    assert "all-gather" not in compiled
    # The reshape would gather the sequence.
    monkeypatch.setattr(row_matmuls, "_may_be_sharded", lambda x: False)
    again = jax.jit(jax.grad(amp(lambda *xs: loss(*xs)), 1)).lower(x, w)
    assert ("all-gather" in again.compile().as_text()) == (spec != P("data"))


def test_explicit_sharding():
    _, x, w = form("bsd,de->bse")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, PartitionSpec(None, "data"))
        y = amp(lambda x, w: x @ w)(x, w)
        assert jax.typeof(y).sharding.spec == P(None, "data", None)
        assert not of_rows(lambda x, w: x @ w, x, w)


def test_a_mesh_of_one_device():
    _, x, w = form("bsd,de->bse")
    for kind, merges in ((AxisType.Auto, True), (AxisType.Explicit, False)):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        assert of_rows(lambda x, w: x @ w, placed, w) == merges


def test_each_device_of_a_shard_map_has_rows():
    _, x, w = form("bsd,de->bse")
    fn = over_devices(lambda x, w: x @ w, (P(None, "data"), P()), P(None, "data"))
    assert of_rows(fn, x, w)
    run = jit(jax.grad(amp(lambda x, w: squares(fn(x, w))), 1))
    assert_close(run(x, w), jax.grad(loss, 1)(x, w), jnp.bfloat16, gradient=True)


def test_a_context_with_a_mesh(mesh):
    """Types do not tell of such a mesh."""
    fn, x, w = form("bsd,de->bse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX 0.11
        with mesh:
            assert not of_rows(fn, x, w)
    assert of_rows(fn, x, w)


@pytest.mark.parametrize("spec", AFFECTED[::3])
def test_gradients_of_weights_in_float32(spec):
    """The matmuls of `reduce_in_float32` add up in float32, too."""
    found = errors(*form(spec), reduce_in_float32=True)
    assert all(error < ROUNDING for error in found.values()), found
