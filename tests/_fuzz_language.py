"""A small language of programs: plain data that hypothesis can shrink, and `run`.

A program is a tuple of nodes. Each node maps a float32 array of shape (4, 4) to another
one, with the weights in `params`. What a node prints is the code that makes it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from _programs import attention, norm
from flax_amp import amp_stop

SIZE = 4
WEIGHTS = 3


class Op(NamedTuple):
    """One operation of `OPS`, with a weight and a number."""

    name: str
    w: int = 0
    c: float = 1.25


class In(NamedTuple):
    """A body inside of a loop, a branch, a jit, a custom rule, ... of `AROUND`."""

    kind: str
    body: tuple[Any, ...]
    n: int = 2


class Join(NamedTuple):
    """Two bodies that read the same array, and what joins their results."""

    kind: str
    left: tuple[Any, ...]
    right: tuple[Any, ...]


class State(NamedTuple):
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
    body = lambda p, x: sequence(node.body, s._replace(params=p), x)  # noqa: E731
    return AROUND[node.kind](body, s, x, node.n)


def arguments(seed=0):
    """The params, the data, and indices."""
    rng = np.random.default_rng(seed)
    w, b, x = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((WEIGHTS, SIZE, SIZE), (WEIGHTS, SIZE), (SIZE, SIZE))
    )
    return {"w": [*(w / 2)], "b": [*(b / 4)]}, x, np.array([1, 3, 1, 0], np.int32)


# --- operations ----------------------------------------------------------------------


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


def update(s, x):
    row = jax.lax.dynamic_slice_in_dim(x, s.ints[0], 2)
    return jax.lax.dynamic_update_slice_in_dim(x, row * 0.5, s.ints[3], 0)


def _elementwise(fn):
    return lambda s, w, b, x, c: fn(x)


OPS = {
    "dot": lambda s, w, b, x, c: x @ w,
    "dot_self": lambda s, w, b, x, c: x @ x.T / SIZE,
    "dot_highest": lambda s, w, b, x, c: jnp.dot(x, w, precision="highest"),
    "conv": lambda s, w, b, x, c: conv(w, x),
    "attention": lambda s, w, b, x, c: attention(w, x),
    "residual": lambda s, w, b, x, c: x + norm(x) @ w,
    "bias": lambda s, w, b, x, c: x + b,
    "scale": lambda s, w, b, x, c: x * c,
    "weights": lambda s, w, b, x, c: x * jnp.exp(b) + w,
    "tanh": _elementwise(jnp.tanh),
    "relu": _elementwise(jax.nn.relu),
    "exp": _elementwise(lambda x: jnp.exp(-jnp.square(x))),
    "abs": _elementwise(jnp.abs),
    "softmax": _elementwise(jax.nn.softmax),
    "norm": _elementwise(norm),
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
}  # fmt: skip

JOINS = {
    "add": lambda s, x, y: x + y,
    "mul": lambda s, x, y: x * y,
    "dot": lambda s, x, y: x @ y / 2,
    "where": lambda s, x, y: jnp.where(s.weight(1) > 0, x, y),
    "gate": lambda s, x, y: x * jax.nn.sigmoid(y),
}

# --- around: loops, branches, custom rules ... ----------------------------------------


def _scan(body, s, x, n):
    def step(carry, _):
        i, x = carry
        y = body(s.params, x)
        return (i + 1, y), (y, i, y.sum() > -1e9)

    (i, x), (ys, _, flags) = jax.lax.scan(step, (0, x), None, n)
    return x + ys.mean(0) * jnp.where(flags.all(), i, 0)


def _scan_layers(body, s, x, n):
    def step(x, layer):
        params = {name: [v] * WEIGHTS for name, v in layer.items()}
        return body(params, x), x.mean()

    stacked = {name: jnp.stack(v[:n]) for name, v in s.params.items()}
    x, means = jax.lax.scan(step, x, stacked)
    return x + means.sum()


def _scan_state(body, s, x, n):
    step = lambda h, v: (body(s.params, h / 2 + v[None]), h)  # noqa: E731
    h, hs = jax.lax.scan(step, jnp.zeros_like(x), x[: n + 1])
    return h + hs[-1]


def _while(body, s, x, n):
    def step(carry):
        i, x, _ = carry
        return i + 1, body(s.params, x), x.sum() > -1e9

    return jax.lax.while_loop(lambda c: (c[0] < n) & c[2], step, (0, x, True))[1]


def _other(p, x):
    return x * 0.5 - p["b"][0][None]


def _switch(body, s, x, n):
    branches = [lambda p, x: jnp.tanh(x), body, _other, lambda p, x: x]
    return jax.lax.switch(s.ints[n], branches, s.params, x)


def _custom_jvp(body, s, x, n):
    fn = jax.custom_jvp(body)

    @fn.defjvp
    def _(primals, tangents):
        y, t = jax.jvp(body, primals, tangents)
        return y, t * (0.5 + n)

    return fn(s.params, x)


def _vjp_rules(body, factor):
    def forward(*args):
        y, vjp = jax.vjp(body, *args)
        return y, (vjp, y)

    return forward, lambda kept, g: kept[0](g * factor + 0.01 * kept[1])


def _custom_vjp(body, s, x, n):
    fn = jax.custom_vjp(body)
    fn.defvjp(*_vjp_rules(body, 0.5 + n))
    return fn(s.params, x)


def _custom_vjp_closed(body, s, x, n):
    """The function and its rules close over a tracer that nobody differentiates."""
    mask = s.ints[:, None] > n - 2
    function = lambda p, x: jnp.where(mask, body(p, x), x)  # noqa: E731
    fn = jax.custom_vjp(function)
    fn.defvjp(*_vjp_rules(function, jnp.where(mask, 1.0, 0.5)))
    return fn(s.params, x)


def _vmap(body, s, x, n):
    return jax.vmap(body, (None, 0))(s.params, jnp.stack([x, x / n])).mean(0)


def _grad(body, s, x, n):
    return x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(body(s.params, x))))(x)


def _calls(wrap):
    return lambda body, s, x, n: wrap(body)(s.params, x)


_DOTS = jax.checkpoint_policies.dots_saveable

AROUND = {
    "jit": _calls(jax.jit),
    "scan": _scan,
    "scan_layers": _scan_layers,
    "scan_state": _scan_state,
    "while": _while,
    "switch": _switch,
    "checkpoint": _calls(jax.checkpoint),
    "checkpoint_dots": _calls(functools.partial(jax.checkpoint, policy=_DOTS)),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vjp_closed": _custom_vjp_closed,
    "vmap": _vmap,
    "grad": _grad,
    "stop": _calls(amp_stop),
}
