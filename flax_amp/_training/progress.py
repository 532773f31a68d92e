"""Tells a run that skips every step from one that still searches for its scale.

The user calls it. An error inside of the step would need a callback or a transfer in
each step.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._training.arguments import check_type, first_of
from flax_amp._training.precision import compute_dtype_of
from flax_amp._training.scaler import SKIP_COUNTS, check_keys, values_out_of_range
from flax_amp._training.step_call import explain_deleted
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
# A few bad batches in a row are no reason to stop a run.
_MAX_SKIPS = 20

# The default of `min_scaler`.
_LOWEST_USEFUL = 2.0**-14

# The names of the metrics of `flax_amp.metrics.finite_by_leaf` begin with this.
_LEAVES = "grads_finite/"

_FROZEN = (
    "A parameter that the optimizer freezes still has a gradient, and an inf there "
    "skips every step: if that is the case, put jax.lax.stop_gradient around it in the "
    "loss, or leave it out of what is differentiated, as wrt does for NNX."
)


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
        `(optimizer, scaler)`. For a loop of your own, the pair `(opt_state, scaler)`,
        where the `tx` is an `optax.apply_if_finite(tx, 2**31 - 1)`, which counts
        skipped steps.
      metrics: the metrics of the last step. They tell whether the loss, the updated
        variables or the gradients are not finite; and which gradients, if they hold
        those of `flax_amp.metrics.finite_by_leaf`.
      max_skips: how many steps in a row may be skipped, whatever the scale. The default
        is 20 where a lower scale would not help: if the loss or the variables are not
        finite, or if the scale is the lowest allowed (the scale of `no_scaler`, for
        bfloat16, always is). It is 50 while the scale falls, since the search for a
        scale may take 38.

    Raises:
      StuckError: with the step, the scale, the loss, the number of skipped steps, the
        cause, and what to try. The state is that of the last finite step; the message
        says if its parameters hold an inf or a NaN.
      TypeError: if `state` is none of these or is traced, if its optimizer does not
        count skipped steps, or if `metrics` is not a mapping.
      RuntimeError: if a later step has deleted `state`.
      ValueError: if the scaler lacks a key, or if `max_skips` is not an integer of at
        least 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    step, scaler, in_a_row, total = _read_state(state)
    _check_options(metrics, max_skips)
    check_keys(scaler, "check_progress: state.scaler")
    if isinstance(in_a_row, jax.core.Tracer):
        raise TypeError(
            "check_progress: the state is traced; expected one with values. Call it "
            "outside of jit, where the loop logs metrics."
        )
    metrics = metrics or {}
    # All numbers in one transfer, which waits for the step once.
    with explain_deleted("check_progress", "state", state):
        fetched = jax.device_get(
            {
                **scaler,
                "step": step,
                "in_a_row": in_a_row,
                "total": total,
                **{key: metrics.get(key, ()) for key in ("loss", "grad_norm")},
            }
        )
    # Each is one number, or one for each run (`vmap`) or copy (`pmap`) of the state.
    runs = np.size(fetched["in_a_row"])
    for run in range(runs):
        numbers = {
            key: _number_of_run(run, runs, values) for key, values in fetched.items()
        }
        cause = _find_cause(numbers)
        if numbers["in_a_row"] >= (max_skips or cause.max_skips):
            leaves = _leaves_of_run(run, runs, metrics)
            of_run = "" if runs == 1 else f" of run {run}"
            raise StuckError(_describe_run(state, numbers, cause, leaves, of_run))


def _check_options(metrics: object, max_skips: Any) -> None:
    """Raises an error unless the arguments beside the state are of the right kind."""
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


def _number_of_run(run: int, runs: int, values: Any) -> Any:
    """Returns the number of one run, or `None` if there is none.

    If a metric holds the values of several steps, this is the value of the last step.
    """
    values = np.ravel(values)
    if not len(values):
        return None
    # From the end: with two runs, the values of three steps are (a0, b0, a1, b1, a2,
    # b2). A scale that all runs share is one value for both.
    return values[max(run - runs, -len(values))].item()


def _leaves_of_run(run: int, runs: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns whether each gradient is finite, by its path, if the metrics tell."""
    # Fetched only now: a run that goes on does not need them.
    return {
        name.removeprefix(_LEAVES): _number_of_run(run, runs, value)
        for name, value in jax.device_get(dict(metrics)).items()
        if name.startswith(_LEAVES)
    }


class _Cause(NamedTuple):
    """Why steps are skipped.

    `text` says what is not finite, `kind` what to try, and `searching` whether the
    scale still falls.
    """

    kind: Literal["scaler", "forward", "gradients", "unknown"]
    text: str
    searching: bool = False

    @property
    def max_skips(self) -> int:
        """How many steps may be skipped in a row."""
        return _MAX_SKIPS_IN_SEARCH if self.searching else _MAX_SKIPS


def _find_cause(numbers: Mapping[str, Any]) -> _Cause:
    """Returns why the last step was skipped, if it was."""
    # A scale of 0 or NaN makes all gradients wrong, so the rest would mislead.
    if wrong := values_out_of_range(numbers):
        text = ", ".join(wrong)
        return _Cause("scaler", f"The scaler cannot find its scale: {text}.")
    # From here on in the order of the step: the gradients of a loss that is not finite
    # are not finite either. If both are finite, something after them was to blame.
    loss, norm = numbers["loss"], numbers["grad_norm"]
    if loss is not None and not np.isfinite(loss):
        return _Cause("forward", "The loss is not finite.")
    if loss is not None and norm is not None and np.isfinite(norm):
        return _Cause(
            "forward",
            "Loss and gradients are finite, but updated variables (for example batch "
            "statistics) or the update of the optimizer are not. Of that, look "
            "at its eps and its learning rate.",
        )
    searching = numbers["scaler"] > numbers["min_scaler"]
    if loss is None:
        text = "Pass the metrics of the step to learn what is not finite."
        return _Cause("unknown", text, searching)
    return _Cause("gradients", "The loss is finite, the gradients are not.", searching)


def _describe_run(
    state: _State,
    numbers: Mapping[str, Any],
    cause: _Cause,
    leaves: Mapping[str, Any],
    of_run: str,
) -> str:
    """Returns the message about a run that is stuck."""
    scale, lowest = numbers["scaler"], numbers["min_scaler"]
    place = "the lowest allowed" if scale <= lowest else f"above the lowest, {lowest:g}"
    step = "" if numbers["step"] is None else f"step {numbers['step']}, "
    loss = "" if numbers["loss"] is None else f"loss {numbers['loss']:g}, "
    dtype = _compute_dtype(state, numbers)
    forward = _advise_on_forward(dtype)
    gradients = _advise_on_gradients(dtype, numbers, cause.searching)
    advice = {
        "scaler": "Correct it.",
        "forward": forward,
        "gradients": f"{gradients} {_name_leaves(leaves)} {_FROZEN}",
        "unknown": f"If it is the loss: {forward} If it is the gradients: {gradients}",
    }[cause.kind]
    return (
        f"check_progress: the last {numbers['in_a_row']} steps{of_run} were skipped, "
        f"and the loss scale {scale:g} is {place} ({step}{loss}"
        f"{numbers['total']} steps skipped in all). {cause.text} {advice} "
        f"{_describe_params(state)}"
    )


def _describe_params(state: _State) -> str:
    """Says whether the parameters are still good."""
    if isinstance(state, AmpTrainState) and not _tree.all_finite(state.params):
        return (
            "The parameters hold an inf or a NaN, which no training step writes: "
            "restore an earlier checkpoint, or find what else set them."
        )
    return "The parameters are those of the last finite step."


def _compute_dtype(state: _State, numbers: Mapping[str, Any]) -> np.dtype[Any] | None:
    """Returns the dtype in which a run computes, or `None` if its state tells none.

    Of a pair, only a scale above 1 tells something: float16 alone needs it.
    """
    word = state.precision if isinstance(state, AmpTrainState) else "16-mixed"
    dtype = jnp.dtype(compute_dtype_of(word, None))
    is_scaled = numbers["max_scaler"] > 1
    return dtype if is_scaled or dtype != jnp.float16 else None


def _advise_on_forward(dtype: np.dtype[Any] | None) -> str:
    """Says what to try if the loss or the updated variables are not finite."""
    scale, bfloat16, amp_stop = "", "", ""
    if dtype == jnp.float16:
        scale = "No loss scale helps, and no other min_scaler. "
        bfloat16 = ", use bfloat16 (precision='bf16-mixed')"
    if dtype != jnp.float32:
        amp_stop = ", or keep the layers that overflow in float32 with amp_stop"
    return (
        f"{scale}Look for inf or NaN in the batch, and for a division, log or sqrt at "
        "0. If there is none, values overflow in the forward pass: restore an earlier "
        f"checkpoint and lower the learning rate{bfloat16}{amp_stop}."
    )


def _advise_on_gradients(
    dtype: np.dtype[Any] | None, numbers: Mapping[str, Any], searching: bool
) -> str:
    """Says what to try if the gradients are not finite, and the loss is."""
    advice = (
        "Look for a sqrt, norm or division at 0, whose derivative is not finite, and "
        "which no clipping mends."
    )
    if dtype is None or dtype == jnp.bfloat16:
        name = "half precision" if dtype is None else "bfloat16"
        return (
            f"{advice} If it is at 0 only in {name}, keep its operands in float32 "
            "with amp_stop."
        )
    if dtype != jnp.float16:
        return advice
    if searching:
        finding = "the search for a scale has not ended"
        scale = ", or start with a lower one, init_scaler(scaler=...)"
    else:
        finding = "there is no lower scale to try"
        # Below the default, the gradients that fit become zero.
        may_fall = numbers["min_scaler"] > _LOWEST_USEFUL
        scale = ", or lower min_scaler" if may_fall else ""
    return (
        f"{advice} If there is none, they overflow in float16, and {finding}: use "
        "bfloat16 (precision='bf16-mixed'), or keep the layers that overflow in "
        f"float32 with amp_stop{scale}."
    )


def _name_leaves(leaves: Mapping[str, Any]) -> str:
    """Names the gradients that are not finite, or says how to learn their names."""
    if not leaves:
        return (
            "To learn which gradients are not finite, make the step with "
            "metrics_fn=flax_amp.metrics.finite_by_leaf."
        )
    names = [name for name, finite in leaves.items() if not finite]
    return f"Not finite are the gradients of {first_of(names, 5)}."


def _read_state(state: Any) -> tuple[Any, Mapping[str, Any], Any, Any]:
    """Returns the step, the scaler, and how many steps were skipped in a row, in all.

    The step is () if there is none.
    """
    step: Any = ()
    if isinstance(state, AmpTrainState):
        step, opt_state, scaler = state.step, state.opt_state, state.scaler
    else:
        _check_pair(state)
        opt_state, scaler = state
        if isinstance(opt_state, nnx.Optimizer):
            step, opt_state = opt_state.step[...], pure(opt_state.opt_state)
        # `make_nnx_train_step` counts in the scaler, because an `nnx.Optimizer` has an
        # optimizer of any kind. An `apply_if_finite` counts in its own state.
        has_counts = isinstance(scaler, Mapping) and {*SKIP_COUNTS} <= {*scaler}
        if has_counts and not isinstance(opt_state, optax.ApplyIfFiniteState):
            in_a_row, total = (scaler[key] for key in SKIP_COUNTS)
            return step, scaler, in_a_row, total
    check_type(
        opt_state,
        optax.ApplyIfFiniteState,
        "check_progress: the optimizer does not count skipped steps: its state",
        "an ApplyIfFiniteState, made with tx=optax.apply_if_finite(tx, 2**31 - 1), or "
        "the scaler that the last step of make_nnx_train_step returned, which counts.",
    )
    return step, scaler, opt_state.notfinite_count, opt_state.total_notfinite


def _check_pair(state: Any) -> None:
    """Raises a TypeError unless a state is a pair of something else than a state."""
    expected = (
        "an AmpTrainState, a pair (nnx.Optimizer, scaler), or (opt_state, scaler) for "
        "a loop of your own"
    )
    check_type(state, tuple, "check_progress: state", f"{expected}.")
    if len(state) != 2 or isinstance(state[0], AmpTrainState):
        kinds = ", ".join(type(part).__name__ for part in state)
        raise TypeError(
            f"check_progress: state is a tuple of {kinds}; expected {expected}."
        )
