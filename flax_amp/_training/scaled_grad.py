"""Gradients of a scaled loss, for training loops of the user's own.

The third adapter of the core: it has the passes and the retries of a training step, but
neither an optimizer nor a state.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._training.arguments import (
    Array,
    AxisName,
    PyTree,
    UserFn,
    check_argnums,
    check_axis_name,
    check_retries,
    check_type,
    describe,
)
from flax_amp._training.core import run_with_retries
from flax_amp._training.loss import split_aux
from flax_amp._training.passes import (
    PassResult,
    average_over_devices,
    cast_like,
    device_index,
    mark_varying,
    run_pass,
)
from flax_amp._training.scaler import Scaler, validate_scaler


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
      fun: function to differentiate; it returns a scalar float loss. If it updates
        modules among its arguments, as `nnx.BatchNorm` or `nnx.Rngs` do, they keep the
        updates. If loss, gradients or updated variables are not finite, the modules
        stay as they were.
      has_aux: as in `jax.grad`: `fun` returns `(loss, aux)`.
      redo_on_nan: while the loss is finite, the gradients are not, and the scale can
        still fall, compute again with the lower scale, at most this many times. After
        that, the result is returned as it is.
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
      `(new_state, (value, grads))`, or `(new_state, ((value, aux), grads))`. Whether
      `aux` is finite makes no difference to the scale.

    Raises:
      TypeError: if `axis_name` is not a name, or if `holomorphic` is given; when
        called, if the loss is not a scalar float or if `dynamic_scaler_state` is
        missing.
      ValueError: if `redo_on_nan` is negative; when called, if a value of the scaler is
        out of its range, or `fun` changes the structure of a module.
      NameError: when called, if `axis_name` is not bound.

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
    return _make_grad_fn(caller, fun, has_aux, redo_on_nan, filter, axis_name, kwargs)


def dynamic_scale_grad(
    fun: UserFn,
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: AxisName = None,
    **kwargs: Any,
) -> UserFn:
    """Like `jax.grad`, with the loss scaled and the gradients unscaled.

    Args:
      fun, has_aux, redo_on_nan, filter, axis_name: see
        `dynamic_scale_value_and_grad`.
      **kwargs: further arguments of `jax.grad`, such as `argnums`.

    Returns:
      A function that behaves like the output of `jax.grad`, except that it needs the
      keyword argument `dynamic_scaler_state` and returns `(new_state, grads)`, or
      `(new_state, (grads, aux))` with `has_aux=True`.

    Raises:
      TypeError, ValueError, NameError: as `dynamic_scale_value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_amp import init_scaler
      >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
      >>> state, grad = grad_fn(jnp.float32(3), dynamic_scaler_state=init_scaler())
      >>> float(grad)
      6.0
    """
    caller = "dynamic_scale_grad"
    value_and_grad_fn = _make_grad_fn(
        caller, fun, has_aux, redo_on_nan, filter, axis_name, kwargs
    )

    @functools.wraps(fun)
    def grad_fn(*args: PyTree, **fun_kwargs: PyTree) -> tuple[Scaler, PyTree]:
        state, (value, grads) = value_and_grad_fn(*args, **fun_kwargs)
        return state, ((grads, value[1]) if has_aux else grads)

    return grad_fn


def _make_grad_fn(
    caller: str,
    fun: UserFn,
    has_aux: bool,
    redo_on_nan: int,
    filter: bool,
    axis_name: AxisName,
    kwargs: dict[str, Any],
) -> UserFn:
    """Returns the function of `dynamic_scale_value_and_grad`; `caller` is its name."""
    # Here, not in the call: an error then points to the line that passed the argument.
    retries = check_retries(redo_on_nan, caller)
    check_axis_name(axis_name, caller)
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
        *args: PyTree, dynamic_scaler_state: Any = None, **fun_kwargs: PyTree
    ) -> tuple[Scaler, PyTree]:
        if dynamic_scaler_state is None:
            raise TypeError(
                f"{caller}: the keyword argument dynamic_scaler_state is missing; "
                "expected a scaler. Call grad_fn(..., "
                "dynamic_scaler_state=init_scaler()) and pass the state it returns to "
                "the next call."
            )
        check_argnums(argnums, args, caller)
        scaler = validate_scaler(
            dynamic_scaler_state, "dynamic_scaler_state", wait=True
        )
        device_index(axis_name, caller)  # an axis that is not there fails here
        # Each trace changes copies of the modules. The modules themselves get the
        # variables of the last pass (`finish`).
        call = FunctionalCall(fun, args, fun_kwargs, caller=f"{caller}: {name}")
        indices = _select_inputs(call, argnums, filter)
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

        def run(scaler: Scaler) -> tuple[PassResult, PyTree]:
            nonlocal updates_def, old
            wrt = mark_varying([call.inputs[index] for index in selected], axis_name)
            result = run_pass(loss_of, wrt, scaler, axis_name, **kwargs)
            updates, updates_def = jax.tree.flatten(result.variables)
            named = call.old_leaves()
            _check_variables(updates, named, caller)
            old = [leaf for _, leaf in named]
            result = result._replace(variables=updates)
            result = average_over_devices(result, axis_name, old)
            # A variable without an average, such as a key, is the old one: that is the
            # same on every device.
            result = result._replace(
                grads=cast_like(result.grads, wrt),
                variables=_tree.combine(result.variables, old),
            )
            return result, old

        scaler, finite, result = run_with_retries(run, scaler, retries)
        # A batch with a NaN must not stay in the statistics of a BatchNorm.
        updates = _tree.select(finite, result.variables, old)
        call.finish((None, jax.tree.unflatten(updates_def, updates)))
        grad_of = dict(zip(selected, result.grads, strict=True))
        grads = jax.tree.map(grad_of.__getitem__, indices)
        return scaler, (((result.loss, result.aux) if has_aux else result.loss), grads)

    return value_and_grad_fn


def _select_inputs(call: FunctionalCall, argnums: Any, filter: bool) -> PyTree:
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
        return jax.tree.map(
            lambda index: index if not filter or is_inexact(index) else None,
            args[argnum],
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
