"""A run that skips every step is told apart from one that looks for its scale."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._training.scaler import check_complete, faults_of
from flax_amp._training.train_state import AmpTrainState


class StuckError(RuntimeError):
    """Raised by `check_progress`: steps fail at every scale."""


# A search for the scale from 2**24 down to 2**-14 skips 38 steps.
_HOPELESS, _SEARCHING = 20, 50


def check_progress(
    state: AmpTrainState | tuple[nnx.Optimizer, Mapping[str, Any]],
    metrics: Mapping[str, Any] | None = None,
    *,
    max_skips: int | None = None,
) -> None:
    """Raises an error if one step after the other is skipped.

    Skipped steps are how the scaler finds its scale, so a step never raises. But no
    scale mends a loss that is not finite, and at the lowest one there is nothing left
    to try: the parameters stay as they are for ever, and nobody notices. Call this
    every so many steps, where metrics are logged: it waits for the state and fetches a
    few numbers.

    Args:
      state: the state that the last step returned; for `make_nnx_train_step`, the pair
        `(optimizer, scaler)`, where the optimizer's `tx` is an
        `optax.apply_if_finite(tx, 2**31 - 1)`, which counts.
      metrics: those of the last step, which tell what is not finite: the loss, the
        updated variables or the gradients.
      max_skips: steps in a row that may be skipped, whatever the scale. By default 20
        where a lower scale would not help: the loss or the variables are not finite, or
        the scale is the lowest allowed (bfloat16 runs, with `no_scaler`, are always at
        theirs); 50 while it falls, since a search for it may take 38.

    Raises:
      StuckError: with the step, the scale, the loss, the number of skipped steps, which
        of these it is and what to try. The state is the one after the last finite
        step; the message says if an optimizer put a NaN into it.
      TypeError: if `state` is neither, has no scaler, or its optimizer does not count.
      ValueError: if `max_skips` is not an integer of at least 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    step, scaler, skips = _counters(state)
    if max_skips is not None and (
        not isinstance(max_skips, int | np.integer) or max_skips < 1
    ):
        raise ValueError(
            f"check_progress: {max_skips=}; expected an integer of at least 1. Leave "
            "it out for the default."
        )
    check_complete(scaler, "check_progress: state.scaler")
    fetched = jax.device_get(
        {
            **scaler,
            "step": step,
            "in_a_row": skips.notfinite_count,
            "total": skips.total_notfinite,
            **{key: (metrics or {}).get(key, ()) for key in ("loss", "grad_norm")},
        }
    )
    # One number each, or as many as there are runs (`vmap`) or copies (`pmap`) of it.
    runs = np.size(fetched["in_a_row"])
    for run in range(runs):
        seen = {key: _of(run, runs, values) for key, values in fetched.items()}
        _check_run(state, seen, max_skips, "" if runs == 1 else f" of run {run}")


def _of(run: int, runs: int, values: Any) -> Any:
    """Returns the number of one run.

    If a metric has all steps, the last step counts.
    """
    values = np.ravel(values)
    if not len(values):
        return None
    return values[max(run - runs, -len(values))].item()


def _check_run(
    state: Any, seen: Mapping[str, Any], max_skips: int | None, which: str
) -> None:
    """Raises a `StuckError` if a run is stuck."""
    cause, hopeless = _cause(seen)
    limit = max_skips or (_HOPELESS if hopeless else _SEARCHING)
    if seen["in_a_row"] < limit:
        return
    scale, lowest = seen["scaler"], seen["min_scaler"]
    place = "the lowest allowed" if scale <= lowest else f"above the lowest, {lowest:g}"
    loss = "" if seen["loss"] is None else f", loss {seen['loss']:g}"
    raise StuckError(
        f"check_progress: the last {seen['in_a_row']} steps{which} were skipped, and "
        f"the loss scale {scale:g} is {place} (step {seen['step']}{loss}, "
        f"{seen['total']} steps skipped in all). {cause} {_fate(state)}"
    )


def _fate(state: Any) -> str:
    """Says what has become of the parameters."""
    if isinstance(state, AmpTrainState) and not _tree.all_finite(state.params):
        return (
            "The parameters hold an inf or a NaN, which the optimizer made of finite "
            "gradients: restore an earlier checkpoint, and look at the optimizer (its "
            "eps, say)."
        )
    return "The parameters are those of the last finite step."


_FORWARD = (
    "no loss scale mends that: look for inf or NaN in the batch, and for a division, "
    "log or sqrt at 0. If there is none, values overflow on their way: lower the "
    "learning rate, use compute_dtype=jnp.bfloat16, or keep the layers at fault in "
    "float32 with amp_stop. Another min_scaler changes nothing."
)
_BACKWARD = (
    "Look for a sqrt, norm or division at 0, whose derivative is not finite; lower the "
    "learning rate, clip the gradients, use compute_dtype=jnp.bfloat16, or keep the "
    "layers at fault in float32 with amp_stop"
)


def _cause(seen: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns what is not finite, with what to do, and whether no scale helps."""
    if faults := faults_of(seen):
        text = ", ".join(faults)
        return f"The scaler cannot find its scale: {text}. Correct it.", True
    loss, norm = seen["loss"], seen["grad_norm"]
    lowest = seen["scaler"] <= seen["min_scaler"]
    if loss is not None and not np.isfinite(loss):
        return f"The loss is not finite, and {_FORWARD}", True
    if loss is not None and norm is not None and np.isfinite(norm):
        return (
            "Loss and gradients are finite, but updated variables (batch statistics, "
            f"say) are not, and {_FORWARD}"
        ), True
    subject = "The loss is finite, the gradients are not"
    if loss is None:
        subject = (
            "Pass the metrics of the step to learn what is not finite. If it is the "
            f"loss, {_FORWARD} If it is the gradients"
        )
    if lowest:
        return (
            f"{subject}, and there is no lower scale to try. {_BACKWARD}, or lower "
            "min_scaler."
        ), True
    return (
        f"{subject}, and the scale is still looked for, so far in vain. {_BACKWARD}, "
        "or begin with a lower scale, init_scaler(scaler=...)."
    ), False


def _counters(state: Any) -> tuple[Any, Mapping[str, Any], Any]:
    """Returns the step, the scaler and the counters of skipped steps."""
    if isinstance(state, AmpTrainState):
        return state.step, state.scaler, state.opt_state
    if not (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[0], nnx.Optimizer)
    ):
        raise TypeError(
            f"check_progress: state is a {type(state).__name__}; expected an "
            "AmpTrainState, as the training step returns it, or a pair "
            "(nnx.Optimizer, scaler)."
        )
    optimizer, scaler = state
    if not isinstance(optimizer.opt_state, optax.ApplyIfFiniteState):
        raise TypeError(
            "check_progress: the optimizer does not count skipped steps; expected one "
            "made with tx=optax.apply_if_finite(tx, 2**31 - 1)."
        )
    plain = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]
    return optimizer.step[...], scaler, optax.ApplyIfFiniteState(**plain)
