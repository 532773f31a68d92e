"""What training steps report, gathered on the device until it is fetched.

One rule keeps skipped steps out: of two collections that are merged, one without a
finite step adds nothing to the metrics of finite steps.
"""

from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from clu import values as clu_values

# What the step reports -> its name here. The last value counts, of skipped steps too.
_LAST = {"scaler": "scale", "hyperparams/learning_rate": "learning_rate"}
_LAST |= {name: name for name in ("skipped_total", "learning_rate")}
_FIRST = ("loss", "scale", "grad_norm", "learning_rate", "skip_rate", "skipped_total")


@flax.struct.dataclass
class StepMetrics(clu_metrics.Collection):
    """A collection, in the sense of clu, of what training steps report.

    It holds, on the device, what `make_train_step` and `make_nnx_train_step` return:

    - `loss`, `grad_norm` and every other real scalar, `aux` included: the mean over
      finite steps.
    - `scale`, `learning_rate`, `skipped_total`, `hyperparams/...`: the last value. Each
      is absent if the step does not report it. A `learning_rate` of your own counts.
    - `skip_rate`: the share of skipped steps.
    - metrics and collections of clu in `aux`, merged over finite steps. The names of a
      collection are preceded by its own: `eval/accuracy`.

    Arrays that are no scalars are left out. Nothing of a skipped step enters a mean. If
    all steps were skipped, what is taken over finite steps is NaN: names do not depend
    on values, so that nothing waits for the device.

    `merge`, `reduce`, `compute`, `unreplicate` and `single_from_model_output` are those
    of clu, and work under `jit`.

    Attributes:
      every: the metrics of every step, by name.
      finite: the metrics of finite steps, by name.

    Example:
      >>> metrics = {"loss": jnp.float32(2), "grads_finite": jnp.bool_(True)}
      >>> bad = {"loss": jnp.float32(jnp.nan), "grads_finite": jnp.bool_(False)}
      >>> window = StepMetrics.empty().add(metrics).add(bad)
      >>> {name: float(value) for name, value in window.compute().items()}
      {'loss': 2.0, 'skip_rate': 0.5}
    """

    every: dict[str, Any]
    finite: dict[str, Any]

    @classmethod
    def empty(cls) -> "StepMetrics":
        """Returns a collection without any step."""
        # clu counts merges here to detect an axis of devices; see `compute`.
        return cls(_reduction_counter=None, every={}, finite={})

    @classmethod
    def _from_model_output(cls, **metrics: Any) -> "StepMetrics":
        if "grads_finite" not in metrics:
            raise ValueError(
                f"StepMetrics: got metrics named {sorted(metrics)}, without "
                "'grads_finite'; expected what make_train_step or make_nnx_train_step "
                "returns."
            )
        skipped = jnp.logical_not(metrics["grads_finite"])
        every: dict[str, Any] = {"skip_rate": _average(skipped)}
        finite: dict[str, Any] = {}
        for name, value in metrics.items():
            ours = _LAST.get(name, name)
            if name == "grads_finite" or not _is_kept(value):
                continue
            if ours in every or ours in finite:
                raise ValueError(
                    f"StepMetrics: two metrics are named {ours!r} here, one of them "
                    f"{name!r} in aux; expected one. Rename it."
                )
            if isinstance(value, clu_metrics.Metric | clu_metrics.Collection):
                finite[ours] = value
            elif name in _LAST or name.startswith("hyperparams/"):
                every[ours] = clu_metrics.LastValue(jnp.float32(value), jnp.int32(1))
            else:
                finite[ours] = _average(value)
        return cls(_reduction_counter=None, every=every, finite=finite)

    def add(self, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Returns a collection with one more step, in one dispatch.

        Args:
          metrics: what the step returned, and scalars of your own.

        Raises:
          ValueError: if `grads_finite` is not in it, or if the names are not those of
            the steps before.
        """
        return _add(self, {k: v for k, v in metrics.items() if _is_kept(v)})

    def merge(self, other: "StepMetrics") -> "StepMetrics":
        """Returns a collection of the steps of both; `other` is the later one."""
        if not (self.every and other.every):
            return self if self.every else other
        _check_same_names(self, other)
        every = {n: m.merge(other.every[n]) for n, m in self.every.items()}
        both = {n: m.merge(other.finite[n]) for n, m in self.finite.items()}

        def choose(mine: Any, others: Any, merged: Any) -> Any:
            either = jnp.where(other._finite_steps() > 0, others, mine)
            return jnp.where(in_both, merged, either)

        in_both = (self._finite_steps() > 0) & (other._finite_steps() > 0)
        finite = jax.tree.map(choose, self.finite, other.finite, both)
        return self.replace(every=every, finite=finite)  # type: ignore[attr-defined]

    def reduce(self) -> "StepMetrics":
        """Merges along the leading axis, in order: of a `vmap`, or `all_gather`."""
        first = jax.tree.map(lambda x: x[0], self)
        rest = jax.tree.map(lambda x: x[1:], self)
        return jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)[0]

    def compute(self) -> dict[str, jax.Array]:
        """Returns the values by name, on the device, in one dispatch."""
        if self.every and self.every["skip_rate"].total.ndim:
            raise ValueError(
                "StepMetrics.compute: the collection has an axis of "
                f"{len(self.every['skip_rate'].total)} steps or devices; expected "
                "none. Call reduce() or unreplicate() first."
            )
        with jax.debug_nans(False):  # NaN is the answer if every step was skipped
            found = _compute(self)
        known = {name: found.pop(name) for name in _FIRST if name in found}
        return {**known, **found}

    def compute_values(self) -> dict[str, clu_values.Value]:
        """Returns what `compute` does, for `clu.metric_writers.write_values`."""
        return {name: clu_values.Scalar(v) for name, v in self.compute().items()}

    def _finite_steps(self) -> jax.Array:
        return self.every["skip_rate"].count - self.every["skip_rate"].total


def _is_kept(value: Any) -> bool:
    if isinstance(value, clu_metrics.Metric | clu_metrics.Collection):
        return True
    if not isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array):
        return False
    kinds = ("real floating", "integral", "bool")
    dtype = jnp.result_type(value)
    return jnp.ndim(value) == 0 and jnp.isdtype(dtype, kinds)


def _average(value: Any) -> clu_metrics.Average:
    return clu_metrics.Average(total=jnp.float32(value), count=jnp.int32(1))


def _check_same_names(one: StepMetrics, other: StepMetrics) -> None:
    names = [{*side.every, *side.finite} for side in (one, other)]
    if different := sorted(names[0] ^ names[1]):
        raise ValueError(
            f"StepMetrics: {different} are not in all steps; expected the same metrics "
            "in each. Gather the steps of each kind in a collection of their own."
        )


@jax.jit
def _add(window: StepMetrics, metrics: Mapping[str, Any]) -> StepMetrics:
    return window.merge(type(window).single_from_model_output(**metrics))


@jax.jit
def _compute(window: StepMetrics) -> dict[str, jax.Array]:
    found = {name: metric.compute() for name, metric in window.every.items()}
    for name, metric in window.finite.items():
        value = metric.compute()
        values = value if isinstance(value, Mapping) else {"": value}
        for inner, one in values.items():
            any_finite = window._finite_steps() > 0
            key = f"{name}/{inner}".rstrip("/")
            found[key] = jnp.where(any_finite, one, jnp.nan)
    return found
