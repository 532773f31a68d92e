"""The dynamic loss scaler: a plain dict of four 0-d arrays.

The scaler is data, hyper-parameters included, so a sweep compiles only once. bfloat16
and float32, which need no scaling, have the same dict, with an `adjust_factor` of 1.

The scale falls only when a lower scale can help: a loss that is not finite is not
finite at any scale. Flax and jaxamp lower the scale even for such a loss, so a few bad
batches drive the scale to its lower limit.
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
from flax_amp._checks import describe
from flax_amp._training import Array, PyTree
from flax_amp.policy import Precision, read_precision

Scaler = dict[str, Array]

# The least positive number of float16, and its inverse: no run needs a scale outside of
# these limits.
LOWEST = 2.0**-24
HIGHEST = 2.0**24

# For each key: the dtype, the lowest value and the highest value. The largest number of
# int32 is `2**31 - 1`.
KEYS: dict[str, tuple[DTypeLike, float, float]] = {
    "scaler": (jnp.float32, LOWEST, HIGHEST),
    "count": (jnp.int32, 0, 2**31 - 1),
    "patience": (jnp.int32, 0, 2**31 - 1),
    "adjust_factor": (jnp.float32, 1, HIGHEST),
}


def init_scaler(
    *,
    # The three defaults are the defaults of jaxamp and of Keras's `LossScaleOptimizer`.
    # PyTorch's `GradScaler` and Flax's `DynamicScale` begin at 2**16, with the same
    # patience and the same factor.
    scaler: ArrayLike = 2.0**15,
    patience: ArrayLike = 2000,
    adjust_factor: ArrayLike = 2.0,
) -> Scaler:
    """Makes a dynamic loss scaler. Powers of two make scaling exact.

    Args:
      scaler: the first scale. The scale always stays between 2**-24 and 2**24.
      patience: the number of finite steps to wait; the scale grows on the next finite
        step.
      adjust_factor: the factor, at least 1, by which the scale grows or falls. With 1
        the scale never changes.

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


DynamicScalerState = init_scaler  # the name of the scaler in jaxamp


def static_scaler(scale: ArrayLike) -> Scaler:
    """Makes a scaler whose scale never changes."""
    return init_scaler(scaler=scale, adjust_factor=1.0)


def no_scaler() -> Scaler:
    """Makes a scaler of 1, which never changes, for bfloat16 and float32."""
    return static_scaler(1.0)


def first_scaler(precision: Precision, given: Any = None, name: str = "") -> Scaler:
    """Returns the first scaler of a run: a given scaler, or one for the precision."""
    if given is not None:
        return check_scaler(given, name, wait=True)
    is_float16 = read_precision(precision)[0] == jnp.float16
    return init_scaler() if is_float16 else no_scaler()


def check_scaled(
    asked: Precision | None, held: Precision, scaler: Mapping[str, Any]
) -> None:
    """Warns of a step in float16 whose scale is at most 1 and never moves.

    The precision `asked` of the step wins over the precision `held` by the state. A
    step without any scaler raises a TypeError. The check waits for the scaler on the
    device. A traced scaler is not checked.
    """
    if read_precision(asked or held)[0] != jnp.float16:
        return
    wins = ""
    if asked is not None and asked != held:
        holder = "the precision of a plain nnx.Optimizer"
        if scaler:
            holder = f"{held!r} of the state"
        wins = f"precision={asked!r} of the step wins over {holder}: "
    text = (
        f"train_step: {wins}the step is in float16 without a loss scale, where "
        "gradients below 6e-8 become zero; expected a loss scaler. Make the "
        "AmpTrainState, or the AmpOptimizer, with precision='16-mixed' or "
        "scaler=init_scaler()."
    )
    if not scaler:
        raise TypeError(text)
    factor = scaler.get("adjust_factor")
    if isinstance(factor, jax.core.Tracer | None):
        return
    if np.all((np.asarray(scaler["scaler"]) <= 1) & (np.asarray(factor) == 1)):
        warnings.warn(text, stacklevel=3)  # the line that calls `train_step`


def scale_loss(loss: Array, state: Mapping[str, Any]) -> Array:
    """Returns `loss * scale`, in float32 at least, which has room for the product."""
    return _tree.widen(loss) * check_scaler(state)["scaler"]


def unscale_grads(grads: PyTree, state: Mapping[str, Any]) -> PyTree:
    """Divides gradients, any pytree, by their scale, in float32 at least.

    `state` is the scaler that `scale_loss` used for the loss, not the updated scaler.

    Example:
      >>> scaler = static_scaler(4.0)
      >>> float(scale_loss(jnp.float16(2), scaler))
      8.0
      >>> float(unscale_grads(jnp.float16(8), scaler))
      2.0
    """
    # XLA fuses a multiplication for each leaf with the cast around the multiplication.
    factor = 1.0 / check_scaler(state)["scaler"]

    def unscaled(grad: Any) -> Any:
        return _tree.widen(grad) * factor if _tree.is_inexact(grad) else grad

    return jax.tree.map(unscaled, grads)


def update_scaler(
    state: Mapping[str, Any],
    grads_finite: ArrayLike,
    *,
    loss_finite: ArrayLike = True,
) -> Scaler:
    """Raises or lowers the scale after one step.

    If loss and gradients are finite, `count` goes up by 1; but if `count` has reached
    `patience` already, the scale is multiplied by `adjust_factor` and `count` starts
    again at 0. If only the gradients are not finite, the scale is divided by
    `adjust_factor`, and `count` starts again at 0. If the loss is not finite, nothing
    changes.

    Args:
      state: a scaler, as from `init_scaler`.
      grads_finite: bool[], True when the gradients are finite on every device.
      loss_finite: bool[], True when the loss and all other results of the forward pass
        are finite on every device.

    Raises:
      ValueError: if a key is missing or unknown, or a Python number out of its range.

    Example:
      >>> float(update_scaler(init_scaler(), False)["scaler"])
      16384.0
    """
    state = check_scaler(state)
    # Gradients of a loss that is not finite are not finite either, so they tell nothing
    # about the scale. JAX refuses floats here, such as a loss instead of its flag.
    finite = jnp.bitwise_and(loss_finite, grads_finite)
    falls = loss_finite & ~finite
    scale = state["scaler"]
    factor = state["adjust_factor"]
    count = state["count"]
    grows = finite & (count >= state["patience"])
    scale = jnp.where(grows, scale * factor, jnp.where(falls, scale / factor, scale))
    count = jnp.where(finite, optax.safe_increment(count), count)
    return state | {
        # fmax and fmin ignore a NaN operand, so even a NaN scale recovers.
        "scaler": jnp.fmin(jnp.fmax(scale, LOWEST), HIGHEST),
        "count": jnp.where(falls | grows, 0, count),
    }


def check_scaler(state: Any, name: str = "scaler", *, wait: bool = False) -> Scaler:
    """Returns a scaler of strongly typed arrays, after checking it.

    Values of arrays on the device are checked only with `wait`, tracers never.
    """
    is_dict = isinstance(state, Mapping)
    if not is_dict or state.keys() != KEYS.keys():
        seen = f"is {describe(state)}"
        if is_dict:
            seen = f"has the keys {sorted(state)}"
        raise ValueError(
            f"{name} {seen}; expected a dict of {sorted(KEYS)}. Pass "
            "flax_amp.init_scaler(), or flax_amp.no_scaler() for bfloat16."
        )
    unchecked = jax.core.Tracer if wait else Array  # a tracer is an Array, too
    for key, (dtype, low, high) in KEYS.items():
        value = state[key]
        if not _tree.is_numeric(value) or jnp.shape(value) != ():
            raise ValueError(
                f"{name}[{key!r}] is {describe(value)}; expected a scalar number. To "
                "use several scalers at once, use jax.vmap."
            )
        if isinstance(value, unchecked):
            continue
        seen = np.asarray(value).item()
        kind = "a number" if dtype == jnp.float32 else "an integer"
        if not low <= seen <= high or (dtype == jnp.int32 and int(seen) != seen):
            raise ValueError(
                f"{name}: {key}={seen!r}; expected {kind} between {low:g} and {high:g}."
            )
    return {key: jnp.asarray(state[key], dtype) for key, (dtype, *_) in KEYS.items()}
