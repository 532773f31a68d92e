"""Gradients of a scaled loss, for training loops of the user's own.

They have the passes and the retries of a training step, but neither an optimizer nor a
state.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._training.arguments import (
    Array,
    AxisName,
    PyTree,
    UserFn,
    check_retries,
    check_type,
    describe,
)
from flax_amp._training.core import Judged, forward_finite, run_with_retries
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

    The loss is multiplied by the scale in float32. The gradients are divided by the
    same scale in float32 and then cast to the dtype of their parameters. The value that
    is returned is the unscaled loss, in its own dtype. The caller decides whether to
    skip a step: `flax_amp.all_finite((loss, grads))` says if the result is finite.

    Args:
      fun: function to differentiate; it returns a scalar float loss. Modules among its
        arguments keep what it updates in them, unless something is not finite.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan: while the loss is finite, the gradients are not, and the scale can
        still fall, compute again with the lower scale, at most this many times.
      filter: if True, only the floating and complex array leaves of the
        differentiated argument are differentiated; every other leaf is passed through
        and its gradient is `None`. If False, every leaf is differentiated, as in
        `jax.value_and_grad`.
      axis_name: mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of them,
        over which to average gradients, loss, the variables of modules and scalar
        float entries of `aux`. All devices then update the scale alike.
      **kwargs: further arguments of `jax.value_and_grad`, such as `argnums`. As in
        `nnx.value_and_grad`, `argnums` may hold `nnx.DiffState`, and the gradients of a
        module are an `nnx.State` of its `nnx.Param`.

    Returns:
      A function that behaves like the output of `jax.value_and_grad`, except that it
      needs the keyword argument `dynamic_scaler_state` and returns
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`.

    Raises:
      TypeError, ValueError: if the loss is not a scalar float, if `argnums` selects
        what cannot be differentiated, or if a value of the scaler is out of its range.

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
    retries = check_retries(redo_on_nan, caller)
    check_type(fun, Callable, f"{caller}: fun", "a function that returns a loss.")
    if "holomorphic" in kwargs:
        raise TypeError(
            f"{caller}: got holomorphic={kwargs['holomorphic']}; expected a real loss: "
            "only that can be scaled. Drop holomorphic."
        )
    # `jax.value_and_grad` gets one argument, the list of what these select.
    argnums = kwargs.pop("argnums", 0)
    name = getattr(fun, "__name__", type(fun).__name__)

    @functools.wraps(fun)
    def value_and_grad_fn(
        *args: PyTree, dynamic_scaler_state: Any, **fun_kwargs: PyTree
    ) -> tuple[Scaler, PyTree]:
        scaler = check_scaler(dynamic_scaler_state, "dynamic_scaler_state", wait=True)
        # Each trace changes copies of the modules. The modules themselves get the
        # variables of the last pass (`finish`).
        call = FunctionalCall(fun, args, fun_kwargs, caller=f"{caller}: {name}")
        indices = _select_inputs(call, argnums, filter, caller)
        selected = jax.tree.leaves(indices)
        # Known once the loss was traced: which variables of its modules it changes.
        updates_def: Any = None
        old: list[Any] = []

        def loss_of(wrt: list[Array]) -> tuple[Array, PyTree, PyTree]:
            # Differentiated are the inputs in `selected`, the others are constants.
            inputs = list(call.inputs)
            for index, x in zip(selected, wrt, strict=True):
                inputs[index] = x
            out, updates = call.function(inputs)
            loss, aux = split_aux(out, has_aux, name)
            return loss, updates, aux

        def run(scaler: Scaler) -> Judged:
            nonlocal updates_def, old
            wrt = mark_varying([call.inputs[index] for index in selected], axis_name)
            result = run_pass(loss_of, wrt, scaler, axis_name, **kwargs)
            updates, updates_def = jax.tree.flatten(result.variables)
            named = call.old_leaves(result.variables)
            _check_variables(updates, named, caller)
            old = [leaf for _, leaf in named]
            result = result._replace(variables=updates)
            result = average_over_devices(result, axis_name, old)
            # A variable without an average, such as a key, is the old one: that is the
            # same on every device.
            variables = _tree.combine(result.variables, old)
            result = result._replace(variables=variables)
            forward = forward_finite(result, old)
            # The caller looks at the gradients themselves, not at their squares.
            backward = _tree.all_finite((result.grads, result.overwrite))
            result = result._replace(grads=cast_like(result.grads, wrt))
            return Judged(result, forward, backward, jnp.float32(0))

        scaler, judged = run_with_retries(run, scaler, retries)
        result = judged.result
        # A batch with a NaN must not stay in the statistics of a BatchNorm.
        updates = _tree.select(judged.finite, result.variables, old)
        call.finish((None, jax.tree.unflatten(updates_def, updates)))
        grad_of = dict(zip(selected, result.grads, strict=True))
        grads = jax.tree.map(grad_of.__getitem__, indices)
        return scaler, (((result.loss, result.aux) if has_aux else result.loss), grads)

    return value_and_grad_fn


def dynamic_scale_grad(fun: UserFn, *, has_aux: bool = False, **kwargs: Any) -> UserFn:
    """Like `jax.grad`, with the loss scaled and the gradients unscaled.

    It takes the arguments of `dynamic_scale_value_and_grad`, and returns a function
    that returns `(new_state, grads)`, or `(new_state, (grads, aux))` with
    `has_aux=True`.

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


def _select_inputs(
    call: FunctionalCall, argnums: Any, filter: bool, caller: str
) -> PyTree:
    """Returns the arguments to differentiate, with each leaf's index in the inputs.

    An array that is not differentiated is `None`. A module has only those variables
    that are differentiated.
    """
    indices = range(len(call.inputs))

    def is_inexact(tree: PyTree) -> bool:
        return all(
            _tree.is_inexact_array(call.inputs[i]) for i in jax.tree.leaves(tree)
        )

    def select(argnum: Any) -> PyTree:
        wrt: Any = nnx.Param
        if isinstance(argnum, nnx.DiffState):
            argnum, wrt = argnum.argnum, argnum.filter
        # A quantized weight is an nnx.Param of integers, which has no gradient.
        wrt = nnx.All(wrt, lambda path, variable: is_inexact(variable))
        args, _ = call.rebuild_arguments(
            indices, lambda state: nnx.filter_state(state, wrt)
        )
        if not -len(args) <= argnum < len(args):
            raise TypeError(
                f"{caller}: argnums selects the argument {argnum}; got {len(args)} by "
                "position. Pass it by position."
            )
        indices_of = args[argnum]
        if filter and isinstance(indices_of, int) and not is_inexact(indices_of):
            raise TypeError(
                f"{caller}: the argument {argnum}, {call.inputs[indices_of]!r}, is "
                "static; expected floating arrays to differentiate. Pass "
                "jnp.float32(...), or filter=False."
            )
        return jax.tree.map(
            lambda index: index if not filter or is_inexact(index) else None,
            indices_of,
        )

    if isinstance(argnums, Sequence):
        return tuple(map(select, argnums))
    return select(argnums)


def _check_variables(new: list[Any], old: list[tuple[str, Any]], caller: str) -> None:
    """Raises a ValueError if a variable has changed its shape or dtype."""
    for x, (name, y) in zip(new, old, strict=True):
        after, before = describe(x), describe(y)
        if after != before:
            raise ValueError(
                f"{caller}: the variable {name} changed from {before} to {after}; "
                "expected the same shape and dtype after each call. Create it with "
                "the shape and dtype that it has after the call."
            )
