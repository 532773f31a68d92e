"""Rules of custom derivatives in every setting: `amp` does what plain JAX does.

Some of all combinations run, in which every two settings meet.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import jaxpr_as_fun

from flax_amp import amp
from helpers import (
    HALVES,
    MATMULS,
    equations,
    rewritten_in_float32,
)

SETTINGS = {
    "rule": ("vjp", "vjp_zeros", "jvp", "jvp_zeros"),
    # Not what the function computes: a rule would close over a tracer that is dead.
    "constant": ("none", "numpy", "jnp"),
    "perturbed": ("all", "some", "none"),
    "integer": (False, True),  # among the operands and the results
    "nondiff": (False, True),
    "within": ("plain", "jit", "scan", "vmap", "checkpoint", "nested"),
    "mode": ("grad", "jvp", "grad_of_grad", "jvp_of_grad"),
}
CASES = list(itertools.product(*SETTINGS.values()))


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
TABLE_ON_DEVICE = jnp.asarray(TABLE)
X = jnp.linspace(0.1, 0.9, 9).reshape(3, 3)
# What JAX says, early or late, of a derivative with respect to what a rule closes over.
CLOSURE_ERRORS = {"CustomVJPException", "UnexpectedTracerError"}
NO_FORWARD_MODE = "TypeError"  # of a `custom_vjp`


def make_rule(kind, table, integer, nondiff):
    """A function `(x, y, n, scale) -> (result, integer)` whose derivative is wrong."""
    argnums = (3,) if nondiff else ()

    def fun(x, y, n, scale):
        out = jnp.sin(x) @ table * y * scale + (n if integer else 0)
        return out, (n + 1 if integer else 0.5 * y)

    def tangent(x, y, scale, tx, ty):
        # Twice the truth in `x`; `None` is a tangent that is not there.
        parts = [] if tx is None else [2 * (tx * jnp.cos(x)) @ table * y * scale]
        parts += [] if ty is None else [jnp.sin(x) @ table * ty * scale]
        return sum(parts)

    if kind.startswith("jvp"):
        rule = jax.custom_jvp(fun, nondiff_argnums=argnums)

        def jvp(*args):
            *static, primals, tangents = args
            x, y, n = primals[:3]
            scale = static[0] if nondiff else primals[3]
            tx, ty = (None if type(t) is SymbolicZero else t for t in tangents[:2])
            out = fun(x, y, n, scale)
            t_out = tangent(x, y, scale, tx, ty)
            t_second = zero_from_primal(out[1], symbolic_zeros=True)
            if integer:
                t_second = np.zeros(out[1].shape, jax.dtypes.float0)
            elif ty is not None:
                t_second = 0.5 * ty
            elif kind == "jvp":
                t_second = jnp.zeros_like(y)
            if isinstance(t_out, int):
                t_out = zero_from_primal(out[0], symbolic_zeros=True)
            return out, (t_out, t_second)

        rule.defjvp(jvp, symbolic_zeros=kind == "jvp_zeros")
        return rule

    rule = jax.custom_vjp(fun, nondiff_argnums=argnums)
    zeros = kind == "vjp_zeros"

    def forward(*args):
        asked = [bool(a.perturbed) for a in args[:2]] if zeros else [True, True]
        value = (lambda a: a.value) if zeros else (lambda a: a)
        x, y, n = map(value, args[:3])
        scale = args[3] if nondiff else value(args[3])
        residuals = (x, y, scale) if asked[1] else (x, y, scale, None)
        return fun(x, y, n, scale), residuals

    def backward(*args):
        (x, y, scale, *only_x), (ct, ct_second) = args[1:] if nondiff else args
        is_zero = type(ct) is SymbolicZero
        gx = None if is_zero else 2 * (ct * y * scale) @ table.T * jnp.cos(x)
        gy = None
        if not only_x:
            gy = 0.0 * y if is_zero else jnp.sin(x) @ table * ct * scale
            if not integer and type(ct_second) is not SymbolicZero:
                gy = gy + 0.5 * ct_second
        return (gx, gy, None) if nondiff else (gx, gy, None, None)

    rule.defvjp(forward, backward, symbolic_zeros=zeros)
    return rule


def in_scan(call):
    def calls(x, y):
        step = lambda c, _: (c + 0.1 * call(c, y)[0], call(c, y))  # noqa: E731
        return lax.scan(step, x, None, 2)[1]

    return calls


WITHIN = {
    "plain": lambda call: call,
    "nested": lambda call: call,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda call: lambda x, y: jax.vmap(call)(x[None], y[None]),
    "scan": in_scan,
}


def make_program(rule, constant, perturbed, integer, nondiff, within, mode):
    """A scalar function of `p` around a call of a rule; `q` is its data."""
    del mode

    def program(p, q):
        table = {
            "none": np.eye(3, dtype=np.float32),
            "numpy": TABLE,
            "jnp": TABLE_ON_DEVICE,
        }[constant]
        function = make_rule(rule, table, integer, nondiff)
        if within == "nested":
            function = nest(function, nondiff)
        x, y = {"all": (p, p * 2), "some": (p, q), "none": (q, q * 2)}[perturbed]

        def call(x, y):
            return function(x, y, jnp.arange(3)[None], 0.7)

        out, second = WITHIN[within](call)(x, y)
        out = out.reshape(-1, 3, 3).sum(0)
        return (out * p).sum() + second.sum()

    return program


def nest(function, nondiff):
    """A rule around another one, which it also differentiates."""
    argnums = (3,) if nondiff else ()
    outer = jax.custom_jvp(lambda *args: function(*args), nondiff_argnums=argnums)

    @outer.defjvp
    def jvp(*args):
        *static, primals, tangents = args
        full = (*primals[:3], *(static or primals[3:]))
        outs = function(*full)
        t_second = np.zeros(outs[1].shape, jax.dtypes.float0)
        if jnp.issubdtype(outs[1].dtype, jnp.inexact):
            t_second = 3 * tangents[1]
        return outs, (outs[0] * tangents[0] + tangents[1], t_second)

    return outer


def differentiated(program, mode):
    grad = jax.grad(program)
    return {
        "grad": grad,
        "jvp": lambda p, q: jax.jvp(lambda p: program(p, q), (p,), (q,))[1],
        "grad_of_grad": jax.grad(lambda p, q: (grad(p, q) ** 2).sum()),
        "jvp_of_grad": lambda p, q: jax.jvp(lambda p: grad(p, q), (p,), (q,))[1],
    }[mode]


def result_of(function):
    """The value of a function, or the name of its error; without compiling it."""
    try:
        closed = jax.make_jaxpr(function)(X, X[::-1])
        with jax.disable_jit():
            return np.asarray(jaxpr_as_fun(closed)(X, X[::-1])[0])
    except Exception as error:
        return type(error).__name__


def failures(cases):
    found = []
    for case in cases:
        program, mode = make_program(*case), case[-1]
        expected = result_of(differentiated(program, mode))
        actual = result_of(differentiated(rewritten_in_float32(program), mode))
        if not _agree(actual, expected):
            found.append((case, actual, expected))
    return found


def _agree(actual, expected):
    if isinstance(expected, str):
        assert expected in CLOSURE_ERRORS | {NO_FORWARD_MODE}, expected
        # Of two errors, either may come first.
        is_error = isinstance(actual, str)
        return is_error and actual in CLOSURE_ERRORS | {NO_FORWARD_MODE}
    return not isinstance(actual, str) and np.allclose(actual, expected, 1e-6, 1e-6)


def test_amp_does_what_plain_jax_does():
    """Values, and where JAX refuses the kind of its error."""
    assert not failures(covering(CASES))


# A rule that asks which operands are perturbed runs as it was written, in float32.
HALF_CASES = list(
    covering(
        [
            case
            for case in CASES
            if case[0] in ("vjp", "jvp") and case[1] in ("none", "numpy")
            if case[2:5] == ("all", True, False)
        ]
    )
)


def test_products_of_rules_run_in_the_compute_dtype():
    """Forward and backward, in the function and in its rule, and to second order."""
    for case, dtype in zip(HALF_CASES, itertools.cycle(HALVES), strict=False):
        program, mode = make_program(*case), case[-1]
        run = differentiated(amp(program, compute_dtype=dtype), mode)
        try:
            jaxpr = jax.make_jaxpr(run)(X, X)
        except Exception as error:
            assert type(error).__name__ in CLOSURE_ERRORS | {NO_FORWARD_MODE}, case
            continue
        products = [e for _, e in equations(jaxpr) if e.primitive.name in MATMULS]
        found = {str(v.aval.dtype) for e in products for v in e.invars}
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
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda p: lax.scan(lambda c, _: (c, f(p)), 0.0, None, 2)[1].sum(),
    "vmap": lambda f: (
        lambda p: jax.vmap(lambda s: f(p | {"w": s * p["w"]}))(X[0]).sum()
    ),
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


tapped = jax.custom_vjp(lambda x, ref: x)


def write(ref, cotangent):
    ref[...] = jnp.sum(cotangent**2)
    return cotangent, None


tapped.defvjp(lambda x, ref: (x, ref), write)
scaled = jax.custom_vjp(lambda x, ref: x * ref[...])
scaled.defvjp(lambda x, ref: (x * ref[...], ref[...]), lambda s, ct: (ct * s, None))


scaled_jvp = jax.custom_jvp(lambda x, ref: x * ref[...])
scaled_jvp.defjvp(lambda xs, ts: (xs[0] * xs[1][...], ts[0] * xs[1][...]))


@pytest.mark.parametrize("rule", [tapped, scaled, scaled_jvp], ids="w r jvp".split())
@pytest.mark.parametrize("within", ["call", "scan"])
def test_a_rule_may_take_a_ref(rule, within):
    """It is left as it is, and what stands around it is rewritten."""

    def loss(w, ref):
        def body(c, _):
            return rule(jnp.tanh(c @ w), ref), None

        out = body(w, None)[0] if within == "call" else lax.scan(body, w, None, 2)[0]
        return jnp.sum(jnp.sin(out))

    def run(function):
        ref = jax.new_ref(jnp.float32(3))
        return jax.jit(jax.grad(function))(X / 4, ref), ref[...]

    expected = run(loss)
    for dtype, rtol in ((jnp.float32, 1e-6), (jnp.float16, 2e-2)):
        found = run(amp(loss, compute_dtype=dtype))
        jax.tree.map(
            lambda *xs, r=rtol: np.testing.assert_allclose(*xs, r), found, expected
        )


@pytest.mark.parametrize("rule", ["vjp", "vjp_zeros"])
def test_one_jitted_call_under_changing_perturbation(rule):
    """Residuals fit the backward function, whatever was differentiated before."""
    program = make_program(rule, "jnp", "some", False, False, "plain", "grad")
    run, plain = jax.jit(rewritten_in_float32(program)), jax.jit(program)
    for argnums in (0, 1, 0):
        for derivative in (jax.grad, lambda f, i: jax.jit(jax.grad(f, i))):
            actual = result_of(derivative(run, argnums))
            assert _agree(actual, result_of(derivative(plain, argnums)))
