"""The analysis: what every rule of `flax_amp.paint` promises, on the plan itself."""

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import LEAF, Mode, Paint, Use, Value, join, like
from flax_amp._rewriter.rules import RULES
from flax_amp.policy import Policy

W, X, B = jnp.ones((4, 4)), jnp.ones((3, 4)), jnp.ones((3, 4))


def plan_of(fn, *args, policy=flax_amp.default_amp_policy, dtype=jnp.float16):
    closed = jax.make_jaxpr(fn)(*args)
    painter = Painter(Policy(policy), dtype, RULES)
    ins = like([v.aval for v in closed.jaxpr.invars], LEAF)
    return painter.plan(closed, ins, (Use.NONE,) * len(closed.jaxpr.outvars))


def modes(fn, *args, **kwargs):
    """Returns the mode of each equation, by primitive name (the last one wins)."""
    plan = plan_of(fn, *args, **kwargs)
    pairs = zip(plan.jaxpr.eqns, plan.steps, strict=True)
    return {eqn.primitive.name: step.mode for eqn, step in pairs}


def values(fn, *args, **kwargs):
    """Returns the value of each equation's first result, by primitive name."""
    plan = plan_of(fn, *args, **kwargs)
    pairs = zip(plan.jaxpr.eqns, plan.steps, strict=True)
    return {eqn.primitive.name: step.outs[0] for eqn, step in pairs}


def low(w, x):
    return x @ w


# --- low, full, follow, keep ---------------------------------------------------------


def test_matmul_is_low():
    found = values(lambda w, x: jnp.tanh(low(w, x)) @ w, W, X)
    assert found["dot_general"].paint is Paint.LOW
    assert found["tanh"].paint is Paint.LOW


@pytest.mark.parametrize("op", [jnp.exp, jnp.log, jnp.square, jnp.cumsum, jnp.sum])
def test_full_operations(op):
    assert plan_of(lambda w, x: op(low(w, x)), W, X).outs[0].is_statistic


def test_a_bias_does_not_promote():
    found = values(lambda w, x, b: jnp.tanh(low(w, x) + b) @ w, W, X, B)
    assert found["add"].paint is Paint.LOW


def test_leaves_alone_stay_float32_leaves():
    found = values(lambda w, x, b: low(w, x * 2 + b), W, X, B)
    assert found["mul"].paint is found["add"].paint is Paint.LEAF


def test_movement_keeps_the_paint():
    def fn(w, x):
        return jnp.exp(jnp.transpose(low(w, x))) + jnp.max(x.reshape(4, 3))

    found = values(fn, W, X)
    assert found["transpose"].paint is Paint.LOW
    assert found["reshape"].paint is found["reduce_max"].paint is Paint.LEAF


def test_movement_of_several_operands_joins_them():
    def fn(w, x):
        return jnp.concatenate([low(w, x), x]) @ w

    assert values(fn, W, X)["concatenate"].paint is Paint.LOW


# --- where full precision ends -------------------------------------------------------


def norm(x, scale=1.0):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale


def test_a_norm_returns_to_the_stream():
    def fn(w, x, b):
        h = low(w, x)
        return jnp.tanh(h + norm(h, b) + b) @ w  # scale and shift in float32

    plan = plan_of(fn, W, X, B)
    by_name = [
        (eqn.primitive.name, step.outs[0])
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True)
    ]
    assert [v.paint for name, v in by_name if name == "mul"] == [Paint.FULL] * 2
    assert dict(by_name)["tanh"].paint is Paint.LOW


def test_a_statistic_holds_what_it_meets_in_full():
    found = values(lambda w, x: low(w, x) - jnp.mean(low(w, x)), W, X)
    assert found["sub"] == Value(Paint.FULL, statistic_applied=True)


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

    plan = plan_of(fn, W, X)
    steps = dict(
        zip([e.primitive.name for e in plan.jaxpr.eqns], plan.steps, strict=True)
    )
    inside = steps["scan"].detail.body
    names = [e.primitive.name for e in inside.jaxpr.eqns]
    found = dict(zip(names, inside.steps, strict=True))
    assert found["add"].outs[0].loop_state
    assert found["tanh"].mode is Mode.FULL  # the last one, of the state
    assert steps["scan"].outs[1] == Value(Paint.FULL)
    assert steps["tanh"].mode is Mode.LOW


# --- backward demand -----------------------------------------------------------------


def test_softmax_subtracts_in_float32():
    found = values(lambda w, x: jax.nn.softmax(low(w, x)) @ w, W, X)
    assert found["sub"].paint is Paint.FULL
    assert found["reduce_max"].paint is Paint.LOW  # exact, so it costs nothing low


def test_log_softmax_subtracts_in_float32():
    def fn(w, x):
        logits = low(w, x)
        shifted = logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
        return shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))

    plan = plan_of(fn, W, X)
    assert {
        step.mode
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True)
        if eqn.primitive.name == "sub"
    } == {Mode.FULL}


def test_the_logits_bias_is_added_in_float32():
    found = modes(lambda w, x, b: jnp.sum(jax.nn.softmax(low(w, x) + b)), W, X, B)
    assert found["add"] is Mode.FULL


def test_the_loss_behind_the_prediction_is_full():
    found = modes(lambda w, x, y: jnp.mean(jnp.square(low(w, x) - y)), W, X, B)
    assert found["sub"] is Mode.FULL


def test_running_averages_are_not_rounded():
    def fn(w, x, mean, var):
        return jnp.tanh((low(w, x) - mean) * jax.lax.rsqrt(var + 1e-5)) @ w

    found = modes(fn, W, X, B, B)
    assert found["sub"] is Mode.FULL and found["tanh"] is Mode.LOW


def test_a_value_read_low_elsewhere_stays_low():
    def fn(w, x, b):
        h = low(w, x) + b
        return jnp.sum(jnp.exp(h)) + jnp.sum(h @ w)

    assert modes(fn, W, X, B)["exp"] is Mode.FULL
    plan = plan_of(fn, W, X, B)
    assert plan.steps[1].mode is Mode.LOW  # h


def test_returning_a_value_is_no_use_of_it():
    assert modes(lambda w, x, b: low(w, x) + b, W, X, B)["add"] is Mode.LOW

    def both(w, x, b):
        h = low(w, x) + b
        return jnp.exp(h), h

    assert modes(both, W, X, B)["add"] is Mode.FULL


# --- constants -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "mode"),
    [
        (lambda h: h * 2.0, Mode.LOW),
        (lambda h: h * 1e-8, Mode.FULL),  # would be zero
        (lambda h: h * 1e6, Mode.FULL),  # would be 65504
        (lambda h: h + 1e-8, Mode.FULL),  # an epsilon that guards a division
        (lambda h: h - 1e9, Mode.LOW),  # a mask: saturates
        (lambda h: jnp.maximum(h, -1e9), Mode.LOW),
        (lambda h: h + jnp.inf, Mode.LOW),
    ],
)
def test_constants_that_half_precision_cannot_hold(fn, mode):
    plan = plan_of(lambda w, x: jnp.tanh(fn(low(w, x))) @ w, W, X)
    assert plan.steps[1].mode is mode


def test_bfloat16_holds_what_float32_holds():
    plan = plan_of(lambda w, x: low(w, x) * 1e-8 @ w, W, X, dtype=jnp.bfloat16)
    assert plan.steps[1].mode is Mode.LOW


# --- what is never touched -----------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.matmul(x, w, precision="highest"),
        lambda w, x: jnp.matmul(x, w, precision=jax.lax.Precision.HIGH),
        lambda w, x: jax.lax.dot(
            x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32
        ),
    ],
)
def test_requested_precision_is_kept(fn):
    assert modes(fn, W, X)["dot_general"] is Mode.FULL


def test_a_half_that_the_user_asked_for_is_left_alone():
    def fn(w, x):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    plan = plan_of(fn, W, X, dtype=jnp.float16)
    assert plan.outs[0].paint is Paint.FULL
    assert [step.mode for step in plan.steps].count(Mode.LOW) == 0


def test_a_quantized_factor_keeps_its_matmul_in_full():
    def fn(w, x):
        numbers = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, w.astype(jnp.int8), numbers)

    assert modes(fn, W, X)["dot_general"] is Mode.FULL


def test_a_requested_accumulation_dtype_is_left_alone():
    def fn(w, x):
        w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    plan = plan_of(fn, W, X, dtype=jnp.bfloat16)
    assert plan.outs[0].paint is Paint.FULL


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_comparisons_with_exact_constants_need_no_cast(threshold):
    found = modes(lambda w, x: low(w, x) > threshold, W, X)
    assert found["gt"] is Mode.LOW


def test_other_comparisons_run_at_the_widest_dtype():
    assert modes(lambda w, x, b: low(w, x) > b, W, X, B)["gt"] is Mode.FULL
    assert modes(lambda w, x: low(w, x) > 0.1, W, X)["gt"] is Mode.FULL


# --- policies ------------------------------------------------------------------------


def test_a_user_function_is_asked_for_its_dtypes():
    def mine(compute_dtype, original_dtypes, *invars, **bind_params):
        return [x.astype(compute_dtype) for x in invars], bind_params

    policy = flax_amp.default_amp_policy | {jax.lax.exp_p: mine}
    plan = plan_of(lambda x: jnp.exp(x), X, policy=policy)
    assert plan.steps[0].mode is Mode.CALL
    assert plan.outs[0].paint is Paint.LOW


def test_a_low_scope_spares_what_cannot_be_low():
    def fn(x):
        with jax.named_scope("fast"):
            return jnp.exp(x), jnp.linalg.cholesky(x)

    policy = flax_amp.default_amp_policy | {"fast": flax_amp.use_compute_precision}
    found = modes(fn, W, policy=policy)
    assert found["exp"] is Mode.LOW
    assert "cholesky" not in found or found["cholesky"] is not Mode.LOW


def test_structured_primitive_takes_no_precision_function():
    from jax.extend.core.primitives import scan_p

    policy = flax_amp.default_amp_policy | {scan_p: flax_amp.use_compute_precision}

    def fn(x):
        return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0]

    with pytest.raises(TypeError, match="'scan' is a structured primitive"):
        plan_of(fn, X, policy=policy)
    untouched = flax_amp.default_amp_policy | {scan_p: flax_amp.use_original_precision}
    assert modes(fn, X, policy=untouched)["scan"] is Mode.FULL


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
