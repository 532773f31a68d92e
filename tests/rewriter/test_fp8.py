"""Matmuls in fp8: their numbers, every transform of them, which ones, and where."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

from _programs import DERIVATIVES, normal, over_devices
from flax_amp import (
    AmpTrainState,
    PolicyWarning,
    amp,
    amp_stop,
    default_amp_policy,
    explain,
    make_eval_step,
    make_train_step,
    use_fp8,
)
from flax_amp._rewriter.fp8 import (
    BACKWARD,
    FORWARD,
    fp8_dot_p,
    has_fp8,
    quantize,
    scale_exponent,
)
from helpers import (
    MATMULS,
    assert_close,
    assert_identical,
    equations_of,
    relative_error,
    run_all,
)

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:amp. no matmul of this"),
]

FP8, REAL = use_fp8(emulate=True), use_fp8(emulate=False)
NAME = fp8_dot_p.name


def fp8(fn, recipe=FP8, **options):
    """Returns `amp(fn)` with its matmuls in fp8, small ones and the last one, too."""

    @functools.wraps(fn)
    def scoped(*args, **kwargs):
        with jax.named_scope("net"):
            return fn(*args, **kwargs)

    return amp(scoped, amp_policy=default_amp_policy | {"net": recipe}, **options)


def count(fn, *args):
    """Returns how many matmuls run in fp8 in `fn(*args)`, and how many others."""
    return tuple(len(equations_of(fn, *args, primitive=p)) for p in (NAME, MATMULS))


# --- numbers -------------------------------------------------------------------------

# Every number of bfloat16, each for itself, and float32 numbers around the borders.
BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
_NEAR = np.float32([1.75, 1.5, 2.0, 1.0, 448.0, 57344.0, 3.3e38, 1e-30, 1.2e-38])
FLOAT32 = np.concatenate(
    [_NEAR, np.nextafter(_NEAR, np.float32(0)), np.nextafter(_NEAR, np.float32(np.inf))]
)


@pytest.mark.parametrize("format_", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("numbers", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_numbers_are_rounded_with_the_least_exponent_that_fits(numbers, format_):
    info = ml_dtypes.finfo(format_)
    x = jnp.asarray(numbers)
    e = scale_exponent(x, format_, ())
    power = np.exp2(np.asarray(e, np.float64))
    with np.errstate(invalid="ignore"):  # of a NaN
        wide = numbers.astype(np.float64)
    is_normal = np.isfinite(wide) & (np.abs(wide) > 2.0**-110)
    scaled = np.abs(wide)[is_normal] / power[is_normal]
    assert (scaled <= float(info.max)).all() and (2 * scaled > float(info.max)).all()
    # What is smaller, or no number, gets a power of two that is a number itself.
    assert e.min() >= -126
    # None saturates or becomes a NaN.
    actual = np.asarray(quantize(x, e, format_).astype(jnp.float32), np.float64) * power
    assert (np.isfinite(actual) == np.isfinite(wide)).all()
    errors = np.abs(actual - wide)[is_normal] / np.abs(wide)[is_normal]
    assert errors.max() <= float(info.eps) / 2


# --- matmuls ------------------------------------------------------------------------

FACTORS = {  # name: (shapes of two factors, dimension numbers)
    "dense": ((16, 8), (8, 4), (((1,), (0,)), ((), ()))),
    "experts in the middle": ((5, 3, 8), (8, 3, 4), (((2,), (0,)), ((1,), (1,)))),
}
matmuls = pytest.mark.parametrize("name", FACTORS)


def bound(name, emulate=True):
    """The primitive on one of the matmuls, its factors, and the dimension numbers."""
    *shapes, numbers = FACTORS[name]
    factors = [normal(i, *shape).astype(jnp.bfloat16) for i, shape in enumerate(shapes)]
    bind = functools.partial(
        fp8_dot_p.bind,
        dimension_numbers=numbers,
        formats=(FORWARD, FORWARD),
        dtype=jnp.dtype(jnp.bfloat16),
        emulate=emulate,
    )
    return jax.jit(bind), factors, numbers


def rounded_by_numpy(x, format_, batch):
    """An array, scaled and rounded to a format and scaled back."""
    x = np.asarray(x, np.float64)
    axes = tuple(set(range(x.ndim)) - set(batch))
    largest = np.abs(x).max(axes, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(largest / float(ml_dtypes.finfo(format_).max))))
    return ((x / scale).astype(format_).astype(np.float64) * scale).astype(np.float32)


@matmuls
def test_a_matmul_is_that_of_the_rounded_factors(name):
    """And its gradients read the cotangent in the format with the wider range."""
    bind, factors, numbers = bound(name)
    pairs = zip(factors, numbers[1], strict=True)
    rounded = [rounded_by_numpy(x, FORWARD, batch) for x, batch in pairs]
    dot = functools.partial(lax.dot_general, dimension_numbers=numbers)
    y, pullback = jax.vjp(bind, *factors)
    plain, plain_pullback = jax.vjp(dot, *rounded)
    assert relative_error(y, plain) < 2.0**-8
    # XLA for CPUs has matmuls of 8-bit floats, which it computes in wider ones.
    real, *_ = bound(name, emulate=False)
    assert relative_error(real(*factors), y) < 2.0**-8
    g = normal(3, *y.shape).astype(y.dtype)
    expected = plain_pullback(rounded_by_numpy(g, BACKWARD, range(len(numbers[1][0]))))
    for actual, gradient in zip(pullback(g), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert relative_error(actual, gradient) < 2.0**-7


@matmuls
@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (1, 0)], ids=str)
def test_batching(name, mapped):
    bind, factors, _ = bound(name)
    stacked = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip(factors, mapped, strict=True)
    ]
    each = []
    for k in range(3):
        of_k = zip(stacked, mapped, strict=True)
        each.append(bind(*(x if a is None else x.take(k, a) for x, a in of_k)))
    assert_close(jax.vmap(bind, mapped)(*stacked), jnp.stack(each), jnp.bfloat16)
    assert equations_of(jax.vmap(bind, mapped), *stacked, primitive=NAME)


def test_gradients_read_8_bit_floats():
    """A weight in float32 gets a gradient in float32, rounded before."""
    bind, (x, w), _ = bound("dense", emulate=False)
    y, pullback = jax.vjp(bind, x, w.astype(jnp.float32))
    dots = equations_of(pullback, y, primitive=NAME)
    assert [eqn.outvars[0].aval.dtype for eqn in dots] == [jnp.bfloat16] * 2
    assert [g.dtype for g in pullback(y)] == [jnp.bfloat16, jnp.float32]
    text = jax.jit(pullback).lower(y).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 2
    for line in dots:
        assert "HIGHEST" in line  # no sums in fewer digits
        assert {"f8E4M3FN", "f8E5M2"} <= set(line.replace(">", "x").split("x"))


def test_powers_of_two_out_of_range_meet_in_a_matmul():
    """`2**d * 2**e` is out of the range of float32 where the result is in it."""
    a, b = jnp.array([[1e30, 1.0]], jnp.bfloat16), jnp.array([[0.0], [1e20]])
    bind, *_ = bound("dense")
    assert_close(bind(a * 1e-37, b * 1e-17), [[1e-37 * 1e3]], FORWARD)
    for factors in ((a, b), (0 * a, b * 1e18)):
        assert_identical(bind(*factors), jnp.zeros((1, 1), jnp.bfloat16))


def test_a_number_that_is_not_finite_stays_in_its_row():
    bind, (x, w), _ = bound("dense")
    found = bind(x.at[3, 2].set(jnp.nan).at[5, 1].set(-jnp.inf), w)
    is_bad = np.isnan(np.asarray(found, np.float32))
    assert is_bad.all(axis=1).tolist() == [i in (3, 5) for i in range(16)]
    keep = np.array([i not in (3, 5) for i in range(16)])
    # The largest number may have been in one of these two rows.
    assert relative_error(found[keep], bind(x, w)[keep]) < 0.05


# --- transforms ----------------------------------------------------------------------


def mlp(w, x):
    x = jnp.tanh(x @ w[0])
    with jax.named_scope("middle"):
        x = jnp.tanh(x @ w[1])
    with jax.named_scope("last"):
        return x @ w[2]


def loss(w, x):
    return jnp.sum(jnp.cos(jnp.tanh(mlp(w, x))))


W, X = normal(4, 3, 8, 8) / 3, normal(5, 8, 8)


def over_all_devices(f):
    shard = lambda w, x: lax.psum(f(w, x), "data")  # noqa: E731
    return over_devices(shard, (P(), P("data")), P())


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)


def rematted(policy):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
    return lambda w, x: jnp.sum(layer(layer(x, w[0]), w[1]) @ w[2])


DOTS = jax.checkpoint_policies.checkpoint_dots
NAMES = "grad", "jvp", "vmap of grad", "jvp of grad", "grad of grad"
TRANSFORMS = {name: DERIVATIVES[name] for name in NAMES}
TRANSFORMS["shard_map"] = lambda f: jax.grad(over_all_devices(f))


@pytest.mark.parametrize(
    "function, transform",
    [*((loss, t) for t in TRANSFORMS), (scanned, "grad"), (rematted(DOTS), "grad")],
)
def test_transforms(function, transform):
    f, around = function, TRANSFORMS[transform]
    assert count(around(fp8(f)), W, X)[0], "no matmul in fp8"
    error = relative_error(*run_all(around(fp8(f)), around(f))(W, X))
    assert error < (0.4 if transform == "grad of grad" else 0.25)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_program_is_exported_for_other_devices(platform):
    f = jax.jit(jax.grad(fp8(loss, REAL)))
    exported = export.export(f, platforms=[platform])(W, X)
    assert "f8E4M3FN" in exported.mlir_module()
    assert exported.serialize()
    lowered = f.trace(W, X).lower(lowering_platforms=(platform,)).as_text()
    constraints = lowered.count("LayoutConstraint")
    assert bool(constraints) == (platform == "cuda")


def test_a_policy_for_dots_saves_matmuls_in_fp8():
    """The backward pass then has two matmuls for each, and otherwise three."""
    nothing = jax.checkpoint_policies.nothing_saveable
    found, expected = (
        sum(count(jax.grad(fp8(rematted(policy))), W, X)) for policy in (DOTS, nothing)
    )
    assert found == expected - 2


def test_no_8_bit_copy_is_a_residual():
    """The factors are stored in half precision, or in float32 if they are weights."""
    _, pullback = jax.vjp(fp8(loss), W, X)
    dtypes = {x.dtype.name for x in jax.tree.leaves(pullback) if hasattr(x, "dtype")}
    assert not [name for name in dtypes if name.startswith("float8")]


# --- which matmuls ------------------------------------------------------------------

SIZES = {
    (16384, 4096, 4096): True,
    (2048, 4096, 4096): False,  # few rows
    (16384, 1024, 4096): True,
    (16384, 768, 3072): False,
}


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_small_matmuls_stay_in_half_precision(sizes, weight_first):
    m, k, n = sizes

    def fn(w, x):
        x = jnp.tanh(x @ jnp.ones((k, k)))
        with jax.named_scope("middle"):
            y = w.T @ x.T if weight_first else x @ w
        return jnp.tanh(y) @ y.T

    args = struct(k, n), struct(m, k)
    small = f"too small, ({n}, {k}) by" if weight_first else f"too small, ({m}, {k}) by"
    (_, found, _) = reasons(fn, *args, matmul_dtype=FP8)
    assert found.startswith("in fp8" if SIZES[sizes] else f"not in fp8: {small}")
    (_, found, _) = reasons(fn, *args, amp_policy=default_amp_policy | {"middle": FP8})
    assert found.startswith("in fp8")


def test_a_symbolic_size_is_not_known_to_pay():
    fn = jax.jit(amp(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w) @ w, matmul_dtype=REAL))
    (rows,) = export.symbolic_shape("rows")
    with pytest.warns(PolicyWarning, match="too small, .rows, 4096. by .4096, 4096."):
        exported = export.export(fn)(struct(4096, 4096), struct(rows, 4096))
    assert "f8E4M3FN" not in exported.mlir_module()


def attention(w, x):
    x = jnp.tanh(x @ w[0])
    scores = jax.nn.softmax((x @ w[1]) @ (x @ w[2]).T)
    return (scores @ x) @ w[0] @ w[1]


def between(middle):
    return lambda w, x: jnp.tanh(middle(jnp.tanh(x @ w[0]), w[1])) @ w[2]


FIRST = "not in fp8: computed from arguments and constants alone"
LAST = "not in fp8: no matmul in half precision behind it"
PAIR = "not in fp8: neither factor is an argument"
ROWS = {  # name: (function, how many in fp8, why not the others, in order)
    "first and last": (mlp, 1, (FIRST, LAST)),
    "attention": (attention, 3, (FIRST, PAIR, PAIR, LAST)),
    "a moved weight": (between(lambda x, w: x @ w.T[::-1]), 1, (FIRST, LAST)),
    "a scaled weight": (between(lambda x, w: x @ (2 * w)), 0, (FIRST, PAIR, LAST)),
    "a user's cast": (
        between(lambda x, w: x @ w.astype(jnp.bfloat16)), 0,
        (FIRST, "not in fp8: a factor is not float32", LAST),
    ),
}  # fmt: skip


def reasons(fn, *args, **options):
    """Returns why each matmul runs as it does."""
    found = explain(fn, backward=False, **options)(*args)
    return [row.reason for row in found.equations if row.primitive in MATMULS]


@pytest.mark.parametrize("name", ROWS)
def test_matmuls(name):
    fn, in_fp8, expected = ROWS[name]
    args = struct(3, 4096, 4096), struct(16384, 4096)
    assert count(amp(fn, matmul_dtype=FP8), *args)[0] == in_fp8
    found = reasons(fn, *args, matmul_dtype=FP8)
    others = [reason for reason in found if not reason.startswith("in fp8")]
    assert len(others) == len(expected)
    assert all(map(str.startswith, others, expected)), others


def test_a_carry_is_no_weight():
    """It starts as an argument, and is something else in the next step."""
    (eqn,) = equations_of(fp8(scanned), W, X, primitive=NAME)
    assert [v.aval.dtype for v in eqn.invars] == [jnp.bfloat16, jnp.float32]


def test_arrays_with_explicit_shardings_stay_in_half_precision():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args, policy = (W, jax.device_put(X, P("data"))), {"middle": FP8}
        found = reasons(mlp, *args, amp_policy=default_amp_policy | policy)
    assert "not in fp8: its sharding is explicit" in found


def test_scopes():
    """Of small matmuls and the last one, too, but not of code that is stopped."""
    for fn, keys, expected in (
        (mlp, ("middle", "last"), (2, 1)),
        (amp_stop(mlp), ("middle",), (0, 3)),
    ):
        policy = default_amp_policy | dict.fromkeys(keys, FP8)
        assert count(amp(fn, amp_policy=policy), W, X) == expected


def test_in_float32_nothing_is_rounded():
    key = {lax.dot_general_p: FP8}
    clz = {lax.clz_p: jnp.bfloat16}  # makes `amp` rewrite what it need not
    for entries in (key, key | clz):
        policy = default_amp_policy | entries
        fn = amp(mlp, compute_dtype=jnp.float32, amp_policy=policy)
        assert count(fn, W, X) == (0, 3)
        assert_identical(fn(W, X), mlp(W, X))


@pytest.mark.filterwarnings("error")
def test_a_program_without_matmuls_in_fp8_warns():
    message = (
        "runs in fp8: computed from arguments and constants alone (1); too small, "
        "(8, 8) by (8, 8) (1); no matmul in half precision behind it (1). Expected "
    )
    with pytest.warns(PolicyWarning, match=re.escape(message)):
        jax.eval_shape(amp(mlp, matmul_dtype=FP8), W, X)
    emulated = r'"\*/mlp/\*": flax_amp.use_fp8\(emulate=True\)}'
    with pytest.warns(PolicyWarning, match=emulated):
        jax.eval_shape(amp(mlp, matmul_dtype=use_fp8(emulate=True)), W, X)
    with pytest.warns(PolicyWarning, match="has no matmul that could. Expected"):
        jax.eval_shape(amp(jnp.sin, matmul_dtype=FP8), X)
    jax.eval_shape(jax.grad(lambda w: fp8(mlp)(w, X).sum()), W)


# --- devices -------------------------------------------------------------------------


DEVICES = [  # platform, kind, compute capability, whether it has such matmuls
    ("cpu", "cpu", "", False),
    ("tpu", "TPU v6 lite", "", False),
    ("tpu", "TPU7x", "", True),
    ("gpu", "NVIDIA A100", "8.0", False),
    ("gpu", "NVIDIA L4", "8.9", True),
    ("gpu", "MI300", "gfx942", False),
]
REFUSED = (
    "fp8: the device 'cpu' has no matmuls in fp8, .* Expected precision="
    "'bf16-mixed', .*emulate=True"
)


@pytest.mark.parametrize("platform, kind, capability, expected", DEVICES)
def test_devices_with_fp8(platform, kind, capability, expected):
    of_device = dict(device_kind=kind, compute_capability=capability)
    assert has_fp8(SimpleNamespace(platform=platform, **of_device)) == expected


def test_a_device_without_fp8_is_refused():
    with pytest.raises(ValueError, match=REFUSED):
        jax.eval_shape(amp(mlp, matmul_dtype="fp8"), W, X)
    for device in (jax.devices()[0], "cpu"):
        with jax.default_device(device), pytest.raises(ValueError, match=REFUSED):
            fp8(mlp, "fp8")(W, X)
    amp(mlp, matmul_dtype=REAL)(W, X)  # who compiles for another one
    amp(mlp, compute_dtype=jnp.float32, matmul_dtype="fp8")(W, X)


# --- training ------------------------------------------------------------------------


def loss_fn(params, batch):
    return jnp.mean(jnp.square(mlp(params["w"], batch) - 1.0))


def test_a_state_in_fp8_steps_in_fp8():
    create = functools.partial(
        AmpTrainState.create, params={"w": W}, tx=optax.adam(1e-2)
    )
    for word in ("fp8", "fp8-mixed"):
        state = create(precision=word)
        assert state.precision == "fp8-mixed" and state.scaler["scaler"] == 1.0
        for make in (make_train_step, make_eval_step):
            with pytest.raises(ValueError, match=REFUSED):
                make(loss_fn)(state, X)
    for make, expected in ((make_train_step, 6), (make_eval_step, 2)):
        assert count(make(fp8(loss_fn), jit=False), create(), X)[0] == expected
