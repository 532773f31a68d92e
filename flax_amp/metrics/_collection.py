"""The metrics of training steps, gathered on the device until they are fetched."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

try:
    from clu import metrics as clu_metrics
    from clu import values as clu_values
except ImportError as error:
    raise ImportError(
        "flax_amp.metrics.StepMetrics needs clu, which is not installed. In a clone of "
        "flax_amp, run: pip install '.[logs]'"
    ) from error

_NAMES = {"scaler": "scale", "hyperparams/learning_rate": "learning_rate"}
# For these names the last value counts, also the value of a skipped step.
_LAST = ("scale", "learning_rate", "skipped_total", "spikes_total")


@flax.struct.dataclass
class StepMetrics(clu_metrics.Collection):
    """A collection, in the sense of clu, of the metrics of training steps.

    The collection holds, on the device, the metrics that the steps of `make_train_step`
    and `make_nnx_train_step` return:

    - `loss`, `grad_norm` and every further real scalar, `aux` included: the mean over
      finite steps; NaN if all were skipped.
    - `scale`, `learning_rate`, `skipped_total`, `spikes_total`, `hyperparams/...`: the
      last value.
    - `skip_rate`: the share of skipped steps.
    - metrics and collections of clu in `aux`, merged over finite steps. The names in a
      collection are preceded by the name of the collection: `eval/accuracy`.

    Arrays that are no scalars, and `grads_finite/...`, are left out: pass the metrics
    of the step, not a `StepMetrics`, to `check_progress`. `merge`, `reduce`, `compute`,
    `unreplicate` and `single_from_model_output` work under `jit`.

    Attributes:
      steps: int32[2], the numbers of finite and of skipped steps.
      values: float32[...], the means and the last values, in a single array.
      own: the metrics of clu in `aux`, by name.
      names: the names of `values`.

    Example:
      >>> metrics = {"loss": jnp.float32(2), "grads_finite": jnp.bool_(True)}
      >>> bad = {"loss": jnp.float32(jnp.nan), "grads_finite": jnp.bool_(False)}
      >>> window = StepMetrics.empty().add(metrics).add(bad)
      >>> {name: float(value) for name, value in window.compute().items()}
      {'loss': 2.0, 'skip_rate': 0.5}
    """

    steps: Any
    # A single array, because each array that a call returns costs time: 13 metrics take
    # 14 µs, and 136 µs if each is a metric of clu.
    values: Any
    own: dict[str, Any]
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(cls) -> "StepMetrics":
        """Returns a collection without any step."""
        return cls(None, None, None, own={}, names=())

    @classmethod
    def _from_model_output(cls, /, **metrics: Any) -> "StepMetrics":
        if np.shape(metrics.get("grads_finite", [0])):
            raise ValueError(
                f"StepMetrics: got metrics named {sorted(metrics)}; expected the "
                "metrics of one step, with a scalar 'grads_finite'. Call jax.vmap("
                "lambda m: StepMetrics.single_from_model_output(**m))(stacked)"
                ".reduce()."
            )
        finite = jnp.bool_(metrics.pop("grads_finite"))
        scalars = [
            (_NAMES.get(n, n), x) for n, x in metrics.items() if _is_reported(n, x)
        ]
        by_name = dict(sorted(scalars, key=lambda item: item[0]))
        if len(by_name) < len(scalars) or "skip_rate" in by_name:
            raise ValueError(
                f"StepMetrics: of {sorted(metrics)}, two metrics have the same name "
                f"here, or a name that is taken: {_NAMES}, 'skip_rate'. Rename them."
            )
        values = jnp.float32([*by_name.values()])
        return cls(
            # clu tells a replicated collection by the shape of this counter; here the
            # shape of `steps` tells.
            _reduction_counter=None,
            steps=jnp.int32([finite, ~finite]),
            values=jnp.where(finite | _is_last(tuple(by_name)), values, 0),
            own={name: x for name, x in metrics.items() if _is_of_clu(x)},
            names=tuple(by_name),
        )

    def add(self, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Returns a collection with the metrics of a further step, in one dispatch.

        `metrics` are the metrics that the step returned, with scalars of your own if
        you like. The names must be the names of the earlier steps.
        """
        return _add(self, dict(metrics))

    def merge(self, other: "StepMetrics") -> "StepMetrics":
        """Returns a collection of the steps of both; `other` has the later steps."""
        if self.steps is None:
            return other
        if other.steps is None:
            return self
        if different := {*self.names, *self.own} ^ {*other.names, *other.own}:
            raise ValueError(
                f"StepMetrics: {sorted(different)} are not in all steps; expected the "
                "same metrics in each. Gather each kind of steps by itself."
            )
        steps = self.steps + other.steps
        share = other.steps[0] / jnp.maximum(steps[0], 1)
        # A running mean and not a sum, which overflows, and loses more digits over many
        # steps.
        means = self.values + (other.values - self.values) * share

        # Only a metric of clu knows the meaning of its leaves, so that the leaves
        # cannot be masked: a metric without a finite step is not merged.
        def choose(mine: Any, others: Any, merged: Any) -> Any:
            either = jnp.where(other.steps[0] > 0, others, mine)
            return jnp.where((self.steps[0] > 0) & (other.steps[0] > 0), merged, either)

        merged = {name: own.merge(other.own[name]) for name, own in self.own.items()}
        return other.replace(  # type: ignore[attr-defined]
            steps=steps,
            values=jnp.where(_is_last(self.names), other.values, means),
            own=jax.tree.map(choose, self.own, other.own, merged),
        )

    def reduce(self) -> "StepMetrics":
        """Merges along the leading axis, in order, after a `vmap` or `all_gather`."""
        first = jax.tree.map(lambda x: x[0], self)
        rest = jax.tree.map(lambda x: x[1:], self)
        return jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)[0]

    def compute(self) -> dict[str, jax.Array]:
        """Returns the values by name, on the device, in a single dispatch."""
        if self.steps is None:
            return {}
        if self.steps.ndim > 1:
            raise ValueError(
                f"StepMetrics.compute: the collection has an axis of {len(self.steps)} "
                "steps or devices; expected none. Call reduce() or unreplicate() first."
            )
        with jax.debug_nans(False):  # NaN is the result if every step was skipped.
            found = _compute(self)
        return {name: found[name] for name in sorted(found, key=lambda x: x != "loss")}

    def compute_values(self) -> dict[str, clu_values.Value]:
        """Returns the values of `compute` for `clu.metric_writers.write_values`."""
        return {name: clu_values.Scalar(v) for name, v in self.compute().items()}


def _is_of_clu(value: Any) -> bool:
    return isinstance(value, clu_metrics.Metric | clu_metrics.Collection)


def _is_reported(name: str, value: Any) -> bool:
    """Whether a metric is a real scalar, and no flag of a gradient."""
    if value is None or _is_of_clu(value) or np.shape(value):
        return False
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    is_real = any(jnp.issubdtype(dtype, x) for x in (np.floating, np.integer, np.bool_))
    return is_real and not name.startswith("grads_finite/")


def _is_last(names: tuple[str, ...]) -> np.ndarray:
    return np.array([n in _LAST or n.startswith("hyperparams/") for n in names], bool)


@jax.jit
def _add(window: StepMetrics, metrics: Mapping[str, Any]) -> StepMetrics:
    # Not `single_from_model_output`, whose first argument has the name of a metric.
    return window.merge(type(window)._from_model_output(**metrics))


@jax.jit
def _compute(window: StepMetrics) -> dict[str, jax.Array]:
    finite, skipped = window.steps
    values = jnp.where((finite > 0) | _is_last(window.names), window.values, jnp.nan)
    found = dict(zip(window.names, values, strict=True))
    found["skip_rate"] = skipped / (finite + skipped)
    for name, metric in window.own.items():
        computed = metric.compute()
        if not isinstance(computed, Mapping):
            computed = {"": computed}
        for last, value in computed.items():
            key = f"{name}/{last}".rstrip("/")
            found[key] = jnp.where(finite > 0, value, jnp.nan)
    return found
