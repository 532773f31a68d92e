"""`amp` as a transform: under and over the others, on every kind of argument.

Wrong options of `amp` are errors.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export, lax
from jax.experimental import checkify, jet, sparse
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import flax_amp
from _programs import (
    DERIVATIVES,
    PROGRAMS,
    SECOND_ORDER,
    SIZE,
    WITHIN,
    W,
    X,
    in_scan,
    in_while,
    loss_of,
    norm,
    normal,
    over_devices,
    squares,
)
from flax_amp import amp, amp_stop, default_amp_policy
from helpers import (
    HALVES,
    assert_all_in,
    assert_close,
    assert_identical,
    assert_same_avals,
    both_halves,
    dtypes_of,
    exact_jit,
    jit,
    relative_error,
    rewritten_in_float32,
    run_all,
)

# --- every program x every transform -------------------------------------------------


def in_shard_map(fn):
    mean = lambda w, x: lax.pmean(fn(w, x), "data")  # noqa: E731
    return over_devices(mean, (P(), P()), P())


def of_loss(derivative):
    return lambda fn: derivative(loss_of(fn))


SAVED = dict(policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
AROUND = WITHIN | {
    "scan of checkpoint of jit": lambda fn: in_scan(
        jax.checkpoint(jax.jit(fn), **SAVED)
    ),
    "shard_map": in_shard_map,
    "vmap of all": lambda fn: (
        lambda w, x: jax.vmap(fn)(jnp.stack([w, -w]), x[None, :].repeat(2, 0))
    ),
}
# Each with its backward pass, but for a loop of which the end is not known.
TRANSFORMS = {
    name: lambda fn, around=around: jax.value_and_grad(loss_of(around(fn)), (0, 1))
    for name, around in AROUND.items()
}
TRANSFORMS["while"] = in_while
TRANSFORMS |= {f"{name} of loss": of_loss(d) for name, d in DERIVATIVES.items()}
# Parts of other transforms: "plain" is a value and its gradient, "nested jit" holds a
# jit, "vmap" and "checkpoint" have gradients.
PARTS = {"jit", "value of loss", "grad of loss", "jit of grad of loss"}
PARTS |= {"vmap of loss", "grad of vmap of loss", "checkpoint of loss"}
WITH_BIAS = ("vmap of all", "vmap of grad of loss")  # run with a bias
PAIRS = [(program, "plain") for program in PROGRAMS if program != "attention"]
PAIRS += [("mlp", transform) for transform in WITH_BIAS]
PAIRS += [
    ("attention", transform)
    for transform in TRANSFORMS
    if transform not in PARTS | {*WITH_BIAS}
]

# What calls the function with its own arguments has the value and the gradients of
# "plain", and needs no reference of its own.
AS_PLAIN = {"nested jit", "scan", "cond", "checkpoint", "custom_jvp", "custom_vjp"}
AS_PLAIN |= {"scan of checkpoint of jit", "shard_map"}


@functools.cache
def reference(program, transform):
    return jit(TRANSFORMS[transform](PROGRAMS[program]))(W, X)


@pytest.mark.parametrize(("program", "transform"), sorted(PAIRS))
def test_under_and_over(program, transform):
    """transform(amp(f)) and amp(transform(f)): avals, and nearly values, of f.

    As many matmuls as in f, and each in half precision.
    """
    fn, wrap = PROGRAMS[program], TRANSFORMS[transform]
    dtype = HALVES[len(program) % 2]
    # Second derivatives and recurrences lose a few digits more.
    is_second = transform.removesuffix(" of loss") in SECOND_ORDER
    bound = 6e-2 if is_second or dtype == jnp.bfloat16 else 1e-2
    lower = functools.partial(amp, compute_dtype=dtype)
    count, avals = len(dtypes_of(wrap(fn), W, X)), jax.eval_shape(wrap(fn), W, X)
    traced = []
    for lowered in (wrap(lower(fn)), lower(wrap(fn))):
        closed, found = jax.make_jaxpr(lowered, return_shape=True)(W, X)
        assert_same_avals(found, avals)
        traced.append(jaxpr_as_fun(closed))
        assert_all_in(traced[-1], W, X, dtype=dtype, count=count)
    expected = reference(program, "plain" if transform in AS_PLAIN else transform)
    for actual in run_all(*traced)(W, X):
        assert relative_error(actual, expected) < bound


@both_halves
def test_amp_in_amp(dtype):
    """The inner dtype holds inside, the outer one outside, `amp_stop` in between."""
    other = {jnp.float16: jnp.bfloat16, jnp.bfloat16: jnp.float16}[dtype]

    def fn(w, x):
        y = amp(jnp.matmul, compute_dtype=other)(x @ w, w)
        return amp_stop(jnp.matmul)(y, w) @ w

    found = dtypes_of(amp(fn, compute_dtype=dtype), W, X)
    wanted = [d.__name__ for d in (dtype, other, jnp.float32, dtype)]
    assert found == [(name, name) for name in wanted]


def test_no_tracer_leaks():
    """Nothing that amp keeps outlives its trace, in custom rules and loops either."""
    step = lambda h, x: (jax.nn.relu(h @ W + x), None)  # noqa: E731
    fn = jax.checkpoint(lambda x: lax.scan(step, x[0], x)[0])
    gc.collect()
    gc.freeze()  # JAX collects garbage after each trace, and looks through all objects
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(lambda x: amp(fn)(x).sum()))(X)


# --- arguments, results, closures ----------------------------------------------------


def keyworded(w, *, x, mode="plain", flag=True, act=None, extra=None):
    assert mode in ("plain", "other") and extra is None and isinstance(flag, bool)
    y = x @ w if flag else x
    return {"y": act(y) if act else y, "mode": mode, "none": None, "n": 3, "act": act}


def test_arguments_and_results_of_any_kind():
    """Keywords, strings, booleans, functions and None pass through unharmed."""
    out = amp(keyworded)(W, x=X, mode="other", act=jnp.tanh)
    assert_close(out.pop("y"), jnp.tanh(X @ W), jnp.bfloat16)
    assert out == {"mode": "other", "none": None, "n": 3, "act": jnp.tanh}
    assert_identical(amp(keyworded)(W, x=X, flag=False)["y"], X)
    config = {"act": jnp.sin, "name": "sin"}
    out = amp(lambda c, w, s: (c["act"](w @ w) * s, c))(config, W, 2.0)
    assert out[1] == config


def run_on(fn, *args):
    """Runs amp(fn) and fn, asserts equal avals, returns both results."""
    actual, expected = amp(fn)(*args), fn(*args)
    assert_same_avals(actual, expected)
    return actual, expected


def test_float64():
    """With x64 on, float64 stays float64 and float32 is lowered beside it."""
    with jax.enable_x64(True):
        w64, w32 = np.eye(3) / 3, np.eye(3, dtype=np.float32)
        fn = lambda a, b: (a @ a, jnp.tanh(a), b @ b, a @ b)  # noqa: E731
        actual, expected = run_on(fn, w64, w32)
        assert_identical(actual[:2], expected[:2])
        assert sorted(dtypes_of(amp(fn), w64, w32)) == [
            ("bfloat16", "bfloat16"), ("float64", "float32"), ("float64", "float64")
        ]  # fmt: skip


def test_numpy_and_scalar_inputs():
    """numpy arrays and scalars are arrays; Python scalars stay weak."""
    w = np.eye(3)  # float64, which JAX reads as float32
    actual, expected = run_on(lambda w, s: (jnp.tanh(w @ w) * s, w), w, np.float32(2))
    assert_close(actual[0], expected[0], jnp.bfloat16)
    loop = lambda w, n: lax.fori_loop(0, n, lambda _, c: c @ w, w)  # noqa: E731
    run_on(loop, w, np.int32(2))
    half = jnp.ones((3,), jnp.float16)
    run_on(lambda x, s: (x * s, x + 1, jnp.where(x > 0, x, 2.0)), half, 2.5)
    assert float(jax.grad(amp(lambda x: x * x))(3.0)) == 6.0
    assert float(jax.jvp(amp(jax.nn.relu), (3.0,), (1.0,))[1]) == 1.0


WEAK = jnp.full((4,), 0.3)
WEAKLY_TYPED = {
    "matmul": (lambda w: jnp.stack([w, w]) @ w, WEAK),
    "scatter": (lambda x: jnp.full((4,), 1e5).at[0].set(x[0]), jnp.ones(4)),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: 2 * c, x), WEAK),
    "numbers": (
        lambda x: (jnp.asarray(2.0), jnp.float32(2), jnp.asarray(True), jnp.int32(3)),
        jnp.ones(3),
    ),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", WEAKLY_TYPED)
def test_weak_types_of_results(name, dtype):
    """A weak result takes the dtype of what it is multiplied with."""
    fn, x = WEAKLY_TYPED[name]
    expected = jax.tree.leaves(fn(x))
    lowered = amp(fn, compute_dtype=dtype)
    for way in (lowered, jax.jit(lowered), amp(jax.jit(fn), compute_dtype=dtype)):
        for a, b in zip(jax.tree.leaves(way(x)), expected, strict=True):
            assert isinstance(a, jax.Array)
            assert a.weak_type == b.weak_type
            assert (a * jnp.bfloat16(1)).dtype == (b * jnp.bfloat16(1)).dtype


# --- amp_stop and scopes -------------------------------------------------------------


def test_amp_stop_as_decorator_and_context():
    """What is inside is float32, its backward pass included; what is outside is not."""

    @amp_stop
    def exact(w, x):
        return x @ w

    def fn(w, x):
        y = exact(w, x @ w)
        with amp_stop():
            return jnp.sum(y @ w)

    half, full = ("bfloat16",) * 2, ("float32",) * 2
    assert dtypes_of(amp(fn), W, X) == [half, full, full]
    for grad in (jax.grad(amp(fn)), amp(jax.grad(fn))):
        found = dtypes_of(grad, W, X)
        # Of x @ w inside exact(w, ...) only w needs a gradient.
        assert (found.count(half), found.count(full)) == (2, 6)


@pytest.mark.parametrize(
    "chosen", [flax_amp.use_compute_precision, "bfloat16", "float16"]
)
def test_forced_scope_spares_what_cannot_be_lowered(chosen):
    """Linear algebra and random numbers, which rounding would turn into infinities."""

    def fn(w, k):
        with jax.named_scope("head"):
            root = jnp.linalg.cholesky(w @ w.T + 4 * jnp.eye(SIZE)).at[0].apply(jnp.sin)
            return root, jax.random.normal(k, (10_000,)), jax.random.bits(k)

    key = jax.random.key(7)
    lowered = amp(fn, amp_policy=default_amp_policy | {"head": chosen})
    (root, *numbers), (expected, *exact) = lowered(W, key), fn(W, key)
    assert_close(root, expected, jnp.bfloat16)
    assert jnp.isfinite(numbers[0]).all()
    assert_identical(numbers, exact)


def test_amp_as_decorator():
    """With and without arguments; name and docstring stay."""

    @amp
    def plain(w):
        """Says something."""
        return w @ w

    @amp(compute_dtype=jnp.float16)
    def other(w):
        return w @ w

    assert (plain.__name__, plain.__doc__) == ("plain", "Says something.")
    assert_all_in(plain, W, dtype=jnp.bfloat16, count=1)
    assert_all_in(other, W, dtype=jnp.float16, count=1)


# --- in float32 `amp` is the identity, unless the policy asks for another dtype ------

identity = functools.partial(amp, compute_dtype=jnp.float32)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_that_of_plain_jax(name):
    fn = PROGRAMS[name]
    actual, expected = (
        jax.make_jaxpr(jax.grad(loss_of(f)))(W, X) for f in (identity(fn), fn)
    )
    assert str(actual) == str(expected)


def test_the_function_runs_once_and_sees_its_arguments(count_traces):
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))
        return args, kwargs

    args, kwargs = (W, "name", 3, None, np.ones(2)), {"key": len}
    assert identity(fn)(*args, **kwargs) == (args, kwargs)
    ((found_args, found_kwargs),) = seen
    assert all(map(lambda x, y: x is y, found_args, args))
    assert found_kwargs == kwargs

    fn, traces = count_traces(PROGRAMS["mlp"])
    jax.jit(jax.grad(loss_of(identity(fn))))(W, X)
    assert traces() == 1


# --- policies that ask for another dtype ---------------------------------------------


@pytest.mark.parametrize("key", [lax.dot_general_p, "head"])
def test_a_policy_may_ask_for_another_dtype(key):
    def fn(w, x):
        with jax.named_scope("head"):
            return x @ w

    lowered = identity(fn, amp_policy=default_amp_policy | {key: jnp.bfloat16})
    assert_all_in(lowered, W, X, dtype=jnp.bfloat16, count=1)


def test_the_tests_of_the_rewriter_rewrite():
    seen = []
    rewritten_in_float32(lambda w, x: seen.append(x) or x @ w)(W, X)
    assert isinstance(seen[-1], jax.core.Tracer)


# --- the interpreters that JAX ships, over `amp` and under it: docs/composition.md ---


def normed_layers(w, x):
    for _ in range(2):
        x = jnp.tanh(norm(x @ w + x[0, 0]))
    return jnp.mean((x @ (w * 2)) ** 3)


def series(fn):
    """The value and three derivatives along a line."""
    zeros = jnp.zeros_like
    terms = (W.T / 4, zeros(W), zeros(W)), (X[::-1] / 8, zeros(X), zeros(X))
    return jax.jit(lambda w, x: jet.jet(fn, (w, x), terms))


def in_sparse(fn):
    def run(w, x):
        return sparse.sparsify(fn)(sparse.BCOO.fromdense(w, nse=w.size), x)

    return jax.jit(run)


def checked(fn):
    run_checked = jax.jit(checkify.checkify(fn, errors=checkify.float_checks))

    def run(w, x):
        error, out = run_checked(w, x)
        error.throw()
        return out

    return run


def keys_checked(fn):
    def run(w, x):
        with jax.debug_key_reuse(True):
            return jax.jit(fn)(w, x)

    return run


def as_function(fn):
    return lambda *args: jaxpr_as_fun(jax.make_jaxpr(fn)(*args))(*args)[0]


ALL = (checked, keys_checked, as_function)
WITHOUT_RULES = (series, in_sparse)  # for a checkpoint


@pytest.mark.parametrize("interpreter", ALL + WITHOUT_RULES)
def test_over_amp(interpreter):
    options = dict(recompute=False) if interpreter in WITHOUT_RULES else {}
    actual = interpreter(amp(normed_layers, **options))(W, X)
    assert relative_error(actual, interpreter(normed_layers)(W, X)) < 0.1


@pytest.mark.parametrize("interpreter", [*ALL, series])
def test_under_amp(interpreter):
    inside = interpreter(normed_layers)
    actual, expected = amp(inside)(W, X), inside(W, X)
    assert relative_error(actual, expected) < 0.1
    assert "bf16[" in str(jax.make_jaxpr(amp(inside))(W, X))


# --- `jax.export` with symbolic shapes, for several platforms ------------------------


def layers_and_rows(w, x):
    """Branches, a checkpoint, and a loop of which the length is a symbol."""
    x = lax.cond(x.sum() > 0, lambda: norm(nn.gelu(x @ w)), lambda: x)
    x = jax.checkpoint(lambda x: norm(nn.relu(x @ w)))(x)
    return lax.scan(lambda c, x: (c + jnp.sum(nn.silu(x @ w)), norm(x)), 0.0, x)


def test_export():
    """One program computes the function and its gradient at two sizes."""
    w, lowered = normal(0, 4, 4), amp(layers_and_rows)

    def both(w, x):
        return lowered(w, x), jax.grad(lambda w: squares(lowered(w, x)))(w)

    shape = *export.symbolic_shape("b, 2*s"), 4
    args = w, jax.ShapeDtypeStruct(shape, w.dtype)
    done = export.export(jax.jit(both), platforms=("cpu", "cuda", "tpu"))(*args)
    done = export.deserialize(done.serialize())
    for size in (2, 6):
        args = w, normal(1, size, size, 4)
        found, expected = (exact_jit(fn)(*args) for fn in (done.call, both))
        # A compiler may add up the gradient of a bias in half or in float32.
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5),
            found,
            expected,
        )


# --- wrong options -------------------------------------------------------------------


def loss(*args):
    return None


F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32

WRONG = [  # options, error, message
    (dict(compute_dtype="float12"), TypeError, "compute_dtype: got 'float12'"),
    *(
        (dict(compute_dtype=x), TypeError, "got .*; expected jnp.float16")
        for x in ("int8", jnp.int8, jnp.float64, "bf16-mixed", object())
    ),
    (dict(precision="half"), ValueError, "precision is 'half'; expected one of"),
    (dict(precision="fp16", compute_dtype=BF16), TypeError, "got both precision="),
    (dict(amp_policy={"a": 5}), TypeError, "amp_policy: wrong entries:\n  'a': 5\n"),
    *(
        (dict(recompute=x), TypeError, "recompute: got .*; expected True or False")
        for x in ("auto", None, 1)
    ),
    (dict(reduce_in_float32=1), TypeError, "reduce_in_float32: got 1; expected True"),
]


@pytest.mark.parametrize("options, error, message", WRONG)
def test_wrong_options(options, error, message):
    """They fail when a function is made, not when it is called."""
    for make in (functools.partial(amp, loss), amp):  # with the function, or without
        with pytest.raises(error, match=message):
            make(**options)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="amp: got int; expected a function"):
        amp(3)
    for dtype in (F16, BF16, F32):  # which can be called
        with pytest.raises(TypeError, match=r"amp: got .*float.*@amp\(compute_dtype="):
            amp(dtype)
