"""The walk over the equations of a program."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_amp._rewriter.primitives import walk


def test_the_walk_enters_bodies_but_no_kernels():
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    def step(x, _):
        return jax.jit(pl.pallas_call(kernel, jax.typeof(x)))(x), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=2)[0])(jnp.ones(8))
    names = [visit.eqn.primitive.name for visit in walk(closed)]
    assert names == ["scan", "jit", "pallas_call"]
