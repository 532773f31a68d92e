"""Gradients of a scaled loss, for loops of the user's own: the passes of a step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from flax_amp import _tree
from flax_amp._checks import check_count, check_type, describe
from flax_amp._training import AxisName, PyTree, UserFn
from flax_amp._training.core import Judged, run_with_retries
from flax_amp._training.loss import LossOutput, split_aux
from flax_amp._training.passes import average_over_devices, cast_like, run_pass
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

    The loss is multiplied by the scale in float32. The gradients are divided by the
    scale in float32 and then cast to the dtype of their parameters. The value is the
    unscaled loss, in its own dtype. The caller decides whether to skip a step:
    `flax_amp.all_finite((loss, grads))` says if the result is finite.

    Args:
      fun: the function of pytrees to differentiate. `fun` returns a scalar float loss.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan, axis_name: as in `flax_amp.make_train_step`.
      filter: if True, only the floating and complex array leaves of the
        differentiated argument are differentiated; every other leaf is passed through
        and its gradient is `None`. If False, every leaf is differentiated, as in
        `jax.value_and_grad`.
      **kwargs: further arguments of `jax.value_and_grad`, such as `argnums`.

    Returns:
      A function that behaves like the output of `jax.value_and_grad`, except that the
      function needs the keyword argument `dynamic_scaler_state` and returns
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`.

    Raises:
      TypeError, ValueError: if the loss is not a scalar float, if an argument is an
        `nnx.Module`, if `argnums` selects an argument that cannot be differentiated, or
        if a value of the scaler is out of its range.

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
    retries = check_count(redo_on_nan, f"{caller}: {redo_on_nan=}", "of retries", 0)
    check_type(fun, Callable, f"{caller}: fun", "a function that returns a loss.")
    argnums = kwargs.pop("argnums", 0)
    is_sequence = isinstance(argnums, Sequence)
    numbers = tuple(argnums) if is_sequence else (argnums,)
    options = dict(argnums=numbers, **kwargs)
    if not filter:
        options["is_wanted"] = lambda leaf: True
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

        def loss_of(*args: PyTree) -> LossOutput:
            loss, aux = split_aux(fun(*args, **fun_kwargs), has_aux, name)
            return LossOutput(loss, aux=aux)

        def run(scaler: Scaler) -> Judged:
            result = run_pass(loss_of, args, scaler, axis_name, **options)
            result = average_over_devices(result, axis_name, None, None)
            forward_finite = _tree.all_finite(result.output.loss)
            # The caller looks at the gradients themselves, not at their squares.
            backward_finite = _tree.all_finite(result.grads)
            grads = cast_like(result.grads, tuple(args[n] for n in numbers))
            result = result._replace(grads=grads)
            return Judged(result, forward_finite, backward_finite)

        scaler, judged = run_with_retries(run, scaler, retries)
        grads = judged.result.grads
        output = judged.result.output
        for number, grad in zip(numbers, grads, strict=True):
            if grad is None and args[number] is not None:
                raise TypeError(
                    f"{caller}: the argument {number}, {args[number]!r}, is static; "
                    "expected floating arrays to differentiate. Pass "
                    "jnp.float32(...), or filter=False."
                )
        value = (output.loss, output.aux) if has_aux else output.loss
        if not is_sequence:
            grads = grads[0]
        return scaler, (value, grads)

    return value_and_grad_fn


def dynamic_scale_grad(fun: UserFn, *, has_aux: bool = False, **kwargs: Any) -> UserFn:
    """Like `dynamic_scale_value_and_grad`, without the value.

    The function returns `(new_state, grads)`, or `(new_state, (grads, aux))`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_amp import init_scaler
      >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
      >>> _, grad = grad_fn(jnp.float32(3), dynamic_scaler_state=init_scaler())
      >>> float(grad)
      6.0
    """
    value_and_grad_fn = dynamic_scale_value_and_grad(fun, has_aux=has_aux, **kwargs)

    @functools.wraps(fun)
    def grad_fn(*args: PyTree, **fun_kwargs: PyTree) -> tuple[Scaler, PyTree]:
        state, (value, grads) = value_and_grad_fn(*args, **fun_kwargs)
        if has_aux:
            _, aux = value
            return state, (grads, aux)
        return state, grads

    return grad_fn
