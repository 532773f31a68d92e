"""The analysis: what `keep.py` and `paint.py` promise, on the plan itself."""

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from _programs import PROGRAMS, loss_of
from flax_amp._rewriter import paint
from flax_amp._rewriter.plan import FULL, LEAF, LOW, Mode, Need, at_border, join
from helpers import equations, plan_of, steps_of

W, X, B = jnp.ones((4, 4)), jnp.ones((3, 4)), jnp.ones((3, 4))


def paints(fn, primitive):
    """The paints of the results of all equations of a primitive: low, full, leaf."""
    args = (W, X, B)[: fn.__code__.co_argcount]
    found = steps_of(plan_of(fn, *args))
    values = [v for eqn, s in found if eqn.primitive.name == primitive for v in s.outs]
    return [value and value.paint.value for value in values]


def behind_a_loop(w, x):
    step = lambda c, _: (jnp.sin(c @ w), jnp.sin(c))  # noqa: E731
    return jnp.cos(jax.lax.scan(step, x, None, length=2)[1]) @ w


def choice_behind_a_loop(w, x):
    layer = lambda _, w: (None, jnp.sin(x @ w))  # noqa: E731
    found = jax.lax.scan(layer, None, jnp.stack([w, w]))[1]
    return jax.lax.top_k(found, 2)[0].sum(0) @ w[:2]


def behind_a_branch(w, x):
    return jnp.cos(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.tanh, x @ w)) @ w


def residual(w, x):
    h = jnp.sin(x @ w)
    return (h * (jnp.cos(h) @ w)) @ w


def last_residual(w, x):
    h = jnp.sin(x @ w)
    return h * (jnp.cos(h) @ w)


def with_a_logged_mean(w, x):
    h = jnp.sin(x @ w)
    return h.mean(), jnp.cos(h) @ w


def softmax(w, x):
    return jax.nn.softmax(x @ w) @ w


def scaled(w, x):  # the scalar is read on the other side of a product
    h = x @ w
    s = jnp.sqrt(jnp.vdot(h, h))
    return ((h * s) @ w * s) @ w


def divided(w, x):
    s = jnp.sin(x @ w)
    return (jnp.cos(x @ w) @ w / s) @ w


def solved(w, x):  # `h` is read twice, and so would be kept
    h = jnp.sin((x @ w)[:3, :3])
    return jnp.linalg.cholesky(h + h.mean()) @ x


def inner_product(w, x):
    h = jnp.sin(x @ w)
    return (h * jnp.einsum("bi,bi->b", h, h)[:, None]) @ w


def scalar_carry(w, x):  # of a stack of layers
    layer = lambda c, w: ((jnp.sin(c[0] @ w), 1.01 * c[1]), None)  # noqa: E731
    h = x @ w
    (h, t), _ = jax.lax.scan(layer, (h, h.mean()), jnp.stack([w, w]))
    return (h * t) @ w


def centered(w, x):
    h = jnp.sin(x @ w)
    return (h - h.mean()) @ w


def logged(w, x):
    h = jnp.sin(x @ w)
    return jnp.sum(h @ w), h.mean(), jnp.exp(h), jnp.cos(h)


EQUATIONS = {  # name: (function, a primitive, the paints of its equations)
    # Products, and what is read by them.
    "a product": (lambda w, x: x @ w, "dot_general", "low"),
    "a product reads it": (lambda w, x: jnp.sin(x @ w) @ w, "sin", "low"),
    "arithmetic reads it": (lambda w, x: jnp.cos(jnp.sin(x @ w)) @ w, "sin", "full"),
    "nothing reads it": (lambda w, x: jnp.sin(x @ w), "sin", "full"),
    "a loss reads it": (lambda w, x: jnp.mean(jnp.sin(x @ w)), "sin", "full"),
    "a move to a product": (lambda w, x: jnp.sin(x @ w).T @ x, "sin", "low"),
    "a maximum to a product": (
        lambda w, x: jnp.maximum(jnp.sin(x @ w), 0.0) @ w, "sin", "low"
    ),
    # Across products, and sums beside other readers.
    "across a product": (residual, "sin", "low"),
    "across the last product": (last_residual, "sin", "full"),
    "a sum and another reader": (centered, "sin", "low"),
    "an inner product and another reader": (inner_product, "sin", "low"),
    "a sum alone": (lambda w, x: jnp.sin(x @ w).mean(0) @ w, "sin", "full"),
    "a sigmoid and another reader": (
        lambda w, x: jax.nn.silu(jnp.sin(x @ w)) @ w, "sin", "low"
    ),
    "a sigmoid alone": (lambda w, x: jax.nn.sigmoid(jnp.sin(x @ w)) @ w, "sin", "full"),
    "the exponentials of a softmax": (softmax, "exp", "low"),
    "the sum of a softmax": (softmax, "reduce_sum", "full"),
    "the exponentials of a softmax alone": (
        lambda w, x: jax.nn.softmax(x @ w), "exp", "full"
    ),
    "the exponentials of a softmax of arguments": (
        lambda w, x: jax.nn.softmax(x) @ w, "exp", "leaf"
    ),
    "the exponentials of a log_softmax": (
        lambda w, x: jax.nn.log_softmax(x @ w) @ w, "exp", "full"
    ),
    # Locality: what leads to no product changes nothing.
    "read low and logged": (logged, "sin", "low"),
    "what is logged": (logged, "cos", "full"),
    "a mean that is logged": (with_a_logged_mean, "sin", "full"),
    # Borders.
    "out of a loop": (behind_a_loop, "scan", "full low"),
    "out of a branch": (behind_a_branch, "cond", "low"),
    "out of branches, of which one is a sum": (
        lambda w, x: jax.lax.cond(
            x[0, 0] > 0, lambda y: jnp.cumsum(y, 0), lambda y: y @ w, x @ w
        ),
        "cond",
        "full",
    ),
    "out of a checkpoint to a product": (
        lambda w, x: jax.checkpoint(jnp.sin)(x @ w) @ w, "sin", "low"
    ),
    "across a checkpoint to arithmetic": (
        lambda w, x: jnp.cos(jax.checkpoint(jnp.sin)(x @ w)) @ w, "remat2", "low"
    ),
    "out of a checkpoint to a loss": (
        lambda w, x: jnp.mean(jax.checkpoint(jnp.sin)(x @ w)), "remat2", "full"
    ),
    "out of a jit, which is no border": (
        lambda w, x: jnp.cos(jax.jit(jnp.sin)(x @ w)) @ w, "jit", "full"
    ),
    "to a product and to arithmetic": (
        lambda w, x: (h := jnp.sin(x @ w)) @ w + jnp.cos(h) @ w, "sin", "full"
    ),
    "to a product and to a loss": (
        lambda w, x: ((h := jnp.sin(x @ w)) @ w).sum() + jnp.log(h).sum(), "sin", "low"
    ),
    # Moves.
    "moved to a product": (lambda w, x: (x @ w).T @ x, "transpose", "low"),
    "moved to a loss": (lambda w, x: (x @ w).T.sum(), "transpose", "full"),
    "moved arguments": (lambda w, x: x.T, "transpose", "leaf"),
    "moved with arguments": (
        lambda w, x: jnp.concatenate([x @ w, x]) @ w, "concatenate", "low"
    ),
    # Additions of halves.
    "two halves": (lambda w, x: (x @ w + x @ w) @ w, "add", "low"),
    "two halves in a loss": (lambda w, x: (x @ w + x @ w).sum(), "add", "full"),
    "a bias": (lambda w, x: (x @ w + w[:1]) @ w, "add", "low"),
    "a computed offset": (
        lambda w, x: jnp.sin(x @ w + 100 * jnp.arange(4.0)[None]), "add", "full"
    ),
    "a bias before a loss": (lambda w, x: jnp.sin(x @ w + w[:1]), "add", "low"),
    "a bias that is returned": (lambda w, x: x @ w + w[:1], "add", "low"),
    "a bias of several parts": (
        lambda w, x: jnp.sin(x @ w + jnp.concatenate([w[:1, 2:], w[:1, :2]], 1)),
        "add",
        "low",
    ),
    "a bias in a jitted layer": (
        lambda w, x: jnp.sin(jax.jit(lambda x: x @ w + w[:1])(x)),
        "add",
        "low",
    ),
    "a choice behind a loop": (choice_behind_a_loop, "scan", "full"),
    "a choice": (lambda w, x: jax.lax.top_k(jnp.sin(x @ w), 4)[0] @ w, "sin", "full"),
    "a choice by sorting": (
        lambda w, x: x[:, jnp.argsort(jnp.sin(x @ w), axis=1)[0]] @ w, "sin", "full"
    ),
    "what a choice by sorting and a product read": (
        lambda w, x: (jnp.argsort(h := jnp.sin(x @ w)).astype(jnp.float32) + h) @ w,
        "sin",
        "full",
    ),
    "a logged choice": (
        lambda w, x: (jnp.argmax(h := jnp.sin(x @ w)), h @ w),
        "sin",
        "low",
    ),
    "an argument that is no bias": (lambda w, x, b: (x @ w + b) @ w, "add", "low"),
    "a returned sum with an argument": (lambda w, x, b: x @ w + b, "add", "full"),
    # What is never rounded.
    "arguments alone": (lambda w, x: jnp.sin(w) @ w, "sin", "leaf"),
    "a sum": (lambda w, x: (x @ w).sum(0) @ w, "reduce_sum", "full"),
    "a scalar": (scaled, "sqrt", "full"),
    "a scalar carry": (scalar_carry, "scan", "low low"),
    "a divisor across a product": (divided, "sin", "full"),
    "what linear algebra reads": (solved, "sin", "full"),
    "what a product in float32 reads": (
        lambda w, x: jnp.matmul(jnp.sin(x @ w), w, precision="highest") @ w,
        "sin",
        "full",
    ),
    "an inner product": (lambda w, x: jnp.vdot(x @ w, x) * w @ w, "dot_general",
                         "low full low"),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name):
    fn, primitive, wanted = EQUATIONS[name]
    assert " ".join(paints(fn, primitive)) == wanted


def in_a_scan(w, x, c):
    add = lambda _, c: (None, jnp.sin(x @ w + c))  # noqa: E731
    return jax.lax.scan(add, None, c)[1]


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda w, x, c: jnp.sin(x @ w + c), ()),
        (lambda w, x, c: jnp.sin(x @ w + c[1]), (8,)),
        (lambda w, x, c: jnp.sin(x @ w + jnp.broadcast_to(c[1], (3, 4))), (8,)),
        (in_a_scan, (8,)),
    ],
    ids=["argument", "of an array", "broadcast", "in a scan"],
)
def test_a_scalar_is_no_bias(fn, shape):
    lowered = flax_amp.amp(fn, compute_dtype=jnp.bfloat16)
    found = equations(jax.make_jaxpr(lowered)(W, X, jnp.ones(shape)))
    dtypes = {
        eqn.outvars[0].aval.dtype
        for _, eqn in found
        if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == (3, 4)
    }
    assert dtypes == {jnp.dtype(jnp.float32)}


# --- needs ---------------------------------------------------------------------------

LATER, COSTLY = Need.LATER, Need.COSTLY


@pytest.mark.parametrize(
    ("one", "other", "is_kept"),
    [
        (LATER, LATER, False),
        (LATER | COSTLY, Need.NONE, False),
        (LATER | COSTLY, LATER, True),
        (LATER | COSTLY, LATER | COSTLY, True),
        (Need.READ_IN_FLOAT32, LATER | COSTLY, False),  # a metric
        (Need.NONE, LATER | Need.PRODUCT, False),
    ],
)
def test_needs_of_two_readers(one, other, is_kept):
    for both in (one.together_with(other), other.together_with(one)):
        assert both == one | other | (Need.SHARED if is_kept else Need.NONE)


def test_need_at_a_border():
    assert at_border((LATER, Need.READ_IN_FLOAT32)) == (
        LATER | Need.BORDER,
        Need.READ_IN_FLOAT32,
    )


# --- modes ---------------------------------------------------------------------------


def modes(fn, primitive, *args, **options):
    found = steps_of(plan_of(fn, *args, **options))
    return [step.mode for eqn, step in found if eqn.primitive.name == primitive]


HIGHEST, PRESET = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32


@pytest.mark.parametrize("precision", ["highest", HIGHEST, PRESET])
def test_a_precision_of_the_user_keeps_a_product_in_float32(precision):
    dot = lambda w, x: jax.lax.dot(x, w, precision=precision)  # noqa: E731
    assert modes(dot, "dot_general", W, X) == [Mode.FULL]


def test_a_quantized_factor_keeps_a_product_in_float32():
    def quantized(w, x):
        return jax.lax.dot_general(x, w.astype(jnp.int8), (((1,), (0,)), ((), ())))

    assert modes(quantized, "dot_general", W, X) == [Mode.FULL]


@pytest.mark.parametrize(
    ("limit", "mode"),
    [(0.0, Mode.LOW), (1.0, Mode.LOW), (0.1, Mode.FULL), (None, Mode.FULL)],
)
def test_a_comparison_is_low_only_if_it_is_exact(limit, mode):
    def compare(w, x):
        return x @ w > (x if limit is None else limit)

    assert modes(compare, "gt", W, X) == [mode]


def test_exponentials_are_exact_for_their_derivative():
    assert "rounded_function" in str(jax.make_jaxpr(flax_amp.amp(softmax))(W, X))
    alone = flax_amp.amp(lambda w, x: jnp.exp(x @ w))
    assert "rounded_function" not in str(jax.make_jaxpr(alone)(W, X))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_dtype_that_the_user_asked_for_is_left_alone(dtype):
    other = jnp.float16 if dtype == jnp.bfloat16 else jnp.bfloat16

    def fn(w, x):
        return jnp.matmul(x.astype(other), w.astype(other)).astype(jnp.float32)

    assert modes(fn, "dot_general", W, X, dtype=dtype) == [Mode.FULL]


def test_a_user_function_is_asked_for_its_dtypes():
    def mine(compute_dtype, original_dtypes, *invars, **bind_params):
        return [x.astype(compute_dtype) for x in invars], bind_params

    policy = flax_amp.default_amp_policy | {jax.lax.exp_p: mine}
    plan = plan_of(jnp.exp, X, policy=policy)
    assert plan.steps[0].mode is Mode.CALL
    assert plan.outs == (LOW,)


# --- plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flow_is_found_once(name, monkeypatch):
    """Of a jaxpr for given needs, however many equations call it."""
    found, find = [], paint.find_flow

    def record(jaxpr, out_needs, has_product, reads):
        found.append((jaxpr, out_needs))
        return find(jaxpr, out_needs, has_product, reads)

    monkeypatch.setattr(paint, "find_flow", record)
    plan_of(loss_of(PROGRAMS[name]), W, jnp.ones((8, 4)))
    assert found
    assert len(found) == len({(id(jaxpr), needs) for jaxpr, needs in found})


def test_one_plan_per_jaxpr_and_values():
    block = jax.jit(lambda h, w: jnp.tanh(h @ w) @ w)

    def fn(w, x):
        h = block(x, w)  # a leaf goes in
        for _ in range(3):
            h = block(h, w)  # low goes in
        return h

    plan = plan_of(fn, W, X)
    assert plan.steps[0].detail is not plan.steps[1].detail
    assert plan.steps[1].detail is plan.steps[2].detail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((LEAF, LEAF), LEAF),
        ((LEAF, LOW), LOW),
        ((LOW, FULL), FULL),
        ((LOW, FULL._replace(is_state=True)), FULL._replace(is_state=True)),
        ((LEAF._replace(bits=b"this"), LEAF._replace(bits=b"that")), LEAF),
        ((None, None), None),
    ],
)
def test_join(values, expected):
    assert join(values) == expected
