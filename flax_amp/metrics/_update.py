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
    the optimizer freezes, as `optax.multi_transform` with `optax.set_to_zero` does.
    Here a parameter counts as frozen if the update leaves it as it is. Returns
    `update_norm` and `trained_grad_norm`, each float32[].

    Example:
      >>> import flax_amp
      >>> state = flax_amp.AmpTrainState.create(
      ...     params={"head": jnp.ones(4), "frozen": jnp.ones(4)},
      ...     tx=optax.multi_transform(
      ...         {"train": optax.sgd(0.5), "freeze": optax.set_to_zero()},
      ...         {"head": "train", "frozen": "freeze"},
      ...     ),
      ... )
      >>> train_step = flax_amp.make_train_step(
      ...     lambda params, x: (x * params["head"] * params["frozen"]).sum(),
      ...     metrics_fn=flax_amp.metrics.trained_norms,
      ... )
      >>> state, metrics = train_step(state, jnp.full(4, 3.0))
      >>> float(metrics["trained_grad_norm"]), float(metrics["update_norm"])
      (6.0, 3.0)
      >>> round(float(metrics["grad_norm"]), 2)
      8.49
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

    It is a `metrics_fn` of a training step. `flax_amp.check_progress` names those
    gradients that are not finite if it is given metrics that hold these. `StepMetrics`
    leaves them out.

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
