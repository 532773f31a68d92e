"""`fp8_dot`: products of 8-bit floats, their derivatives, every transform of them."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import jet
from jax.sharding import PartitionSpec as P

from _programs import normal
from flax_amp import amp, use_fp8
from flax_amp._rewriter.fp8_dot import (
    BACKWARD,
    FORWARD,
    fp8_dot_p,
    power_of_two,
    quantize,
    scale_exponent,
)
from helpers import (
    assert_close,
    assert_identical,
    equations,
    equations_of,
    relative_error,
)

FP8 = use_fp8(emulate=True, any_shape=True)
fp8 = functools.partial(amp, matmul_dtype=FP8)
NAME = fp8_dot_p.name

# --- numbers -------------------------------------------------------------------------

# Every number of bfloat16, each for itself, and float32 numbers around the borders.
BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
_NEAR = np.float32([1.75, 1.5, 2.0, 1.0, 448.0, 57344.0, 3.3e38, 1e-30, 1.2e-38])
FLOAT32 = np.concatenate(
    [_NEAR, np.nextafter(_NEAR, np.float32(0)), np.nextafter(_NEAR, np.float32(np.inf))]
)


def in_float64(numbers):
    with np.errstate(invalid="ignore"):  # of a NaN
        return numbers.astype(np.float64)


@pytest.mark.parametrize("format_", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("numbers", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_an_exponent_is_the_least_that_fits(numbers, format_):
    largest = float(ml_dtypes.finfo(format_).max)
    found = np.asarray(scale_exponent(jnp.asarray(numbers), format_, ()))
    x = np.abs(in_float64(numbers))
    is_normal = np.isfinite(x) & (x > 2.0**-110)
    scaled = x[is_normal] / np.exp2(found[is_normal].astype(np.float64))
    assert (scaled <= largest).all() and (2 * scaled > largest).all()
    # What is smaller, or no number, gets a power of two that is a number itself.
    assert found.min() >= -126


@pytest.mark.parametrize("format_", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("numbers", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_no_number_saturates_or_becomes_a_nan(numbers, format_):
    x = jnp.asarray(numbers)
    e = scale_exponent(x, format_, ())
    actual = np.asarray(quantize(x, e, format_).astype(jnp.float32), np.float64)
    actual *= np.exp2(np.asarray(e, np.float64))
    wide = in_float64(numbers)
    assert (np.isfinite(actual) == np.isfinite(wide)).all()
    is_normal = np.isfinite(wide) & (np.abs(wide) > 2.0**-110)
    errors = np.abs(actual - wide)[is_normal] / np.abs(wide)[is_normal]
    assert errors.max() <= float(ml_dtypes.finfo(format_).eps) / 2


def test_one_exponent_for_all_along_the_axes():
    x = jnp.array([[1.0, -900.0, 0.0], [jnp.inf, jnp.nan, 0.25]])
    of_all, of_rows = (
        scale_exponent(x, FORWARD, (0, 1)),
        scale_exponent(x, FORWARD, (1,)),
    )
    assert (of_all.shape, of_rows.shape) == ((1, 1), (2, 1))
    assert of_all.item() == of_rows[0, 0] == 2  # 900 / 2**2 = 225
    assert of_rows[1, 0] == -10  # what is not finite does not count


@pytest.mark.parametrize("x", [jnp.zeros((2, 3)), jnp.zeros((0, 3))], ids=str)
def test_zeros_and_nothing_have_an_exponent(x):
    e = scale_exponent(x, FORWARD, (0, 1))
    assert_identical(quantize(x, e, FORWARD), x.astype(FORWARD))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_powers_of_two(dtype):
    e = np.arange(-126, 128)
    assert_identical(power_of_two(jnp.asarray(e), dtype), np.exp2(e).astype(dtype))
    ends = power_of_two(jnp.array([-300, -127, 128, 300]), dtype)
    assert_identical(ends, np.array([0, 0, np.inf, np.inf], dtype))


# --- products ------------------------------------------------------------------------


def rounded_by_numpy(x, format_, axes):
    """Returns an array, scaled and rounded to a format and scaled back, in float64."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axes, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(largest / float(ml_dtypes.finfo(format_).max))))
    return (x / scale).astype(format_).astype(np.float64) * scale


PRODUCTS = {
    "dense": ("bk,kn->bn", (16, 8), (8, 4)),
    "weight first": ("nk,bk->nb", (4, 8), (16, 8)),
    "three axes": ("btk,kn->btn", (2, 3, 8), (8, 4)),
    "two sums": ("bhd,hdn->bn", (5, 2, 4), (2, 4, 3)),
    "heads": ("bk,khd->bhd", (5, 8), (8, 2, 3)),
    "experts": ("ebk,ekn->ebn", (3, 5, 8), (3, 8, 4)),
    "experts in the middle": ("bek,ken->ebn", (5, 3, 8), (8, 3, 4)),
}
products = pytest.mark.parametrize("name", PRODUCTS)


def bound(name, **options):
    """Returns the primitive on one of the products, and its factors in bfloat16."""
    spec, left, right = PRODUCTS[name]
    a, b = normal(1, *left), normal(2, *right)
    (eqn,) = equations_of(
        lambda a, b: jnp.einsum(spec, a, b), a, b, primitive="dot_general"
    )
    is_swapped = eqn.invars[0].aval.shape != a.shape
    if is_swapped:
        a, b = b, a
    params = dict(
        dimension_numbers=eqn.params["dimension_numbers"],
        formats=(FORWARD, FORWARD),
        dtype=jnp.dtype(jnp.bfloat16),
        recipe=FP8,
        weight=int(not is_swapped) if "weight" not in name else int(is_swapped),
        wide=False,
    )
    bind = functools.partial(fp8_dot_p.bind, **params | options)
    return bind, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)


def exact(numbers, a, b):
    """Returns a product in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (a, b)]
        return np.asarray(lax.dot_general(*map(jnp.asarray, wide), numbers))


@products
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_product_is_that_of_the_rounded_factors(name, scaling):
    bind, a, b = bound(name, recipe=use_fp8(scaling=scaling, emulate=True))
    numbers = bind.keywords["dimension_numbers"]
    rounded = []
    for x, contracted, batch in zip((a, b), *numbers, strict=True):
        axes = contracted
        if scaling == "tensor":
            axes = tuple(set(range(x.ndim)) - set(batch))
        rounded.append(rounded_by_numpy(x, FORWARD, axes))
    expected = exact(numbers, *rounded)
    assert relative_error(bind(a, b), expected) < 2.0**-8  # of bfloat16


@products
def test_emulated_numbers_are_those_of_fp8(name):
    """XLA for CPUs has products of 8-bit floats, which it computes in wider ones."""
    bind, a, b = bound(name)
    real, *_ = bound(name, recipe=use_fp8(emulate=False))
    assert relative_error(real(a, b), bind(a, b)) < 2.0**-8


@products
@pytest.mark.parametrize("i", [0, 1])
def test_gradients_are_products_of_cotangents_in_the_wider_format(name, i):
    bind, a, b = bound(name)
    factors = [a, b]
    y, pullback = jax.vjp(bind, a, b)
    g = normal(3, *y.shape).astype(y.dtype)

    def half(x):
        operands = list(factors)
        operands[1 - i] = rounded(factors[1 - i], FORWARD)
        operands[i] = x
        return lax.dot_general(
            *operands,
            bind.keywords["dimension_numbers"],
            preferred_element_type=jnp.float32,
        )

    def rounded(x, format_):
        batch = bind.keywords["dimension_numbers"][1]
        of_x = batch[1 - i] if format_ == FORWARD else range(len(batch[0]))
        axes = tuple(set(range(x.ndim)) - set(of_x))
        return jnp.asarray(rounded_by_numpy(x, format_, axes), jnp.float32)

    wide = factors[i].astype(jnp.float32)
    expected = jax.vjp(half, wide)[1](rounded(g, BACKWARD))[0]
    actual = pullback(g)[i]
    assert actual.dtype == factors[i].dtype
    assert relative_error(actual, expected) < 2.0**-7


@products
@pytest.mark.parametrize("i", [0, 1])
def test_tangents_are_in_the_wider_format(name, i):
    bind, *factors = bound(name)
    t = normal(3, *factors[i].shape).astype(jnp.bfloat16)

    def tangent(t):
        primals = [(x,) for x in factors]
        fn = (
            (lambda a: bind(a, factors[1]))
            if i == 0
            else (lambda b: bind(factors[0], b))
        )
        return jax.jvp(fn, primals[i], (t,))[1]

    found = equations_of(tangent, t, primitive=NAME)[-1].params["formats"]
    assert found == ((BACKWARD, FORWARD) if i == 0 else (FORWARD, BACKWARD))
    operands = [*factors]
    operands[i] = t
    expected = exact(bind.keywords["dimension_numbers"], *operands)
    assert_close(tangent(t), expected, FORWARD, gradient=True)


@products
@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (1, 1), (1, 0)], ids=str)
def test_batching(name, mapped):
    """A product of two mapped factors is that of each pair."""
    bind, *factors = bound(name)
    stacked = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip(factors, mapped, strict=True)
    ]
    found = jax.vmap(bind, mapped)(*stacked)
    each = [
        bind(
            *(
                x if a is None else x.take(k, a)
                for x, a in zip(stacked, mapped, strict=True)
            )
        )
        for k in range(3)
    ]
    assert_close(found, jnp.stack(each), jnp.bfloat16)
    assert equations_of(jax.vmap(bind, mapped), *stacked, primitive=NAME)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weight_gradients", ["fp8", "half"])
def test_dtypes_of_gradients(weight_gradients, wide):
    """A weight in float32 gets a gradient in float32, rounded before or not."""
    recipe = use_fp8(weight_gradients=weight_gradients, emulate=False)
    bind, x, w = bound("dense", recipe=recipe, wide=wide)
    w = w.astype(jnp.float32)
    y, pullback = jax.vjp(bind, x, w)
    dots = equations_of(pullback, y, primitive=(NAME, "dot_general"))
    of_weight = [eqn for eqn in dots if eqn.outvars[0].aval.shape in ((8, 4), (4, 8))]
    (eqn,) = of_weight
    assert (eqn.primitive.name == NAME) == (weight_gradients == "fp8")
    assert eqn.outvars[0].aval.dtype == (jnp.float32 if wide else jnp.bfloat16)
    (of_activation,) = [eqn for eqn in dots if eqn is not of_weight[0]]
    assert of_activation.outvars[0].aval.dtype == jnp.bfloat16
    # Only what is a weight still has its layout constrained, and its gradients widened.
    assert of_activation.params["weight"] == 1
    assert eqn.params.get("weight") is None
    assert [g.dtype for g in pullback(y)] == [jnp.bfloat16, jnp.float32]


def test_the_compiled_product_reads_8_bit_floats():
    bind, x, w = bound("dense", recipe=use_fp8(emulate=False))
    found = jax.jit(jax.grad(lambda x, w: bind(x, w).astype(jnp.float32).sum(), (0, 1)))
    text = found.lower(x, w.astype(jnp.float32)).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    both = [
        {"f8E4M3FN", "f8E5M2"} & set(line.replace(">", "x").split("x")) for line in dots
    ]
    # The forward product is dropped: its result is not read.
    assert len(both) == 2
    assert all("HIGHEST" in line for line in dots)  # no sums in fewer digits
    assert all(names == {"f8E4M3FN", "f8E5M2"} for names in both)


def test_powers_of_two_out_of_range_meet_in_a_product():
    """`2**d * 2**e` is out of the range of float32 where the result is in it."""
    a = jnp.array([[1e30, 1.0]], jnp.bfloat16)
    b = jnp.array([[0.0], [1e20]])
    eqn = dict(dimension_numbers=(((1,), (0,)), ((), ())), formats=(FORWARD, FORWARD))
    bind = functools.partial(
        fp8_dot_p.bind, **eqn, dtype=jnp.dtype(jnp.bfloat16), weight=1, wide=False
    )
    rows = use_fp8(scaling="row", emulate=True)
    assert_close(bind(a, b, recipe=rows), [[0.0]], jnp.bfloat16)
    small = bind(a * 1e-37, b * 1e-17, recipe=FP8)
    assert_close(small, [[1e-37 * 1e3]], FORWARD)
    zeros = bind(0 * a, b * 1e18, recipe=FP8)
    assert_identical(zeros, jnp.zeros((1, 1), jnp.bfloat16))


def test_a_number_that_is_not_finite_stays_in_its_row():
    bind, x, w = bound("dense")
    expected = bind(x, w)
    bad = x.at[3, 2].set(jnp.nan).at[5, 1].set(-jnp.inf)
    found = bind(bad, w)
    is_bad = np.isnan(np.asarray(found, np.float32))
    assert is_bad.all(axis=1).tolist() == [i in (3, 5) for i in range(16)]
    keep = np.array([i not in (3, 5) for i in range(16)])
    # The largest number may have been in one of these two rows.
    assert relative_error(found[keep], expected[keep]) < 0.05


# --- transforms ----------------------------------------------------------------------


def network(w, x):
    for i in range(3):
        x = jnp.tanh(x @ w[i])
    return x


def loss(w, x):
    return jnp.sum(jnp.cos(network(w, x)))


W, X = normal(4, 3, 8, 8) / 3, normal(5, 6, 8)
MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def over_devices(f):
    def shard(w, x):
        return lax.psum(f(w, x), "data")

    return jax.shard_map(shard, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)


def rematted(policy):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
    return lambda w, x: jnp.sum(layer(layer(x, w[0]), w[1]) @ w[2])


def along_ones(f):
    return lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (jnp.ones_like(w),))[1]


FUNCTIONS = {
    "straight": loss,
    "jit": jax.jit(loss),
    "scan": scanned,
    "remat": rematted(None),
    "remat of dots": rematted(jax.checkpoint_policies.checkpoint_dots),
    "cond": lambda w, x: lax.cond(
        x[0, 0] < 9, loss, lambda w, x: 0 * x.sum(), w, x
    ),
    "while": lambda w, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x).sum(),
    "vmap over examples": lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]).sum(),
    "vmap over weights": lambda w, x: jax.vmap(
        lambda w: loss(w, x), in_axes=2
    )(jnp.stack([w, w], 2)).sum(),
    "vmap over both": lambda w, x: jax.vmap(loss)(
        jnp.stack([w, w]), jnp.stack([x, 2 * x])
    ).sum(),
}  # fmt: skip
TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad in jit": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian-vector": lambda f: lambda w, x: along_ones(jax.grad(f))(w, x),
    "grad of grad": lambda f: jax.grad(
        lambda w, x: jnp.sum(jnp.sin(jax.grad(f)(w, x)))
    ),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x])),
    "vmap of grad": lambda f: (
        lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, jnp.stack([x, x]))
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "shard_map": lambda f: jax.grad(over_devices(f), (0,)),
}


def _cells():
    for function in FUNCTIONS:
        for transform in TRANSFORMS:
            needs_reverse = transform not in ("value", "jvp", "jacfwd", "vmap")
            if function == "while" and needs_reverse and transform != "linearize":
                continue  # which JAX cannot do
            # A row of shard_map has too few examples for these.
            if transform == "shard_map" and function.startswith("vmap"):
                continue
            is_slow = function != "straight"
            marks = [pytest.mark.slow, pytest.mark.once] if is_slow else []
            yield pytest.param(function, transform, marks=marks)


@pytest.mark.parametrize("function, transform", list(_cells()))
def test_transforms(function, transform):
    f, around = FUNCTIONS[function], TRANSFORMS[transform]
    x = jnp.concatenate([X, X[:2]]) if transform == "shard_map" else X
    count = len(equations_of(around(fp8(f)), W, x, primitive=NAME))
    assert count, "no product in fp8"
    actual, expected = around(fp8(f))(W, x), around(f)(W, x)
    assert_close(actual, expected, FORWARD, gradient=True)


def test_an_exported_program_computes_the_same():
    f = jax.jit(jax.grad(fp8(loss)))
    again = export.deserialize(export.export(f)(W, X).serialize())
    assert_close(again.call(W, X), f(W, X), jnp.bfloat16)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_program_is_exported_for_other_devices(platform):
    f = jax.jit(
        jax.grad(amp(loss, matmul_dtype=use_fp8(emulate=False, any_shape=True)))
    )
    exported = export.export(f, platforms=[platform])(W, X)
    assert "f8E4M3FN" in exported.mlir_module()
    assert exported.serialize()
    lowered = f.trace(W, X).lower(lowering_platforms=(platform,)).as_text()
    constraints = lowered.count("LayoutConstraint")
    assert bool(constraints) == (platform == "cuda")


def test_taylor_series_are_of_half_precision():
    series = [[jnp.ones_like(x), jnp.zeros_like(x)] for x in (W, X)]
    actual, expected = (jet.jet(f, (W, X), series) for f in (fp8(network), network))
    assert_close(actual, expected, FORWARD, gradient=True)


def test_eager_and_compiled_are_the_same():
    eager, compiled = fp8(loss)(W, X), jax.jit(fp8(loss))(W, X)
    assert_close(eager, compiled, jnp.bfloat16)


def test_both_passes_make_the_same_copies():
    """XLA merges what is equal to the order of its axes."""
    run = amp(loss, matmul_dtype=use_fp8(emulate=False, any_shape=True))
    text = jax.jit(jax.grad(run, (0, 1))).lower(W, X).compile().as_text()
    maxima = [line for line in text.splitlines() if " reduce(" in line]
    dimensions = [re.search(r"dimensions={(.*?)}", line)[1] for line in maxima]
    assert "0,1" in dimensions and "1,0" not in dimensions


@pytest.mark.parametrize("policy", ["checkpoint_dots", "everything_saveable"])
def test_a_policy_for_dots_saves_products_in_fp8(policy):
    """The backward pass then has two products for each, and otherwise three."""

    def count(policy):
        grad = jax.grad(fp8(rematted(policy)))
        return len(equations_of(grad, W, X, primitive=(NAME, "dot_general")))

    policies = jax.checkpoint_policies
    saved = count(getattr(policies, policy))
    assert saved == count(policies.nothing_saveable) - 2


def test_a_policy_sees_the_product_in_half_precision():
    seen = []

    def policy(primitive, *avals, **params):
        if primitive is lax.dot_general_p:
            seen.append(([x.dtype.name for x in avals], params))
        return False

    jax.make_jaxpr(jax.grad(fp8(rematted(policy))))(W, X)
    assert seen
    for names, params in seen:
        assert names == ["bfloat16", "bfloat16"]
        assert params["preferred_element_type"] == jnp.bfloat16
        assert params["dimension_numbers"] == (((1,), (0,)), ((), ()))


def test_no_8_bit_copy_is_a_residual():
    """The factors are stored in half precision, or in float32 if they are weights."""
    _, pullback = jax.vjp(fp8(loss), W, X)
    dtypes = {x.dtype.name for x in jax.tree.leaves(pullback) if hasattr(x, "dtype")}
    assert not [name for name in dtypes if name.startswith("float8")]


def test_float16_products():
    run = functools.partial(fp8, compute_dtype=jnp.float16)
    found = equations_of(jax.grad(run(loss)), W, X, primitive=NAME)
    assert {eqn.outvars[0].aval.dtype for eqn in found} == {jnp.dtype(jnp.float16)}
    # The sums of 512 products of numbers near 448 are out of the range of float16.
    w, x = jnp.ones((2, 512, 512)) / 512, jnp.ones((4, 512))
    assert_close(run(lambda w, x: x @ w[0] @ w[1] @ w[0])(w, x), x, FORWARD)
    assert_close(run(loss)(W, X), loss(W, X), FORWARD)


def test_equal_layers_are_one_function():
    w = normal(6, 8, 16, 16) / 4

    def deep(w, x):
        for i in range(8):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.tanh(jnp.tanh(x @ w[i]) @ w[i].T) * jax.nn.sigmoid(x)
        return jnp.sum(x @ w[0])

    found = equations(jax.make_jaxpr(fp8(deep))(w, normal(7, 4, 16)))
    bodies = [path for path, eqn in found if eqn.primitive.name == NAME]
    assert len(bodies) < 16
