"""The dynamic loss scaler: a plain dict of 0-d arrays.

The scaler is data, hyper-parameters included: it passes through `jit`, `vmap` and any
checkpoint without losing a field. Whatever happens to the gradients, the scale stays
a finite, positive number between `min_scaler` and `max_scaler`. What uses it stands in
`flax_amp.scaled_grad`.

The scale is lowered only when a lower one can help. The forward pass does not see the
scale: a loss that is not finite comes from the batch or from the activations, and would
be as wrong at any other scale.

Sharp edges:
  The scale grows on the `patience + 1`-th finite step in a row, as in jaxamp and in
  Flax's `DynamicScale`, not on the `patience`-th.
"""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flax_amp import _tree

PyTree = Any
Scaler = dict[str, jax.Array]

# The reciprocal of a scale must be a normal float32: XLA flushes subnormals to zero,
# and the gradients with them.
_LARGEST_SCALE = 2.0**126
_SMALLEST_SCALE = 2.0**-126

_INT32_MAX = 2**31 - 1


class DynamicScalerState(TypedDict, total=False):
    """The type of the scaler: a dict of 0-d arrays, all strongly typed.

    `DynamicScalerState(patience=10)` is the dict `{"patience": 10}`. Every function
    that takes a scaler completes missing keys with the defaults of `init_scaler` and
    turns Python numbers into arrays, so such a short form is enough to start with.

    Attributes:
      scaler: float32, the loss is multiplied by it.
      count: int32, finite steps since the scale last changed.
      patience: int32, the scale grows on the finite step after `patience` others.
      adjust_factor: float32, what the scale is multiplied or divided by.
      total_resets: int32, how many steps were not finite, those that left the scale
        alone included.
      min_scaler: float32, lower limit of the scale.
      max_scaler: float32, upper limit of the scale.

    Example:
      >>> DynamicScalerState(patience=10)
      {'patience': 10}
    """

    scaler: ArrayLike
    count: ArrayLike
    patience: ArrayLike
    adjust_factor: ArrayLike
    total_resets: ArrayLike
    min_scaler: ArrayLike
    max_scaler: ArrayLike


_DEFAULTS: dict[str, tuple[float, Any]] = {
    "scaler": (2.0**15, jnp.float32),
    "count": (0, jnp.int32),
    "patience": (2000, jnp.int32),
    "adjust_factor": (2.0, jnp.float32),
    "total_resets": (0, jnp.int32),
    "min_scaler": (2.0**-14, jnp.float32),
    "max_scaler": (2.0**24, jnp.float32),
}


def init_scaler(
    *,
    scaler: ArrayLike = 2.0**15,
    patience: ArrayLike = 2000,
    adjust_factor: ArrayLike = 2.0,
    min_scaler: ArrayLike = 2.0**-14,
    max_scaler: ArrayLike = 2.0**24,
) -> Scaler:
    """Makes a dynamic loss scaler.

    Powers of two for `scaler` and `adjust_factor` make scaling and unscaling exact.
    Values that are traced (under `jit` or `vmap`) are not checked.

    Args:
      scaler: the first scale.
      patience: finite steps to wait; the scale grows on the one after them.
      adjust_factor: what the scale is multiplied or divided by, greater than 1.
      min_scaler: the scale never falls below it.
      max_scaler: the scale never rises above it.

    Returns:
      A dict of 0-d strongly typed arrays; see `DynamicScalerState` for the keys.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> state = init_scaler(patience=10)
      >>> sorted(state)  # doctest: +NORMALIZE_WHITESPACE
      ['adjust_factor', 'count', 'max_scaler', 'min_scaler', 'patience', 'scaler',
       'total_resets']
      >>> float(state["scaler"])
      32768.0
    """
    given = dict(
        scaler=scaler,
        patience=patience,
        adjust_factor=adjust_factor,
        min_scaler=min_scaler,
        max_scaler=max_scaler,
    )
    check_scaler(given, "init_scaler")
    return complete_scaler(given)


def static_scaler(value: ArrayLike) -> Scaler:
    """Makes a scaler that keeps its scale for ever.

    It has the keys of a dynamic one, so that a checkpoint fits both. Its limits are
    both `value`: the ordinary update leaves it there, and still counts what was not
    finite in `total_resets`.

    Args:
      value: the scale.

    Returns:
      A scaler as from `init_scaler`.

    Example:
      >>> float(update_scaler(static_scaler(1024.0), False)["scaler"])
      1024.0
    """
    return init_scaler(scaler=value, min_scaler=value, max_scaler=value)


def no_scaler() -> Scaler:
    """Makes a scaler of 1, for bfloat16 and float32, which need no loss scaling.

    Example:
      >>> float(no_scaler()["scaler"])
      1.0
    """
    return static_scaler(1.0)


def complete_scaler(state: Mapping[str, Any], where: str = "scaler") -> Scaler:
    """Fills in missing keys and turns Python numbers into strongly typed arrays.

    This is also what brings the scaler of an older checkpoint up to date. It does not
    look at the values: `check_scaler` does.

    Args:
      state: any part of a scaler; see `DynamicScalerState`.
      where: what it was given as, for messages.

    Returns:
      A dict with every key, as from `init_scaler`.

    Raises:
      TypeError: if `state` is not a mapping.
      ValueError: if a key is unknown or a value is not a scalar number.

    Example:
      >>> int(complete_scaler({"patience": 10})["patience"])
      10
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{where}: got {type(state).__name__}; expected a dict such as "
            "flax_amp.init_scaler() returns. Pass that, or flax_amp.no_scaler() for "
            "bfloat16."
        )
    if unknown := sorted(str(key) for key in state if key not in _DEFAULTS):
        raise ValueError(
            f"{where}: unknown keys {unknown}; expected some of {sorted(_DEFAULTS)}. "
            "Remove or rename them."
        )
    return {
        key: _as_scalar(key, state.get(key, default), dtype)
        for key, (default, dtype) in _DEFAULTS.items()
    }


def update_scaler(
    state: Mapping[str, Any],
    grads_finite: ArrayLike,
    *,
    loss_finite: ArrayLike = True,
) -> Scaler:
    """Grows or lowers the scale after one step.

    A finite step adds one to `count`; when `count` has reached `patience`, it instead
    multiplies the scale by `adjust_factor` and starts the count again. A finite loss
    with gradients that are not finite divides the scale and starts the count again. A
    loss that is not finite leaves both alone: no scale would have helped. Either adds
    one to `total_resets`. The scale is kept within its limits, and counters stop at
    the largest int32.

    Args:
      state: a scaler; see `DynamicScalerState`.
      grads_finite: bool[], True when the gradients are finite on every device.
      loss_finite: bool[], True when the loss, and whatever else the forward pass gave,
        is finite on every device.

    Returns:
      A new scaler with the same keys, shapes and dtypes.

    Raises:
      TypeError: if `state` is not a mapping.
      ValueError: if a key is unknown, or a Python number is out of its range.

    Example:
      >>> state = update_scaler(init_scaler(), False)
      >>> float(state["scaler"]), int(state["total_resets"])
      (16384.0, 1)
      >>> state = update_scaler(state, False, loss_finite=False)
      >>> float(state["scaler"]), int(state["total_resets"])
      (16384.0, 2)
    """
    state = checked_scaler(state)
    forward = jnp.asarray(loss_finite, bool)
    finite = forward & jnp.asarray(grads_finite, bool)
    lowers = forward & ~finite
    scale, factor, count = state["scaler"], state["adjust_factor"], state["count"]
    grows = finite & (count >= state["patience"])
    moved = jnp.where(grows, scale * factor, scale)
    moved = jnp.where(lowers, scale / factor, moved)
    # fmax and fmin ignore a NaN operand: even a scale that came in broken recovers.
    moved = jnp.fmin(jnp.fmax(moved, state["min_scaler"]), state["max_scaler"])
    counted = jnp.where(finite, _saturating_increment(count), count)
    resets = state["total_resets"]
    return state | {
        "scaler": moved,
        "count": jnp.where(lowers | grows, 0, counted),
        "total_resets": jnp.where(finite, resets, _saturating_increment(resets)),
    }


def _saturating_increment(count: jax.Array) -> jax.Array:
    return jnp.where(count < _INT32_MAX, count + 1, count)


def _as_scalar(key: str, value: Any, dtype: Any) -> jax.Array:
    _check_scalar(key, value)
    return jnp.asarray(value, dtype)


def _check_scalar(key: str, value: Any) -> None:
    shape = getattr(value, "shape", ())
    if not isinstance(value, bool | int | float) and not _tree.is_array(value):
        raise ValueError(
            f"scaler[{key!r}] is a {type(value).__name__}; expected a scalar number. "
            "Build the dict with flax_amp.init_scaler()."
        )
    if shape != ():
        raise ValueError(
            f"scaler[{key!r}] has shape {shape}; expected a scalar. For several "
            "scalers at once, use jax.vmap."
        )


def checked_scaler(state: Any, where: str = "scaler", *, wait: bool = False) -> Scaler:
    """Returns a complete scaler, after checking what is known of it.

    Args:
      state: any part of a scaler.
      where: what it was given as, for messages.
      wait: look at arrays on the device, too, and wait for them.
    """
    if isinstance(state, Mapping):
        check_scaler(state, where, wait=wait)
    return complete_scaler(state, where)


def check_scaler(state: Mapping[str, Any], where: str, *, wait: bool = True) -> None:
    """Raises a ValueError that lists every value out of its range.

    Traced values are not checked; arrays on the device only with `wait`. Missing keys
    have their defaults.
    """
    unknown = jax.core.Tracer if wait else jax.Array
    values = {key: state.get(key, default) for key, (default, _) in _DEFAULTS.items()}
    for key, value in values.items():
        _check_scalar(key, value)
    known = {k: v for k, v in values.items() if not isinstance(v, unknown)}
    if known and (bad := faults_of(known)):
        raise ValueError(
            f"{where}: {', '.join(bad)}. Correct these values; the scale must stay "
            "a finite, positive float32."
        )


def check_complete(state: Any, where: str) -> None:
    """Raises a ValueError unless `state` is a dict with every key of a scaler."""
    keys = state.keys() if isinstance(state, Mapping) else set()
    if missing := sorted(_DEFAULTS.keys() - keys):
        raise ValueError(
            f"{where}, a {type(state).__name__}, lacks {missing}; expected every key "
            "of flax_amp.init_scaler(). Complete it: flax_amp.init_scaler() | scaler."
        )


def faults_of(state: Mapping[str, Any]) -> list[str]:
    """Returns one text for each value of a scaler that is out of its range.

    The text names the range. Missing values count as in their ranges.
    """
    known = {key: np.asarray(state[key]).item() for key in _DEFAULTS if key in state}
    values = {key: default for key, (default, _) in _DEFAULTS.items()}
    values |= {"min_scaler": _SMALLEST_SCALE, "max_scaler": _LARGEST_SCALE} | known
    with np.errstate(over="ignore"):  # as the float32 that it becomes
        scaler, factor, low, high = (
            float(np.float32(values[key]))
            for key in ("scaler", "adjust_factor", "min_scaler", "max_scaler")
        )
    rules = {
        "min_scaler": (low >= _SMALLEST_SCALE, "at least 2**-126"),
        "max_scaler": (high <= _LARGEST_SCALE, "at most 2**126"),
        "scaler": (
            low <= scaler <= high,
            f"between min_scaler={low} and max_scaler={high}",
        ),
        "adjust_factor": (factor > 1 and math.isfinite(factor), "finite, above 1"),
    } | {
        key: (
            0 <= values[key] <= _INT32_MAX and int(values[key]) == values[key],
            "an integer of at least 0 that fits int32",
        )
        for key in ("patience", "count", "total_resets")
    }
    return [
        f"{key}={values[key]!r} (expected {text})"
        for key, (holds, text) in rules.items()
        if key in known and not holds
    ]
