"""A small language of programs: plain data that hypothesis can shrink, and `run`.

A program is a tuple of nodes. Each node maps a float32 array of shape (4, 4) to another
one, with the weights in `params`. What a node prints is the code that makes it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _fuzz_around import AROUND, SIZE, WEIGHTS


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of `OPS`, with a weight and a number."""

    name: str
    w: int = 0
    c: float = 1.25


@dataclasses.dataclass(frozen=True)
class In:
    """A body inside of a loop, a branch, a jit, a custom rule, ... of `AROUND`."""

    kind: str
    body: tuple[Any, ...]
    n: int = 2


@dataclasses.dataclass(frozen=True)
class Join:
    """Two bodies that read the same array, and what joins their results."""

    kind: str
    left: tuple[Any, ...]
    right: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class State:
    """What an operation reads beside its array."""

    params: dict[str, Any]  # w: lists of (4, 4), b: of (4,)
    ints: Any  # (4,), of int32

    def weight(self, i):
        return self.params["w"][i % WEIGHTS]

    def bias(self, i):
        return self.params["b"][i % WEIGHTS][None]


def run(program, params, x, ints):
    """Returns the result of a program, and what has another dtype."""
    y = sequence(program, State(params, ints), x)
    return {
        "y": y,
        "argmax": jnp.argmax(y, axis=-1),
        "mask": x > 0,
        "w": params["w"][0],
        "half": y.astype(jnp.bfloat16),
        "sum": y.sum(),
    }


def sequence(nodes, s, x):
    for node in nodes:
        x = apply(node, s, x)
    return x


def apply(node, s, x):
    if isinstance(node, Op):
        return OPS[node.name](s, s.weight(node.w), s.bias(node.w), x, node.c)
    if isinstance(node, Join):
        left, right = (sequence(body, s, x) for body in (node.left, node.right))
        return JOINS[node.kind](s, left, right)
    body = lambda p, x: sequence(node.body, dataclasses.replace(s, params=p), x)  # noqa: E731
    return AROUND[node.kind](body, s, x, node.n)


def arguments(seed=0):
    """The params, the data, and indices."""
    rng = np.random.default_rng(seed)
    w, b, x = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((WEIGHTS, SIZE, SIZE), (WEIGHTS, SIZE), (SIZE, SIZE))
    )
    return {"w": [*(w / 2)], "b": [*(b / 4)]}, x, np.array([1, 3, 1, 0], np.int32)


# --- effects -------------------------------------------------------------------------

LOG: list[Any] = []  # what callbacks saw


def record(tag, *values):
    LOG.append((tag, *map(np.asarray, values)))


def _count(tag, n):
    record(tag, n)
    return np.int32(n % 3)


def _sine(tag, x):
    record(f"pure {tag}", x)
    return np.sin(x + np.float32(len(tag))).astype(np.asarray(x).dtype)


def pure(tag, x):
    return jax.pure_callback(
        functools.partial(_sine, tag),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.lax.stop_gradient(x),
        vmap_method="sequential",
    )


def debug(tag, x):
    jax.debug.callback(functools.partial(record, tag), jax.lax.stop_gradient(x))
    return x


def io(tag, x, n, ordered):
    struct = jax.ShapeDtypeStruct((), jnp.int32)
    count = functools.partial(_count, tag)
    n = jax.experimental.io_callback(count, struct, n, ordered=ordered)
    return x * (n.astype(x.dtype) + 0.5)


# --- operations ----------------------------------------------------------------------


def norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def conv(w, x):
    return jax.lax.conv_general_dilated(
        x[None, :, :, None],
        w[:3, :3, None, None],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0, :, :, 0]


def dropout(x, number):
    key = jax.random.fold_in(jax.random.key(7), number)
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


def attention(w, x):
    scores = jnp.where(jnp.tri(SIZE, dtype=bool), (x @ w) @ x.T, -1e9)
    return jax.nn.softmax(scores) @ x


def update(s, x):
    row = jax.lax.dynamic_slice_in_dim(x, s.ints[0], 2)
    return jax.lax.dynamic_update_slice_in_dim(x, row * 0.5, s.ints[3], 0)


def _elementwise(fn):
    return lambda s, w, b, x, c: fn(x)


OPS = {
    "dot": lambda s, w, b, x, c: x @ w,
    "dot_self": lambda s, w, b, x, c: x @ x.T / SIZE,
    "dot_highest": lambda s, w, b, x, c: jnp.dot(x, w, precision="highest"),
    "dense": lambda s, w, b, x, c: jnp.tanh(x @ w + b),
    "conv": lambda s, w, b, x, c: conv(w, x),
    "attention": lambda s, w, b, x, c: attention(w, x),
    "residual": lambda s, w, b, x, c: x + norm(x) @ w,
    "bias": lambda s, w, b, x, c: x + b,
    "scale": lambda s, w, b, x, c: x * c,
    "weights": lambda s, w, b, x, c: x * jnp.exp(b) + w,
    "pow": lambda s, w, b, x, c: (x * x * 0.5 + 0.1) ** 1.5,
    "tanh": _elementwise(jnp.tanh),
    "relu": _elementwise(jax.nn.relu),
    "silu": _elementwise(jax.nn.silu),
    "exp": _elementwise(lambda x: jnp.exp(-jnp.square(x))),
    "log": _elementwise(lambda x: jnp.log1p(x * x)),
    "abs": _elementwise(jnp.abs),
    "softmax": _elementwise(jax.nn.softmax),
    "logsumexp": lambda s, w, b, x, c: (
        x - jax.nn.logsumexp(x, axis=0, keepdims=True)
    ),
    "norm": _elementwise(norm),
    "center": _elementwise(lambda x: x - x.mean(0, keepdims=True)),
    "largest": lambda s, w, b, x, c: x - x.max(1, keepdims=True),
    "cumsum": lambda s, w, b, x, c: jnp.cumsum(x, 0) / 2,
    "sort": lambda s, w, b, x, c: jnp.sort(x, axis=0),
    "lookup": lambda s, w, b, x, c: x + w[s.ints],
    "gather": lambda s, w, b, x, c: x[s.ints],
    "scatter": lambda s, w, b, x, c: x.at[s.ints].add(0.5 * x),
    "update": lambda s, w, b, x, c: update(s, x),
    "roll": lambda s, w, b, x, c: jnp.roll(x, int(4 * c), axis=0).T,
    "flip": lambda s, w, b, x, c: jnp.concatenate([x[2:, ::-1], jnp.pad(x[:2], 0)]),
    "where": lambda s, w, b, x, c: jnp.where(w > 0, x, b),
    "clip": lambda s, w, b, x, c: jnp.clip(x, -c, c),
    "own_half": _elementwise(
        lambda x: (x.astype(jnp.float16) * 2).astype(jnp.float32)
    ),
    "dropout": lambda s, w, b, x, c: dropout(x, int(100 * c)),
    "stopped": lambda s, w, b, x, c: x * jax.lax.stop_gradient(jnp.sin(x)),
    "pure": lambda s, w, b, x, c: x + pure(str(c), x),
    "debug": lambda s, w, b, x, c: debug(f"debug{c}", x),
    "io": lambda s, w, b, x, c: io(f"io{c}", x, s.ints[0], False),
    "io_ordered": lambda s, w, b, x, c: io(f"ordered{c}", x, s.ints[1], True),
}  # fmt: skip

JOINS = {
    "add": lambda s, x, y: x + y,
    "mul": lambda s, x, y: x * y,
    "dot": lambda s, x, y: x @ y / 2,
    "where": lambda s, x, y: jnp.where(s.weight(1) > 0, x, y),
    "divide": lambda s, x, y: x / (1 + y * y),
    "gate": lambda s, x, y: x * jax.nn.sigmoid(y),
}
