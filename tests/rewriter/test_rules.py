"""Structured primitives: what is inside them is rewritten, and nothing else changes."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from flax_amp import amp
from helpers import (
    MATMULS,
    assert_all_in,
    assert_close,
    assert_identical,
    assert_same_avals,
    both_halves,
    dtypes_of,
    equations,
    jit,
)

SIZE = 8


def layer(w, x):
    return jnp.tanh(x @ w)


# --- functions with custom derivatives -----------------------------------------------


@jax.custom_jvp
def jvp_layer(w, x):
    return jnp.tanh(x @ w)


@jvp_layer.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


@jax.custom_vjp
def vjp_layer(w, x):
    return jnp.tanh(x @ w)


def _vjp_layer_fwd(w, x):
    y = jnp.tanh(x @ w)
    return y, {"inputs": (w, x), "y": y}


def _vjp_layer_bwd(residuals, ct):
    w, x = residuals["inputs"]
    ct = ct * (1 - residuals["y"] ** 2)
    return x.T @ ct, ct @ w.T


vjp_layer.defvjp(_vjp_layer_fwd, _vjp_layer_bwd)


@jax.custom_vjp
def vjp_rows(w, x, rows):
    """Takes integers, which have no gradient."""
    return x[rows] @ w


def _vjp_rows_bwd(residuals, ct):
    w, x, rows = residuals
    return x[rows].T @ ct, jnp.zeros_like(x).at[rows].add(ct @ w.T), None


vjp_rows.defvjp(lambda *args: (vjp_rows(*args), args), _vjp_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def vjp_static(act, w, x, scale):
    return act(x @ w) * scale


def _vjp_static_fwd(act, w, x, scale):
    return vjp_static(act, w, x, scale), (w, x)


def _vjp_static_bwd(act, scale, residuals, ct):
    return jax.vjp(lambda w, x: act(x @ w) * scale, *residuals)[1](ct)


vjp_static.defvjp(_vjp_static_fwd, _vjp_static_bwd)


@jax.custom_vjp
def vjp_tree(params):
    y = params["x"] @ params["w"]
    return {"y": y, "both": (y * 2, jnp.arange(len(y)))}


def _vjp_tree_bwd(params, ct):
    ct = ct["y"] + 2 * ct["both"][0]
    return ({"w": params["x"].T @ ct, "x": ct @ params["w"].T},)


vjp_tree.defvjp(lambda params: (vjp_tree(params), params), _vjp_tree_bwd)


def from_tree(w, x):
    out = vjp_tree({"w": w, "x": x})
    return out["y"] + jnp.tanh(out["both"][0]) * out["both"][1][:, None] / SIZE


# --- loops and devices ---------------------------------------------------------------


def scan(fn, w, x, length=3, **options):
    return lax.scan(lambda c, _: (fn(w, c), None), x, None, length, **options)[0]


def scan_xs(w, x):
    """Weights come in as xs, results go out as ys."""
    ws = jnp.stack([w, w.T, -w])
    carry, ys = lax.scan(lambda c, v: (layer(v, c), c @ v), x, ws)
    return carry + ys.sum(0)


def while_loop(fn, w, x):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, fn(w, c[1])), (0, x)
    )[1]


def cond_of(w, x):
    return lax.cond(x[0, 0] > -100, layer, lambda w, x: jnp.sin(x @ w), w, x)


def switch(w, x):
    branches = [layer, lambda w, x: x @ w, lambda w, x: x]
    return sum(lax.switch(i, branches, w, x) for i in range(3))


def sharded(fn, check_vma=True):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )


def psum_inside(w, x):
    y = layer(w, x)
    return y - lax.psum(y.mean(0), "data")[None]


def gather_inside(w, x):
    return layer(w, lax.all_gather(x, "data", tiled=True))[:1] * x.mean()


def remat(fn, **options):
    return jax.checkpoint(fn, **options)


POLICIES = jax.checkpoint_policies


class Case(NamedTuple):
    fn: Any
    forward: int  # matmuls in the function ...
    both: int | None  # ... and in its value_and_grad; None: no reverse mode


CASES = {
    "jit": Case(jax.jit(layer), 1, 3),
    "scan_carry": Case(functools.partial(scan, layer), 1, 3),
    "scan_xs_ys": Case(scan_xs, 2, 6),
    "scan_reversed": Case(functools.partial(scan, layer, reverse=True), 1, 3),
    "scan_unrolled": Case(functools.partial(scan, layer, unroll=3), 1, 3),
    "while": Case(functools.partial(while_loop, layer), 1, None),
    "fori_static": Case(
        lambda w, x: lax.fori_loop(0, 3, lambda i, c: layer(w, c), x), 1, 3
    ),
    "fori_dynamic": Case(
        lambda w, x: lax.fori_loop(0, jnp.int32(3), lambda i, c: layer(w, c), x),
        1,
        None,
    ),
    "cond": Case(cond_of, 2, 6),
    "switch": Case(switch, 6, 18),
    "remat": Case(remat(layer), 1, 4),
    "remat_dots": Case(remat(layer, policy=POLICIES.dots_saveable), 1, 3),
    "remat_nothing": Case(remat(layer, policy=POLICIES.nothing_saveable), 1, 4),
    "remat_everything": Case(remat(layer, policy=POLICIES.everything_saveable), 1, 3),
    "remat_cse": Case(remat(layer, prevent_cse=False), 1, 4),
    "custom_jvp": Case(jvp_layer, 1, 3),
    "custom_vjp": Case(vjp_layer, 1, 3),
    "custom_vjp_integers": Case(
        lambda w, x: vjp_rows(w, x, jnp.arange(SIZE) // 2), 1, 3
    ),
    "custom_vjp_nondiff": Case(
        lambda w, x: vjp_static(jnp.tanh, w, x, 2.0), 1, 4
    ),
    "custom_vjp_tree": Case(from_tree, 1, 3),
    "shard_map": Case(sharded(layer), 1, 3),
    "shard_map_unchecked": Case(sharded(layer, check_vma=False), 1, 3),
    "shard_map_psum": Case(sharded(psum_inside), 1, 3),
    "shard_map_psum_unchecked": Case(sharded(psum_inside, check_vma=False), 1, 3),
    "shard_map_gather": Case(sharded(gather_inside), 1, 3),
    "shard_map_of_scan": Case(sharded(functools.partial(scan, layer)), 1, 3),
    "shard_map_of_custom_vjp": Case(sharded(vjp_layer, check_vma=False), 1, 3),
    "vmap_of_scan": Case(
        lambda w, x: jax.vmap(functools.partial(scan, layer, w))(x[:, None])[:, 0], 1, 3
    ),
    "vmap_of_custom_vjp": Case(
        lambda w, x: jax.vmap(vjp_layer, (None, 0))(w, x[:, None])[:, 0], 1, 3
    ),
    "vmap_of_custom_vjp_in_scan": Case(
        lambda w, x: jax.vmap(lambda r: scan(vjp_layer, w, r[None])[0])(x), 1, 3
    ),
    "scan_of_remat_of_jit": Case(
        functools.partial(scan, remat(jax.jit(layer), prevent_cse=False)), 1, 4
    ),
    "jit_of_scan_of_cond": Case(jax.jit(functools.partial(scan, cond_of)), 2, 6),
    "remat_of_custom_vjp": Case(remat(vjp_layer), 1, 4),
    "remat_of_custom_jvp": Case(remat(jvp_layer), 1, 4),
    "scan_in_while": Case(
        functools.partial(while_loop, functools.partial(scan, layer, length=1)), 1, None
    ),
    "scan_in_scan": Case(
        functools.partial(scan, functools.partial(scan, layer)), 1, 3
    ),
    "jit_of_scan_of_custom_vjp": Case(
        jax.jit(functools.partial(scan, vjp_layer)), 1, 3
    ),
    "map": Case(lambda w, x: lax.map(lambda r: layer(w, r[None])[0], x), 1, 3),
    "associative_scan": Case(
        lambda w, x: lax.associative_scan(jnp.matmul, jnp.stack([w, w.T, x]))[-1],
        2,
        6,
    ),
}  # fmt: skip


def arguments(dtype=np.float32):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(SIZE, SIZE)) / np.sqrt(SIZE)
    return w.astype(np.float32).astype(dtype), rng.normal(size=w.shape).astype(
        np.float32
    ).astype(dtype)


def loss_of(fn):
    return lambda w, x: jnp.mean(fn(w, x) ** 2)


def differentiate(fn, has_reverse):
    """Returns value and gradients; in forward mode along one direction."""
    if has_reverse:
        return jax.value_and_grad(loss_of(fn), argnums=(0, 1))
    return lambda w, x: jax.jvp(loss_of(fn), (w, x), (jnp.ones_like(w), x))


@pytest.fixture(scope="module")
def exact():
    """The value and gradients of a case in float64."""

    @functools.cache
    def compute(name):
        case = CASES[name]
        with jax.enable_x64(True):
            w, x = arguments(np.float64)
            return jax.tree.map(
                np.asarray, jit(differentiate(case.fn, case.both))(w, x)
            )

    return compute


@both_halves
@pytest.mark.parametrize("name", CASES)
def test_matmuls_inside_are_low(name, dtype, exact):
    """Every matmul is in the compute dtype, forward and backward, and right."""
    case, args = CASES[name], arguments()
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
    expected, expected_grads = exact(name)
    assert_close(value, expected, dtype)
    assert_close(grads, expected_grads, dtype, gradient=True)


@both_halves
def test_linear_solves(dtype):
    """The solver runs in float32; the products of the map that it inverts run low."""

    def solve(w, x):
        a = jnp.eye(SIZE) * 4 + w
        return lax.custom_linear_solve(
            lambda v: a @ v,
            x,
            lambda _, b: jnp.linalg.solve(a, b),
            lambda _, b: jnp.linalg.solve(a.T, b),
        )

    args = arguments()
    lowered = amp(loss_of(solve), compute_dtype=dtype)
    grad = jax.grad(lowered, argnums=(0, 1))
    assert (jnp.dtype(dtype).name,) * 2 in dtypes_of(grad, *args)
    expected = jax.grad(loss_of(solve), argnums=(0, 1))(*args)
    assert_close(grad(*args), expected, dtype, gradient=True)


@both_halves
def test_custom_root_is_right(dtype):
    """Newton's method, implicitly differentiated: sqrt(2), and 1 / (2 sqrt(2))."""

    def root(a):
        f = lambda y: y * y - a  # noqa: E731
        step = lambda y, f: y - f(y) / (2 * y)  # noqa: E731
        return lax.custom_root(
            f,
            jnp.ones_like(a),
            lambda f, y: lax.fori_loop(0, 8, lambda _, y: step(y, f), y),
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    value, grad = jax.value_and_grad(amp(root, compute_dtype=dtype))(jnp.float32(2.0))
    assert_close(value, np.sqrt(2), dtype)
    assert_close(grad, 1 / np.sqrt(8), dtype, gradient=True)


# --- what a structured primitive keeps -----------------------------------------------


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
