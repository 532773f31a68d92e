"""Tells a run that skips every step from one that still searches for its scale."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._training.aliases import check_type
from flax_amp._training.scaler import check_keys, values_out_of_range
from flax_amp._training.train_state import AmpTrainState
from flax_amp.optim._optimizer import pure

# A train state; or a pair of an optimizer, or its state, and the scaler.
_State: TypeAlias = (
    AmpTrainState | tuple[nnx.Optimizer | optax.OptState, Mapping[str, Any]]
)


class StuckError(RuntimeError):
    """Raised by `check_progress` when one step after the other is skipped."""


# The search for a scale from 2**24 down to 2**-14 skips 38 steps.
_MAX_SKIPS_IN_SEARCH = 50
_MAX_SKIPS = 20


def check_progress(
    state: _State,
    metrics: Mapping[str, Any] | None = None,
    *,
    max_skips: int | None = None,
) -> None:
    """Raises an error if one step after the other is skipped.

    The scaler finds its scale by skipping steps, so a step never raises an error. But
    no scale helps if the loss is not finite, and at the lowest scale there is nothing
    left to try. The parameters then never change again, and nobody notices. Call this
    function every N steps, where you log metrics: it waits for the state and fetches a
    few numbers.

    Args:
      state: the state that the last step returned. For `make_nnx_train_step`, the pair
        `(optimizer, scaler)`, where the `tx` of the optimizer is an
        `optax.apply_if_finite(tx, 2**31 - 1)`, which counts skipped steps. For a loop
        of your own with such a `tx`, the pair `(opt_state, scaler)`.
      metrics: the metrics of the last step. They tell whether the loss, the updated
        variables or the gradients are not finite.
      max_skips: how many steps in a row may be skipped, whatever the scale. The default
        is 20 where a lower scale would not help: if the loss or the variables are not
        finite, or if the scale is the lowest allowed (the scale of `no_scaler`, for
        bfloat16, always is). It is 50 while the scale falls, since the search for a
        scale may take 38.

    Raises:
      StuckError: with the step, the scale, the loss, the number of skipped steps, the
        cause, and what to try. The state is that of the last finite step; the message
        says if an optimizer put a NaN into it.
      TypeError: if `state` is none of these or is traced, if its optimizer does not
        count skipped steps, or if `metrics` is not a mapping.
      ValueError: if the scaler lacks a key, or if `max_skips` is not an integer of at
        least 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    step, scaler, counters = _read_state(state)
    check_type(
        metrics,
        Mapping | None,
        "check_progress: metrics",
        "the dict of metrics that the training step returns. Pass it, or leave it out.",
    )
    if max_skips is not None and (
        not isinstance(max_skips, int | np.integer) or max_skips < 1
    ):
        raise ValueError(
            f"check_progress: {max_skips=}; expected an integer of at least 1. Leave "
            "it out for the default."
        )
    check_keys(scaler, "check_progress: state.scaler")
    if isinstance(counters.notfinite_count, jax.core.Tracer):
        raise TypeError(
            "check_progress: the state is traced; expected one with values. Call it "
            "outside of jit, where the loop logs metrics."
        )
    fetched = jax.device_get(
        {
            **scaler,
            "step": step,
            "in_a_row": counters.notfinite_count,
            "total": counters.total_notfinite,
            **{key: (metrics or {}).get(key, ()) for key in ("loss", "grad_norm")},
        }
    )
    # Each is one number, or one for each run (`vmap`) or copy (`pmap`) of the state.
    runs = np.size(fetched["in_a_row"])
    for run in range(runs):
        numbers = {
            key: _number_of_run(run, runs, values) for key, values in fetched.items()
        }
        _check_run(state, numbers, max_skips, "" if runs == 1 else f" of run {run}")


def _number_of_run(run: int, runs: int, values: Any) -> Any:
    """Returns the number of one run, or `None` if there is none.

    If a metric holds the values of several steps, this is the value of the last step.
    """
    values = np.ravel(values)
    if not len(values):
        return None
    return values[max(run - runs, -len(values))].item()


def _check_run(
    state: _State, numbers: Mapping[str, Any], max_skips: int | None, of_run: str
) -> None:
    """Raises a `StuckError` if a run is stuck."""
    cause, still_searching = _find_cause(numbers)
    limit = max_skips or (_MAX_SKIPS_IN_SEARCH if still_searching else _MAX_SKIPS)
    if numbers["in_a_row"] < limit:
        return
    scale, lowest = numbers["scaler"], numbers["min_scaler"]
    place = "the lowest allowed" if scale <= lowest else f"above the lowest, {lowest:g}"
    step = "" if numbers["step"] is None else f"step {numbers['step']}, "
    loss = "" if numbers["loss"] is None else f"loss {numbers['loss']:g}, "
    raise StuckError(
        f"check_progress: the last {numbers['in_a_row']} steps{of_run} were skipped, "
        f"and the loss scale {scale:g} is {place} ({step}{loss}"
        f"{numbers['total']} steps skipped in all). {cause} {_describe_params(state)}"
    )


def _describe_params(state: _State) -> str:
    """Says whether the parameters are still good."""
    if isinstance(state, AmpTrainState) and not _tree.all_finite(state.params):
        return (
            "The parameters hold an inf or a NaN, which the optimizer made of finite "
            "gradients: restore an earlier checkpoint, and check the optimizer, for "
            "example its eps."
        )
    return "The parameters are those of the last finite step."


_FORWARD_NOT_FINITE = (
    "no loss scale helps: look for inf or NaN in the batch, and for a division, "
    "log or sqrt at 0. If there is none, values overflow in the forward pass: lower "
    "the learning rate, use bfloat16 (precision='bf16-mixed'), or keep the layers that "
    "overflow in float32 with amp_stop. Another min_scaler changes nothing."
)
_GRADS_NOT_FINITE = (
    "Look for a sqrt, norm or division at 0, whose derivative is not finite; lower the "
    "learning rate, clip the gradients, use bfloat16 (precision='bf16-mixed'), or keep "
    "the layers that overflow in float32 with amp_stop"
)


def _find_cause(numbers: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns what is not finite and what to do, and whether the scale still falls."""
    if wrong := values_out_of_range(numbers):
        text = ", ".join(wrong)
        return f"The scaler cannot find its scale: {text}. Correct it.", False
    loss, norm = numbers["loss"], numbers["grad_norm"]
    if loss is not None and not np.isfinite(loss):
        return f"The loss is not finite, and {_FORWARD_NOT_FINITE}", False
    if loss is not None and norm is not None and np.isfinite(norm):
        return (
            "Loss and gradients are finite, but updated variables (for example batch "
            f"statistics) are not, and {_FORWARD_NOT_FINITE}"
        ), False
    finding = "The loss is finite, the gradients are not"
    if loss is None:
        finding = (
            "Pass the metrics of the step to learn what is not finite. If it is the "
            f"loss, {_FORWARD_NOT_FINITE} If it is the gradients"
        )
    if numbers["scaler"] <= numbers["min_scaler"]:
        return (
            f"{finding}, and there is no lower scale to try. {_GRADS_NOT_FINITE}, or "
            "lower min_scaler."
        ), False
    return (
        f"{finding}, and the search for a scale has not ended. {_GRADS_NOT_FINITE}, "
        "or start with a lower scale, init_scaler(scaler=...)."
    ), True


def _read_state(
    state: Any,
) -> tuple[Any, Mapping[str, Any], optax.ApplyIfFiniteState]:
    """Returns the step, or () if there is none, the scaler, and the counters."""
    expected = (
        "an AmpTrainState, a pair (nnx.Optimizer, scaler), or (opt_state, scaler) for "
        "a loop of your own"
    )
    step: Any = ()
    if isinstance(state, AmpTrainState):
        step, opt_state, scaler = state.step, state.opt_state, state.scaler
    else:
        check_type(state, tuple, "check_progress: state", f"{expected}.")
        if len(state) != 2 or isinstance(state[0], AmpTrainState):
            kinds = ", ".join(type(part).__name__ for part in state)
            raise TypeError(
                f"check_progress: state is a tuple of {kinds}; expected {expected}."
            )
        opt_state, scaler = state
        if isinstance(opt_state, nnx.Optimizer):
            step, opt_state = opt_state.step[...], pure(opt_state.opt_state)
    check_type(
        opt_state,
        optax.ApplyIfFiniteState,
        "check_progress: the optimizer does not count skipped steps: its state",
        "an ApplyIfFiniteState, made with tx=optax.apply_if_finite(tx, 2**31 - 1).",
    )
    return step, scaler, opt_state
