"""Ready functions for `metrics_fn`, which measures the update of a training step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path


def trained_norms(state: Any, grads: Any, updates: Any) -> dict[str, jax.Array]:
    """Measures the update, and the gradients of those parameters that it changes.

    `grad_norm`, which every step reports, also counts the gradients of parameters that
    the optimizer freezes. Returns `update_norm` and `trained_grad_norm`, float32[].

    Example:
      >>> grads = {"head": jnp.full(4, 3.0), "frozen": jnp.ones(4)}
      >>> updates = {"head": jnp.full(4, -1.5), "frozen": jnp.zeros(4)}
      >>> {name: float(x) for name, x in trained_norms(None, grads, updates).items()}
      {'update_norm': 3.0, 'trained_grad_norm': 6.0}
    """
    del state
    trained = jax.tree.map(
        lambda g, u: jnp.where(jnp.any(u != 0), g, 0), grads, updates
    )
    return {
        "update_norm": optax.tree.norm(updates),
        "trained_grad_norm": optax.tree.norm(trained),
    }


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
