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

SIZE = 4
WEIGHTS = 3


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

# --- functions around a body ---------------------------------------------------------


def _scan(body, s, x, n, **options):
    step = lambda x, _: (body(s.params, x), None)  # noqa: E731
    return jax.lax.scan(step, x, None, n, **options)[0]


def _scan_outputs(body, s, x, n):
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


def _scan_state(body, s, x, n, **options):
    step = lambda h, v: (body(s.params, h / 2 + v[None]), h)  # noqa: E731
    h, hs = jax.lax.scan(step, jnp.zeros_like(x), x[: n + 1], **options)
    return h + hs[-1]


def _while(body, s, x, n):
    def step(carry):
        i, x, _ = carry
        return i + 1, body(s.params, x), x.sum() > -1e9

    return jax.lax.while_loop(lambda c: (c[0] < n) & c[2], step, (0, x, True))[1]


def _other(p, x):
    return x * 0.5 - p["b"][0][None]


def _cond(body, s, x, n):
    return jax.lax.cond(s.weight(0)[0, n] > 0, body, _other, s.params, x)


def _cond_closed(body, s, x, n):
    return jax.lax.cond(
        s.ints[n] > 1, lambda: body(s.params, x), lambda: x @ s.weight(1)
    )


def _switch(body, s, x, n):
    branches = [lambda p, x: jnp.tanh(x), body, _other, lambda p, x: x]
    return jax.lax.switch(s.ints[n], branches, s.params, x)


def _jvp_rule(body, factor):
    def rule(primals, tangents):
        y, t = jax.jvp(body, primals, tangents)
        return y, t * factor

    return rule


def _custom_jvp(body, s, x, n):
    fn = jax.custom_jvp(body)
    fn.defjvp(_jvp_rule(body, 0.5 + n))
    return fn(s.params, x)


def _custom_jvp_const(body, s, x, n):
    shift = np.full((SIZE, 1), 0.25 * n, np.float32)
    function = lambda p, x: body(p, x) + shift  # noqa: E731
    fn = jax.custom_jvp(function)
    fn.defjvp(_jvp_rule(function, shift))
    return fn(s.params, x)


def _custom_jvp_nondiff(body, s, x, n):
    fn = jax.custom_jvp(lambda f, p, n, x: f(p, x) * n, nondiff_argnums=(0, 2))

    @fn.defjvp
    def _(f, n, primals, tangents):
        y, t = jax.jvp(f, primals, tangents)
        return y * n, t * (n + 0.5)

    return fn(body, s.params, n, x)


def _custom_jvp_zeros(body, s, x, n):
    fn = jax.custom_jvp(lambda w, x: body(s.params, x) @ w)
    fn.defjvps(None, lambda t, y, w, x: jax.jvp(lambda x: fn(w, x), (x,), (t,))[1])
    fn = jax.custom_jvp(lambda w, x: jnp.tanh(x @ w))

    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        y = jnp.tanh(x @ w)
        zero = jax.custom_derivatives.SymbolicZero
        t = jnp.zeros_like(y) if isinstance(dx, zero) else dx @ w
        return y, (1 - y * y) * (t if isinstance(dw, zero) else t + x @ dw * n)

    fn.defjvp(rule, symbolic_zeros=True)
    return fn(jax.lax.stop_gradient(s.weight(n)), body(s.params, x))


def _vjp_rules(body, factor):
    def forward(*args):
        y, vjp = jax.vjp(body, *args)
        return y, (vjp, y)

    return forward, lambda kept, g: kept[0](g * factor + 0.01 * kept[1])


def _custom_vjp(body, s, x, n):
    fn = jax.custom_vjp(body)
    fn.defvjp(*_vjp_rules(body, 0.5 + n))
    return fn(s.params, x)


def _custom_vjp_const(body, s, x, n):
    shift = np.full((SIZE, 1), 0.25 * n, np.float32)
    function = lambda p, x: body(p, x) * shift  # noqa: E731
    fn = jax.custom_vjp(function)
    fn.defvjp(*_vjp_rules(function, shift))
    return fn(s.params, x)


def _custom_vjp_closed(body, s, x, n):
    """The function and its rules close over a tracer that nobody differentiates."""
    mask = s.ints[:, None] > n - 2
    function = lambda p, x: jnp.where(mask, body(p, x), x)  # noqa: E731
    fn = jax.custom_vjp(function)
    fn.defvjp(*_vjp_rules(function, jnp.where(mask, 1.0, 0.5)))
    return fn(s.params, x)


def _custom_vjp_rule_closed(body, s, x, n):
    """Only the backward rule closes over a computed array."""
    h = jax.lax.stop_gradient(x @ s.weight(n))
    fn = jax.custom_vjp(body)
    forward, backward = _vjp_rules(body, 1.0)
    fn.defvjp(forward, lambda kept, g: backward(kept, g * jnp.tanh(h)))
    return fn(s.params, x)


def _custom_vjp_nondiff(body, s, x, n):
    def function(f, p, n, x, rows):
        return f(p, x)[rows] * n

    fn = jax.custom_vjp(function, nondiff_argnums=(0, 2))

    def forward(f, p, n, x, rows):
        return fn(f, p, n, x, rows), (p, x, rows)

    def backward(f, n, kept, g):
        p, x, rows = kept
        _, vjp = jax.vjp(lambda p, x: f(p, x)[rows], p, x)
        return (*vjp(g * (n - 0.5)), None)

    fn.defvjp(forward, backward)
    return fn(body, s.params, n, x, s.ints)


def _custom_gradient(body, s, x, n):
    @jax.custom_gradient
    def fn(p, x):
        y, vjp = jax.vjp(body, p, x)
        return y, lambda g: vjp(jnp.clip(g, -n, n))

    return fn(s.params, x)


def _custom_vmap(body, s, x, n):
    fn = jax.custom_batching.custom_vmap(body)

    @fn.def_vmap
    def _(size, batched, p, x):
        axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
        return jax.vmap(body, axes)(p, x) * n, True

    x = jax.lax.stop_gradient(x)
    params = jax.lax.stop_gradient(s.params)
    return jax.vmap(fn, (None, 0))(params, jnp.stack([x, -x])).mean(0)


def _vmap(body, s, x, n):
    return jax.vmap(body, (None, 0))(s.params, jnp.stack([x, x / n])).mean(0)


def _vmap_weights(body, s, x, n):
    stacked = jax.tree.map(lambda v: jnp.stack([v, v / n]), s.params)
    return jax.vmap(body, (0, None), 1)(stacked, x).mean(1)


def _grad(body, s, x, n):
    return x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(body(s.params, x))))(x)


def _jvp(body, s, x, n):
    y, t = jax.jvp(lambda x: body(s.params, x), (x,), (jnp.sin(x),))
    return y + t / n


def _scope(body, s, x, n):
    with jax.named_scope(f"scope{n}"):
        return body(s.params, x)


def _jit_twice(body, s, x, n):
    fn = jax.jit(body)
    return fn(s.params, fn(s.params, x))


def _stop(body, s, x, n):
    from flax_amp import amp_stop

    return amp_stop(body)(s.params, x)


def _calls(wrap):
    return lambda body, s, x, n: wrap(body)(s.params, x)


_POLICIES = jax.checkpoint_policies
_remat = functools.partial(functools.partial, jax.checkpoint)

AROUND = {
    "jit": _calls(jax.jit),
    "jit_inline": _calls(functools.partial(jax.jit, inline=True)),
    "jit_closed": lambda body, s, x, n: jax.jit(lambda x: body(s.params, x))(x),
    "jit_twice": _jit_twice,
    "scan": _scan,
    "scan_reverse": functools.partial(_scan_state, reverse=True),
    "scan_unroll": functools.partial(_scan, unroll=2),
    "scan_outputs": _scan_outputs,
    "scan_layers": _scan_layers,
    "scan_state": _scan_state,
    "fori": lambda body, s, x, n: jax.lax.fori_loop(
        0, n, lambda _, x: body(s.params, x), x
    ),
    "while": _while,
    "map": lambda body, s, x, n: jax.lax.map(
        functools.partial(body, s.params), jnp.stack([x, -x])
    ).mean(0),
    "cond": _cond,
    "cond_closed": _cond_closed,
    "switch": _switch,
    "checkpoint": _calls(jax.checkpoint),
    "checkpoint_loop": _calls(_remat(prevent_cse=False)),
    "checkpoint_dots": _calls(_remat(policy=_POLICIES.dots_saveable)),
    "checkpoint_nothing": _calls(_remat(policy=_POLICIES.nothing_saveable)),
    "checkpoint_all": _calls(_remat(policy=_POLICIES.everything_saveable)),
    "custom_jvp": _custom_jvp,
    "custom_jvp_const": _custom_jvp_const,
    "custom_jvp_nondiff": _custom_jvp_nondiff,
    "custom_jvp_zeros": _custom_jvp_zeros,
    "custom_vjp": _custom_vjp,
    "custom_vjp_const": _custom_vjp_const,
    "custom_vjp_closed": _custom_vjp_closed,
    "custom_vjp_rule_closed": _custom_vjp_rule_closed,
    "custom_vjp_nondiff": _custom_vjp_nondiff,
    "custom_gradient": _custom_gradient,
    "custom_vmap": _custom_vmap,
    "vmap": _vmap,
    "vmap_weights": _vmap_weights,
    "grad": _grad,
    "jvp": _jvp,
    "scope": _scope,
    "stop": _stop,
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
