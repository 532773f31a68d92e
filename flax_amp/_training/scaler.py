"""The dynamic loss scaler: a plain dict of 0-d arrays.

The scaler is data, hyper-parameters included. So it passes through `jit`, `vmap` and
any checkpoint without losing a field, and a sweep over settings compiles once. Whatever
happens to the gradients, the scale stays a finite, positive number between `min_scaler`
and `max_scaler`.

The scale falls only when a lower scale can help. The forward pass does not see the
scale: a loss that is not finite comes from the batch or from the activations, and it
would be the same at every other scale. Flax and jaxamp lower the scale then, too, so a
few bad batches drive it to its lower limit.

Sharp edges:
  The scale grows on the `patience + 1`-th finite step since it moved, as in jaxamp and
  in Flax's `DynamicScale`, not on the `patience`-th. A run that is migrated from one of
  them goes on exactly.
"""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from flax_amp import _tree
from flax_amp._training.arguments import Array, PyTree, check_type, describe

Scaler = dict[str, Array]

# The reciprocal of a scale must be a normal float32. XLA flushes subnormal numbers to
# zero, and gradients that are multiplied by zero are lost.
_LARGEST_SCALE = 2.0**126
_SMALLEST_SCALE = 2.0**-126

_INT32_MAX = 2**31 - 1


class DynamicScalerState(TypedDict, total=False):
    """The type of the scaler: a dict of 0-d arrays, all strongly typed.

    `DynamicScalerState(patience=10)` is the dict `{"patience": 10}`. Every function
    that takes a scaler fills in missing keys with the defaults of `init_scaler` and
    turns Python numbers into arrays, so this short form is enough to start with.

    Attributes:
      scaler: float32, the scale: the loss is multiplied by it.
      count: int32, the number of finite steps since the scale last changed.
      patience: int32, the scale grows on the finite step after `patience` others.
      adjust_factor: float32, the factor by which the scale grows or falls.
      total_resets: int32, the number of steps that were not finite. It also counts the
        steps that left the scale alone.
      min_scaler: float32, the lower limit of the scale.
      max_scaler: float32, the upper limit of the scale.

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


# What `make_nnx_train_step` adds to these keys in the scaler that it returns: how many
# steps were skipped since the last update, and in all.
SKIP_COUNTS = ("skipped_in_a_row", "skipped_total")

# What is missing in a scaler has its default: one of an older checkpoint is completed,
# and so is `{"patience": 10}`.
_DEFAULTS: dict[str, tuple[float, DTypeLike]] = {
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
      patience: the number of finite steps to wait; the scale grows on the next one.
      adjust_factor: the factor by which the scale grows or falls, greater than 1.
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
    # A step donates the scaler, so it must not hold an array of the caller, nor one
    # array twice.
    complete = validate_scaler(given, "init_scaler", wait=True)
    return {key: _tree.own(value) for key, value in complete.items()}


def static_scaler(value: ArrayLike) -> Scaler:
    """Makes a scaler whose scale never changes.

    It has the same keys as a dynamic scaler, so one checkpoint fits both. Both of its
    limits are `value`: the ordinary update leaves the scale there, and `total_resets`
    still counts the steps that were not finite.

    Args:
      value: the scale.

    Returns:
      A scaler as from `init_scaler`.

    Example:
      >>> float(update_scaler(static_scaler(1024.0), False)["scaler"])
      1024.0
    """
    # No flag says that it is static: one rule updates every scaler, in one program.
    return init_scaler(scaler=value, min_scaler=value, max_scaler=value)


def no_scaler() -> Scaler:
    """Makes a scaler of 1 for bfloat16 and float32, which need no loss scaling.

    A jitted step in float16 warns when it gets one: small gradients are lost.

    Example:
      >>> float(no_scaler()["scaler"])
      1.0
    """
    return static_scaler(1.0)


def complete_scaler(state: Mapping[str, Any], name: str = "scaler") -> Scaler:
    """Fills in missing keys and turns Python numbers into strongly typed arrays.

    It also brings the scaler of an older checkpoint up to date, and leaves out the
    counts of `make_nnx_train_step`. It does not look at the values; `check_scaler`
    does.

    Raises:
      TypeError: if `state` is not a mapping.
      ValueError: if a key is unknown or a value is not a scalar number.

    Example:
      >>> int(complete_scaler({"patience": 10})["patience"])
      10
    """
    check_type(
        state,
        Mapping,
        name,
        "a dict such as flax_amp.init_scaler() returns. Pass that, or "
        "flax_amp.no_scaler() for bfloat16.",
    )
    if unknown := sorted(str(key) for key in state.keys() - {*_DEFAULTS, *SKIP_COUNTS}):
        raise ValueError(
            f"{name}: unknown keys {unknown}; expected some of {sorted(_DEFAULTS)}. "
            "Remove or rename them."
        )
    scaler = {}
    for key, (default, dtype) in _DEFAULTS.items():
        value = state.get(key, default)
        _check_scalar(key, value)
        scaler[key] = jnp.asarray(value, dtype)
    return scaler


def scale_loss(loss: Array, state: Mapping[str, Any]) -> Array:
    """Returns `loss * scale`, in float32 at least, which has room for the product.

    Args:
      loss: a loss of any float dtype.
      state: a scaler; see `flax_amp.DynamicScalerState`.

    Example:
      >>> from flax_amp import init_scaler
      >>> scale_loss(jnp.float16(8), init_scaler())
      Array(262144., dtype=float32)
    """
    scale = validate_scaler(state)["scaler"]
    if not _tree.is_numeric(loss):
        raise TypeError(
            f"scale_loss: loss is {describe(loss)}; expected a number. Scale "
            "the loss alone, without aux."
        )
    return _tree.widen(loss) * scale


def unscale_grads(grads: PyTree, state: Mapping[str, Any]) -> PyTree:
    """Divides gradients by the scale they were made with, in float32 at least.

    Args:
      grads: gradients of `scale_loss(loss, state)`.
      state: the scaler that was used for them, not the updated one.

    Returns:
      The gradients; floating leaves are float32, or wider if they were wider.

    Example:
      Two losses that share one scaler:

      >>> from flax_amp import all_finite, init_scaler, update_scaler
      >>> scaler = init_scaler()
      >>> def scaled(w):
      ...     loss = w**2
      ...     return scale_loss(loss, scaler), loss
      >>> first, loss = jax.grad(scaled, has_aux=True)(jnp.float32(3))
      >>> second, _ = jax.grad(scaled, has_aux=True)(jnp.float32(4))
      >>> grads = unscale_grads((first, second), scaler)
      >>> scaler = update_scaler(
      ...     scaler, all_finite(grads), loss_finite=all_finite(loss)
      ... )
      >>> [float(grad) for grad in grads], int(scaler["count"])
      ([6.0, 8.0], 1)
    """
    # XLA fuses one multiplication for each leaf with the cast around it.
    factor = 1.0 / validate_scaler(state)["scaler"]
    return jax.tree.map(
        lambda g: _tree.widen(g) * factor if _tree.is_inexact(g) else g, grads
    )


def update_scaler(
    state: Mapping[str, Any],
    grads_finite: ArrayLike,
    *,
    loss_finite: ArrayLike = True,
) -> Scaler:
    """Raises or lowers the scale after one step.

    - If loss and gradients are finite, `count` goes up by one. If `count` has already
      reached `patience`, the scale is multiplied by `adjust_factor` instead, and
      `count` starts again at 0.
    - If the loss is finite and the gradients are not, the scale is divided by
      `adjust_factor`, `count` starts again at 0, and `total_resets` goes up by one.
    - If the loss is not finite, no scale would have helped: scale and `count` stay, and
      `total_resets` goes up by one.

    The scale stays within its limits, and the counters stop at the largest int32.

    Args:
      state: a scaler; see `DynamicScalerState`.
      grads_finite: bool[], True when the gradients are finite on every device.
      loss_finite: bool[], True when the loss and everything else that the forward pass
        computes is finite on every device.

    Returns:
      A new scaler with the same keys, shapes and dtypes.

    Raises:
      TypeError: if `state` is not a mapping, or a flag is not bool[].
      ValueError: if a key is unknown, or if a Python number is out of its range.

    Example:
      >>> state = update_scaler(init_scaler(), False)
      >>> float(state["scaler"]), int(state["total_resets"])
      (16384.0, 1)
      >>> state = update_scaler(state, False, loss_finite=False)
      >>> float(state["scaler"]), int(state["total_resets"])
      (16384.0, 2)
    """
    state = validate_scaler(state)
    loss_finite = _as_flag(loss_finite, "loss_finite")
    # Gradients of a loss that is not finite are not finite either, so they tell nothing
    # about the scale.
    finite = loss_finite & _as_flag(grads_finite, "grads_finite")
    falls = loss_finite & ~finite
    scale, factor, count = state["scaler"], state["adjust_factor"], state["count"]
    grows = finite & (count >= state["patience"])
    new_scale = jnp.where(grows, scale * factor, scale)
    new_scale = jnp.where(falls, scale / factor, new_scale)
    # fmax and fmin ignore a NaN operand, so even a NaN scale recovers.
    new_scale = jnp.fmin(jnp.fmax(new_scale, state["min_scaler"]), state["max_scaler"])
    # A counter that wrapped around would let the scale wait for 2**31 more steps.
    new_count = jnp.where(finite, optax.safe_increment(count), count)
    resets = state["total_resets"]
    return state | {
        "scaler": new_scale,
        "count": jnp.where(falls | grows, 0, new_count),
        "total_resets": jnp.where(finite, resets, optax.safe_increment(resets)),
    }


def _as_flag(value: Any, name: str) -> Array:
    """Returns bool[]. As a bool, a loss or a gradient would be True unless it is 0."""
    if describe(value) != "bool[]":
        raise TypeError(
            f"update_scaler: {name} is {describe(value)}; expected True, False or "
            f"bool[]. Pass flax_amp.all_finite({name.partition('_')[0]})."
        )
    return jnp.asarray(value)


def _check_scalar(key: str, value: Any) -> None:
    shape = getattr(value, "shape", ())
    if not isinstance(value, bool | int | float) and not _tree.is_array(value):
        raise ValueError(
            f"scaler[{key!r}] is a {type(value).__name__}; expected a scalar number. "
            "Build the dict with flax_amp.init_scaler()."
        )
    if shape != ():
        raise ValueError(
            f"scaler[{key!r}] has shape {shape}; expected a scalar. To use several "
            "scalers at once, use jax.vmap."
        )


def validate_scaler(state: Any, name: str = "scaler", *, wait: bool = False) -> Scaler:
    """Returns a complete scaler after checking its values.

    `name` is what the messages call it. With `wait`, arrays on the device are checked
    too, and waited for.
    """
    if isinstance(state, Mapping):
        check_scaler(state, name, wait=wait)
    return complete_scaler(state, name)


def check_scaler(state: Mapping[str, Any], name: str, *, wait: bool = True) -> None:
    """Raises a ValueError that lists every value out of its range.

    Traced values are not checked. Arrays on the device are checked only with `wait`.
    Missing keys have their defaults.
    """
    unchecked = jax.core.Tracer if wait else Array  # a tracer is an Array, too
    values = {key: state.get(key, default) for key, (default, _) in _DEFAULTS.items()}
    for key, value in values.items():
        _check_scalar(key, value)
    known = {k: v for k, v in values.items() if not isinstance(v, unchecked)}
    if known and (wrong := values_out_of_range(known)):
        raise ValueError(
            f"{name}: {', '.join(wrong)}. Correct these values; the scale must stay "
            "a finite, positive float32."
        )


def check_keys(state: object, name: str) -> None:
    """Raises a ValueError unless `state` is a dict with every key of a scaler."""
    keys = state.keys() if isinstance(state, Mapping) else set()
    if missing := sorted(_DEFAULTS.keys() - keys):
        raise ValueError(
            f"{name}, a {type(state).__name__}, lacks {missing}; expected every key "
            "of flax_amp.init_scaler(). Complete it: flax_amp.init_scaler() | scaler."
        )


def values_out_of_range(state: Mapping[str, Any]) -> list[str]:
    """Describes each value of a scaler that is out of its range, with that range.

    A missing value counts as one that is in its range.
    """
    known = {key: np.asarray(state[key]).item() for key in _DEFAULTS if key in state}
    values = {key: default for key, (default, _) in _DEFAULTS.items()}
    values |= {"min_scaler": _SMALLEST_SCALE, "max_scaler": _LARGEST_SCALE} | known
    # The scaler holds float32, so its values are compared as float32. A number that
    # overflows float32 becomes inf here, which is out of every range.
    with np.errstate(over="ignore"):
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
