"""Recurrences in straight code: the state that each step adds to stays in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from flax_amp import amp
from flax_amp._rewriter import paint
from flax_amp._rewriter.recurrence import find_states
from helpers import both_halves, equations, jit, relative_error

ROWS, SIZE, DT = 4, 8, 1e-3
SCALE = 2.0**14  # for float16


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X = normal(0, SIZE, SIZE) / np.sqrt(SIZE), normal(1, ROWS, SIZE)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def field(w, y):
    return jnp.tanh(y @ w)


def euler(w, y):
    return y + DT * field(w, y)


def runge_kutta(w, y):
    k1 = field(w, y)
    k2 = field(w, y + DT / 2 * k1)
    k3 = field(w, y + DT / 2 * k2)
    k4 = field(w, y + DT * k3)
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
    "two_layers": lambda w, y: y + DT * (field(w, y) @ w[::-1]),
    "pre_norm": lambda w, y: y + DT * field(w, norm(y)),
    "gated": gated,
    "both_sides": lambda w, y: y + DT * ((1.0 - y @ w) @ w.T),
    "descent": descent,
    "computed_weight": lambda w, y: y + DT * field(w / jnp.linalg.norm(w), y),
}
STARTS = {
    "leaf": lambda w, x: x,
    "low": lambda w, x: jnp.tanh(x @ w[:, ::-1]),
    "full": lambda w, x: norm(x @ w[:, ::-1]),
}


def with_vjp(step):
    rebuilt = jax.custom_vjp(step)
    rebuilt.defvjp(lambda w, y: jax.vjp(step, w, y), lambda vjp, g: vjp(g))
    return rebuilt


def with_jvp(step):
    rebuilt = jax.custom_jvp(step)
    rebuilt.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return rebuilt


def in_cond(step):
    return lambda w, y: lax.cond(w[0, 0] < 9, step, lambda w, y: y * 2, w, y)


def in_scan(step):
    """The step is unrolled in the body of a loop that brings weights of its own."""

    def steps(w, y):
        def body(y, v):
            return step(w, step(w, y)) + 0 * v, None

        return lax.scan(body, y, jnp.zeros((2, SIZE, SIZE))[:, :ROWS])[0]

    return steps


TRANSFORMS = {
    "plain": lambda step: step,
    "jit": jax.jit,
    "nested_jit": lambda step: jax.jit(lambda w, y: jax.jit(step)(w, y) * 1.0),
    "scan": in_scan,
    "vmap": lambda step: jax.vmap(step, (None, 0)),
    "checkpoint": jax.checkpoint,
    "cond": in_cond,
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
}


def unrolled(step, start=STARTS["leaf"], steps=8):
    def fn(w, x):
        y0 = y = start(w, x)
        for _ in range(steps):
            y = step(w, y)
        return jnp.mean((y - lax.stop_gradient(y0)) ** 2)

    return fn


def gradient_error(fn, dtype, *args):
    scaled = lambda *a: SCALE * amp(fn, compute_dtype=dtype)(*a)  # noqa: E731
    actual = jit(jax.grad(scaled))(*args)
    expected = jit(jax.grad(lambda *a: SCALE * fn(*a)))(*args)
    return relative_error(actual, expected)


@both_halves
def test_thirty_small_steps(dtype):
    """Rounded at each step, the gradient is 88 % wrong in bfloat16."""
    assert gradient_error(unrolled(euler, steps=30), dtype, W, X) < 0.01


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_states(cell, transform):
    """The sums of each kind of step are float32 ones, its products are not."""
    dtype = (jnp.float16, jnp.bfloat16)[len(cell + transform) % 2]
    if transform == "vmap" and cell == "descent":
        pytest.skip("differentiates a whole batch")
    fn = unrolled(TRANSFORMS[transform](CELLS[cell]), steps=4)
    jaxpr = jax.make_jaxpr(amp(fn, compute_dtype=dtype))(W, X)
    found = [e for _, e in equations(jaxpr)]
    sums = {
        str(e.outvars[0].aval.dtype)
        for e in found
        if e.primitive.name in ("add", "add_any") and e.outvars[0].aval.shape == X.shape
    }
    assert sums == {"float32"}
    products = {
        str(v.aval.dtype)
        for e in found
        if e.primitive.name == "dot_general"
        for v in e.invars
    }
    assert products == {jnp.dtype(dtype).name}
    if cell in ("euler", "gated"):
        assert gradient_error(fn, dtype, W, X) < 0.02


@both_halves
@pytest.mark.parametrize("start", STARTS)
def test_starts(start, dtype):
    """Data, low values and normalized ones may enter."""
    assert gradient_error(unrolled(gated, STARTS[start], 4), dtype, W, X) < 0.02


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(SIZE)(nn.LayerNorm()(x)))
        return x + DT * nn.Dense(SIZE)(hidden)


class LinenTied(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = (nn.remat(LinenBlock) if self.remat else LinenBlock)()
        for _ in range(4):
            x = block(x)
        return x


class NnxTied(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.linear = (
            nnx.LayerNorm(SIZE, rngs=rngs),
            nnx.Linear(SIZE, SIZE, rngs=rngs),
        )

    def __call__(self, x):
        for _ in range(4):
            x = x + DT * nnx.relu(self.linear(self.norm(x)))
        return x


@both_halves
@pytest.mark.parametrize("kind", ["linen", "linen_remat", "nnx"])
def test_modules_called_again(kind, dtype):
    """A module that a Python loop calls again and again is a recurrence."""
    if kind == "nnx":
        graph, params = nnx.split(NnxTied(nnx.Rngs(0)))
        apply = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    else:
        model = LinenTied(remat=kind == "linen_remat")
        params = model.init(jax.random.key(0), X)
        apply = model.apply

    def fn(params, x):
        return jnp.mean((apply(params, x) - x) ** 2)

    assert gradient_error(fn, dtype, params, X) < 0.02


# --- what is none --------------------------------------------------------------------

V = normal(2, SIZE, SIZE) / np.sqrt(SIZE)
WS = [W, V, W + V, W - V]


def stack(ws, x):
    for w in ws:
        x = x + field(w, norm(x))
    return x


def attention(ws, x):
    q, k, v, o = (x @ w for w in ws)
    return x + jax.nn.softmax(q @ k.T) @ v + o


OTHERS = {
    "layers": stack,
    "side_by_side": lambda ws, x: stack(ws, x) * stack(ws, x[::-1]),
    "tied_ends": lambda ws, x: stack(ws[1:], x @ ws[0]) @ ws[0].T,
    "tied_products": lambda ws, x: stack(ws[1:], x @ ws[0]) @ ws[0],
    "autoencoder": lambda ws, x: x + jnp.tanh(x @ ws[0]) @ ws[0].T,
    "twice_without_a_sum": lambda ws, x: field(ws[0], field(ws[0], x)),
    "one_input": lambda ws, x: sum(x @ w for w in ws),
    "attention": lambda ws, x: attention(ws, norm(x @ ws[0].T)),
    "input_at_each_step": lambda ws, x: (
        lambda u: field(ws[0], jnp.tanh(jnp.tanh(x @ ws[0] + u) @ ws[0] + u))
    )(x @ ws[1]),
    "backward_pass_inside": lambda ws, x: jax.grad(lambda ws: stack(ws, x).sum())(ws),
    "tangents_inside": lambda ws, x: jax.jvp(lambda x: stack(ws, x), (x,), (x,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_recurrence(name):
    """Weights that are used once, side by side, or at both ends change nothing."""
    jaxpr = jax.make_jaxpr(OTHERS[name])(WS, X)
    states, _ = find_states(getattr(jaxpr, "jaxpr", jaxpr))
    assert not states


def test_behind_a_recurrence_the_stream_is_low_again():
    """A product ends it; the layers behind it are as they are without it."""

    def fn(w, ws, x):
        for _ in range(3):
            x = euler(w, x)
        return stack(ws, x @ w.T)

    jaxpr = jax.make_jaxpr(amp(fn))(W, WS, X)
    sums = [
        str(e.outvars[0].aval.dtype)
        for _, e in equations(jaxpr)
        if e.primitive.name == "add" and e.outvars[0].aval.shape == X.shape
    ]
    assert sums == ["float32"] * 3 + ["float16"] * 4


@pytest.mark.parametrize(
    "model", ["mlp", "vit_small", "gpt_scan", "gpt_unroll", "resnet50", "lstm"]
)
def test_the_models_of_the_benchmarks_are_unchanged(model, monkeypatch):
    """No state and no gather of theirs is treated apart."""
    from benchmarks import variants

    found = []

    def watched(function):
        def call(*args):
            found.append(function(*args))
            return found[-1]

        return call

    monkeypatch.setattr(paint, "find_states", watched(paint.find_states))
    monkeypatch.setattr(paint, "may_read_twice", watched(paint.may_read_twice))
    training = variants.training("amp_bf16", model, "tiny")
    with jax.numpy_rank_promotion("allow"):
        jax.make_jaxpr(training.step)(*training.shapes())
    searches = [result for result in found if not isinstance(result, bool)]
    assert searches and not any(states for states, _ in searches)
    assert True not in found


def test_a_long_program_is_not_searched():
    """Calls within calls may inline to any length: 2**20 products here."""
    f = jax.jit(field)
    for _ in range(20):
        f = jax.jit(lambda w, y, f=f: f(w, f(w, y)))
    states, _ = find_states(jax.make_jaxpr(f)(W, X).jaxpr)
    assert not states
