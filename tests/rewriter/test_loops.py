"""Loops: their states stay in float32, the stream through stacked layers is half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import norm, normal
from flax_amp import amp
from helpers import (
    HALVES,
    assert_all_in,
    assert_close,
    both_halves,
    equations_of,
    jit,
    relative_error,
    run_all,
)

ROWS, SIZE = 4, 8
W, X = normal(0, SIZE, SIZE) / np.sqrt(SIZE), normal(1, ROWS, SIZE)
STACK = jnp.stack([W, -W, W])


def layer(w, x):
    return jnp.tanh(x @ w)


@both_halves
def test_weight_shared_by_4096_steps_accumulates_in_float32(dtype):
    """A weight cast outside the loop would give a gradient that is 84 % wrong."""

    def fn(w, xs):
        return lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros(2), xs)[0].sum()

    # Exact in half precision: only the accumulation can be wrong.
    w, xs = jnp.full((4, 2), 0.25), jnp.ones((4096, 4))
    grad = jit(jax.grad(amp(fn, compute_dtype=dtype)))(w, xs)
    assert relative_error(grad, np.full((4, 2), 4096.0)) < 1e-3


CARRIES = {  # name: (body of (w, carry, x), first carry from x, is it a stream?)
    "from_zeros": (lambda w, c, x: jnp.tanh(c @ w + x), jnp.zeros_like, True),
    "residual_stream": (lambda w, c, x: c + layer(w, c), lambda x: 2 * x, True),
    "normed_embedding": (lambda w, c, x: c + layer(w, norm(c)), norm, True),
}
LOOPS = {  # of `step(w, carry)`, from a first carry
    "stack": lambda step, w, c: lax.scan(lambda c, w: (step(w, c), None), c, w)[0],
    "scan": lambda step, w, c: lax.scan(lambda c, _: (step(w, c), None), c, None, 3)[0],
    "fori": lambda step, w, c: lax.fori_loop(0, 3, lambda _, c: step(w, c), c),
    "while": lambda step, w, c: lax.fori_loop(
        0, jnp.int32(3), lambda _, c: step(w, c), c
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CARRIES)
def test_carry_dtype(name, loop):
    """The stream through a stack of layers is half; every other carry is float32."""
    body, first, is_stream = CARRIES[name]
    dtype = HALVES[len(name + loop) % 2]
    w = STACK if loop == "stack" else W

    def fn(w, x):
        return LOOPS[loop](lambda w, c: body(w, c, x), w, first(x))

    lowered = amp(fn, compute_dtype=dtype)
    primitive = "while" if loop == "while" else "scan"
    (eqn,) = equations_of(lowered, w, X, primitive=primitive)
    carries = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 2]
    assert carries == [dtype if is_stream and loop == "stack" else jnp.float32]
    counters = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 0]
    assert all(d == jnp.int32 for d in counters)
    assert_close(jit(lowered)(w, X), jit(fn)(w, X), dtype, gradient=True)


def test_weights_in_a_carry():
    """A carry that the body hands on untouched does not keep its products wide."""

    def fn(w, x):
        def body(carry):
            i, w, bias, x = carry
            return i + 1, w, bias, jnp.tanh(x @ w + bias) @ w

        start = jnp.int32(0), w, jnp.mean(x @ w, keepdims=True), x
        return lax.while_loop(lambda c: c[0] < 3, body, start)[-1]

    assert_all_in(amp(fn), W, X, dtype=jnp.bfloat16, count=3)


def through_cond(w, c, x):
    return lax.cond(x.sum() > 0, lambda c: c + x @ w, lambda c: c - x @ w, c)


def through_inner_loop(w, c, x):
    return lax.scan(lambda c, _: (c + x @ w, None), c, None, length=2)[0]


@pytest.mark.parametrize("inner", [through_cond, through_inner_loop])
def test_a_state_stays_in_float32_behind_what_is_nested_in_its_loop(inner):
    """Sums that follow a branch or an inner loop are float32 ones, too."""

    def fn(w, xs):
        def body(c, x):
            return inner(w, c, x) + layer(w, x) + layer(w, x), None

        return lax.scan(body, jnp.zeros(SIZE), xs)[0]

    found = equations_of(amp(fn), W, X, primitive=("add", "add_any"))
    sums = [eqn.outvars[0].aval for eqn in found]
    dtypes = [aval.dtype.name for aval in sums if aval.shape == (SIZE,)]
    assert len(dtypes) >= 3 and set(dtypes) == {"float32"}


def test_calls_within_calls_are_not_inlined():
    """Each calls the next one twice: there would be 2**12 matmuls."""
    f = jax.jit(layer)
    for _ in range(12):
        f = jax.jit(lambda w, y, f=f: f(w, f(w, y)))
    jaxpr = jax.make_jaxpr(amp(f))(W, X)
    assert len(str(jaxpr)) < 50_000


# --- states, which no scan may carry in half precision -------------------------------

# Found by outsiders: rounded, `.999 * s` is `s` again, and small updates are lost.
DATA = jnp.full((1000, 4), 0.01)
BATCHES = normal(3, 1000, 16, 8)


def decayed(x):
    """The decay of a state that a product of the same step reads."""

    def step(s, a):
        s = 0.999 * s + 0.001 * jnp.outer(a @ jnp.eye(4), a)
        return s, s @ a

    return lax.scan(step, jnp.ones((4, 4)), x)[0]


def decayed_and_read_later(x):
    def step(s, a):
        s = 0.999 * s + (0.001 * a) @ jnp.eye(4)
        return s, jnp.sum((s @ jnp.eye(4)) ** 2 * s)

    return lax.scan(step, jnp.ones(4), x)[0]


def trained(xs, start):
    """Steps of gradient descent: the carry is the weight, and what is scanned data."""

    def step(w, a):
        loss = lambda w: jnp.mean((a @ w - a[:, :1]) ** 2)  # noqa: E731
        return w - 1e-3 * jax.grad(loss)(w), None

    return lax.scan(step, start, xs)[0]


def gram(xs):
    """A sum of products that another product of the step reads."""
    step = lambda p, a: (p + 1e-3 * a.T @ a, (p @ a.T).sum())  # noqa: E731
    return lax.scan(step, jnp.eye(8), xs)[0]


STATES = {
    "decayed": (decayed, DATA),
    "decayed and read later": (decayed_and_read_later, DATA),
    "weights": (lambda xs: trained(xs, jnp.full((8, 1), 0.5)), BATCHES),
    "weights among the arguments": (trained, BATCHES, jnp.ones((8, 1))),
    "gram": (gram, BATCHES),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    fn, *args = STATES[name]
    expected, found = run_all(fn, amp(fn))(*args)
    assert relative_error(found, expected) < 1e-2
