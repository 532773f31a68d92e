"""Gradients of a scaled loss, for loops of the user's own: the passes of a step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_amp import _tree
from flax_amp._training.arguments import (
    Array,
    AxisName,
    PyTree,
    UserFn,
    check_count,
    check_type,
    describe,
)
from flax_amp._training.core import Judged, run_with_retries
from flax_amp._training.loss import split_aux
from flax_amp._training.passes import (
    average_over_devices,
    cast_like,
    mark_varying,
    run_pass,
)
from flax_amp._training.scaler import Scaler, check_scaler


def dynamic_scale_value_and_grad(
    fun: UserFn,
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: AxisName = None,
    **kwargs: Any,
) -> UserFn:
    """Like `jax.value_and_grad`, with the loss scaled and the gradients unscaled.

    The loss is multiplied by the scale in float32. The gradients are divided by it in
    float32 and then cast to the dtype of their parameters. The value is the unscaled
    loss, in its own dtype. The caller decides whether to skip a step:
    `flax_amp.all_finite((loss, grads))` says if the result is finite.

    Args:
      fun: function of pytrees to differentiate; it returns a scalar float loss.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan: as in `flax_amp.make_train_step`.
      filter: if True, only the floating and complex array leaves of the
        differentiated argument are differentiated; every other leaf is passed through
        and its gradient is `None`. If False, every leaf is differentiated, as in
        `jax.value_and_grad`.
      axis_name: as in `flax_amp.make_train_step`. All devices update the scale alike.
      **kwargs: further arguments of `jax.value_and_grad`, such as `argnums`.

    Returns:
      A function that behaves like the output of `jax.value_and_grad`, except that it
      needs the keyword argument `dynamic_scaler_state` and returns
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`.

    Raises:
      TypeError, ValueError: if the loss is not a scalar float, if an argument is an
        `nnx.Module`, if `argnums` selects what cannot be differentiated, or if a value
        of the scaler is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_amp import DynamicScalerState
      >>> grad_fn = dynamic_scale_value_and_grad(lambda w, x: (w * x) ** 2)
      >>> state, (loss, grad) = grad_fn(
      ...     jnp.float32(3), 2.0, dynamic_scaler_state=DynamicScalerState()
      ... )
      >>> float(loss), float(grad), int(state["count"])
      (36.0, 24.0, 1)
    """
    caller = "dynamic_scale_value_and_grad"
    # Here, not in the call: an error then points to the line that passed the argument.
    retries = check_count(redo_on_nan, f"{caller}: {redo_on_nan=}", "of retries", 0)
    check_type(fun, Callable, f"{caller}: fun", "a function that returns a loss.")
    if "holomorphic" in kwargs:
        raise TypeError(
            f"{caller}: got holomorphic={kwargs['holomorphic']}; expected a real loss: "
            "only that can be scaled. Drop holomorphic."
        )
    # `jax.value_and_grad` gets one argument: what these select.
    argnums = kwargs.pop("argnums", 0)
    name = getattr(fun, "__name__", type(fun).__name__)

    @functools.wraps(fun)
    def value_and_grad_fn(
        *args: PyTree, dynamic_scaler_state: Any, **fun_kwargs: PyTree
    ) -> tuple[Scaler, PyTree]:
        scaler = check_scaler(dynamic_scaler_state, "dynamic_scaler_state", wait=True)
        if modules := _tree.nodes((args, fun_kwargs), nnx.Pytree):
            raise TypeError(
                f"{caller}: {name} got {describe(modules[0])}; expected arrays. Train "
                "an nnx.Module with make_nnx_train_step, or differentiate a function "
                "of the arrays of nnx.split(model)."
            )
        numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
        selected = {number: _get(args, number, filter, caller) for number in numbers}
        wrt, rest = _tree.partition(
            selected, _tree.is_inexact_array if filter else lambda _: True
        )

        def loss_of(wrt: PyTree) -> tuple[Array, None, PyTree]:
            given = list(args)
            for number, argument in _tree.combine(wrt, rest).items():
                given[number] = argument
            loss, aux = split_aux(fun(*given, **fun_kwargs), has_aux, name)
            return loss, None, aux

        def run(scaler: Scaler) -> Judged:
            inputs = mark_varying(wrt, axis_name)
            result = run_pass(loss_of, inputs, scaler, axis_name, **kwargs)
            result = average_over_devices(result, axis_name, None)
            forward = _tree.all_finite(result.loss)
            # The caller looks at the gradients themselves, not at their squares.
            backward = _tree.all_finite(result.grads)
            result = result._replace(grads=cast_like(result.grads, wrt))
            return Judged(result, forward, backward, jnp.float32(0))

        scaler, judged = run_with_retries(run, scaler, retries)
        loss, aux, grads = judged.result.loss, judged.result.aux, judged.result.grads
        grads = tuple(grads[number] for number in numbers)
        value = (loss, aux) if has_aux else loss
        return scaler, (value, grads if isinstance(argnums, Sequence) else grads[0])

    return value_and_grad_fn


def dynamic_scale_grad(fun: UserFn, *, has_aux: bool = False, **kwargs: Any) -> UserFn:
    """Like `dynamic_scale_value_and_grad`, without the value.

    The function returns `(new_state, grads)`, or `(new_state, (grads, aux))`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_amp import init_scaler
      >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
      >>> state, grad = grad_fn(jnp.float32(3), dynamic_scaler_state=init_scaler())
      >>> float(grad)
      6.0
    """
    value_and_grad_fn = dynamic_scale_value_and_grad(fun, has_aux=has_aux, **kwargs)

    @functools.wraps(fun)
    def grad_fn(*args: PyTree, **fun_kwargs: PyTree) -> tuple[Scaler, PyTree]:
        state, (value, grads) = value_and_grad_fn(*args, **fun_kwargs)
        return state, ((grads, value[1]) if has_aux else grads)

    return grad_fn


def _get(args: tuple[PyTree, ...], number: int, filter: bool, caller: str) -> PyTree:
    """Returns the argument to differentiate, after checking that there is one."""
    if not -len(args) <= number < len(args):
        raise TypeError(
            f"{caller}: argnums selects the argument {number}; got {len(args)} by "
            "position. Pass it by position."
        )
    argument = args[number]
    is_leaf = jax.tree_util.all_leaves([argument])
    if filter and is_leaf and not _tree.is_inexact_array(argument):
        raise TypeError(
            f"{caller}: the argument {number}, {argument!r}, is static; expected "
            "floating arrays to differentiate. Pass jnp.float32(...), or filter=False."
        )
    return argument
