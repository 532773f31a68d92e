"""What people log of the values in a program, and how a program logs it."""

import jax.numpy as jnp
from jax import lax


def silent(metric, value):
    return ()


def logged(metric, value):
    """Of a flat array, so that no equation of a metric is like one of a program."""
    return metric(lax.stop_gradient(value).ravel())


def entropy(p):
    return -jnp.sum(p * jnp.log(p + 1e-9))


def length(x):
    return jnp.sqrt(jnp.sum(x * x))


def histogram(x):
    return jnp.sum(x[:, None] < jnp.linspace(-3.0, 3.0, 9)[None], 0)


def spread(x):
    return jnp.std(x) / (jnp.max(x) - jnp.min(x) + 1e-6)


def saturated(gate):
    return jnp.mean((gate < 0.05) | (gate > 0.95))
