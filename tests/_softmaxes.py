"""Classes and a softmax for the tests of losses that read probabilities."""

import jax
import jax.numpy as jnp

SIZE, CLASSES = 4, 5
TARGET = jnp.roll(jnp.eye(SIZE, CLASSES), 1, axis=1)  # never the first class
SMOOTH = 0.9 * TARGET + 0.1 / CLASSES


@jax.custom_jvp
def with_rule(logits):
    return jax.nn.softmax(logits)


@with_rule.defjvp
def _jvp(primals, tangents):
    p, t = with_rule(*primals), tangents[0]
    return p, p * (t - (p * t).sum(-1, keepdims=True))
