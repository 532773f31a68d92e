"""Logs and pictures of a run: the metrics of its steps, a log, and a plot of the log.

`StepMetrics` gathers the metrics of steps on the device, `create_writer` writes them
for TensorBoard, as JSON lines and on the terminal, `read` reads them and `plot` draws
them. Nothing here is needed for training. clu, tensorboardX and matplotlib are imported
when they are first used. README.md in this folder says more.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp.metrics._log import MetricWriter as MetricWriter
from flax_amp.metrics._log import create_writer as create_writer
from flax_amp.metrics._log import read as read
from flax_amp.metrics._plot import plot as plot

if TYPE_CHECKING:
    from flax_amp.metrics._collection import StepMetrics as StepMetrics

__all__ = "MetricWriter StepMetrics create_writer finite_by_leaf plot read".split()


def finite_by_leaf(state: Any, grads: Any, updates: Any = None) -> dict[str, jax.Array]:
    """Returns whether each gradient is finite, as metrics by the path of its parameter.

    `flax_amp.check_progress` names the gradients that are not finite if its metrics
    hold these flags. `StepMetrics` leaves the flags out.

    Example:
      >>> grads = {"dense": {"bias": jnp.zeros(2), "kernel": jnp.array([1.0, jnp.inf])}}
      >>> {name: bool(value) for name, value in finite_by_leaf(None, grads).items()}
      {'grads_finite/dense/bias': True, 'grads_finite/dense/kernel': False}
    """
    del state, updates
    return {
        f"grads_finite/{keystr(at, simple=True, separator='/')}": jnp.isfinite(x).all()
        for at, x in tree_leaves_with_path(nnx.as_pure(grads))
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    }


def __getattr__(name: str) -> Any:
    if name == "StepMetrics":  # a subclass of a class of clu
        from flax_amp.metrics._collection import StepMetrics

        return StepMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
