"""What training steps report, gathered on the device until it is fetched.

A skipped step adds nothing to a sum. A metric of clu merges as it likes, so of two
collections, one without a finite step is not merged into the other.
"""

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

# What the step reports -> its name here. The last value counts, of skipped steps too.
_LAST = {"scaler": "scale", "hyperparams/learning_rate": "learning_rate"}
_LAST |= {name: name for name in ("skipped_total", "learning_rate")}
_KINDS = ("means", "last", "counts", "own")


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

    Left out are arrays that are no scalars, and `grads_finite/...`: pass what the step
    returned, not this, to `check_progress`. Nothing of a skipped step enters a mean. If
    all steps were skipped, what is taken over finite steps is NaN. `merge`, `reduce`,
    `compute`, `unreplicate` and `single_from_model_output` work under `jit`.

    Attributes:
      steps: the numbers of finite and of skipped steps, and then `skipped_total`, if it
        is reported: a float32 counts to 2**24.
      means, last: the means over finite steps and the last values, as one array each.
      own: the metrics of clu in `aux`, by name.
      names: those of `means`, of `last`, and of what follows in `steps`.

    Example:
      >>> metrics = {"loss": jnp.float32(2), "grads_finite": jnp.bool_(True)}
      >>> bad = {"loss": jnp.float32(jnp.nan), "grads_finite": jnp.bool_(False)}
      >>> window = StepMetrics.empty().add(metrics).add(bad)
      >>> {name: float(value) for name, value in window.compute().items()}
      {'loss': 2.0, 'skip_rate': 0.5}
    """

    steps: Any
    means: Any
    last: Any
    own: dict[str, Any]
    names: tuple[tuple[str, ...], ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(cls) -> "StepMetrics":
        """Returns a collection without any step."""
        return cls(None, None, None, None, own={}, names=((), (), ()))

    @classmethod
    def _from_model_output(cls, /, **metrics: Any) -> "StepMetrics":
        if np.shape(metrics.get("grads_finite", [0])):
            raise ValueError(
                f"StepMetrics: got metrics named {sorted(metrics)}; expected those of "
                "one step, with a scalar 'grads_finite'. For steps that are stacked, "
                "call jax.vmap(lambda m: StepMetrics.single_from_model_output(**m))("
                "stacked).reduce()."
            )
        finite = jnp.bool_(metrics.pop("grads_finite"))
        kinds: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for name, value in metrics.items():
            ours = _LAST.get(name, name)
            if ours == "skip_rate" or any(ours in kind for kind in kinds.values()):
                raise ValueError(
                    f"StepMetrics: two metrics are named {ours!r} here, one of them "
                    f"{name!r} in aux; expected one. Rename it."
                )
            if kind := _kind_of(name, value):
                kinds[kind][ours] = value
        means, last, counts, own = kinds.values()
        # One array for each kind, because each one that a call returns costs time: 13
        # metrics take 14 µs, and 136 µs if each is a metric of clu. They are sorted, in
        # whatever order they are given.
        names = tuple(tuple(sorted(kind)) for kind in (means, last, counts))
        values = jnp.float32([means[name] for name in names[0]])
        return cls(
            _reduction_counter=None,  # `steps` tells what clu uses it for
            steps=jnp.int32([finite, ~finite, *counts.values()]),
            means=jnp.where(finite, values, 0),
            last=jnp.float32([last[name] for name in names[1]]),
            own=own,
            names=names,
        )

    def add(self, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Returns a collection with one more step, in one dispatch.

        Args:
          metrics: what the step returned, and scalars of your own.

        Raises:
          ValueError: if `grads_finite` is not in it or is no scalar, or if the names
            are not those of the steps before.
        """
        return _add(self, dict(metrics))

    def merge(self, other: "StepMetrics") -> "StepMetrics":
        """Returns a collection of the steps of both; `other` is the later one."""
        if self.steps is None or other.steps is None:
            return other if self.steps is None else self
        kinds = zip((*self.names, self.own), (*other.names, other.own), strict=True)
        if different := sorted(set().union(*({*a} ^ {*b} for a, b in kinds))):
            raise ValueError(
                f"StepMetrics: {different} are not in all steps; expected the same "
                "metrics in each. Gather the steps of each kind in a collection of "
                "their own."
            )

        # Only a metric of clu knows what its leaves mean, so they cannot be masked: of
        # two, one without a finite step is not merged.
        def choose(mine: Any, others: Any, merged: Any) -> Any:
            either = jnp.where(other.steps[0] > 0, others, mine)
            return jnp.where((self.steps[0] > 0) & (other.steps[0] > 0), merged, either)

        steps = self.steps[:2] + other.steps[:2]
        share = other.steps[0] / jnp.maximum(steps[0], 1)
        merged = {name: own.merge(other.own[name]) for name, own in self.own.items()}
        return other.replace(  # type: ignore[attr-defined]
            steps=jnp.concatenate([steps, other.steps[2:]]),
            # Not a sum, which overflows, and loses more digits over many steps.
            means=self.means + (other.means - self.means) * share,
            own=jax.tree.map(choose, self.own, other.own, merged),
        )

    def reduce(self) -> "StepMetrics":
        """Merges along the leading axis, in order: of a `vmap`, or `all_gather`."""
        first = jax.tree.map(lambda x: x[0], self)
        rest = jax.tree.map(lambda x: x[1:], self)
        return jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)[0]

    def compute(self) -> dict[str, jax.Array]:
        """Returns the values by name, on the device, in one dispatch."""
        if self.steps is None:
            return {}
        if self.steps.ndim > 1:
            raise ValueError(
                f"StepMetrics.compute: the collection has an axis of {len(self.steps)} "
                "steps or devices; expected none. Call reduce() or unreplicate() first."
            )
        with jax.debug_nans(False):  # NaN is the answer if every step was skipped
            found = _compute(self)
        return {name: found[name] for name in sorted(found, key=lambda x: x != "loss")}

    def compute_values(self) -> dict[str, clu_values.Value]:
        """Returns what `compute` does, for `clu.metric_writers.write_values`."""
        return {name: clu_values.Scalar(v) for name, v in self.compute().items()}


def _kind_of(name: str, value: Any) -> str | None:
    """Returns how a metric is gathered; `None` if it is left out."""
    if isinstance(value, clu_metrics.Metric | clu_metrics.Collection):
        return "own"
    dtype = getattr(
        value, "dtype", np.dtype(type(value)) if value is not None else None
    )
    kinds = (np.floating, np.integer, np.bool_)
    is_real = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if name.startswith("grads_finite/") or not is_real or np.shape(value):
        return None
    if name == "skipped_total":
        return "counts"
    return "last" if name in _LAST or name.startswith("hyperparams/") else "means"


@jax.jit
def _add(window: StepMetrics, metrics: Mapping[str, Any]) -> StepMetrics:
    # Not `single_from_model_output`, whose first argument has the name of a metric.
    return window.merge(type(window)._from_model_output(**metrics))


@jax.jit
def _compute(window: StepMetrics) -> dict[str, jax.Array]:
    finite, skipped, *counts = window.steps
    means = jnp.where(finite > 0, window.means, jnp.nan)
    values = [*means, *window.last, *counts]
    found = dict(zip(sum(window.names, ()), values, strict=True))
    found["skip_rate"] = skipped / (finite + skipped)
    for name, metric in window.own.items():
        computed = metric.compute()
        inner = computed if isinstance(computed, Mapping) else {"": computed}
        for last, value in inner.items():
            key = f"{name}/{last}".rstrip("/")
            found[key] = jnp.where(finite > 0, value, jnp.nan)
    return found
