"""A ready function for `metrics_fn`, which measures the update of a training step."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path


def finite_by_leaf(state: Any, grads: Any, updates: Any = None) -> dict[str, jax.Array]:
    """Returns whether each gradient is finite, as metrics by the path of its parameter.

    `flax_amp.check_progress` names the gradients that are not finite if it is given
    metrics that hold these. `StepMetrics` leaves them out.

    Example:
      >>> grads = {"dense": {"bias": jnp.zeros(2), "kernel": jnp.array([1.0, jnp.inf])}}
      >>> {name: bool(value) for name, value in finite_by_leaf(None, grads).items()}
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
