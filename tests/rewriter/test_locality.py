"""What is logged changes no other equation."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from _logged_programs import PROGRAMS
from _metrics import logged, silent
from flax_amp import amp
from helpers import assert_identical, equations


def traced(name, log):
    program, params, x = PROGRAMS[name]
    fn = functools.partial(program, log)
    lowered = amp(fn, recompute="never", merge_layers=False)
    return jax.make_jaxpr(jax.value_and_grad(lowered, has_aux=True))(params, x)


def types(atoms):
    return tuple((str(v.aval.dtype), *v.aval.shape) for v in atoms)


def counted(closed):
    """Counts equations by primitive and types; casts up, which reading adds, are not.

    Those with bodies are not either, but what stands in these is.
    """
    found = Counter()
    for _, eqn in equations(closed):
        operands, results = types(eqn.invars), types(eqn.outvars)
        if any(jax.extend.core.jaxprs_in_params(eqn.params)):
            continue
        if eqn.primitive.name == "convert_element_type" and results[0][0] == "float32":
            continue
        found[eqn.primitive.name, operands, results] += 1
    return found


def casts_down(counts):
    halves = ("bfloat16", "float16")
    return {
        key: count
        for key, count in counts.items()
        if key[0] == "convert_element_type" and key[2][0][0] in halves
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_metric_changes_no_other_equation(name):
    plain, with_metrics = (counted(traced(name, log)) for log in (silent, logged))
    assert len(with_metrics) > len(plain)
    assert plain - with_metrics == Counter()
    # No value is rounded for the sake of a metric.
    assert casts_down(plain) == casts_down(with_metrics)


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
