"""Custom derivatives: the user's rule decides, rewritten but never dropped."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from _programs import DERIVATIVES, normal, over_devices, with_vjp
from flax_amp import amp
from helpers import (
    HALVES,
    MATMULS,
    dtypes_of,
    equations,
    equations_of,
    relative_error,
    rewritten_in_float32,
    run_all,
)

# --- every setting: `amp` does what plain JAX does ------------------------------------

# Some of all combinations run, in which every two settings meet.
SETTINGS = (
    ("vjp", "jvp"),  # the rule
    # The constant is not what the function computes: its tracer would be dead.
    ("none", "numpy", "jnp"),
    ("all", "some", "none"),  # perturbed
    (False, True),  # is an integer among the operands and the results?
    (False, True),  # nondiff_argnums
    ("plain", "jit", "scan", "vmap", "checkpoint"),
    ("grad", "jvp", "grad of grad", "jvp of grad"),
)
CASES = list(itertools.product(*SETTINGS))


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def covering(cases):
    """Some of the cases, in which every pair of settings is that the cases have."""
    missing, draw = set().union(*map(pairs_of, cases)), random.Random(0)
    while missing:
        some = draw.sample(cases, min(100, len(cases)))
        case = max(some, key=lambda case: len(pairs_of(case) & missing))
        if pairs_of(case) & missing:
            missing -= pairs_of(case)
            yield case


TABLE = np.linspace(0.5, 1.5, 9, dtype=np.float32).reshape(3, 3)
TABLES = {
    "none": np.eye(3, dtype=np.float32),
    "numpy": TABLE,
    "jnp": jnp.asarray(TABLE),
}
X = jnp.linspace(0.1, 0.9, 9).reshape(3, 3)
# What JAX says of a derivative with respect to what a rule closes over, early or late,
# and of forward mode.
ERRORS = {"CustomVJPException", "UnexpectedTracerError", "TypeError"}


def make_rule(kind, table, integer, nondiff):
    """A function `(x, y, n, scale) -> (result, integer)` whose derivative is wrong.

    It is twice the truth in `x`.
    """
    argnums = (3,) if nondiff else ()

    def fun(x, y, n, scale):
        out = jnp.sin(x) @ table * y * scale + (n if integer else 0)
        return out, (n + 1 if integer else 0.5 * y)

    def jvp(*args):
        *static, primals, tangents = args
        function = lambda x, y: fun(x, y, *primals[2:], *static)  # noqa: E731
        return jax.jvp(function, primals[:2], (2 * tangents[0], tangents[1]))

    def forward(*args):
        return fun(*args), args

    def backward(*args):
        (x, y, *others), cts = args[-2:]
        gx, gy = jax.vjp(lambda x, y: fun(x, y, *others), x, y)[1](cts)
        return (2 * gx, gy, None) if nondiff else (2 * gx, gy, None, None)

    if kind == "jvp":
        rule = jax.custom_jvp(fun, nondiff_argnums=argnums)
        rule.defjvp(jvp)
    else:
        rule = jax.custom_vjp(fun, nondiff_argnums=argnums)
        rule.defvjp(forward, backward)
    return rule


def in_scan(call):
    def calls(x, y):
        step = lambda c, _: (c + 0.1 * call(c, y)[0], call(c, y))  # noqa: E731
        return lax.scan(step, x, None, 2)[1]

    return calls


WITHIN = {
    "plain": lambda call: call,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda call: lambda x, y: jax.vmap(call)(x[None], y[None]),
    "scan": in_scan,
}


def make_program(rule, constant, perturbed, integer, nondiff, within, mode):
    """A scalar function of `p` around a call of a rule; `q` is its data."""
    del mode
    table = TABLES[constant]

    def program(p, q):
        function = make_rule(rule, table, integer, nondiff)
        x, y = {"all": (p, p * 2), "some": (p, q), "none": (q, q * 2)}[perturbed]

        def call(x, y):
            return function(x, y, jnp.arange(3)[None], 0.7)

        out, second = WITHIN[within](call)(x, y)
        out = out.reshape(-1, 3, 3).sum(0)
        return (out * p).sum() + second.sum()

    return program


def result_of(program, mode):
    """The value of a derivative, or the name of its error; without compiling it."""
    function = DERIVATIVES[mode](lambda p: program(p, X[::-1]))
    try:
        closed = jax.make_jaxpr(function)(X)
        with jax.disable_jit():
            return [np.asarray(x) for x in jaxpr_as_fun(closed)(X)]
    except Exception as error:
        return type(error).__name__


def test_amp_does_what_plain_jax_does():
    """Values, and where JAX refuses an error as well."""
    for case in covering(CASES):
        program, mode = make_program(*case), case[-1]
        expected = result_of(program, mode)
        actual = result_of(rewritten_in_float32(program), mode)
        if isinstance(expected, str):
            # Of two errors, either may come first.
            assert {actual, expected} <= ERRORS, (case, actual, expected)
        else:
            assert not isinstance(actual, str), (case, actual)
            np.testing.assert_allclose(actual, expected, 1e-6, 1e-6, err_msg=str(case))


def test_matmuls_of_rules_run_in_the_compute_dtype():
    """Forward and backward, in the function and in its rule, and to second order."""
    cases = [c for c in CASES if c[1] != "jnp" and c[2:5] == ("all", True, False)]
    for case, dtype in zip(covering(cases), itertools.cycle(HALVES), strict=False):
        program, mode = make_program(*case), case[-1]
        lowered = amp(program, compute_dtype=dtype)
        try:
            run = DERIVATIVES[mode](lambda p, f=lowered: f(p, X))
            jaxpr = jax.make_jaxpr(run)(X)
        except Exception as error:
            assert type(error).__name__ in ERRORS, case
            continue
        matmuls = [e for _, e in equations(jaxpr) if e.primitive.name in MATMULS]
        found = {str(v.aval.dtype) for e in matmuls for v in e.invars}
        assert found == {dtype.__name__}, (case, found)


def recording(symbolic_zeros):
    """Returns `2 x`; the "gradient" of the statistic is its new value, as in fp8."""
    record = jax.custom_vjp(lambda x, stat: 2 * x)

    def forward(x, stat):
        x = x.value if symbolic_zeros else x
        return 2 * x, jnp.abs(x).max()

    record.defvjp(forward, lambda res, _: (None, res), symbolic_zeros=symbolic_zeros)
    return record


ignoring = jax.custom_vjp(lambda x, q: x * 1.0)
ignoring.defvjp(lambda x, q: (x * 1.0, None), lambda _, ct: (ct, None))
AROUND = {
    "call": lambda f: f,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda p: lax.scan(lambda c, _: (c, f(p)), 0.0, None, 2)[1].sum(),
}


@pytest.mark.parametrize("symbolic_zeros", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_a_rule_runs_although_its_cotangents_are_zero(name, symbolic_zeros):
    """As in plain JAX: a statistic that the rule returns as a gradient arrives."""
    record = recording(symbolic_zeros)
    p = {"w": jnp.float32(1.5), "stat": jnp.float32(0)}
    loss = AROUND[name](lambda p: ignoring(h := X * p["w"], record(h, p["stat"])).sum())
    expected = jax.grad(loss)(p)
    assert expected["stat"] != 0
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.float16, 2e-2)):
        found = jax.grad(amp(loss, compute_dtype=dtype))(p)
        for key in p:
            np.testing.assert_allclose(found[key], expected[key], rtol=tolerance)


@pytest.mark.filterwarnings("ignore:amp. no matmul")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_jvp_rule_that_asks_what_is_perturbed(around):
    """It runs as written, in float32, with what it closes over."""
    table = jnp.asarray(TABLE)
    f = jax.custom_jvp(lambda x, y: jnp.sin(x) @ table * y)

    def rule(primals, tangents):
        assert type(tangents[1]) is SymbolicZero
        return f(*primals), 2 * tangents[0] @ table

    f.defjvp(rule, symbolic_zeros=True)
    loss = lambda x: around(f)(x, X[::-1]).sum()  # noqa: E731
    gradients = [jax.jit(jax.grad(fn))(X) for fn in (amp(loss), loss)]
    np.testing.assert_array_equal(*gradients)


tapped = jax.custom_vjp(lambda x, ref: x)


def write(ref, cotangent):
    ref[...] = jnp.sum(cotangent**2)
    return cotangent, None


tapped.defvjp(lambda x, ref: (x, ref), write)
scaled = jax.custom_vjp(lambda x, ref: x * ref[...])
scaled.defvjp(lambda x, ref: (x * ref[...], ref[...]), lambda s, ct: (ct * s, None))


@pytest.mark.parametrize("rule", [tapped, scaled], ids=["writes", "reads"])
def test_a_rule_may_take_a_ref(rule):
    """It is left as it is, and what stands around it is rewritten."""

    def loss(w, ref):
        call = lambda c, _: (rule(jnp.tanh(c @ w), ref), None)  # noqa: E731
        return jnp.sum(jnp.sin(lax.scan(call, call(w, None)[0], None, 2)[0]))

    def run(function):
        ref = jax.new_ref(jnp.float32(3))
        return jax.jit(jax.grad(function))(X / 4, ref), ref[...]

    expected = run(loss)
    for dtype, rtol in ((jnp.float32, 1e-6), (jnp.float16, 2e-2)):
        found = run(amp(loss, compute_dtype=dtype))
        jax.tree.map(
            lambda *xs, r=rtol: np.testing.assert_allclose(*xs, r), found, expected
        )


def test_one_jitted_call_under_changing_perturbation():
    """Residuals fit the backward function, whatever was differentiated before."""
    program = make_program("vjp", "jnp", "some", False, False, "plain", "grad")
    run, plain = jax.jit(rewritten_in_float32(program)), jax.jit(program)
    for argnums in (0, 1, 0):
        for derivative in (jax.grad, lambda f, i: jax.jit(jax.grad(f, i))):
            actual, expected = (
                derivative(f, argnums)(X, X[::-1]) for f in (run, plain)
            )
            np.testing.assert_allclose(actual, expected, 1e-6, 1e-6)


# --- errors, precision, how often rules are traced ------------------------------------


def test_an_error_of_a_rule_is_its_own():
    def fails(x):
        raise ValueError("mine")

    f = jax.custom_vjp(jnp.sin)
    f.defvjp(fails, lambda _, ct: (ct,))
    gradient = jax.grad(lambda x: amp(f)(x).sum())
    for derivative in (gradient, over_devices(gradient, P(), P())):
        with pytest.raises(ValueError, match="mine"):
            derivative(jnp.ones(2))


exact_dot = functools.partial(jnp.dot, precision="highest")
exact_vjp, exact_jvp = jax.custom_vjp(jnp.dot), jax.custom_jvp(jnp.dot)
exact_vjp.defvjp(
    lambda x, w: (jnp.dot(x, w), (x, w)),
    lambda xw, ct: (exact_dot(ct, xw[1].T), exact_dot(xw[0].T, ct)),
)
exact_jvp.defjvp(
    lambda xw, ts: (jnp.dot(*xw), exact_dot(ts[0], xw[1]) + exact_dot(xw[0], ts[1]))
)


@pytest.mark.parametrize("dot", [exact_vjp, exact_jvp], ids=["vjp", "jvp"])
def test_a_rule_that_asks_for_precision_gets_it(dot):
    """Also where its function asks for the default, or the process does."""
    run = amp(lambda x, w: dot(x, w).sum())
    along = lambda *xs: jax.jvp(run, xs, xs)  # noqa: E731
    derivative = jax.grad(run) if dot is exact_vjp else along
    for precision in (None, "bfloat16"):
        with jax.default_matmul_precision(precision):
            found = dtypes_of(derivative, jnp.ones((2, 4)), jnp.ones((4, 4)))
        assert sorted(found) == [("bfloat16",) * 2, *[("float32",) * 2] * 2]


in_rule = with_vjp(lambda x, y: with_vjp(jnp.sin)(x) @ y)


def test_an_eager_shard_map():
    """It refuses symbolic zeros, also in the bodies and rules that it runs."""
    x = jnp.arange(9.0).reshape(3, 3) / 9

    def fn(x, y):
        return lax.scan(lambda c, _: (in_rule(c, y), None), in_rule(x, y), None, 2)[0]

    def gradient(fn):
        mapped = over_devices(fn, P(), P())
        return jax.grad(lambda x, y: mapped(x, y).sum(), argnums=(0, 1))(x, x / 2)

    assert relative_error(gradient(rewritten_in_float32(fn)), gradient(fn)) < 1e-5


# --- the tangents of a custom_vjp ----------------------------------------------------


def _clipped(w, x):
    return jnp.tanh(x @ w)


def _clipped_vjp(pair, g):
    w, x, y = pair
    g = jnp.clip(g, -0.01, 0.01) * (1 - y**2)  # which its derivative does not
    return x.T @ g, g @ w.T


clipped = jax.custom_vjp(_clipped)
clipped.defvjp(
    lambda w, x: ((y := jnp.tanh(x @ w)), (w, x, y)),
    _clipped_vjp,
)


CALLS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: (
        lambda w, x: lax.scan(lambda c, _: (c, f(w, x)), 0, None, length=2)[1][0]
    ),
}


# The call does not depend on the dtype: each dtype has two calls.
@pytest.mark.parametrize(
    "around, dtype", list(zip(CALLS, itertools.cycle(HALVES), strict=False))
)
def test_a_custom_vjp_in_the_rule_of_a_custom_jvp(dtype, around):
    """Its backward function is called when the tangents are transposed."""
    outer = jax.custom_jvp(lambda w, x: clipped(w, x))
    outer.defjvp(lambda primals, tangents: jax.jvp(clipped, primals, tangents))
    call, args = CALLS[around](outer), (normal(3, 4, 4) / 2, normal(4, 8, 4))

    def loss(w, x):
        return 100 * jnp.mean(call(w, x) ** 2)

    grad = jax.grad(amp(loss, compute_dtype=dtype), argnums=(0, 1))
    for eqn in equations_of(grad, *args, primitive="dot_general"):
        assert {v.aval.dtype for v in eqn.invars} == {jnp.dtype(dtype)}
    found, exact = run_all(grad, jax.grad(loss, argnums=(0, 1)))(*args)
    for got, asked in zip(found, exact, strict=True):
        assert relative_error(got, asked) < 2e-2
