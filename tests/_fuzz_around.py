"""Loops, branches, custom rules, ...: what the programs of `_fuzz_language` nest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 4
WEIGHTS = 3


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
