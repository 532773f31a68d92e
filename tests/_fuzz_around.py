"""Loops, branches, custom rules, ...: what the programs of `_fuzz_language` nest."""

import functools

import jax
import jax.numpy as jnp

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


def _grad(body, s, x, n):
    return x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(body(s.params, x))))(x)


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
    "jit_twice": _jit_twice,
    "scan": _scan,
    "scan_reverse": functools.partial(_scan_state, reverse=True),
    "scan_outputs": _scan_outputs,
    "scan_layers": _scan_layers,
    "scan_state": _scan_state,
    "while": _while,
    "cond": _cond,
    "switch": _switch,
    "checkpoint": _calls(jax.checkpoint),
    "checkpoint_dots": _calls(_remat(policy=_POLICIES.dots_saveable)),
    "checkpoint_nothing": _calls(_remat(policy=_POLICIES.nothing_saveable)),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vjp_closed": _custom_vjp_closed,
    "custom_gradient": _custom_gradient,
    "custom_vmap": _custom_vmap,
    "vmap": _vmap,
    "grad": _grad,
    "scope": _scope,
    "stop": _stop,
}
