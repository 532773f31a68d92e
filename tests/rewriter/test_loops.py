"""Loops: what adds up over many steps, and in which dtype a carry travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from helpers import HALVES, assert_close, both_halves, equations, jit, relative_error

SIZE = 8


def arguments():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(2, SIZE, SIZE)).astype(np.float32)
    return w / np.sqrt(SIZE).astype(np.float32), x


def layer(w, x):
    return jnp.tanh(x @ w)


def equations_named(fn, *args, primitive):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [e for _, e in equations(jaxpr) if e.primitive.name == primitive]


@both_halves
def test_weight_shared_by_4096_steps_accumulates_in_float32(dtype):
    """A weight cast outside the loop would give a gradient that is 84 % wrong."""

    def fn(w, xs):
        return lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros(2), xs)[0].sum()

    # Exact in half precision: only the accumulation can be wrong.
    w, xs = jnp.full((4, 2), 0.25), jnp.ones((4096, 4))
    grad = jit(jax.grad(amp(fn, compute_dtype=dtype)))(w, xs)
    assert relative_error(grad, np.full((4, 2), 4096.0)) < 1e-3


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


CARRIES = {  # name: (body of (w, carry, x), first carry from x, low in a stack?)
    "accumulator": (lambda w, c, x: c + x @ w, jnp.zeros_like, False),
    "recurrent_state": (lambda w, c, x: jnp.tanh(c @ w + x), jnp.zeros_like, False),
    "residual_stream": (lambda w, c, x: c + layer(w, c), lambda x: x, True),
    "pre_norm": (lambda w, c, x: c + layer(w, norm(c)), lambda x: x, True),
    "post_norm": (lambda w, c, x: norm(c + layer(w, c)), lambda x: x, True),
    "learned_state": (lambda w, c, x: jnp.tanh(c @ w + x), lambda x: x * 0.5, True),
}


@pytest.mark.parametrize("loop", ["stack", "scan", "fori", "while"])
@pytest.mark.parametrize("name", CARRIES)
def test_carry_dtype(name, loop):
    """The stream through a stack of layers goes low; what the same weights are applied
    to again and again, accumulators and zero states stay in float32."""
    body, first, is_low = CARRIES[name]
    is_low = is_low and loop == "stack"
    dtype = HALVES[len(name + loop) % 2]

    def fn(w, x):
        if loop == "stack":
            ws = jnp.stack([w, -w, w])
            return lax.scan(lambda c, w: (body(w, c, x), None), first(x), ws)[0]
        if loop == "scan":
            return lax.scan(lambda c, _: (body(w, c, x), None), first(x), None, 3)[0]
        steps = 3 if loop == "fori" else jnp.int32(3)
        return lax.fori_loop(0, steps, lambda _, c: body(w, c, x), first(x))

    args = arguments()
    lowered = amp(fn, compute_dtype=dtype)
    (eqn,) = equations_named(
        lowered, *args, primitive="while" if loop == "while" else "scan"
    )
    carries = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 2]
    assert carries == [dtype if is_low else jnp.float32]
    counters = [v.aval.dtype for v in eqn.outvars if v.aval.ndim == 0]
    assert all(d == jnp.int32 for d in counters)
    assert_close(jit(lowered)(*args), jit(fn)(*args), dtype, gradient=True)


def test_a_normalized_embedding_enters_a_stack_low():
    """The norm of a leaf is float32; the layers behind it send a low stream on."""

    def fn(w, x):
        ws = jnp.stack([w, w])
        return lax.scan(lambda c, w: (c + layer(w, norm(c)), None), norm(x), ws)[0]

    (eqn,) = equations_named(amp(fn), *arguments(), primitive="scan")
    assert eqn.outvars[0].aval.dtype == jnp.float16


def test_weights_in_a_carry_stay_leaves():
    """A carry that the body hands on untouched does not promote what it meets."""

    def fn(w, x):
        def body(carry):
            i, w, bias, x = carry
            return i + 1, w, bias, jnp.tanh(x @ w + bias) @ w

        start = jnp.int32(0), w, jnp.ones((SIZE, SIZE)) * x, x
        return lax.while_loop(lambda c: c[0] < 3, body, start)[-1]

    dtypes = [
        eqn.invars[0].aval.dtype
        for eqn in equations_named(amp(fn), *arguments(), primitive="tanh")
    ]
    assert dtypes == [jnp.float16]


@both_halves
def test_small_steps_are_not_lost(dtype):
    """An integrator that starts from data moves as it does in float32."""

    def fn(w, x):
        move = lambda y, _: (y + 1e-3 * jnp.tanh(y @ w), None)  # noqa: E731
        return lax.scan(move, x, None, length=300)[0] - x

    args = arguments()
    actual, expected = jit(amp(fn, compute_dtype=dtype))(*args), jit(fn)(*args)
    assert relative_error(actual, expected) < 2e-2


@both_halves
def test_a_condition_for_each_example(dtype):
    """vmap makes a while loop with a condition per example, which is kept."""

    def halve(w, row):
        step = lambda r: 0.5 * jnp.tanh(w @ r)  # noqa: E731
        return lax.while_loop(lambda r: jnp.sum(r * r) > 1e-2, step, row)

    fn = jax.vmap(halve, (None, 0))
    w, x = arguments()
    assert_close(jit(amp(fn, compute_dtype=dtype))(w, x), jit(fn)(w, x), dtype)
    batched = jax.vmap(amp(halve, compute_dtype=dtype), (None, 0))
    assert_close(jit(batched)(w, x), jit(fn)(w, x), dtype)


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

    sums = [
        tuple(str(v.aval.dtype) for v in eqn.invars)
        for eqn in equations_named(amp(fn), *arguments(), primitive="add")
        if eqn.outvars[0].aval.shape == (SIZE,)
    ]
    assert len(sums) >= 3 and set(sums) == {("float32", "float32")}
