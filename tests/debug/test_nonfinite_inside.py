"""`find_nonfinite` inside of structured primitives, and what is no fault at all."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from _programs import with_jvp, with_vjp
from flax_amp import find_nonfinite

THIS = "tests/debug/test_nonfinite_inside.py"
LINES = (Path(__file__).parents[2] / THIS).read_text().splitlines()
W = jnp.eye(8)
BIG = jnp.ones((4, 8)).at[2, 5].set(200.0)
ZERO = jnp.ones((4, 8)).at[2, 5].set(0.0)
HUGE = jnp.ones((4, 8)).at[2, 5].set(6e4)

search = functools.partial(find_nonfinite, compute_dtype=jnp.float32)
in_float16 = functools.partial(find_nonfinite, compute_dtype=jnp.float16)


def line(mark):
    """The line of this file that ends with a mark."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{THIS}:{number}"


# --- faults --------------------------------------------------------------------------


def exp(x):
    with jax.named_scope("bad"):
        return jnp.exp(x)  # exp


def sqrt(x):
    with jax.named_scope("bad"):
        return jnp.sqrt(x)  # sqrt


def matmul(x):
    with jax.named_scope("bad"):
        return x @ (W + 1)  # matmul


# fault -> its input, its primitive, its pass
FAULTS = {
    exp: (BIG, "exp", "forward"),
    sqrt: (ZERO, "div", "backward"),
    matmul: (HUGE, "dot_general", "forward"),
}

# --- structures ----------------------------------------------------------------------


def plain(f, y):
    return f(y)


def scan(f, y):
    def body(c, i):
        with jax.named_scope("layer"):
            return c + f(jnp.where(i == 1, y, 1.0)), i

    return jax.lax.scan(body, y * 0, jnp.arange(3))[0]


def stacked(f, y):
    """The fault is in a stacked result, and the loop runs backwards."""

    def body(c, i):
        return c, f(jnp.where(i == 1, y, 1.0))

    return jax.lax.scan(body, y * 0, jnp.arange(3), reverse=True)[1]


def while_loop(f, y):
    s = jax.lax.stop_gradient(y)

    def body(carry):
        i, c = carry
        return i + 1, c + f(jnp.where(i == 1, s, 1.0))

    loop = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, s * 0))
    return y * 0 + loop[1]


def cond(f, y):
    return jax.lax.cond(y.sum() > 0, f, lambda y: y, y)


def checkpoint(f, y):
    return jax.checkpoint(lambda y: jnp.sin(f(y) * 2))(y)


def custom_jvp(f, y):
    return with_jvp(f)(y)  # custom_jvp


def custom_vjp(f, y):
    return with_vjp(f)(y)  # custom_vjp


def nested(f, y):
    branch = functools.partial(cond, f)
    return jax.jit(lambda y: scan(lambda z: jax.checkpoint(branch)(z), y))(y)


SECOND = "scan iteration 2 of 3"
# structure -> what is around the fault, and the faults
STRUCTURES = {
    plain: ((), (exp, sqrt)),
    scan: ((SECOND,), (matmul,)),
    stacked: ((SECOND,), (exp, sqrt)),
    while_loop: (("while iteration 2",), (exp,)),  # it has no backward pass
    cond: (("branch 1 of 2",), (matmul,)),
    checkpoint: ((), (sqrt,)),
    custom_jvp: ((), (sqrt,)),
    custom_vjp: ((), (sqrt,)),
    nested: ((SECOND, "branch 1 of 2"), (exp, sqrt)),
}


# `nested` shows `scan`, `cond` and `checkpoint` in both passes. The rules of
# `custom_jvp` and `custom_vjp` have their own line in the backward pass only.
CASES = [
    # Programs of the backward pass are larger: one version of JAX has them all.
    pytest.param(
        structure,
        fault,
        marks=pytest.mark.once if fault is sqrt and structure is not plain else (),
    )
    for structure, (_, faults) in STRUCTURES.items()
    for fault in faults
]


@pytest.mark.parametrize(
    "structure, fault", CASES, ids=lambda f: getattr(f, "__name__", "")
)
def test_each_structure_shows_the_fault(structure, fault):
    x, primitive, pass_ = FAULTS[fault]

    def loss(w, x):
        return structure(fault, x * w[0, 0]).mean()

    options = dict(compute_dtype=jnp.float16) if fault is matmul else {}
    found = search(loss, **options)(W, x)
    finding = found.finding
    assert ("backward" if finding.backward else "forward") == pass_
    # The second of three, also if a backward pass goes the other way.
    inside = tuple(x.removesuffix(" (reverse)") for x in finding.inside)
    around, _ = STRUCTURES[structure]
    assert inside == around and finding.kind == "inf"
    assert found.verdict == ("precision" if fault is matmul else "mathematics")
    # JAX has the line of the call of a rule.
    is_rule = structure in (custom_jvp, custom_vjp) and fault is sqrt
    assert finding.primitive == primitive and found.examples == (2,)
    assert finding.source == line((structure if is_rule else fault).__name__)
    layers = "layer/" if structure in (scan, nested) else ""
    assert finding.path == f"{layers}bad"


# --- what is no fault ----------------------------------------------------------------

OK = jnp.arange(8) > 3
FINE = {
    "masked softmax": lambda y: jax.nn.softmax(jnp.where(OK, y, -jnp.inf)).var(),
    "safe log": lambda y: jnp.where(OK, jnp.log(jnp.where(OK, y, 1.0)), 0.0).sum(),
    "dropped": lambda y: jnp.where(
        y > -1, y, jax.lax.stop_gradient(jnp.log(y * 0))
    ).sum(),
    "indices": lambda y: y[jnp.arange(4), jnp.argmax(jnp.where(OK, y, -jnp.inf))].sum(),
    "aux only": lambda y: (y.sum(), {"logits": jnp.where(OK, y, -jnp.inf), "n": 3}),
}


@pytest.mark.parametrize("fun", FINE.values(), ids=FINE)
def test_no_false_alarm(fun):
    found = search(lambda w, x: jax.jit(fun)(x @ w))(W, ZERO + 0.1)
    assert found.verdict == "nothing", str(found)


# --- where it comes from -------------------------------------------------------------


def solved(w, x):
    return jax.lax.custom_linear_solve(
        lambda v: v * w[0, 1], x, lambda _, b: b / w[0, 1], symmetric=True
    ).sum()


MASKED = BIG.at[2, 1].set(0.0)

# A loss, its input, and the first cause: primitive, what it made, text, advice.
CAUSES = {
    "a literal": (
        lambda w, x: jnp.maximum(x @ w, jnp.inf).sum(),
        ZERO,
        ("constant", "inf", "", "where the program puts it in"),
    ),
    "a derivative that a where drops": (
        lambda w, x: jnp.where(x @ w > 0, jnp.log(x @ w), 0.0).sum(),
        ZERO,
        ("div", "NaN", "div(0, 0) = nan", "jnp.where(ok, f("),
    ),
    "the first of two": (
        lambda w, x: (jnp.exp(x @ w) - jnp.exp(x @ w)).sum(),
        BIG,
        ("exp", "inf", "exp(200) = inf", "subtract the maximum"),
    ),
    "beside a mask": (
        lambda w, x: (jnp.exp(jnp.where(x == 0, -jnp.inf, x)) * w[0, 0]).max(),
        MASKED,
        ("exp", "inf", "exp(200) = inf", "subtract the maximum"),
    ),
    "an index out of range": (
        lambda w, x: (w.at[99].get(mode="fill") * x[0]).sum(),
        ZERO,
        ("gather", "NaN", "", "index out of range"),
    ),
    "an opaque primitive": (solved, ZERO, ("custom_linear_solve", "NaN", "", "")),
}


@pytest.mark.parametrize("loss, x, expected", CAUSES.values(), ids=CAUSES)
def test_the_first_cause(loss, x, expected):
    found = search(loss)(W, x)
    primitive, kind, text, advice = expected
    finding = found.finding
    assert found.verdict == "mathematics" and finding.primitive.endswith(primitive)
    assert kind in finding.kind and finding.text == text and advice in found.advice
    assert finding.source.startswith(THIS)
    assert not text or found.examples == (2,)


@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_count_as_they_run(reverse):
    def loss(w, x):
        def body(c, row):
            return c + jnp.log(row @ w).sum(), None

        return jax.lax.scan(body, 0.0, x, reverse=reverse)[0]

    found = search(loss)(W, jnp.ones((4, 8)).at[2].set(0.0))
    text = "scan iteration 2 of 4 (reverse)" if reverse else "scan iteration 3 of 4"
    assert found.finding.inside == (text,)


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(ZERO, jax.NamedSharding(mesh, P("d")))
    w = jax.device_put(W, jax.NamedSharding(mesh, P()))
    found = find_nonfinite(lambda w, x: jnp.log(x @ w).sum() * 2)(w, x)
    assert found.verdict == "mathematics" and found.finding.text == "log(0) = -inf"


def test_a_function_of_jax_has_the_line_of_its_call():
    def loss(w, x):
        return jnp.linalg.norm(0 * (x @ w))  # norm

    found = find_nonfinite(loss)(W, BIG).finding
    assert found.primitive == "div" and found.source == line("norm")


def test_a_function_that_jax_calls_has_its_own_line():
    def loss(w, x):
        def makes_inf(y):
            return jnp.log(y - y)  # inside

        return jnp.piecewise(x @ w, [x < 0], [jnp.sin, makes_inf]).sum()

    assert find_nonfinite(loss)(W, BIG).finding.source == line("inside")


@jax.custom_vjp
def of_vjp(x, w):
    return x @ w


def backward(kept, g):
    x, w = kept
    return g @ w.T + jnp.log(-jnp.abs(x)), x.T @ g  # of_vjp


of_vjp.defvjp(lambda x, w: (x @ w, (x, w)), backward)


@jax.custom_jvp
def of_jvp(x, w):
    return x @ w


@of_jvp.defjvp
def tangent(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w * jnp.log(-jnp.abs(x)) + x @ dw  # of_jvp


@pytest.mark.parametrize("fun", [of_vjp, of_jvp], ids=lambda f: f.__name__)
def test_a_line_of_a_rule_with_matmuls(fun):
    """Not the line that calls the function."""
    found = find_nonfinite(lambda w, x: fun(x @ w, w).sum())(W, BIG)
    assert found.finding.source == line(fun.__name__) and found.finding.backward


def test_examples_that_leave_a_loop_one_after_the_other():
    """They have no iteration in common, so that the loop is named as a whole."""

    def loss(w, x):
        def run(row):
            body = lambda carry: (carry[0] + 1, jnp.log(carry[1] - 1))  # noqa: E731
            start = 0.0, row
            return jax.lax.while_loop(lambda c: c[0] < row[0], body, start)[1]  # loop

        loops = jax.vmap(run)(jax.lax.stop_gradient(x @ w))
        return loops.sum() * w[0, 0]

    found = find_nonfinite(loss)(W, jnp.arange(4.0)[:, None] * jnp.ones((4, 8)))
    assert (found.finding.primitive, found.finding.source) == ("while", line("loop"))
