"""What is logged changes nothing else."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import PROGRAMS, W, X, loss_of
from _transformer import CONTEXTS, inputs, weights
from flax_amp import _compat, amp
from helpers import MATMULS, assert_identical, equations_of, jit, relative_error

lower = functools.partial(amp, compute_dtype=jnp.bfloat16)


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


LOSSES = {name: (loss_of(fn), W, X) for name, fn in PROGRAMS.items()}
LOSSES |= {n: (CONTEXTS[n], weights(), inputs()) for n in ("straight", "scan", "cond")}
CASES = {name: (loss, logged(loss), args) for name, (loss, *args) in LOSSES.items()}
CASES["log in a loop"] = (
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


@pytest.mark.parametrize("name", CASES)
def test_a_metric_changes_neither_matmuls_nor_gradients(name):
    loss, with_logs, args = CASES[name]
    plain = jax.grad(lower(loss))
    with_metrics = jax.grad(lower(with_logs), has_aux=True)
    assert not matmuls(plain, args) - matmuls(with_metrics, args)
    expected = jit(jax.grad(loss))(*args)
    alone = relative_error(jit(plain)(*args), expected)
    beside = relative_error(jit(with_metrics)(*args)[0], expected)
    assert beside < 1.2 * alone + jnp.finfo(jnp.bfloat16).eps


def test_a_callback_may_read_both_sides_of_a_matmul():
    """It has no result whose shape could be compared with those of its operands."""

    def fn(log, w):
        total = jnp.sin(w).sum(-1, keepdims=True) * (w @ w)[:, :1]
        y = jnp.tanh(w @ w @ w)
        log(total, y)
        return ((y @ w) * total).sum()

    w = jnp.eye(2)
    silent, loud = (
        jax.grad(amp(functools.partial(fn, log)))(w)
        for log in (
            lambda *_: None,
            lambda *xs: jax.debug.callback(lambda *_: None, *xs),
        )
    )
    assert_identical(loud, silent)
