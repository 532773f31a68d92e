"""What is logged changes nothing else."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from _logged_programs import PROGRAMS
from _metrics import logged, silent
from flax_amp import amp
from helpers import MATMULS, assert_identical, equations_of, jit, relative_error


def gradient_of(name, log, lower):
    program, params, x = PROGRAMS[name]
    fn = lower(functools.partial(program, log))
    return lambda params: jax.value_and_grad(fn, has_aux=True)(params, x), params


def products(fn, *args):
    """Counts the matmuls of a program by the types of operands and results."""
    found = equations_of(fn, *args, primitive=MATMULS)
    return Counter(
        tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in found
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_metric_changes_neither_matmuls_nor_gradients(name):
    lower = functools.partial(amp, compute_dtype=jnp.bfloat16)
    (plain, params), (with_metrics, _), (exact, _) = (
        gradient_of(name, *how)
        for how in ((silent, lower), (logged, lower), (silent, lambda fn: fn))
    )
    assert not products(plain, params) - products(with_metrics, params)
    (_, expected), *found = (jit(fn)(params) for fn in (exact, plain, with_metrics))
    alone, beside = (relative_error(gradient, expected) for _, gradient in found)
    assert beside < 1.2 * alone + jnp.finfo(jnp.bfloat16).eps


def test_a_callback_may_read_both_sides_of_a_product():
    """It has no result whose shape could be compared with those of its operands."""

    def fn(log, w):
        total = jnp.sin(w).sum(-1, keepdims=True) * (w @ w)[:, :1]
        y = jnp.tanh(w @ w @ w)
        log(total, y)
        return ((y @ w) * total).sum()

    w = jnp.eye(2)
    silent, logged = (
        jax.grad(amp(functools.partial(fn, log)))(w)
        for log in (
            lambda *_: None,
            lambda *xs: jax.debug.callback(lambda *_: None, *xs),
        )
    )
    assert_identical(logged, silent)
