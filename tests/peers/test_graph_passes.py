"""Graphs on which TensorFlow's Grappler and TVM test their passes, as jaxprs.

Each row says which equation runs in how many bits; its comment says where `amp` decides
otherwise than the pass that the graph comes from, and why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from peer_graphs import count_casts, only, painted

from flax_amp import amp
from helpers import (
    HALVES,
    MATMULS,
    assert_identical,
    assert_same_avals,
    equations_of,
    jit,
    relative_error,
)

X, W, V = jnp.full((4, 4), 0.5), jnp.eye(4) / 2, jnp.eye(4) / 4
IMAGES, KERNEL, CHANNELS = jnp.ones((2, 3, 3, 4)), W.reshape(1, 1, 4, 4), jnp.ones(4)


def relu(x):
    return lax.max(x, jnp.zeros((), x.dtype))


def no_product(x):
    return relu(lax.sqrt(relu(jnp.exp(x))))


def already_half(x, w, v):
    x, w, v = (a.astype(jnp.float16) for a in (x, w, v))
    return (relu(x @ w) @ v).astype(jnp.float32)


def simple(last):
    def fn(x, w, v):
        x = relu(lax.sqrt(relu(jnp.exp(x))))
        return relu(last(relu(relu(x @ w) @ v)))

    return fn


def clear_chains(x, w):
    first = relu(x)
    second = relu(first)
    return relu(second @ w), relu(relu(first)), jnp.exp(relu(second))


def all_fetched(x, w, v):
    a = jnp.exp(x)
    b = relu(a)
    c = b @ w
    d = relu(c)
    e = d @ v
    return a, b, c, d, e, relu(e)


def identity_of_a_variable(x, w, v):
    read = lax.stop_gradient(jnp.copy(w))
    return relu(x @ read) @ v, read


def convolve(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def batch_norm(x, kernel, scale, bias):
    y = convolve(x, kernel)
    mean = y.mean((0, 1, 2))
    variance = lax.square(y - mean[None, None, None]).mean((0, 1, 2))
    scale, bias = (a[None, None, None] for a in (scale, bias))
    scale *= lax.rsqrt(variance + 1e-3)[None, None, None]
    y = relu((y - mean[None, None, None]) * scale + bias)
    return convolve(y, -kernel), mean, variance


def list_of_types(x, w, v):
    y, numbers, leaf = jax.jit(lambda *parts: parts)(x @ w, jnp.arange(3), x)
    return jnp.concatenate([y, relu(y)]) @ v, numbers, leaf


def existing_cast(x, w, v):
    return relu((x > 0).astype(jnp.float32) @ w) @ v


def while_loop(step):
    def fn(x, w, v):
        body = lambda c: (c[0] + 1, step(c[1] @ w))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, body, (0, relu(x @ v)))[1] @ v

    return fn


def list_set_and_get(x, w, v):
    buffer = jnp.zeros((2, 4, 4)).at[0].set(x @ w)
    return relu(buffer.at[1].set(relu(x @ v))[1]) @ w


def list_push_and_pop(x, w, v):
    pushed = lax.scan(lambda c, row: (c, relu(row @ w)), 0, jnp.stack([x, -x]))[1]
    return lax.scan(lambda c, y: (c, y @ v), 0, pushed, reverse=True)[1]


def list_from_tensor(x, w, v):
    return jnp.stack([relu(row) for row in jnp.unstack(x @ w)]) @ v


def list_concatenated(x, w, v):
    return jnp.concatenate([x @ w, x, relu(x @ v)]) @ w


def batched_product(x, w, v):
    return relu(jnp.stack([x, x]) @ jnp.stack([w, v])) @ jnp.stack([v, w])


THREE = (X, W, V)
GRAPPLER = {  # name of the test: (function, arguments, how many products it has)
    "NoOp": (no_product, (X,), 0),
    "AlreadyFp16": (already_half, THREE, 2),
    "Simple": (simple(lax.log), THREE, 2),
    # Grappler widens this `tanh`, too, because no product follows.
    "Simple, tanh last": (simple(lax.tanh), THREE, 2),
    # Grappler lowers the whole chain next to a product. Here what is computed from
    # arguments alone stays float32 until the product casts it: a cast earlier saves
    # nothing that XLA does not save, and other readers, such as `exp`, get all digits.
    "BidirectionalClearChain": (clear_chains, (X, W), 1),
    # Grappler leaves what is fetched in float32. Here the product is half, and what
    # leads to no other product is float32.
    "PreserveFetches": (all_fetched, THREE, 2),
    "PreserveIdentityAfterVariable": (identity_of_a_variable, THREE, 2),
    "FusedBatchNorm": (batch_norm, (IMAGES, KERNEL, CHANNELS, CHANNELS), 2),
    "RepeatedAndListTypeAttrs": (list_of_types, THREE, 2),
    "ExistingCast": (existing_cast, THREE, 2),
    "RecurrentEdgeColorMismatch": (while_loop(jnp.exp), THREE, 3),
    "RecurrentEdgeColorMatch": (while_loop(lambda x: lax.add(x, x)), THREE, 3),
    "TensorListSetGet": (list_set_and_get, THREE, 3),
    "TensorListPushPop": (list_push_and_pop, THREE, 2),
    "TensorListFromTensor": (list_from_tensor, THREE, 2),
    "TensorListPushBackBatchAndConcatLists": (list_concatenated, THREE, 3),
    "BatchMatMul": (batched_product, THREE, 2),
}
ARITHMETIC = "exp sqrt log tanh square rsqrt mul sub div reduce_sum iota".split()


def assert_half_products(fn, args, count, dtype):
    """Asserts that products alone are in half precision, and that there are some."""
    found = painted(fn, *args, compute_dtype=dtype)
    in_half = only(found, *MATMULS)
    assert len(in_half) == count
    assert all(entry.endswith(":16") for entry in in_half)
    assert all(entry.endswith(":32") for entry in only(found, *ARITHMETIC))


@pytest.mark.parametrize("name", GRAPPLER)
def test_grappler(name):
    assert_half_products(*GRAPPLER[name], dtype=HALVES[len(name) % 2])


def test_grappler_values():
    """All graphs in one program, which compiles sooner than one by one."""
    both = [(amp(fn), fn, args) for fn, args, _ in GRAPPLER.values()]
    run = lambda: [(low(*args), fn(*args)) for low, fn, args in both]  # noqa: E731
    for name, (actual, expected) in zip(GRAPPLER, jit(run)(), strict=True):
        assert relative_error(actual, expected) < 1e-2, name
        assert_same_avals(actual, expected)


@pytest.mark.parametrize("name", ["NoOp", "AlreadyFp16"])
def test_grappler_leaves_the_graph_alone(name):
    fn, args, _ = GRAPPLER[name]
    lowered = amp(fn, recompute=False)  # which adds no checkpoints either
    assert str(jax.make_jaxpr(lowered)(*args)) == str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("step", [jnp.exp, lambda x: lax.add(x, x)])
def test_grappler_recurrent_edges_agree(step):
    """The carry has one dtype: float32, because what rounding does to it adds up.

    Grappler lowers it where the whole body is low.
    """
    (loop,) = equations_of(amp(while_loop(step)), *THREE, primitive="while")
    assert {str(v.aval.dtype) for v in loop.outvars} == {"int32", "float32"}


# --- TVM ----------------------------------------------------------------------------


def lstm_cell(state, x, w, b):
    h, c = state
    gates = jnp.concatenate([x, h], -1) @ w + b[None]
    i, f, o, g = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm(x, w, b):
    def step(state, x):
        state = lstm_cell(state, x, w, b)
        return state, state[0]

    return lax.scan(step, (jnp.zeros((2, 4)), jnp.zeros((2, 4))), x)[1]


def lstm_unrolled(x, w, b):
    state = jnp.zeros((2, 4)), jnp.zeros((2, 4))
    for row in x:
        state = lstm_cell(state, row, w, b)
    return state[0]


def conv_bn(x, kernel, mean, variance):
    y = convolve(x, kernel)
    mean, factor = (a[None, None, None] for a in (mean, lax.rsqrt(variance + 1e-3)))
    return convolve(relu((y - mean) * factor), -kernel)


def green_gray(x, w, v):
    y = x @ w
    for _ in range(5):
        y = relu(y + y)
    return y @ v


def green_red_gray(x, w):
    return jnp.tanh(jnp.exp(x @ w) + 1.0)


def red_gray_green(x, w):
    return (jnp.tanh(jnp.exp(x) + 1.0) * 2.0) @ w


def let(x, w):
    a, b = x * 2, x * 3
    c = a @ w
    return c + b @ w


def where(x, w, v):
    return jnp.where(x > 0, x @ w, 0.0) + v


GATES = (jnp.full((3, 2, 4), 0.5), jnp.full((8, 16), 0.1), jnp.ones(16))
CONVERTS = {  # name: (function, arguments, how many products it has)
    # Gates and state are float32, because rounding of a recurrent state adds up; TVM
    # lowers them.
    "lstm": (lstm, GATES, 1),
    "lstm_unrolled": (lstm_unrolled, GATES, 3),
    # The first result is normalized in float32, which TVM does in half.
    "conv_bn": (conv_bn, (IMAGES, KERNEL, CHANNELS, CHANNELS), 2),
    "softmax": (jax.nn.softmax, (X,), 0),
    "arange": (lambda x: jnp.arange(300.0) * x[0, 0], (X,), 0),
    "sum": (jnp.sum, (X,), 0),
    "green_gray": (green_gray, THREE, 2),
    "green_red_gray": (green_red_gray, (X, W), 1),
    "red_gray_green": (red_gray_green, (X, W), 1),
    # Two products have two operands each. The weight of both is cast at each use, so
    # that its gradient adds up in float32; XLA makes one cast of the two.
    "let": (let, (X, W), 2),
    "where": (where, THREE, 1),
    "one product": (jnp.matmul, (X, W), 1),
    "no product": (lambda x, w: relu(x + w) * x, (X, W), 0),
}
CASTS = {  # down and up
    "one product": (2, 1),
    "green_red_gray": (2, 1),
    "red_gray_green": (2, 1),
    "let": (4, 2),
    "where": (2, 1),
    "softmax": (0, 0),
    "no product": (0, 0),
}


@pytest.mark.parametrize("name", CONVERTS)
def test_tvm_converts(name):
    dtype = HALVES[len(name) % 2]
    assert_half_products(*CONVERTS[name], dtype=dtype)
    if name in CASTS:
        fn, args, _ = CONVERTS[name]
        assert count_casts(fn, *args, compute_dtype=dtype) == CASTS[name]


@pytest.mark.parametrize("name", ["softmax", "arange", "sum", "no product"])
def test_tvm_does_not_convert(name):
    """Where no product is, every bit is that of float32."""
    fn, args, *_ = CONVERTS[name]
    args = tuple(a * np.linspace(0.1, 3, a.size).reshape(a.shape) for a in args)
    assert_identical(jit(amp(fn))(*args), jit(fn)(*args))
