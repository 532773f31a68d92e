"""Loops: their states stay in float32, the stream through stacked layers is half."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import layer, norm, normal, with_vjp
from flax_amp import amp
from helpers import (
    HALVES,
    assert_all_in,
    assert_close,
    equations_of,
    exact_jit,
    relative_error,
    run_all,
)

ROWS, SIZE = 4, 8
W, X = normal(0, SIZE, SIZE) / np.sqrt(SIZE), normal(1, ROWS, SIZE)
STACK = jnp.stack([W, -W, W])


def carries(fn, *args, primitive="scan"):
    """The dtypes of the arrays that the loop of `fn(*args)` carries."""
    (eqn,) = equations_of(fn, *args, primitive=primitive)
    return [v.aval.dtype for v in eqn.outvars if v.aval.ndim]


UPDATES = {
    "two matmuls": lambda h, x: h @ W + x @ W,
    "a bias": lambda h, x: h @ W + X[:1],
    "moved": lambda h, x: (W @ h.T).T + x @ W,
    "masked": lambda h, x: jnp.where(x > -9, h @ W + x @ W, h),
    "relu": lambda h, x: jax.nn.relu(h @ W + x @ W),
    "relu6": lambda h, x: jax.nn.relu6(h @ W + x @ W),
    "sorted": lambda h, x: jnp.sort(h @ W + x @ W),
    "in a branch": lambda h, x: lax.cond(x[0, 0] > 9, jnp.sin, jnp.flip, h @ W + x @ W),
    # Found by outsiders: rounded, `.999 * h` is `h` again, and small updates are lost.
    "decayed": lambda h, x: 0.999 * h + 0.001 * x * (x @ W),
    "small": lambda h, x: h + 1e-3 * x @ (x.T @ x),
}
CALLS = {
    "plain": lambda f: f,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda h, x: lax.cond(x.sum() < 99, f, lambda h, x: h, h, x),
    "jit": jax.jit,
    "custom_vjp": with_vjp,
    "loop": lambda f: lambda h, x: lax.fori_loop(0, 2, lambda _, h: f(h, x), h),
}


# Each update as it is and in one call, and each call with two updates: a call hands the
# origins of its operands on, whatever they are.
IN_CALLS = [(update, "plain") for update in UPDATES]
IN_CALLS += zip(UPDATES, itertools.cycle(list(CALLS)[1:]), strict=False)


@pytest.mark.parametrize("update, call", IN_CALLS)
def test_a_state_is_not_rounded_though_its_step_multiplies_it(update, call):
    """On the way to the matmul of the same step, a sum of halves would be half."""
    step = CALLS[call](UPDATES[update])

    def fn(x):
        def body(h, x):
            h = step(h, x)
            return h, h @ W

        return lax.scan(body, X, x)

    state, _ = exact_jit(amp(fn))(jnp.stack([X, X[::-1]]))
    assert relative_error(state.astype(jnp.bfloat16), state) > 1e-4


def test_a_result_is_not_rounded_though_a_matmul_reads_it():
    def fn(x):
        hidden = x @ W + x @ W.T
        return hidden, hidden @ W

    hidden, _ = exact_jit(amp(fn))(X)
    assert relative_error(hidden.astype(jnp.bfloat16), hidden) > 1e-4


# --- the stream through stacked layers -----------------------------------------------


def attention(x, w):  # of one stacked array for three projections
    q, k, v = (x @ w[i] for i in range(3))
    return x + jax.nn.softmax(q @ k.T) @ v


def centred(x, w):
    """The mean is of the stream."""
    return x + jnp.tanh((x - jnp.sum(x, axis=-1, keepdims=True) / 64) @ w)


INDEX = jnp.array([2, 0, 2, 1])
THREE_EACH = normal(5, 4, 3, SIZE, SIZE) / SIZE
STREAMS = {  # name: (layer of (carry, weight), first carry of x, weights, is it half?)
    "residual": (lambda c, w: c + layer(w, c), lambda x: x @ W, STACK, True),
    "normed": (lambda c, w: c + layer(w, norm(c)), lambda x: norm(x @ W), STACK, True),
    "slices of one argument": (attention, lambda x: x @ W, THREE_EACH, True),
    "centred": (centred, lambda x: x @ W, STACK, True),
    "small terms": (lambda x, w: x + 0.01 * (x @ w), lambda x: x @ W, STACK, True),
    "from a lookup": (lambda c, w: c + layer(w, c), lambda x: x[INDEX], STACK, True),
    # They begin at data.
    "from zeros": (lambda c, w: jnp.tanh(c @ w + 1), jnp.zeros_like, STACK, False),
    "from an argument": (lambda c, w: c + layer(w, c), lambda x: x, STACK, False),
    "from one, scaled": (lambda c, w: c + layer(w, c), lambda x: 2 * x, STACK, False),
    "from positions": (
        lambda c, w: c + layer(w, c),
        lambda x: jnp.broadcast_to(jnp.arange(8.0), x.shape),
        STACK,
        False,
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name):
    body, first, stack, is_half = STREAMS[name]
    dtype = HALVES[len(name) % 2]

    def fn(stack, x):
        return lax.scan(lambda c, w: (body(c, w), None), first(x), stack)[0]

    lowered = amp(fn, compute_dtype=dtype)
    assert carries(lowered, stack, X) == [dtype if is_half else jnp.float32]
    assert_close(*run_all(lowered, fn)(stack, X), dtype, gradient=True)


LOOPS = {  # of `step(carry)`, from a first carry
    "scan": lambda step, c: lax.scan(lambda c, _: (step(c), None), c, None, 3)[0],
    "fori": lambda step, c: lax.fori_loop(0, 3, lambda _, c: step(c), c),
    "while": lambda step, c: lax.fori_loop(0, jnp.int32(3), lambda _, c: step(c), c),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_without_a_stack_a_carry_is_float32(loop):
    def fn(w, x):
        return LOOPS[loop](lambda c: c + layer(w, c), 2 * x)

    primitive = "while" if loop == "while" else "scan"
    assert carries(amp(fn), W, X, primitive=primitive) == [jnp.float32]
    assert_close(*run_all(amp(fn), fn)(W, X), jnp.bfloat16, gradient=True)


def test_weights_in_a_carry():
    """A carry that the body hands on untouched does not keep its matmuls wide."""

    def fn(w, x):
        def body(carry):
            i, w, bias, x = carry
            return i + 1, w, bias, jnp.tanh(x @ w + bias) @ w

        start = jnp.int32(0), w, jnp.mean(x @ w, keepdims=True), x
        return lax.while_loop(lambda c: c[0] < 3, body, start)[-1]

    assert_all_in(amp(fn), W, X, dtype=jnp.bfloat16, count=3)


def test_a_state_stays_in_float32_behind_a_loop_nested_in_its_own():
    """Sums that follow an inner loop are float32 ones, too."""

    def fn(w, xs):
        def body(c, x):
            c = lax.scan(lambda c, _: (c + x @ w, None), c, None, length=2)[0]
            return c + layer(w, x) + layer(w, x), None

        return lax.scan(body, jnp.zeros(SIZE), xs)[0]

    found = equations_of(amp(fn), W, X, primitive=("add", "add_any"))
    sums = [eqn.outvars[0].aval for eqn in found]
    dtypes = [aval.dtype.name for aval in sums if aval.shape == (SIZE,)]
    assert len(dtypes) >= 3 and set(dtypes) == {"float32"}


# --- weights that a scan trains ------------------------------------------------------

# The samples of a step look like the weights of a layer. They multiply twice, in the
# prediction and in its gradient. The rule does not read the rate.
WIDE, STEPS, BATCH, RATE = 6, 100, 8, 0.05
OUT = 3
START, SAMPLES = normal(0, OUT, WIDE), normal(1, STEPS, WIDE, BATCH)
LABELS = normal(2, STEPS, OUT, BATCH)


PREDICTIONS = {  # name: (prediction of (weights, samples), first weights)
    "columns": (lambda w, x: w @ x, START),
    "rows": (lambda w, x: (x.T @ w.T).T, START),
    "vector": (lambda w, x: (x.T @ w)[None], START[0]),
    "activated": (lambda w, x: jnp.tanh(w) @ x, START),
    "checkpoint": (jax.checkpoint(lambda w, x: w @ x), START),
    "two layers": (
        lambda w, x: w["out"] @ jnp.tanh(w["in"] @ x),
        {"in": START, "out": START[:, :OUT]},
    ),
}


def distance_trained(predict, w, xs, ys):
    """Returns how far weights move that a scan over batches trains."""

    def step(v, batch):
        x, y = batch
        loss = lambda v: jnp.mean((predict(v, x) - y) ** 2)  # noqa: E731
        return jax.tree.map(lambda v, g: v - RATE * g, v, jax.grad(loss)(v)), None

    end = lax.scan(step, w, (xs, ys))[0]
    moved = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), end, w)
    return sum(jax.tree.leaves(moved))


@pytest.mark.parametrize("name", PREDICTIONS)
def test_trained_weights_are_states(name):
    predict, w = PREDICTIONS[name]
    fn, args = functools.partial(distance_trained, predict), (w, SAMPLES, LABELS)
    assert set(carries(amp(fn), *args)) == {jnp.dtype("float32")}
    got, exact = run_all(*(jax.value_and_grad(f) for f in (amp(fn), fn)))(*args)
    assert relative_error(got[0], exact[0]) < 1e-2
    assert relative_error(got[1], exact[1]) < 2e-2


def test_weights_that_two_arrays_train():
    """An error by one array is multiplied by another one, as by a second layer."""

    def fn(w, xs, ys, instruments):
        def step(v, batch):
            x, y, z = batch
            return v - RATE * (v @ x - y) @ z.T / BATCH, None

        return jnp.sum((lax.scan(step, w, (xs, ys, instruments))[0] - w) ** 2)

    args = START, SAMPLES, LABELS, normal(9, STEPS, WIDE, BATCH)
    assert carries(amp(fn), *args) == [jnp.float32]


# Steps with a matmul, none of which computes the next carry from one `carry @ weight`.
NO_STREAMS = {
    "a sum": lambda c, v, x: c + jnp.tanh(x @ v),
    "a product": lambda c, v, x: c * jnp.tanh(x @ v),
    "a gain": lambda c, v, x: c * v[:1] + jnp.tanh(x @ v),
    "its mean": lambda c, v, x: c.mean(0, keepdims=True) + jnp.tanh(x @ v),
    "the weight twice": lambda c, v, x: jnp.tanh(c @ v) @ v,
    "a matmul by itself": lambda c, v, x: (x @ c.T) @ c + x @ v,
}


@pytest.mark.parametrize("name", NO_STREAMS)
def test_a_carry_that_no_weight_multiplies_once_is_float32(name):
    """Though the carry begins at a matmul, and a matmul behind the loop reads it."""

    def fun(w, weights, x):
        step = NO_STREAMS[name]
        carry, _ = lax.scan(lambda c, v: (step(c, v, x), None), x @ w, weights)
        return (carry @ w).sum()

    assert carries(amp(fun), W, STACK, X) == [jnp.float32]
