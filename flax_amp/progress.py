"""A run that skips every step is told apart from one that looks for its scale."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp.train_state import AmpTrainState


class StuckError(RuntimeError):
    """Raised by `check_progress`: steps fail at every scale."""


def check_progress(
    state: AmpTrainState | tuple[nnx.Optimizer, Mapping[str, Any]],
    metrics: Mapping[str, Any] | None = None,
    *,
    max_skips: int = 20,
) -> None:
    """Raises an error if lower scales have not helped and cannot get lower.

    Skipped steps are how the scaler finds its scale, so a step never raises. But at
    the lowest scale there is nothing left to try: the parameters stay as they are for
    ever, and nobody notices. Call this every so many steps, where metrics are logged:
    it waits for the state and fetches four numbers.

    Args:
      state: the state that the last step returned; for `make_nnx_train_step`, the pair
        `(optimizer, scaler)`, where the optimizer's `tx` is an
        `optax.apply_if_finite(tx, 2**31 - 1)`, which counts.
      metrics: its metrics, whose loss is then told.
      max_skips: steps in a row that may be skipped at the lowest scale. bfloat16 runs
        (`no_scaler`) are always at theirs.

    Raises:
      StuckError: with the step, the scale, the loss, the number of skipped steps and
        what to try. The state is good: it is the one after the last finite step.
      TypeError: if `state` is neither, or its optimizer does not count.
      ValueError: if `max_skips` is less than 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    step, scaler, skips = _counters(state)
    if max_skips < 1:
        raise ValueError(f"check_progress: {max_skips=}; expected at least 1.")
    loss = np.nan if metrics is None else metrics["loss"]
    # One number each, or as many as there are runs (`vmap`) or copies (`pmap`) of it.
    scale, lowest, in_a_row, total, steps, loss = map(
        np.ravel,
        jax.device_get(
            (
                scaler["scaler"],
                scaler["min_scaler"],
                skips.notfinite_count,
                skips.total_notfinite,
                step,
                loss,
            )
        ),
    )
    stuck = np.flatnonzero((in_a_row >= max_skips) & (scale <= lowest))
    if not len(stuck):
        return
    first = stuck[0]
    # `scan` over steps gives the losses of all of them.
    last_loss = loss[first] if len(loss) == len(scale) else loss[-1]
    told = "" if metrics is None else f", loss {last_loss:g}"
    which = "" if len(scale) == 1 else f" of run {first}"
    raise StuckError(
        f"check_progress: the last {in_a_row[first]} steps{which} were skipped, and "
        f"the loss scale {scale[first]:g} is the lowest allowed (step {steps[first]}"
        f"{told}, {total[first]} steps skipped in all); expected finite gradients at "
        "some scale. The parameters are those of the last finite step. If the loss is "
        "not finite either, look for inf or NaN in the batch, and for a division, log "
        "or sqrt at 0 in the loss; if it is, lower the learning rate, clip the "
        "gradients, use compute_dtype=jnp.bfloat16, keep the layers at fault in "
        "float32 with amp_stop, or lower min_scaler."
    )


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
