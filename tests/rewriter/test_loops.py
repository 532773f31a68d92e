"""Loops and recurrences: what adds up over many steps stays in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import WITHIN, norm, normal
from flax_amp import amp
from flax_amp._rewriter import paint
from flax_amp._rewriter.plan import LOW
from flax_amp._rewriter.recurrence import find_states
from helpers import (
    HALVES,
    assert_close,
    both_halves,
    dtypes_of,
    equations_of,
    gradient_error,
    jit,
    plan_of,
    relative_error,
    steps_of,
)

ROWS, SIZE, DT = 4, 8, 1e-3
SCALE = 2.0**14  # for float16
W, X = normal(0, SIZE, SIZE) / np.sqrt(SIZE), normal(1, ROWS, SIZE)


def layer(w, x):
    return jnp.tanh(x @ w)


def sums(fn, *args, shape=X.shape):
    """The dtypes of all sums of a shape in a program."""
    found = equations_of(fn, *args, primitive=("add", "add_any"))
    avals = [e.outvars[0].aval for e in found]
    return [aval.dtype.name for aval in avals if aval.shape == shape]


# --- carries -------------------------------------------------------------------------


@both_halves
def test_weight_shared_by_4096_steps_accumulates_in_float32(dtype):
    """A weight cast outside the loop would give a gradient that is 84 % wrong."""

    def fn(w, xs):
        return lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros(2), xs)[0].sum()

    # Exact in half precision: only the accumulation can be wrong.
    w, xs = jnp.full((4, 2), 0.25), jnp.ones((4096, 4))
    grad = jit(jax.grad(amp(fn, compute_dtype=dtype)))(w, xs)
    assert relative_error(grad, np.full((4, 2), 4096.0)) < 1e-3


CARRIES = {  # name: (body of (w, carry, x), first carry from x, low in a stack?)
    "recurrent_state": (lambda w, c, x: jnp.tanh(c @ w + x), jnp.zeros_like, False),
    "residual_stream": (lambda w, c, x: c + layer(w, c), lambda x: x, True),
    "pre_norm": (lambda w, c, x: c + layer(w, norm(c)), lambda x: x, True),
    # The norm of a leaf is float32; the layers behind it send a low stream on.
    "normed_embedding": (lambda w, c, x: c + layer(w, norm(c)), norm, True),
}


@pytest.mark.parametrize("loop", ["stack", "scan", "fori", "while"])
@pytest.mark.parametrize("name", CARRIES)
def test_carry_dtype(name, loop):
    """The stream through a stack of layers goes low; what the same weights are applied
    to again and again, accumulators and zero states stay in float32."""
    body, first, is_low = CARRIES[name]
    dtype = HALVES[len(name + loop) % 2]

    def fn(w, x):
        if loop == "stack":
            ws = jnp.stack([w, -w, w])
            return lax.scan(lambda c, w: (body(w, c, x), None), first(x), ws)[0]
        if loop == "scan":
            return lax.scan(lambda c, _: (body(w, c, x), None), first(x), None, 3)[0]
        steps = 3 if loop == "fori" else jnp.int32(3)
        return lax.fori_loop(0, steps, lambda _, c: body(w, c, x), first(x))

    lowered = amp(fn, compute_dtype=dtype)
    primitive = "while" if loop == "while" else "scan"
    (eqn,) = equations_of(lowered, W, X, primitive=primitive)
    carries = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 2]
    assert carries == [dtype if is_low and loop == "stack" else jnp.float32]
    counters = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 0]
    assert all(d == jnp.int32 for d in counters)
    assert_close(jit(lowered)(W, X), jit(fn)(W, X), dtype, gradient=True)


def test_weights_in_a_carry_are_no_states():
    """A carry that the body hands on untouched does not promote what it meets."""

    def fn(w, x):
        def body(carry):
            i, w, bias, x = carry
            return i + 1, w, bias, jnp.tanh(x @ w + bias) @ w

        start = jnp.int32(0), w, jnp.mean(x @ w, keepdims=True), x
        return lax.while_loop(lambda c: c[0] < 3, body, start)[-1]

    loop = plan_of(fn, W, X).steps[-1]
    steps = {eqn.primitive.name: step for eqn, step in steps_of(loop.detail.body)}
    assert steps["tanh"].outs == (LOW,)


def through_cond(w, c, x):
    return lax.cond(x.sum() > 0, lambda c: c + x @ w, lambda c: c - x @ w, c)


def through_inner_loop(w, c, x):
    return lax.scan(lambda c, _: (c + x @ w, None), c, None, length=2)[0]


@pytest.mark.parametrize("inner", [through_cond, through_inner_loop])
def test_a_state_stays_full_behind_what_is_nested_in_its_loop(inner):
    """Sums that follow a branch or an inner loop are float32 ones, too."""

    def fn(w, xs):
        def body(c, x):
            return inner(w, c, x) + layer(w, x) + layer(w, x), None

        return lax.scan(body, jnp.zeros(SIZE), xs)[0]

    found = sums(amp(fn), W, X, shape=(SIZE,))
    assert len(found) >= 3 and set(found) == {"float32"}


# --- the same steps in straight code -------------------------------------------------


def euler(w, y):
    return y + DT * layer(w, y)


def runge_kutta(w, y):
    k1 = layer(w, y)
    k2 = layer(w, y + DT / 2 * k1)
    k3 = layer(w, y + DT / 2 * k2)
    k4 = layer(w, y + DT * k3)
    return y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def gated(w, y):
    z = DT * jax.nn.sigmoid(y @ w)
    return (1 - z) * y + z * jnp.tanh(y @ w.T)


def descent(w, y):
    """A step of gradient descent: the data are the weights of the recurrence."""
    return jax.grad(lambda y: -DT * jnp.sum(jnp.cos(y @ w)))(y) + y


CELLS = {
    "euler": euler,
    "runge_kutta": runge_kutta,
    "gated": gated,
    "descent": descent,
    "computed_weight": lambda w, y: y + DT * layer(w / jnp.linalg.norm(w), y),
}


def in_loop_with_weights(step):
    """The step is unrolled in the body of a loop that brings weights of its own."""

    def steps(w, y):
        body = lambda y, v: (step(w, step(w, y)) + 0 * v, None)  # noqa: E731
        return lax.scan(body, y, jnp.zeros((2, SIZE, SIZE))[:, :ROWS])[0]

    return steps


STEPS_WITHIN = WITHIN | {
    "scan": in_loop_with_weights,
    "vmap": lambda step: jax.vmap(step, (None, 0)),  # over the rows
}


def unrolled(step):
    def fn(w, x):
        y0 = y = jnp.tanh(x @ w[:, ::-1])
        for _ in range(4):
            y = step(w, y)
        return jnp.mean((y - lax.stop_gradient(y0)) ** 2)

    return fn


CASES = [(cell, "plain") for cell in CELLS]
CASES += [("gated", within) for within in STEPS_WITHIN if within != "plain"]


@pytest.mark.parametrize("cell, within", CASES)
def test_states(cell, within):
    """The sums of each kind of step are float32 ones, its products are not."""
    dtype = HALVES[len(cell + within) % 2]
    fn = unrolled(STEPS_WITHIN[within](CELLS[cell]))
    lowered = amp(fn, compute_dtype=dtype)
    assert set(sums(lowered, W, X)) == {"float32"}
    products = dtypes_of(lowered, W, X)
    assert set().union(*products) == {jnp.dtype(dtype).name}
    if cell in ("euler", "gated", "runge_kutta"):
        assert gradient_error(fn, dtype, W, X, scale=SCALE) < 0.02


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(SIZE)(nn.LayerNorm()(x)))
        return x + DT * nn.Dense(SIZE)(hidden)


class LinenTied(nn.Module):
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        block = self.block()
        for _ in range(4):
            x = block(x)
        return x


@pytest.mark.parametrize("block", [LinenBlock, nn.remat(LinenBlock)])
def test_modules_called_again(block):
    """A module that a Python loop calls again and again is a recurrence."""
    model = LinenTied(block)
    params = model.init(jax.random.key(0), X)

    def fn(params, x):
        return jnp.mean((model.apply(params, x) - x) ** 2)

    assert gradient_error(fn, jnp.bfloat16, params, X, scale=SCALE) < 0.02


# --- what is no recurrence -----------------------------------------------------------

V = normal(2, SIZE, SIZE) / np.sqrt(SIZE)
WS = [W, V, W + V, W - V]


def stack(ws, x):
    for w in ws:
        x = x + layer(w, norm(x))
    return x


def attention(ws, x):
    q, k, v, o = (x @ w for w in ws)
    return x + jax.nn.softmax(q @ k.T) @ v + o


OTHERS = {
    "layers": stack,
    "side_by_side": lambda ws, x: stack(ws, x) * stack(ws, x[::-1]),
    "tied_ends": lambda ws, x: stack(ws[1:], x @ ws[0]) @ ws[0].T,
    "autoencoder": lambda ws, x: x + jnp.tanh(x @ ws[0]) @ ws[0].T,
    "attention": lambda ws, x: attention(ws, norm(x @ ws[0].T)),
    "input_at_each_step": lambda ws, x: (
        lambda u: layer(ws[0], jnp.tanh(jnp.tanh(x @ ws[0] + u) @ ws[0] + u))
    )(x @ ws[1]),
    "backward_pass_inside": lambda ws, x: jax.grad(lambda ws: stack(ws, x).sum())(ws),
    "tangents_inside": lambda ws, x: jax.jvp(lambda x: stack(ws, x), (x,), (x,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_recurrence(name):
    """Weights that are used once, side by side, or at both ends change nothing."""
    states, _ = find_states(jax.make_jaxpr(OTHERS[name])(WS, X).jaxpr)
    assert not states


def test_behind_a_recurrence_the_stream_is_low_again():
    """A product ends it; behind it, what no product reads is float32 alone."""

    def fn(w, ws, x):
        for _ in range(3):
            x = euler(w, x)
        return stack(ws, x @ w.T)

    assert sums(amp(fn), W, WS, X) == ["float32"] * 3 + ["bfloat16"] * 3 + ["float32"]


LONG = [pytest.param(m, marks=pytest.mark.slow) for m in ("gpt_unroll", "resnet50")]


@pytest.mark.parametrize("model", ["mlp", "vit_small", "gpt_scan", "lstm", *LONG])
@pytest.mark.once
def test_the_models_of_the_benchmarks_have_no_states(model, monkeypatch):
    from benchmarks import variants

    found = []

    def watched(jaxpr):
        found.append(find_states(jaxpr))
        return found[-1]

    monkeypatch.setattr(paint, "find_states", watched)
    training = variants.training("amp_bf16", model, "tiny")
    with jax.numpy_rank_promotion("allow"):
        jax.make_jaxpr(training.step)(*training.shapes())
    assert found and not any(states for states, _ in found)


def test_a_long_program_is_not_searched():
    """Calls within calls may inline to any length: 2**20 products here."""
    f = jax.jit(layer)
    for _ in range(20):
        f = jax.jit(lambda w, y, f=f: f(w, f(w, y)))
    states, _ = find_states(jax.make_jaxpr(f)(W, X).jaxpr)
    assert not states
