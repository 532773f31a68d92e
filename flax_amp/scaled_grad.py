"""Gradients of a scaled loss: the scale goes in and comes out again.

The loss is multiplied in float32; the gradients are divided in float32 by the scale
that was used for them, not by the one that the update makes of it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from flax_amp import _tree
from flax_amp.scaler import Scaler, complete_scaler, update_scaler

PyTree = Any


def scale_loss(loss: jax.Array, state: Mapping[str, Any]) -> jax.Array:
    """Returns `loss * scale`, at least in float32, where the product fits.

    Example:
      >>> from flax_amp import init_scaler
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
      >>> from flax_amp import init_scaler
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
      >>> from flax_amp import DynamicScalerState
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
      >>> from flax_amp import init_scaler
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
