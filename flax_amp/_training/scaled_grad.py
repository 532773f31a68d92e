"""Gradients of a scaled loss: the scale goes in and comes out again.

The loss is multiplied in float32; the gradients are divided in float32 by the scale
that was used for them, not by the one that the update makes of it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._training.accumulate import (
    AxisName,
    Result,
    bound_axis,
    synchronize,
    vary,
)
from flax_amp._training.scaler import Scaler, checked_scaler, update_scaler

PyTree = Any


def scale_loss(loss: jax.Array, state: Mapping[str, Any]) -> jax.Array:
    """Returns `loss * scale`, at least in float32, where the product fits.

    Args:
      loss: a loss of any float dtype.
      state: a scaler; see `flax_amp.DynamicScalerState`.

    Example:
      >>> from flax_amp import init_scaler
      >>> scale_loss(jnp.float16(8), init_scaler())
      Array(262144., dtype=float32)
    """
    return _widen(jnp.asarray(loss)) * checked_scaler(state)["scaler"]


def unscale_grads(grads: PyTree, state: Mapping[str, Any]) -> PyTree:
    """Divides gradients by the scale they were made with, at least in float32.

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
    # One multiplication per leaf, which XLA fuses with the cast around it.
    factor = 1.0 / checked_scaler(state)["scaler"]
    return jax.tree.map(
        lambda g: _widen(g) * factor if _tree.is_inexact_array(g) else g, grads
    )


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each floating leaf to the dtype of its counterpart in `like`."""
    return jax.tree.map(
        lambda x, y: x.astype(jnp.result_type(y)) if _tree.is_inexact_array(x) else x,
        tree,
        like,
    )


class Attempt(NamedTuple):
    """One forward and backward pass, and what the scaler has to know of it."""

    forward_finite: jax.Array  # bool[]: the loss, and the variables it updated
    grads_finite: jax.Array
    outputs: PyTree

    @property
    def finite(self) -> jax.Array:
        return self.forward_finite & self.grads_finite


def retry_until_finite(
    attempt: Callable[[Scaler], Attempt], state: Scaler, retries: int
) -> tuple[Scaler, jax.Array, PyTree]:
    """Runs `attempt`, and repeats it while the scale falls.

    Args:
      attempt: one pass with a scaler.
      state: the scaler to begin with.
      retries: how often to run again at most.

    Returns:
      `(new_state, finite, outputs)` of the last run.
    """

    def run(state: Scaler) -> tuple[Scaler, jax.Array, Attempt]:
        tried = attempt(state)
        new = update_scaler(state, tried.grads_finite, loss_finite=tried.forward_finite)
        # The scale stays if a lower one would not help, and at its lower limit.
        fails = tried.forward_finite & ~tried.grads_finite
        return new, fails & (new["scaler"] < state["scaler"]), tried

    state, lowered, tried = run(state)
    if retries == 0:
        return state, tried.finite, tried.outputs
    # Leaves that are not arrays cannot be carried by the loop, nor can they change.
    arrays, static = _tree.partition(tried, _tree.is_array)

    def keep_trying(carry: Any) -> jax.Array:
        _, lowered, _, tries = carry
        return lowered & (tries < retries)

    def try_again(carry: Any) -> Any:
        state, lowered, tried = run(carry[0])
        arrays, _ = _tree.partition(tried, _tree.is_array)
        return state, lowered, arrays, carry[3] + 1

    # The first attempt stands before the loop, so that the carry has its types (and
    # under `shard_map` its varying axes) without a second way to find them.
    state, _, arrays, _ = jax.lax.while_loop(
        keep_trying, try_again, (state, lowered, arrays, jnp.int32(0))
    )
    tried = _tree.combine(arrays, static)
    return state, tried.finite, tried.outputs


def forward_is_finite(loss: jax.Array, new: PyTree, old: PyTree) -> jax.Array:
    """Returns bool[]: the loss and the variables that a forward pass gave are finite.

    Args:
      loss: the loss.
      new: updated variables, `None` for those that did not change.
      old: those before. Elements that were not finite before, such as a mask of -inf,
        are ignored.
    """

    def judged(new: Any, old: Any) -> Any:
        if new is None or not _tree.is_inexact_array(new):
            return None
        return jnp.where(jnp.isfinite(old), new, 0)

    return _tree.all_finite((loss, _tree.map_or_none(judged, new, old)))


def check_retries(redo_on_nan: Any, where: str) -> int:
    """Returns `redo_on_nan` as an int, or raises an error that names `where`."""
    # A bool is an int: the seed's own signature annotates it so.
    if not isinstance(redo_on_nan, int) or redo_on_nan < 0:
        raise ValueError(
            f"{where}: {redo_on_nan=}; expected an integer of at least 0, the number "
            "of times that gradients are computed again with a lower scale."
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
    axis_name: AxisName = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with the loss scaled and the gradients unscaled.

    The loss is multiplied by the scale in float32, the gradients are divided by the
    same scale in float32 and then cast to the dtype of their parameters. The value
    returned is the loss itself, in its own dtype. Whether to skip a step is up to the
    caller: `flax_amp.all_finite((loss, grads))` tells.

    Args:
      fun: function to differentiate; it returns a scalar float loss. Modules among its
        arguments are updated as it updates them, by `nnx.BatchNorm` or `nnx.Rngs`, and
        stay as they were when loss, gradients or updated variables are not finite.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan: while the loss is finite, the gradients are not, and the scale can
        still fall, compute again with the lower scale, at most this many times; then
        give up and return what there is.
      filter: if True, only the floating and complex array leaves of the
        differentiated argument are differentiated; every other leaf is passed through
        and its gradient is `None`. If False, plain `jax.value_and_grad`.
      axis_name: mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of them,
        over which to average gradients, loss, the variables of modules and scalar
        float entries of `aux`. All devices then update the scale alike.
      **kwargs: further arguments of `jax.value_and_grad`, such as `argnums`. As in
        `nnx.value_and_grad`, that may hold `nnx.DiffState`, and the gradients of a
        module are an `nnx.State` of its `nnx.Param`.

    Returns:
      A function that behaves like the output of `jax.value_and_grad`, except that it
      needs the keyword argument `dynamic_scaler_state` and returns
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`. `aux`
      has no say in whether a result is finite.

    Raises:
      TypeError: when called, if the loss is not a scalar float or if
        `dynamic_scaler_state` is missing.
      ValueError: if `redo_on_nan` is negative; when called, if a value of the scaler is
        out of its range, or `fun` changes the structure of a module.
      NameError: when called, if `axis_name` is not bound.

    Example:
      >>> from flax_amp import DynamicScalerState
      >>> grad_fn = dynamic_scale_value_and_grad(lambda w, x: (w * x) ** 2)
      >>> state, (loss, grad) = grad_fn(
      ...     jnp.float32(3), 2.0, dynamic_scaler_state=DynamicScalerState()
      ... )
      >>> float(loss), float(grad), int(state["count"])
      (36.0, 24.0, 1)
    """
    where = "dynamic_scale_value_and_grad"
    return _scaled(where, fun, has_aux, redo_on_nan, filter, axis_name, kwargs)


def _scaled(
    where: str,
    fun: Callable[..., Any],
    has_aux: bool,
    redo_on_nan: int,
    filter: bool,
    axis_name: AxisName,
    kwargs: dict[str, Any],
) -> Callable[..., Any]:
    """Returns the function of `dynamic_scale_value_and_grad`; `where` is for errors."""
    retries = check_retries(redo_on_nan, where)
    argnums = kwargs.pop("argnums", 0)
    name = _name_of(fun)

    @functools.wraps(fun)
    def value_and_grad_fn(
        *args: Any, dynamic_scaler_state: Any = None, **fun_kwargs: Any
    ) -> tuple[Scaler, Any]:
        scaler = _check_call(dynamic_scaler_state, argnums, args, where)
        bound_axis(axis_name, where)
        call = FunctionalCall(fun, args, fun_kwargs, caller=f"{where}: {name}")
        indices = _differentiated(call, argnums, filter)
        chosen = jax.tree.leaves(indices)
        structure: Any = None
        old: list[Any] = []

        def attempt(state: Scaler) -> Attempt:
            def scaled(wrt: list[Any]) -> Any:
                inputs = list(call.inputs)
                for index, x in zip(chosen, wrt, strict=True):
                    inputs[index] = x
                out, updated = call.function(inputs)
                loss, aux = split_aux(out, has_aux, name)
                loss = vary(jnp.asarray(loss), axis_name)
                return scale_loss(loss, state), (loss, updated, aux)

            nonlocal structure, old
            wrt = vary([call.inputs[index] for index in chosen], axis_name)
            grad_fn = jax.value_and_grad(scaled, has_aux=True, **kwargs)
            (_, (loss, updated, aux)), grads = grad_fn(wrt)
            updated, structure = jax.tree.flatten(updated)
            named = call.old_leaves()
            _check_shapes(updated, named, where)
            old = [leaf for _, leaf in named]
            result = Result(unscale_grads(grads, state), None, loss, updated, aux)
            if axis_name is not None:
                result = synchronize(result, axis_name, old)
                result = result._replace(variables=_tree.combine(result.variables, old))
            forward = forward_is_finite(result.loss, result.variables, old)
            result = result._replace(grads=cast_like(result.grads, wrt))
            return Attempt(forward, _tree.all_finite(result.grads), result)

        state, finite, result = retry_until_finite(attempt, scaler, retries)
        kept = _tree.select(finite, result.variables, old)
        call.finish((None, jax.tree.unflatten(structure, kept)))
        of = dict(zip(chosen, result.grads, strict=True))
        grads = jax.tree.map(of.__getitem__, indices)
        return state, (((result.loss, result.aux) if has_aux else result.loss), grads)

    return value_and_grad_fn


def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: AxisName = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.grad`, with the loss scaled and the gradients unscaled.

    Args:
      fun: see `dynamic_scale_value_and_grad`, as for every argument.
      has_aux: see there.
      redo_on_nan: see there.
      filter: see there.
      axis_name: see there.
      **kwargs: see there.

    Returns:
      A function that behaves like the output of `jax.grad`, except that it needs the
      keyword argument `dynamic_scaler_state` and returns `(new_state, grads)`, or
      `(new_state, (grads, aux))` with `has_aux=True`.

    Raises:
      TypeError: as `dynamic_scale_value_and_grad`.
      ValueError: as `dynamic_scale_value_and_grad`.
      NameError: as `dynamic_scale_value_and_grad`.

    Example:
      >>> from flax_amp import init_scaler
      >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
      >>> state, grad = grad_fn(jnp.float32(3), dynamic_scaler_state=init_scaler())
      >>> float(grad)
      6.0
    """
    where = "dynamic_scale_grad"
    value_and_grad_fn = _scaled(
        where, fun, has_aux, redo_on_nan, filter, axis_name, kwargs
    )

    @functools.wraps(fun)
    def grad_fn(*args: Any, **fun_kwargs: Any) -> tuple[Scaler, Any]:
        state, (value, grads) = value_and_grad_fn(*args, **fun_kwargs)
        return state, ((grads, value[1]) if has_aux else grads)

    return grad_fn


def _differentiated(call: FunctionalCall, argnums: Any, filter: bool) -> PyTree:
    """Returns the arguments to differentiate, with the index of each of their inputs.

    What is not differentiated is `None`; of modules, it is left out.
    """
    indices = range(len(call.inputs))

    def inexact(tree: PyTree) -> bool:
        return all(
            _tree.is_inexact_array(call.inputs[i]) for i in jax.tree.leaves(tree)
        )

    def of_argument(argnum: Any) -> PyTree:
        wrt: Any = nnx.Param
        if isinstance(argnum, nnx.DiffState):
            argnum, wrt = argnum.argnum, argnum.filter
        trains = nnx.All(wrt, lambda path, variable: inexact(variable))
        args, _ = call.rebuild_arguments(
            indices, lambda state: nnx.filter_state(state, trains)
        )
        return jax.tree.map(
            lambda index: index if not filter or inexact(index) else None, args[argnum]
        )

    picked = tuple(map(of_argument, _as_sequence(argnums)))
    return picked if isinstance(argnums, Sequence) else picked[0]


def _as_sequence(argnums: Any) -> Sequence[Any]:
    return argnums if isinstance(argnums, Sequence) else [argnums]


def _check_shapes(new: list[Any], old: list[tuple[str, Any]], where: str) -> None:
    """Raises a ValueError if a variable cannot be kept as it was."""
    for x, (name, y) in zip(new, old, strict=True):
        seen, wanted = (
            f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in (x, y)
        )
        if seen != wanted:
            raise ValueError(
                f"{where}: the variable {name} changed from {wanted} to {seen}; "
                "expected the same shape and dtype after each call. Create it with "
                "those that it has afterwards."
            )


def _check_call(state: Any, argnums: Any, args: Sequence[Any], where: str) -> Scaler:
    """Returns the scaler of a call, after checking it and the arguments."""
    if state is None:
        raise TypeError(
            f"{where}: the keyword argument dynamic_scaler_state is missing; "
            "expected a scaler. Call grad_fn(..., dynamic_scaler_state=init_scaler()) "
            "and pass the state it returns to the next call."
        )
    nums = [getattr(num, "argnum", num) for num in _as_sequence(argnums)]
    if not all(isinstance(num, int | np.integer) for num in nums):
        raise TypeError(
            f"{where}: {argnums=}; expected an integer, an nnx.DiffState, or a "
            "sequence of them. Leave argnums out for the first argument."
        )
    if any(not -len(args) <= num < len(args) for num in nums):
        raise TypeError(
            f"{where}: {argnums=} names an argument that was not passed by "
            f"position; got {len(args)} positional arguments. Pass it by position."
        )
    return checked_scaler(state, "dynamic_scaler_state", wait=True)


def _name_of(fun: Any) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
