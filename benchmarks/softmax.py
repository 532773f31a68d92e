"""The softmax of an expert's hand-set model: scores in float32, probabilities back."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import problem

Loss = Callable[..., Any]


def in_float32(loss: Loss, seen: Callable[[], None] = lambda: None) -> Loss:
    """Makes each softmax of half-precision scores compute in float32.

    `seen` is called at each of them. One that is written out, or that casts its scores
    itself, stays as it is.
    """
    softmax = jax.nn.softmax

    def cast(scores: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if scores.dtype not in (jnp.bfloat16, jnp.float16):
            return softmax(scores, *args, **kwargs)
        seen()
        wide = softmax(scores.astype(jnp.float32), *args, **kwargs)
        return wide.astype(scores.dtype)

    def changed(*args: Any) -> Any:
        replaced = functools.partial(mock.patch.object, attribute="softmax", new=cast)
        with replaced(jax.nn), replaced(nn):
            return loss(*args)

    return changed


@functools.cache
def is_in_half(model: str) -> bool:
    """Returns whether a hand-set model computes a softmax in half precision."""
    found: list[bool] = []
    task = problem(model, "tiny", jnp.bfloat16)
    loss = in_float32(task.loss, lambda: found.append(True))
    jax.eval_shape(loss, *task.shapes())
    return bool(found)
