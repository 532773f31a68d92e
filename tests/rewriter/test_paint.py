"""The analysis: what every rule of `flax_amp.paint` promises, on the plan itself."""

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from _programs import norm
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import LEAF, Mode, Paint, Use, Value, join, like
from flax_amp._rewriter.rules import RULES
from flax_amp.policy import Policy

W, X, B = jnp.ones((4, 4)), jnp.ones((3, 4)), jnp.ones((3, 4))
LOW, FULL = Mode.LOW, Mode.FULL


def plan_of(fn, *args, policy=flax_amp.default_amp_policy, dtype=jnp.float16):
    closed = jax.make_jaxpr(fn)(*args)
    painter = Painter(Policy(policy), dtype, RULES)
    ins = like([v.aval for v in closed.jaxpr.invars], LEAF)
    return painter.plan(closed, ins, (Use.UNKNOWN,) * len(closed.jaxpr.outvars))


def steps_of(plan):
    """The steps of a plan, each with the name of its primitive."""
    names = [eqn.primitive.name for eqn in plan.jaxpr.eqns]
    return list(zip(names, plan.steps, strict=True))


def low(w, x):
    return x @ w


# --- the mode, or the paint of the result, of one primitive each ----------------------


def log_softmax(logits):
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))


def batch_norm(w, x, mean, variance):
    return jnp.tanh((low(w, x) - mean) * jax.lax.rsqrt(variance + 1e-5)) @ w


def read_low_elsewhere(w, x, b):
    h = low(w, x) + b
    return jnp.sum(jnp.exp(h)), jnp.sum(h @ w)


def read_and_returned(w, x, b):
    h = low(w, x) + b
    return jnp.exp(h), h


def with_norm_and_scale(w, x, b):
    h = low(w, x)
    return jnp.tanh(h + norm(h) * b + b) @ w


def huber(w, x, y):
    error = jnp.abs(low(w, x) - y)
    small = jnp.minimum(error, 1.0)
    return jnp.mean(0.5 * small**2 + (error - small))


def cubed_between_products(w, x, y):
    h = low(w, x) - y
    return jnp.tanh(h + 0.1 * h**3) @ w


def gated_between_products(w, x, b):
    h = low(w, x) + b
    return (h * jnp.exp(-h)) @ w


def moved(w, x):
    return jnp.exp(jnp.transpose(low(w, x))) + jnp.max(x.reshape(4, 3))


def between_statistics(w, x, b):
    h = low(w, x)
    return jnp.sum((h * jnp.log(b) - h) * jnp.exp(b))


def polynomial(w, x, b):
    d = jnp.sin(low(w, x))
    return jnp.exp(d * (jnp.square(d) + jnp.log(b)))


def quantized(w, x):
    return jax.lax.dot_general(x, w.astype(jnp.int8), (((1,), (0,)), ((), ())))


def sum_of_two_log_softmaxes(w, x):
    logits = low(w, x)
    return log_softmax(logits) + 2 * log_softmax(-logits)


EQUATIONS = {  # name: (function, what is expected of all its equations of a primitive)
    # Low, full, follow, keep.
    "matmul": (lambda w, x: jnp.tanh(low(w, x)) @ w, dict(dot_general=LOW, tanh=LOW)),
    "a bias does not promote": (
        lambda w, x, b: jnp.tanh(low(w, x) + b) @ w, dict(add=LOW)
    ),
    "leaves alone": (
        lambda w, x, b: low(w, x * 2 + b), dict(mul=Paint.LEAF, add=Paint.LEAF)
    ),
    "movement": (
        moved, dict(transpose=Paint.LOW, reshape=Paint.LEAF, reduce_max=Paint.LEAF)
    ),
    "movement of several operands": (
        lambda w, x: jnp.concatenate([low(w, x), x]) @ w, dict(concatenate=Paint.LOW)
    ),
    "a maximum by indices": (
        lambda w, x: low(w, x).at[0].max(x[1]) @ w, {"scatter-max": Paint.LOW}
    ),
    # Where full precision ends.
    "a norm returns to the stream": (with_norm_and_scale, dict(mul=FULL, tanh=LOW)),
    "running averages": (batch_norm, dict(sub=FULL, tanh=LOW)),
    "normalized values that are added and returned": (
        sum_of_two_log_softmaxes, dict(mul=FULL, add=FULL)
    ),
    "the same before a product": (
        lambda w, x: sum_of_two_log_softmaxes(w, x) @ w, dict(mul=LOW, add=LOW)
    ),
    "normalized values and others": (
        lambda w, x: low(w, x) + log_softmax(low(w, x)), dict(add=LOW)
    ),
    # Backward demand.
    "softmax": (
        lambda w, x: jax.nn.softmax(low(w, x)) @ w,
        dict(sub=FULL, reduce_max=Paint.LOW, exp=Mode.EXP),  # a maximum is exact
    ),
    "the log of a softmax": (
        lambda w, x: jnp.log(jax.nn.softmax(low(w, x))), dict(exp=FULL, div=FULL)
    ),
    "log_softmax": (lambda w, x: log_softmax(low(w, x)), dict(sub=FULL)),
    "the bias of logits": (
        lambda w, x, b: jnp.sum(jax.nn.softmax(low(w, x) + b)), dict(add=FULL)
    ),
    "the loss behind the prediction": (
        lambda w, x, y: jnp.mean(jnp.square(low(w, x) - y)), dict(sub=FULL)
    ),
    "the error of a Huber loss": (huber, dict(sub=FULL, abs=FULL)),
    "a cube between products": (cubed_between_products, dict(sub=LOW, tanh=LOW)),
    "an exponential gate between products": (
        gated_between_products, dict(add=LOW, exp=FULL)
    ),
    "between two applied statistics": (between_statistics, dict(sub=FULL, mul=FULL)),
    "a square that nothing sums": (polynomial, dict(sin=FULL, square=FULL)),
    "a square in a hidden layer": (
        lambda w, x, b: jax.nn.gelu(low(w, x) - b) @ w, dict(sub=LOW)
    ),
    "read low elsewhere": (read_low_elsewhere, dict(add=LOW, exp=FULL)),
    "returning is no use": (lambda w, x, b: low(w, x) + b, dict(add=LOW)),
    "read and returned": (read_and_returned, dict(add=FULL)),
    # What is never touched.
    "precision": (lambda w, x: jnp.matmul(x, w, precision="highest"),
                  dict(dot_general=FULL)),
    "enum of precision": (
        lambda w, x: jnp.matmul(x, w, precision=jax.lax.Precision.HIGH),
        dict(dot_general=FULL),
    ),
    "algorithm": (
        lambda w, x: jax.lax.dot(
            x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32
        ),
        dict(dot_general=FULL),
    ),
    "a quantized factor": (quantized, dict(dot_general=FULL)),
    # Comparisons.
    "with 0": (lambda w, x: low(w, x) > 0.0, dict(gt=LOW)),
    "with 1": (lambda w, x: low(w, x) > 1.0, dict(gt=LOW)),
    "with 0.1": (lambda w, x: low(w, x) > 0.1, dict(gt=FULL)),
    "with a leaf": (lambda w, x, b: low(w, x) > b, dict(gt=FULL)),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name):
    fn, expected = EQUATIONS[name]
    args = (W, X, B, B)[: fn.__code__.co_argcount]
    steps = steps_of(plan_of(fn, *args))
    for primitive, wanted in expected.items():
        found = [step for other, step in steps if other == primitive]
        assert found, primitive
        for step in found:
            is_mode = isinstance(wanted, Mode)
            assert (step.mode if is_mode else step.outs[0].paint) is wanted


def test_a_statistic_holds_what_it_meets_in_full():
    plan = plan_of(lambda w, x: low(w, x) - jnp.mean(low(w, x)), W, X)
    assert plan.outs[0] == Value(Paint.FULL, statistic_applied=True)


def test_the_residual_stream_stays_low_through_unrolled_norms():
    def fn(w, x):
        h = low(w, x)
        for i in range(3):  # each layer with weights of its own
            h = h + low(w * (i + 2.0), norm(h))
        return jnp.sum(low(w, norm(h)))

    plan = plan_of(fn, W, X)
    streams = [
        step.outs[0].paint
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True)
        if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == X.shape
    ]
    assert streams == [Paint.LOW] * 3


def test_a_recurrent_state_is_full_inside_its_loop_only():
    def fn(w, x):
        def cell(c, _):
            c = jax.nn.sigmoid(low(w, c)) * c + jnp.tanh(low(w, x))
            return c, jnp.tanh(c)

        _, states = jax.lax.scan(cell, jnp.zeros_like(x), None, length=4)
        return jnp.tanh(states + low(w * 2.0, states)) @ w

    steps = dict(steps_of(plan_of(fn, W, X)))
    inside = dict(steps_of(steps["scan"].detail.body))
    assert inside["add"].outs[0].loop_state
    assert inside["tanh"].mode is FULL  # the last one, of the state
    assert steps["scan"].outs[1] == Value(Paint.FULL)
    assert steps["tanh"].mode is LOW


# --- constants and dtypes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "mode", "dtype"),
    [
        (lambda h: h * 2.0, LOW, jnp.float16),
        (lambda h: h * 1e-8, FULL, jnp.float16),  # would be zero
        (lambda h: h * 1e6, FULL, jnp.float16),  # would be 65504
        (lambda h: h + 1e-8, FULL, jnp.float16),  # an epsilon that guards a division
        (lambda h: h - 1e9, LOW, jnp.float16),  # a mask: saturates
        (lambda h: jnp.maximum(h, -1e9), LOW, jnp.float16),
        (lambda h: h + jnp.inf, LOW, jnp.float16),
        (lambda h: h * 1e-8, LOW, jnp.bfloat16),  # has the range of float32
    ],
)
def test_constants_that_half_precision_cannot_hold(fn, mode, dtype):
    plan = plan_of(lambda w, x: jnp.tanh(fn(low(w, x))) @ w, W, X, dtype=dtype)
    assert plan.steps[1].mode is mode


@pytest.mark.parametrize(
    ("fn", "paint"),
    [
        (lambda h: jnp.where(h > 0, h, 0), Paint.LOW),
        (lambda h: jnp.where(h > 0, h, -(10**9)), Paint.LOW),
        (lambda h: jnp.pad(h, 1), Paint.LOW),
        (lambda h: jnp.clip(h, 0, 1), Paint.LOW),
        (lambda h: jax.jit(lambda h, n: h / n)(h, 3), Paint.LOW),
        (lambda h: jax.jit(lambda h, n: h / n)(h, 100_000), Paint.FULL),  # not 65504
        (lambda h: jax.jit(lambda h, n: h / n)(h, jnp.arange(4)[None]), Paint.FULL),
        (lambda h: h * jnp.arange(4).astype(jnp.float32)[None], Paint.FULL),
    ],
)
def test_integers_that_a_jit_casts_are_constants(fn, paint):
    """`jnp.where(mask, x, 0)` is a jit that gets the 0 as an integer."""
    plan = plan_of(lambda w, x: fn(low(w, x)), W, X)
    assert plan.outs[0].paint is paint


def test_calls_of_one_jit_have_numbers_of_their_own():
    """The two calls share one jaxpr, of which 3 is exact and 100000 is out of range."""
    divide = jax.jit(lambda h, n: h / n)

    def both(w, x):
        h = low(w, x)
        return divide(h, 3), divide(h, 100_000), divide(h, 3)

    outs = plan_of(both, W, X).outs
    assert [value.paint for value in outs] == [Paint.LOW, Paint.FULL, Paint.LOW]


def as_bfloat16(w, x, **options):
    return jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), **options)


@pytest.mark.parametrize(
    "fn, dtype",
    [
        (lambda w, x: as_bfloat16(w, x).astype(jnp.float32), jnp.float16),
        (
            lambda w, x: as_bfloat16(w, x, preferred_element_type=jnp.float32),
            jnp.bfloat16,
        ),
    ],
    ids=["half", "accumulation"],
)
def test_a_dtype_that_the_user_asked_for_is_left_alone(fn, dtype):
    plan = plan_of(fn, W, X, dtype=dtype)
    assert plan.outs[0].paint is Paint.FULL
    if dtype == jnp.float16:
        assert LOW not in [step.mode for step in plan.steps]


def test_a_user_function_is_asked_for_its_dtypes():
    def mine(compute_dtype, original_dtypes, *invars, **bind_params):
        return [x.astype(compute_dtype) for x in invars], bind_params

    policy = flax_amp.default_amp_policy | {jax.lax.exp_p: mine}
    plan = plan_of(lambda x: jnp.exp(x), X, policy=policy)
    assert plan.steps[0].mode is Mode.CALL
    assert plan.outs[0].paint is Paint.LOW


# --- plans ---------------------------------------------------------------------------


def test_one_plan_per_jaxpr_and_values():
    block = jax.jit(lambda h, w: jnp.tanh(h @ w))

    def fn(w, x):
        h = block(x, w)  # a leaf goes in
        for _ in range(3):
            h = block(h, w)  # low goes in
        return h

    plan = plan_of(fn, W, X)
    assert len({id(step.detail) for step in plan.steps[:3]}) == 2
    assert plan.steps[1].detail is plan.steps[2].detail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((LEAF, LEAF), LEAF),
        ((LEAF, Value(Paint.LOW)), Value(Paint.LOW)),
        ((Value(Paint.LOW), Value(Paint.FULL)), Value(Paint.FULL)),
        ((LEAF, Value(Paint.FULL, statistic_applied=True)), Value(Paint.LOW)),
        ((Value(Paint.LEAF, bits=b"this"), Value(Paint.LEAF, bits=b"that")), LEAF),
        ((None, None), None),
    ],
)
def test_join(values, expected):
    assert join(values) == expected
