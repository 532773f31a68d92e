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
class Layers:
    """Unrolled layers that are equal but for one of them, which has a `change`."""

    body: tuple[Any, ...]
    change: str
    count: int = 6
    odd: int = 3


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


def names(nodes):
    """Yields the kind and the name of each node of a program."""
    for node in nodes:
        kind = type(node).__name__.lower()
        yield f"{kind} {getattr(node, _NAME.get(kind, 'kind'))}"
        for body in ("body", "left", "right"):
            yield from names(getattr(node, body, ()))


_NAME = {"op": "name", "layers": "change"}


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
    if isinstance(node, Layers):
        return _layers(node, s, x)
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


def noise(x, number):
    return x + 0.1 * jax.random.normal(jax.random.key(number), x.shape, x.dtype)


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
    "dot_left": lambda s, w, b, x, c: w.T @ x,
    "dot_self": lambda s, w, b, x, c: x @ x.T / SIZE,
    "dot_highest": lambda s, w, b, x, c: jnp.dot(x, w, precision="highest"),
    "dot_batched": lambda s, w, b, x, c: jnp.einsum(
        "bi,bij->bj", x, x[:, None] * w[None]
    ),
    "dense": lambda s, w, b, x, c: jnp.tanh(x @ w + b),
    "gated": lambda s, w, b, x, c: x + jax.nn.silu(x @ w) * (x @ w.T),
    "conv": lambda s, w, b, x, c: conv(w, x),
    "attention": lambda s, w, b, x, c: attention(w, x),
    "residual": lambda s, w, b, x, c: x + norm(x) @ w,
    "bias": lambda s, w, b, x, c: x + b,
    "scale": lambda s, w, b, x, c: x * c,
    "shift": lambda s, w, b, x, c: x + c,
    "tiny": lambda s, w, b, x, c: x / (jnp.abs(x).sum(-1, keepdims=True) + 1e-8),
    "weights": lambda s, w, b, x, c: x * jnp.exp(b) + w,
    "pow": lambda s, w, b, x, c: (x * x * 0.5 + 0.1) ** 1.5,
    "cube": _elementwise(lambda x: 0.3 * x**3),
    "square": _elementwise(lambda x: 0.5 * jnp.square(x)),
    "tanh": _elementwise(jnp.tanh),
    "relu": _elementwise(jax.nn.relu),
    "gelu": _elementwise(jax.nn.gelu),
    "silu": _elementwise(jax.nn.silu),
    "softplus": _elementwise(jax.nn.softplus),
    "exp": _elementwise(lambda x: jnp.exp(-jnp.square(x))),
    "log": _elementwise(lambda x: jnp.log1p(x * x)),
    "sin": _elementwise(jnp.sin),
    "sqrt": _elementwise(lambda x: jnp.sqrt(x * x + 0.1)),
    "erf": _elementwise(jax.lax.erf),
    "abs": _elementwise(jnp.abs),
    "softmax": _elementwise(jax.nn.softmax),
    "log_softmax": _elementwise(jax.nn.log_softmax),
    "logsumexp": lambda s, w, b, x, c: (
        x - jax.nn.logsumexp(x, axis=0, keepdims=True)
    ),
    "norm": _elementwise(norm),
    "center": _elementwise(lambda x: x - x.mean(0, keepdims=True)),
    "total": _elementwise(lambda x: x + x.sum() / 8),
    "product": lambda s, w, b, x, c: x * jnp.prod(jnp.tanh(x), -1, keepdims=True),
    "largest": lambda s, w, b, x, c: x - x.max(1, keepdims=True),
    "cumsum": lambda s, w, b, x, c: jnp.cumsum(x, 0) / 2,
    "cummax": lambda s, w, b, x, c: jax.lax.cummax(x, axis=1),
    "sort": lambda s, w, b, x, c: jnp.sort(x, axis=0),
    "top_k": lambda s, w, b, x, c: jax.lax.top_k(x, SIZE)[0],
    "rows": lambda s, w, b, x, c: x[jnp.array([1, 1, 0, 3])],
    "lookup": lambda s, w, b, x, c: x + w[s.ints],
    "gather": lambda s, w, b, x, c: x[s.ints],
    "scatter": lambda s, w, b, x, c: x.at[s.ints].add(0.5 * x),
    "scatter_set": lambda s, w, b, x, c: x.at[1].set(w[0]),
    "segments": lambda s, w, b, x, c: jax.ops.segment_sum(x, s.ints, SIZE) / 2,
    "update": lambda s, w, b, x, c: update(s, x),
    "roll": lambda s, w, b, x, c: jnp.roll(x, int(4 * c), axis=0).T,
    "flip": lambda s, w, b, x, c: jnp.concatenate([x[2:, ::-1], jnp.pad(x[:2], 0)]),
    "one_hot": lambda s, w, b, x, c: jax.nn.one_hot(s.ints, SIZE) @ x,
    "where": lambda s, w, b, x, c: jnp.where(w > 0, x, b),
    "select": lambda s, w, b, x, c: jnp.where(s.ints[:, None] > 0, x, -c),
    "clip": lambda s, w, b, x, c: jnp.clip(x, -c, c),
    "positions": lambda s, w, b, x, c: x + jnp.arange(4.0)[None] * c,
    "own_half": _elementwise(
        lambda x: (x.astype(jnp.float16) * 2).astype(jnp.float32)
    ),
    "complex": _elementwise(lambda x: jnp.fft.ifft(jnp.fft.fft(x) * 0.5).real),
    "dropout": lambda s, w, b, x, c: dropout(x, int(100 * c)),
    "noise": lambda s, w, b, x, c: noise(x, int(100 * c)),
    "stopped": lambda s, w, b, x, c: x * jax.lax.stop_gradient(jnp.sin(x)),
    "pure": lambda s, w, b, x, c: x + pure(str(c), x),
    "debug": lambda s, w, b, x, c: debug(f"debug{c}", x),
    "io": lambda s, w, b, x, c: io(f"io{c}", x, s.ints[0], False),
    "io_ordered": lambda s, w, b, x, c: io(f"ordered{c}", x, s.ints[1], True),
}  # fmt: skip

JOINS = {
    "add": lambda s, x, y: x + y,
    "sub": lambda s, x, y: x - y,
    "mul": lambda s, x, y: x * y,
    "dot": lambda s, x, y: x @ y / 2,
    "max": lambda s, x, y: jnp.maximum(x, y),
    "where": lambda s, x, y: jnp.where(s.weight(1) > 0, x, y),
    "divide": lambda s, x, y: x / (1 + y * y),
    "stack": lambda s, x, y: jnp.concatenate([x[:2], y[:2]]),
    "gate": lambda s, x, y: x * jax.nn.sigmoid(y),
}

# --- unrolled layers -----------------------------------------------------------------


def _rule_factor(s, w, x, odd):
    """A function whose derivative alone differs."""
    fn = jax.custom_jvp(jnp.sin)
    factor = 0.5 if odd else 2.0
    fn.defjvp(lambda p, t: (jnp.sin(p[0]), t[0] * factor))
    return fn(x)


def _rule_const(s, w, x, odd):
    """A backward rule that closes over an array, which differs in one element."""
    scale = np.ones((SIZE, SIZE), np.float32)
    scale[0, 0] = 2.0 if odd else 1.0
    fn = jax.custom_vjp(jnp.tanh)
    fn.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * scale,))
    return fn(x)


def _nondiff(s, w, x, odd):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def fn(power, x):
        return jnp.tanh(x)

    fn.defvjp(lambda n, x: (jnp.tanh(x), x), lambda n, x, g: (g * jnp.cos(x) ** n,))
    return fn(3 if odd else 2, x)


def _branch_order(s, w, x, odd):
    branches = [jnp.tanh, jnp.sin]
    return jax.lax.cond(s.ints[1] > 1, *(branches[::-1] if odd else branches), x)


def _array(s, w, x, odd):
    shift = np.zeros((SIZE, SIZE), np.float32)
    shift[2, 1] = 1.0 if odd else 0.0
    return x + jnp.asarray(shift)


CHANGES = {
    "nothing": lambda s, w, x, odd: x,
    "constant": lambda s, w, x, odd: x * (1.5 if odd else 1.25),
    "sign_of_zero": lambda s, w, x, odd: jnp.arctan2(x, -0.0 if odd else 0.0),
    "array": _array,
    "activation": lambda s, w, x, odd: (jax.nn.gelu if odd else jax.nn.silu)(x),
    "relu": lambda s, w, x, odd: (jax.nn.relu6 if odd else jax.nn.relu)(x),
    "operands": lambda s, w, x, odd: (x - x.T * 0.5) if odd else (x.T * 0.5 - x),
    "axis": lambda s, w, x, odd: x - x.mean(int(odd), keepdims=True),
    "transpose": lambda s, w, x, odd: x @ (w.T if odd else w),
    "precision": lambda s, w, x, odd: jnp.dot(
        x, w, precision="highest" if odd else None
    ),
    "integer": lambda s, w, x, odd: dropout(x, 1 + odd),
    "roll": lambda s, w, x, odd: jnp.roll(x, 2 if odd else 1, axis=0),
    "scan_length": lambda s, w, x, odd: jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ w), None), x, None, 3 if odd else 2
    )[0],
    "jit": lambda s, w, x, odd: jax.jit(lambda x: x * (3.0 if odd else 2.0) / 2)(x),
    "checkpoint": lambda s, w, x, odd: jax.checkpoint(
        lambda x: jnp.sin(x) * (3.0 if odd else 2.0) / 2
    )(x),
    "branch_order": _branch_order,
    "rule_factor": _rule_factor,
    "rule_const": _rule_const,
    "nondiff": _nondiff,
    "pure": lambda s, w, x, odd: x + pure("odd" if odd else "layer", x),
    "debug": lambda s, w, x, odd: debug("odd" if odd else "layer", x),
    "debug_only": lambda s, w, x, odd: debug("odd", x) if odd else x,
    "io": lambda s, w, x, odd: io("odd" if odd else "layer", x, s.ints[0], False),
    "cast": lambda s, w, x, odd: (
        x.astype(jnp.float16 if odd else jnp.bfloat16).astype(jnp.float32)
    ),
    "stop": lambda s, w, x, odd: (jax.lax.stop_gradient(x) + x) if odd else x + x * 0.5,
}  # fmt: skip


def _layers(node, s, x):
    for i in range(node.count):
        at = i % WEIGHTS
        shifted = {name: v[at:] + v[:at] for name, v in s.params.items()}
        layer = dataclasses.replace(s, params=shifted)
        x = sequence(node.body, layer, x)
        x = CHANGES[node.change](s, s.weight(i), x, i == node.odd)
        x = jnp.tanh(x)
    return x
