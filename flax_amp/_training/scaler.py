"""The dynamic loss scaler: a plain dict of four 0-d arrays.

The scaler is data, hyper-parameters included. So it passes through `jit`, `vmap` and
any checkpoint, and a sweep over settings compiles once. bfloat16 and float32, which
need no loss scaling, have the same dict, with an `adjust_factor` of 1: it never moves.

The scale falls only when a lower scale can help. The forward pass does not see it: a
loss that is not finite would be the same at every other scale. Flax and jaxamp lower
the scale then, too, so a few bad batches drive it to its lower limit. It grows on the
`patience + 1`-th finite step since it moved, as theirs does.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from flax_amp import _tree
from flax_amp._training import Array, PyTree
from flax_amp._training.arguments import describe
from flax_amp.policy import Precision, read_precision

Scaler = dict[str, Array]

# Beyond 2**24 no gradient of float16 gains, and below 2**-24 all of them are 0.
LOWEST, HIGHEST = 2.0**-24, 2.0**24

# For each key: the dtype, and between which numbers a value must lie.
KEYS: dict[str, tuple[DTypeLike, float, float]] = {
    "scaler": (jnp.float32, LOWEST, HIGHEST),
    "count": (jnp.int32, 0, 2**31 - 1),
    "patience": (jnp.int32, 0, 2**31 - 1),
    "adjust_factor": (jnp.float32, 1, HIGHEST),
}


def init_scaler(
    *,
    scaler: ArrayLike = 2.0**15,
    patience: ArrayLike = 2000,
    adjust_factor: ArrayLike = 2.0,
) -> Scaler:
    """Makes a dynamic loss scaler. Powers of two make scaling exact.

    Args:
      scaler: the first scale, between 2**-24 and 2**24, where it always stays.
      patience: the number of finite steps to wait; the scale grows on the next one.
      adjust_factor: the factor, at least 1, by which the scale grows or falls. With 1
        it never does.

    Returns:
      A dict of 0-d strongly typed arrays: `scaler` and `adjust_factor` float32,
      `patience` and `count` (the finite steps since the scale last changed) int32.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> scaler = init_scaler(patience=10)
      >>> sorted(scaler), float(scaler["scaler"])
      (['adjust_factor', 'count', 'patience', 'scaler'], 32768.0)
    """
    given = dict(scaler=scaler, count=0, patience=patience, adjust_factor=adjust_factor)
    return check_scaler(given, "init_scaler", wait=True)


# The name that jaxamp has for it.
DynamicScalerState = init_scaler


def static_scaler(scale: ArrayLike) -> Scaler:
    """Makes a scaler whose scale never changes."""
    return init_scaler(scaler=scale, adjust_factor=1.0)


def no_scaler() -> Scaler:
    """Makes a scaler of 1, which never changes, for bfloat16 and float32."""
    return static_scaler(1.0)


def first_scaler(precision: Precision) -> Scaler:
    """Returns the scaler with which a run of a precision starts."""
    return init_scaler() if needs_scale(precision) else no_scaler()


def needs_scale(precision: Precision) -> bool:
    """Whether gradients need a loss scale; bfloat16 has the range of float32."""
    return read_precision(precision)[0] == jnp.float16


def warn_if_unscaled(precision: Precision, scaler: Scaler, stacklevel: int) -> None:
    """Warns of a run in float16 whose scale is at most 1 and never moves.

    It waits for the scaler on the device. Traced values tell nothing.
    """
    factor = scaler.get("adjust_factor")
    if isinstance(factor, jax.core.Tracer | None) or not needs_scale(precision):
        return
    if np.all((np.asarray(scaler["scaler"]) <= 1) & (np.asarray(factor) == 1)):
        warnings.warn(
            "train_step: the step is in float16 with a scale of at most 1, as of "
            "no_scaler(): gradients below 6e-8 become zero. Expected a loss scaler. "
            "Make the state, or the AmpOptimizer, with precision='16-mixed', or pass "
            "scaler=flax_amp.init_scaler().",
            stacklevel=stacklevel,
        )


def scale_loss(loss: Array, state: Mapping[str, Any]) -> Array:
    """Returns `loss * scale`, in float32 at least, which has room for the product."""
    return _tree.widen(loss) * check_scaler(state)["scaler"]


def unscale_grads(grads: PyTree, state: Mapping[str, Any]) -> PyTree:
    """Divides gradients, any pytree, by their scale, in float32 at least.

    `state` is the scaler that `scale_loss` used for them, not the updated one.

    Example:
      >>> scaler = static_scaler(4.0)
      >>> float(scale_loss(jnp.float16(2), scaler))
      8.0
      >>> float(unscale_grads(jnp.float16(8), scaler))
      2.0
    """
    # XLA fuses one multiplication for each leaf with the cast around it.
    factor = 1.0 / check_scaler(state)["scaler"]
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

    If loss and gradients are finite, `count` goes up by one, or, if it has reached
    `patience` already, the scale is multiplied by `adjust_factor` and `count` starts
    again. If only the gradients are not finite, the scale is divided by
    `adjust_factor`, and `count` starts again. If the loss is not, nothing changes.

    Args:
      state: a scaler, as from `init_scaler`.
      grads_finite: bool[], True when the gradients are finite on every device.
      loss_finite: bool[], the same of all that the forward pass computes.

    Raises:
      TypeError, ValueError: if a flag is not bool[], if a key is missing or unknown, or
        a Python number out of its range.

    Example:
      >>> float(update_scaler(init_scaler(), False)["scaler"])
      16384.0
    """
    state = check_scaler(state)
    loss_finite = _as_flag(loss_finite, "loss_finite")
    # Gradients of a loss that is not finite are not finite either, so they tell nothing
    # about the scale.
    finite = loss_finite & _as_flag(grads_finite, "grads_finite")
    falls = loss_finite & ~finite
    scale, factor, count = state["scaler"], state["adjust_factor"], state["count"]
    grows = finite & (count >= state["patience"])
    scale = jnp.where(grows, scale * factor, jnp.where(falls, scale / factor, scale))
    count = jnp.where(finite, optax.safe_increment(count), count)
    return state | {
        # fmax and fmin ignore a NaN operand, so even a NaN scale recovers.
        "scaler": jnp.fmin(jnp.fmax(scale, LOWEST), HIGHEST),
        "count": jnp.where(falls | grows, 0, count),
    }


def _as_flag(value: Any, name: str) -> Array:
    """Returns bool[]. As a bool, a loss or a gradient would be True unless it is 0."""
    if describe(value) != "bool[]":
        raise TypeError(
            f"update_scaler: {name} is {describe(value)}; expected True, False or "
            f"bool[]. Pass flax_amp.all_finite({name.partition('_')[0]})."
        )
    return jnp.asarray(value)


def check_scaler(state: Any, name: str = "scaler", *, wait: bool = False) -> Scaler:
    """Returns a scaler of strongly typed arrays, after checking it.

    Values of arrays on the device are checked only with `wait`, traced ones never.
    """
    is_dict = isinstance(state, Mapping)
    if not is_dict or state.keys() != KEYS.keys():
        seen = f"has the keys {sorted(state)}" if is_dict else f"is {describe(state)}"
        raise ValueError(
            f"{name} {seen}; expected a dict of {sorted(KEYS)}. Pass "
            "flax_amp.init_scaler(), or flax_amp.no_scaler() for bfloat16."
        )
    for key, value in state.items():
        if not _tree.is_numeric(value) or jnp.shape(value) != ():
            raise ValueError(
                f"{name}[{key!r}] is {describe(value)}; expected a scalar number. To "
                "use several scalers at once, use jax.vmap."
            )
    unchecked = jax.core.Tracer if wait else Array  # a tracer is an Array, too
    known = {key: x for key, x in state.items() if not isinstance(x, unchecked)}
    if wrong := values_out_of_range(known):
        raise ValueError(f"{name}: {', '.join(wrong)}. Correct these values.")
    return {key: jnp.asarray(state[key], dtype) for key, (dtype, *_) in KEYS.items()}


def values_out_of_range(state: Mapping[str, Any]) -> list[str]:
    """Describes each value of a scaler that is out of its range, with that range."""
    wrong = []
    for key, (dtype, low, high) in KEYS.items():
        if key not in state:
            continue
        value = np.asarray(state[key]).item()
        if not low <= value <= high or (dtype == jnp.int32 and int(value) != value):
            kind = "a number" if dtype == jnp.float32 else "an integer"
            between = f"{kind} between {low:g} and {high:g}"
            wrong.append(f"{key}={value!r} (expected {between})")
    return wrong
