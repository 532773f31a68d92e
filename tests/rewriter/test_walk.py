"""The walk over the equations of a program, and the interpreter."""

import weakref

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_amp._compat import evaluate
from flax_amp._rewriter.walk import walk


class Held:
    """Stands for an array."""


def test_a_value_is_dropped_after_its_last_use():
    """Operands may be anything; literals come as they are, and an input may leave."""
    closed = jax.make_jaxpr(lambda x: (jnp.sin(jnp.cos(x)) * x + 2.0, x))(1.0)
    alive, counts, literals = weakref.WeakSet(), [], []

    def run(eqn, operands):
        counts.append((eqn.primitive.name, len(alive)))
        literals.extend(x for x in operands if not isinstance(x, Held))
        result = Held()
        alive.add(result)
        return [result]

    out, same = evaluate(closed, [given := Held()], run)
    assert counts == [("cos", 0), ("sin", 1), ("mul", 1), ("add", 1)]
    assert list(alive) == [out] and same is given
    assert list(map(float, literals)) == [2.0]


def test_the_walk_enters_bodies_but_no_kernels():
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    def step(x, _):
        return jax.jit(pl.pallas_call(kernel, jax.typeof(x)))(x), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=2)[0])(jnp.ones(8))
    names = [visit.eqn.primitive.name for visit in walk(closed)]
    assert names == ["scan", "jit", "pallas_call"]


def test_deep_calls_are_walked():
    """More calls within calls than Python may recurse into."""
    fn = jnp.sin
    for _ in range(100):
        fn = jax.jit(lambda x, fn=fn: fn(x))
    *calls, sine = walk(jax.make_jaxpr(fn)(1.0))
    assert len(calls) == len(sine.around) == 100
