"""What is emitted: its size, what is rounded; what is logged changes nothing else."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import PROGRAMS, loss_of, normal, with_jvp, with_vjp
from _transformer import inputs, scanned, weights
from flax_amp import _compat, amp, default_amp_policy
from helpers import MATMULS, equations, equations_of, jit, relative_error

SIZE = 8
W, X = normal(0, SIZE, SIZE), normal(1, SIZE, SIZE)

# --- the size of what is emitted ------------------------------------------------------


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x * 16) / 16


rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))


def dense(x, w):
    return jnp.tanh(x @ w)


by_vjp, by_jvp = with_vjp(dense), with_jvp(dense)
LAYERS = {  # from the results of all former layers, and a weight
    "residual": lambda xs, w: xs[-1] + dense(xs[-1], w),
    "straight through": lambda xs, w: dense(rounded(xs[-1]), rounded(w)),
    "custom_vjp": lambda xs, w: by_vjp(xs[-1], w),
    "custom_jvp": lambda xs, w: by_jvp(xs[-1], w),
    "sum over all former layers": lambda xs, w: dense(sum(xs), w),
}


def size(fn, layer, depth):
    """The number of equations of value and gradient."""

    def loss(w, x):
        xs = [x]
        for _ in range(depth):
            xs.append(layer(xs, w))
        return (xs[-1] ** 2).mean()

    traced = jax.make_jaxpr(jax.value_and_grad(fn(loss)))(W, X)
    return sum(1 for _ in equations(traced))


@pytest.mark.parametrize("name", LAYERS)
def test_the_program_grows_as_the_users_does(name):
    """What layers add is in proportion to what they add to the user's program."""
    layer, depths = LAYERS[name], (6, 12, 24)
    ours, plain = (
        np.diff([size(fn, layer, depth) for depth in depths])
        for fn in (amp, lambda fn: fn)
    )
    ratios = ours / plain
    assert ratios[1] <= 1.1 * ratios[0], ratios
    assert ratios.max() <= 4, ratios


def test_nested_calls():
    def fn(x):
        return jnp.tanh(x @ W).sum()

    for _ in range(60):
        fn = jax.jit(functools.partial(lambda fn, x: fn(x), fn))
    jax.make_jaxpr(jax.grad(amp(fn)))(X)


# --- what is rounded -----------------------------------------------------------------


@pytest.mark.parametrize("steps", [16, 512])
@pytest.mark.parametrize("read", ["arithmetic", "matmul"])
def test_a_scan_adds_up_the_cotangents_of_what_it_closes_over(read, steps):
    """In float32: a half would lose the small terms of many steps."""
    w0, w, x = normal(0, 3, 16, 16) / 4

    def loss(w0):
        h = x @ w0

        def step(c, _):
            seen = jnp.sin(h) if read == "arithmetic" else jax.nn.softmax(c @ h) @ h
            return c + (jnp.tanh(c @ w) * 0.1 + seen) / steps, None

        return (lax.scan(step, jnp.zeros_like(h), length=steps)[0] ** 2).mean()

    actual, expected = (jit(jax.grad(f))(w0) for f in (amp(loss), loss))
    assert relative_error(actual, expected) < 0.012


def test_bits_are_those_of_float32():
    def bits(h):
        return lax.bitcast_convert_type(h @ jnp.eye(4), jnp.uint32)

    policy = default_amp_policy | {"amp_default": jnp.bfloat16}
    assert amp(bits, amp_policy=policy)(jnp.ones((4, 4))).shape == (4, 4)


@pytest.mark.parametrize("last", [lambda x: x + 64.0 / (1 + x * x), None])
def test_what_is_no_small_step_is_rounded(last):
    """A numerator is no factor, and one small step says nothing of those before."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        x = last(x) if last else x + 0.01 * jnp.sin(x)
        return (x @ ws[0]).sum()

    args = [jnp.eye(4)] * 3, jnp.ones((2, 4))
    halves = equations_of(amp(loss), *args, primitive="flax_amp_stored")
    adds = [v.aval for eqn in halves for v in eqn.outvars if v.aval.shape == (2, 4)]
    assert {aval.dtype.name for aval in adds} == {"bfloat16"}


# --- what is logged changes nothing else ---------------------------------------------


def metrics(x):
    """What people log, of a flat array: no equation is then like one of a program."""
    x = lax.stop_gradient(x).ravel()
    entropy = -jnp.sum(jnp.abs(x) * jnp.log(jnp.abs(x) + 1e-9))
    return entropy, jnp.std(x) / (x.max() - x.min() + 1e-6), jnp.mean(x < 0.05)


def logged(loss):
    """The loss with metrics of each value that it computes outside of its loops."""

    def with_logs(*args):
        logs = []

        def run(eqn, operands):
            results = _compat.bind(eqn, operands, eqn.params)
            logs.extend(metrics(x) for x in results if x.dtype == jnp.float32)
            return results

        closed = jax.make_jaxpr(loss)(*args)
        (value,) = _compat.evaluate(closed, jax.tree.leaves(args), run)
        return value, logs

    return with_logs


def recurrence(w, x, log=lambda x: ()):
    """A gated unit that may log in its loop."""

    def step(h, x):
        gate = jax.nn.sigmoid(x @ w + h @ w)
        h = (1 - gate) * h + gate * jnp.tanh(x @ w)
        return h, (h, log(gate), log(h))

    _, (hs, *logs) = lax.scan(step, jnp.zeros(w.shape[:1]), x)
    return jnp.mean((hs @ w) ** 2), logs


LOGGED = {
    name: (loss_of(PROGRAMS[name]), logged(loss_of(PROGRAMS[name])), (W, X))
    for name in ("mlp", "attention", "scattered")
}
LOGGED["scan"] = scanned, logged(scanned), (weights(), inputs())
LOGGED["log in a loop"] = (
    lambda w, x: recurrence(w, x)[0],
    functools.partial(recurrence, log=metrics),
    (W, X),
)


def matmuls(fn, args):
    """Counts the matmuls of a program by the types of operands and results."""
    found = equations_of(fn, *args, primitive=MATMULS)
    return Counter(
        tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in found
    )


@pytest.mark.parametrize("name", LOGGED)
def test_a_metric_changes_neither_matmuls_nor_gradients(name):
    loss, with_logs, args = LOGGED[name]
    plain = jax.grad(amp(loss))
    with_metrics = jax.grad(amp(with_logs), has_aux=True)
    assert not matmuls(plain, args) - matmuls(with_metrics, args)
    expected = jit(jax.grad(loss))(*args)
    alone = relative_error(jit(plain)(*args), expected)
    beside = relative_error(jit(with_metrics)(*args)[0], expected)
    assert beside < 1.2 * alone + jnp.finfo(jnp.bfloat16).eps
