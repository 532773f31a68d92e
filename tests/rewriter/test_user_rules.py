"""Rules that users write may read and change anything while they are traced."""

import functools
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp
from flax_amp._rewriter import captures
from flax_amp._rewriter.custom_derivatives import CustomCall
from helpers import rewritten_in_float32, run_all


class Counter:
    """What a rule may read and change while it is traced."""

    def __init__(self):
        self.number, self.list = 0, []

    def attribute(self):
        self.number += 1
        return self.number

    def item(self):
        self.list.append(0)
        return len(self.list)


COUNTER = Counter()
STATES = {  # name: what makes a function that counts
    "global": lambda counter: lambda: COUNTER.attribute() / 10,
    "iterator": lambda counter: functools.partial(next, itertools.count(1.0)),
    "method": lambda counter: counter.attribute,
    "list": lambda counter: lambda: counter.item() / 10,
}


def _counting(kind, count):
    """A function whose rule counts the times that it is traced."""
    if kind == "jvp":
        f = jax.custom_jvp(jnp.sin)
        f.defjvp(lambda p, t: (p[0], t[0] * count()))
        return f
    f = jax.custom_vjp(jnp.sin)
    if kind == "forward":
        f.defvjp(lambda x: (x * count(), None), lambda _, ct: (ct,))
    else:
        f.defvjp(lambda x: (x, None), lambda _, ct: (ct * count(),))
    return f


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
def test_rules_of_a_user_are_traced_for_each_call(kind, state, monkeypatch):
    """As often as in plain JAX, also where the calls are equal."""
    w, x = jnp.eye(4) * 0.9, jnp.ones((2, 4))

    def gradient(transform):
        monkeypatch.setattr(sys.modules[__name__], "COUNTER", Counter())
        f = _counting(kind, STATES[state](Counter()))

        def loss(w, x):
            for _ in range(8):
                x = f(x @ w)
            return x.sum()

        return jax.jit(jax.grad(transform(loss), argnums=(0, 1)))(w, x)

    plain = gradient(jax.jit)
    lowered = gradient(rewritten_in_float32)
    jax.tree.map(np.testing.assert_allclose, lowered, plain)


@pytest.mark.parametrize("as_rule", [functools.partial, types.MethodType])
def test_a_rule_with_a_large_object_is_a_rule_of_a_user(as_rule):
    """More lies behind it than the search for functions looks at."""
    much = [[i] for i in range(captures._LIMIT + 1)]
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(as_rule(lambda _, p, t: (p[0], t[0]), much))
    (eqn,) = jax.make_jaxpr(f)(1.0).eqns
    assert captures.HasUserRule()(eqn)


def test_a_search_that_was_cut_off_finds_a_rule_of_a_user(monkeypatch):
    (relu,) = jax.make_jaxpr(jax.nn.relu)(1.0).eqns
    assert not captures.HasUserRule()(relu)
    monkeypatch.setattr(captures, "_LIMIT", 3)
    assert captures.HasUserRule()(relu)


def test_rules_of_jax_are_traced_once(monkeypatch):
    traced = []
    trace = CustomCall.trace

    def record(call, *args):
        traced.append(call.eqn)
        return trace(call, *args)

    monkeypatch.setattr(CustomCall, "trace", record)

    def loss(w, x):
        for _ in range(5):
            x = jax.nn.relu(x @ w)
        return x.sum()

    jax.grad(amp(loss, merge_layers=False))(jnp.eye(4), jnp.ones((2, 4)))
    assert 1 <= len(traced) <= 2  # the last one is read in another precision


CLOSED = {  # what a rule closes over, computed in the function
    "scale": lambda x: lax.stop_gradient(jnp.abs(x).max()),
    "integer": lambda x: jnp.argmax(lax.stop_gradient(x)).astype(jnp.int32),
    "key": lambda x: jax.random.fold_in(jax.random.key(0), 1),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("closed", CLOSED)
def test_jvp_rules_may_close_over_what_a_region_computes(closed, recompute):
    def loss(w, x):
        value = CLOSED[closed](x)

        def factor():
            is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            return jax.random.uniform(value) if is_key else value * 0.5

        f = jax.custom_jvp(lambda x: x * factor())
        f.defjvp(lambda p, t: (p[0] * factor(), t[0] * factor()))
        return (f(jax.nn.gelu(x @ w)) ** 2).mean()

    w, x = jnp.eye(4), jnp.arange(8.0).reshape(2, 4) / 8
    lowered = amp(loss, compute_dtype="bfloat16", recompute=recompute)
    transforms = (
        jax.grad,
        lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[:, None]),
        jax.hessian,
    )
    for transform in transforms:
        plain, found = run_all(transform(loss), transform(lowered))(w, x)
        np.testing.assert_allclose(found, plain, atol=0.05, rtol=0.05)
