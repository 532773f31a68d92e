"""The dynamic loss scaler: a plain dict of 0-d arrays, and gradients that use it.

The scaler is data, hyper-parameters included: it passes through `jit`, `vmap` and any
checkpoint without losing a field. Whatever happens to the gradients, the scale stays
a finite, positive number between `min_scaler` and `max_scaler`, and every returned
gradient was unscaled by the scale it was made with.

Sharp edges:
  The scale grows on the `patience + 1`-th finite step in a row, as in jaxamp and in
  Flax's `DynamicScale`, not on the `patience`-th.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
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
      total_resets: int32, how often a gradient or loss was not finite.
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
    _check_hyperparameters(scaler, patience, adjust_factor, min_scaler, max_scaler)
    return complete_scaler(
        dict(
            scaler=scaler,
            patience=patience,
            adjust_factor=adjust_factor,
            min_scaler=min_scaler,
            max_scaler=max_scaler,
        )
    )


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


def complete_scaler(state: Mapping[str, Any]) -> Scaler:
    """Fills in missing keys and turns Python numbers into strongly typed arrays.

    This is also what brings the scaler of an older checkpoint up to date.

    Args:
      state: any part of a scaler; see `DynamicScalerState`.

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
            f"scaler: got {type(state).__name__}; expected a dict such as "
            "flax_amp.init_scaler() returns. Pass dynamic_scaler_state=init_scaler()."
        )
    if unknown := sorted(str(key) for key in state if key not in _DEFAULTS):
        raise ValueError(
            f"scaler: unknown keys {unknown}; expected some of {sorted(_DEFAULTS)}. "
            "Remove or rename them."
        )
    return {
        key: _as_scalar(key, state.get(key, default), dtype)
        for key, (default, dtype) in _DEFAULTS.items()
    }


def update_scaler(state: Mapping[str, Any], grads_finite: ArrayLike) -> Scaler:
    """Grows or lowers the scale after one step.

    A finite step adds one to `count`; when `count` has reached `patience`, it instead
    multiplies the scale by `adjust_factor` and starts the count again. A non-finite
    step divides the scale, starts the count again and adds one to `total_resets`. The
    scale is kept within its limits, and counters stop at the largest int32.

    Args:
      state: a scaler; see `DynamicScalerState`.
      grads_finite: bool[], True when loss and gradients are finite on every device.

    Returns:
      A new scaler with the same keys, shapes and dtypes.

    Example:
      >>> state = update_scaler(init_scaler(), False)
      >>> float(state["scaler"]), int(state["total_resets"])
      (16384.0, 1)
    """
    state = complete_scaler(state)
    finite = jnp.asarray(grads_finite, bool)
    scale, factor, count = state["scaler"], state["adjust_factor"], state["count"]
    grows = finite & (count >= state["patience"])
    moved = jnp.where(grows, scale * factor, scale)
    moved = jnp.where(finite, moved, scale / factor)
    # fmax and fmin ignore a NaN operand: even a scale that came in broken recovers.
    moved = jnp.fmin(jnp.fmax(moved, state["min_scaler"]), state["max_scaler"])
    counted = jnp.where(finite & ~grows, _saturating_increment(count), 0)
    resets = state["total_resets"]
    return state | {
        "scaler": moved,
        "count": counted,
        "total_resets": jnp.where(finite, resets, _saturating_increment(resets)),
    }


def scale_loss(loss: jax.Array, state: Mapping[str, Any]) -> jax.Array:
    """Returns `loss * scale`, at least in float32, where the product fits.

    Example:
      >>> scale_loss(jnp.float16(8), init_scaler())
      Array(262144., dtype=float32)
    """
    return _widen(loss) * state["scaler"]


def unscale_grads(
    grads: PyTree, state: Mapping[str, Any], loss: ArrayLike = 0.0
) -> PyTree:
    """Divides gradients by the scale they were made with, at least in float32.

    Args:
      grads: gradients of `scale_loss(loss, state)`.
      state: the scaler that was used for them, not the updated one.
      loss: the unscaled loss. When it is not finite, every gradient becomes NaN, so
        that whoever tests the gradients learns of it.

    Returns:
      The gradients; floating leaves are float32, or wider if they were wider.

    Example:
      >>> unscale_grads(jnp.float16(2**15), init_scaler())
      Array(1., dtype=float32)
    """
    # One multiplication per leaf, which XLA fuses with the cast around it.
    factor = jnp.where(jnp.isfinite(loss), 1.0 / state["scaler"], jnp.nan)
    return jax.tree.map(
        lambda g: _widen(g) * factor if _tree.is_inexact_array(g) else g, grads
    )


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each floating leaf to the dtype of its counterpart in `like`."""
    return jax.tree.map(
        lambda x, y: x.astype(y.dtype) if _tree.is_inexact_array(x) else x, tree, like
    )


def retry_until_finite(
    attempt: Callable[[Scaler], tuple[jax.Array, PyTree]],
    state: Mapping[str, Any],
    retries: int,
) -> tuple[Scaler, jax.Array, PyTree]:
    """Runs `attempt` and, while it is not finite, again with a lower scale.

    Args:
      attempt: maps a scaler to `(finite, outputs)`.
      state: the scaler to begin with.
      retries: how often to run again at most.

    Returns:
      `(new_state, finite, outputs)` of the last run.
    """
    state = complete_scaler(state)
    finite, outputs = attempt(state)
    state = update_scaler(state, finite)
    if retries == 0:
        return state, finite, outputs
    # Leaves that are not arrays cannot be carried by the loop, nor can they change.
    arrays, static = _tree.partition(outputs, _tree.is_array)

    def keep_trying(carry: Any) -> jax.Array:
        _, finite, _, tries = carry
        return ~finite & (tries < retries)

    def try_again(carry: Any) -> Any:
        state, _, _, tries = carry
        finite, outputs = attempt(state)
        arrays, _ = _tree.partition(outputs, _tree.is_array)
        return update_scaler(state, finite), finite, arrays, tries + 1

    # The first attempt stands before the loop, so that the carry has its types (and
    # under `shard_map` its varying axes) without a second way to find them.
    state, finite, arrays, _ = jax.lax.while_loop(
        keep_trying, try_again, (state, finite, arrays, jnp.int32(0))
    )
    return state, finite, _tree.combine(arrays, static)


def check_retries(redo_on_nan: Any, where: str) -> int:
    """Returns `redo_on_nan` as an int, or raises an error that names `where`."""
    # A bool is an int: the seed's own signature annotates it so.
    if not isinstance(redo_on_nan, int) or redo_on_nan < 0:
        raise ValueError(
            f"{where}: {redo_on_nan=}; expected an integer of at least 0, the number "
            "of times a step that is not finite is computed again."
        )
    return int(redo_on_nan)


def check_loss(loss: Any, where: str) -> None:
    """Raises a TypeError unless `loss` is a scalar float."""
    if isinstance(loss, float):
        return
    if not _tree.is_array(loss):
        seen = f"a {type(loss).__name__}"
    elif loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating):
        return
    else:
        seen = f"{loss.dtype}{list(loss.shape)}"
    raise TypeError(
        f"{where} returned {seen} as its loss; expected a scalar float. Reduce it, "
        "e.g. with .mean(); when it returns a (loss, aux) pair, say has_aux=True."
    )


def split_aux(out: Any, has_aux: bool, where: str) -> tuple[Any, Any]:
    """Returns `(loss, aux)` of what a loss function returned, after checking it."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{where} returned a {type(out).__name__}; expected a (loss, aux) pair "
            "because of has_aux=True. Return the pair or drop has_aux=True."
        )
    loss, aux = out if has_aux else (out, None)
    check_loss(loss, where)
    return loss, aux


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with the loss scaled and the gradients unscaled.

    The loss is multiplied by the scale in float32, the gradients are divided by the
    same scale in float32 and then cast to the dtype of their parameters. The value
    returned is the loss itself, in its own dtype.

    Args:
      fun: function to differentiate; it returns a scalar float loss.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan: while loss or gradients are not finite, lower the scale and compute
        again, at most this many times; then give up and return what there is.
      filter: if True, only the floating and complex array leaves of the
        differentiated argument are differentiated; every other leaf is passed through
        and its gradient is `None`. If False, plain `jax.value_and_grad`.
      **kwargs: further arguments of `jax.value_and_grad`, such as `argnums`.

    Returns:
      A function that behaves like the output of `jax.value_and_grad`, except that it
      needs the keyword argument `dynamic_scaler_state` and returns
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`. `aux`
      has no say in whether a result is finite.

    Raises:
      TypeError: when called, if the loss is not a scalar float or if
        `dynamic_scaler_state` is missing.
      ValueError: if `redo_on_nan` is negative.

    Example:
      >>> grad_fn = dynamic_scale_value_and_grad(lambda w, x: (w * x) ** 2)
      >>> state, (loss, grad) = grad_fn(
      ...     jnp.float32(3), 2.0, dynamic_scaler_state=DynamicScalerState()
      ... )
      >>> float(loss), float(grad), int(state["count"])
      (36.0, 24.0, 1)
    """
    retries = check_retries(redo_on_nan, "dynamic_scale_value_and_grad")
    argnums = kwargs.pop("argnums", 0)

    @functools.wraps(fun)
    def value_and_grad_fn(
        *args: Any, dynamic_scaler_state: Any = None, **fun_kwargs: Any
    ) -> tuple[Scaler, Any]:
        _check_call(dynamic_scaler_state, argnums, args)
        wrt, rebuild = _differentiated(args, argnums, filter)

        def attempt(state: Scaler) -> tuple[jax.Array, Any]:
            def scaled(wrt: PyTree) -> Any:
                out = fun(*rebuild(wrt), **fun_kwargs)
                loss, aux = split_aux(out, has_aux, _name_of(fun))
                return scale_loss(jnp.asarray(loss), state), (loss, aux)

            grad_fn = jax.value_and_grad(scaled, has_aux=True, **kwargs)
            (_, (loss, aux)), grads = grad_fn(wrt)
            grads = cast_like(unscale_grads(grads, state, loss), wrt)
            value = (loss, aux) if has_aux else loss
            return _tree.all_finite((jnp.asarray(loss), grads)), (value, grads)

        state, _, outputs = retry_until_finite(attempt, dynamic_scaler_state, retries)
        return state, outputs

    return value_and_grad_fn


def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.grad`, with the loss scaled and the gradients unscaled.

    Args:
      fun: see `dynamic_scale_value_and_grad`, as for every argument.
      has_aux: see there.
      redo_on_nan: see there.
      filter: see there.
      **kwargs: see there.

    Returns:
      A function that behaves like the output of `jax.grad`, except that it needs the
      keyword argument `dynamic_scaler_state` and returns `(new_state, grads)`, or
      `(new_state, (grads, aux))` with `has_aux=True`.

    Raises:
      TypeError: as `dynamic_scale_value_and_grad`.
      ValueError: as `dynamic_scale_value_and_grad`.

    Example:
      >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
      >>> state, grad = grad_fn(jnp.float32(3), dynamic_scaler_state=init_scaler())
      >>> float(grad)
      6.0
    """
    value_and_grad_fn = dynamic_scale_value_and_grad(
        fun, has_aux=has_aux, redo_on_nan=redo_on_nan, filter=filter, **kwargs
    )

    @functools.wraps(fun)
    def grad_fn(*args: Any, **fun_kwargs: Any) -> tuple[Scaler, Any]:
        state, (value, grads) = value_and_grad_fn(*args, **fun_kwargs)
        return state, ((grads, value[1]) if has_aux else grads)

    return grad_fn


def _differentiated(
    args: tuple[Any, ...], argnums: int | Sequence[int], filter: bool
) -> tuple[PyTree, Callable[[PyTree], list[Any]]]:
    """Returns what to differentiate, and how to make the arguments from it."""
    single = isinstance(argnums, int)
    nums = [argnums] if isinstance(argnums, int) else list(argnums)
    chosen = [args[num] for num in nums]
    rest: list[Any] = []
    if filter:
        parts = [_tree.partition(arg, _tree.is_inexact_array) for arg in chosen]
        chosen, rest = [part[0] for part in parts], [part[1] for part in parts]

    def rebuild(wrt: PyTree) -> list[Any]:
        values = [wrt] if single else list(wrt)
        if filter:
            values = [_tree.combine(*pair) for pair in zip(values, rest, strict=True)]
        full = list(args)
        for num, value in zip(nums, values, strict=True):
            full[num] = value
        return full

    return (chosen[0] if single else tuple(chosen)), rebuild


def _check_call(state: Any, argnums: int | Sequence[int], args: Sequence[Any]) -> None:
    if state is None:
        raise TypeError(
            "dynamic_scale_grad: the keyword argument dynamic_scaler_state is missing; "
            "expected a scaler. Call grad_fn(..., dynamic_scaler_state=init_scaler()) "
            "and pass the state it returns to the next call."
        )
    nums = [argnums] if isinstance(argnums, int) else argnums
    if any(not -len(args) <= num < len(args) for num in nums):
        raise TypeError(
            f"dynamic_scale_grad: {argnums=} names an argument that was not passed by "
            f"position; got {len(args)} positional arguments. Pass it by position."
        )


def _name_of(fun: Any) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _saturating_increment(count: jax.Array) -> jax.Array:
    return jnp.where(count < _INT32_MAX, count + 1, count)


def _as_scalar(key: str, value: Any, dtype: Any) -> jax.Array:
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
    return jnp.asarray(value, dtype)


def _check_hyperparameters(
    scaler: Any, patience: Any, factor: Any, low: Any, high: Any
) -> None:
    """Raises one ValueError that lists every bad value; skips traced ones."""
    values = dict(
        scaler=scaler,
        patience=patience,
        adjust_factor=factor,
        min_scaler=low,
        max_scaler=high,
    )
    if any(isinstance(value, jax.core.Tracer) for value in values.values()):
        return
    rules = {
        "min_scaler": (low >= _SMALLEST_SCALE, "at least 2**-126"),
        "max_scaler": (high <= _LARGEST_SCALE, "at most 2**126"),
        "scaler": (low <= scaler <= high, f"between {low=} and {high=}"),
        "adjust_factor": (factor > 1 and math.isfinite(factor), "finite, above 1"),
        "patience": (
            0 <= patience <= _INT32_MAX and int(patience) == patience,
            "an integer of at least 0 that fits int32",
        ),
    }
    if bad := [
        f"{name}={values[name]!r} (expected {text})"
        for name, (holds, text) in rules.items()
        if not holds
    ]:
        raise ValueError(
            f"init_scaler: {', '.join(bad)}. Correct these values; the scale must stay "
            "a finite, positive float32."
        )
