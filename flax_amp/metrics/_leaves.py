"""Which gradients are finite, leaf by leaf, for the metrics of a step."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path


def grads_finite(state: Any, grads: Any, updates: Any = None) -> dict[str, jax.Array]:
    """Returns whether each gradient is finite, as metrics by the path of its parameter.

    It is a `metrics_fn` of a training step. `flax_amp.check_progress` names those
    gradients that are not finite if it is given metrics that hold these.

    Args:
      state: is not used.
      grads: a pytree of gradients.
      updates: is not used.

    Returns:
      `{"grads_finite/dense/kernel": bool[], ...}`, on the device.

    Example:
      >>> grads = {"dense": {"bias": jnp.zeros(2), "kernel": jnp.array([1.0, jnp.inf])}}
      >>> {name: bool(value) for name, value in grads_finite(None, grads).items()}
      {'grads_finite/dense/bias': True, 'grads_finite/dense/kernel': False}
    """
    del state, updates
    return {
        f"grads_finite/{keystr(path, simple=True, separator='/')}": jnp.all(
            jnp.isfinite(leaf)
        )
        for path, leaf in tree_leaves_with_path(nnx.as_pure(grads))
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    }
