"""`check_progress`: tells a run that is stuck from one that searches for its scale."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._checks import check_type, first_of
from flax_amp._training import PyTree
from flax_amp._training.scaler import LOWEST
from flax_amp._training.step_call import check_not_deleted
from flax_amp._training.train_state import AmpTrainState
from flax_amp.optim._optimizer import pure
from flax_amp.optim._skip_spikes import spikes_in_a_row


class StuckError(RuntimeError):
    """Raised by `check_progress` when too many steps in a row are skipped."""


# The search for a scale from 2**24 down to 2**-24, by factors of 2, skips 48 steps.
_MAX_SKIPS_IN_SEARCH = 50
# The limit without a search for a scale: a few bad batches in a row are no reason to
# stop a run. If every second batch is bad by chance, 20 bad batches in a row come after
# `2**21 - 2` steps on average, and 10 in a row after 2,046 steps. With a limit of 40, a
# run that is stuck only wastes 20 more steps.
_MAX_SKIPS = 20

# `skip_spikes` takes a new level for normal after half a window of spikes, which is 64
# with its default window of 128. So 100 spikes in a row are no new level.
_MAX_SPIKES = 100
_SPIKES = (
    "The loss or a norm is finite and far above the recent values: "
    "flax_amp.optim.skip_spikes skips such steps. Look at their batches, or raise the "
    "factor of skip_spikes."
)

# The names of the metrics of `flax_amp.metrics.finite_by_leaf` begin with this.
_LEAVES = "grads_finite/"


def check_progress(
    state: Any,
    metrics: Mapping[str, Any] | None = None,
    *,
    max_skips: int | None = None,
) -> None:
    """Raises an error if too many steps in a row are skipped.

    The scaler finds its scale by skipping steps, so a step never raises an error. Where
    no scale helps, the parameters never change again. Call this function every N steps,
    where you log metrics: the call waits for the state and fetches a few numbers.

    Args:
      state: the `AmpTrainState` that the last step returned, or the `AmpOptimizer`, or
        the pair `(model, optimizer)`. Of several copies (`pmap`), runs (`vmap`) or
        steps (a scan), the largest numbers count.
      metrics: the metrics of the last step, which tell whether the loss, the gradients
        or the updated variables are not finite. If the metrics of
        `flax_amp.metrics.finite_by_leaf` are among them, the error names the gradients.
      max_skips: the number of skipped steps in a row at which the error is raised. The
        default is 50 while a lower scale may help, because the search for a scale may
        take 48 steps; 100 for steps that `optim.skip_spikes` has skipped; and 20
        otherwise.

    Raises:
      StuckError: with the cause, and the call of `find_nonfinite` that says where the
        cause is. The state is the state after the last finite step.
      TypeError, ValueError: if an argument is none of these.
      RuntimeError: if a later step has deleted `state`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    numbers, call, params = _read(state)
    metrics = metrics or {}
    check_not_deleted("check_progress", "state", state)
    measured = {key: metrics[key] for key in ("loss", "grad_norm") if key in metrics}
    # A single transfer of all numbers waits for the step only once.
    fetched = jax.device_get(numbers | measured)
    numbers = {key: np.max(x).item() for key, x in fetched.items()}
    cause, limit = _find_cause(numbers)
    if max_skips is None:
        max_skips = limit
    if numbers["in_a_row"] < max_skips:
        return
    # Fetched only now: a run that goes on does not need them.
    flags = jax.device_get({k: x for k, x in metrics.items() if k.startswith(_LEAVES)})
    if bad := [k.removeprefix(_LEAVES) for k, x in flags.items() if not np.all(x)]:
        cause = f"{cause} Not finite are the gradients of {first_of(bad, 5)}."
    raise StuckError(_describe(numbers, cause, call, params))


def _read(state: Any) -> tuple[dict[str, Any], str, PyTree]:
    """Returns numbers of a run, arguments of `find_nonfinite`, and the parameters."""
    model = None
    held = state
    if type(state) is tuple and len(state) == 2:
        model, held = state
    expected = "an AmpTrainState, an AmpOptimizer, or (model, optimizer)."
    check_type(held, AmpTrainState | nnx.Optimizer, "check_progress: state", expected)
    if isinstance(held, AmpTrainState):
        call = "state, loss_fn, batch"
        params = held.params
    else:
        call = "(model, optimizer), loss_fn, batch"
        params = None if model is None else nnx.state(model, held.wrt)
    skips = pure(held.opt_state)
    check_type(
        skips,
        optax.ApplyIfFiniteState,
        "check_progress: the optimizer does not count skipped steps: its state",
        "the state of an AmpOptimizer, or of tx=optax.apply_if_finite(tx, 2**31 - 1).",
    )
    numbers = {
        **pure(getattr(held, "scaler", {})),
        "step": pure(held.step),
        "in_a_row": skips.notfinite_count,
        "total": skips.total_notfinite,
    }
    if (spikes := spikes_in_a_row(skips)) is not None:
        numbers["spikes"] = spikes
    return numbers, call, params


def _find_cause(numbers: Mapping[str, Any]) -> tuple[str, int]:
    """Returns why the last step was skipped, and the default of `max_skips`."""
    loss = numbers.get("loss")
    norm = numbers.get("grad_norm", np.nan)
    # A step that is not finite after a spike does not change the number of spikes in a
    # row, so spikes are the cause only if all steps in the row were spikes.
    if numbers.get("spikes", 0) >= numbers["in_a_row"] > 0:
        return _SPIKES, _MAX_SPIKES
    may_fall = numbers.get("adjust_factor", 1) > 1 and numbers["scaler"] > LOWEST
    limit = _MAX_SKIPS_IN_SEARCH if may_fall else _MAX_SKIPS
    if loss is None:
        text = "Pass the metrics of the step to learn which number is not finite."
        return text, limit
    # The checks are in the order of the step: the gradients of a loss that is not
    # finite are not finite either. If loss and gradients are finite, the step was
    # skipped because of the updated variables.
    if not np.isfinite(loss):
        return "The loss is not finite, which no loss scale changes.", _MAX_SKIPS
    if np.isfinite(norm):
        text = "Loss and gradients are finite, but updated variables, such as batch "
        return f"{text}statistics, are not.", _MAX_SKIPS
    why = "as the gradients of a sqrt, norm or division at 0"
    if may_fall:
        why = "and the search for a scale has not ended"
    return (
        f"The loss is finite, the gradients are not, {why}. A parameter that the "
        "optimizer freezes still has a gradient, and an inf there skips every step: "
        "put jax.lax.stop_gradient around the parameter in the loss.",
        limit,
    )


def _describe(numbers: Mapping[str, Any], cause: str, call: str, params: PyTree) -> str:
    """Returns the message about a run that is stuck."""
    seen = [f"step {numbers['step']}"]
    if "loss" in numbers:
        seen.append(f"loss {numbers['loss']:g}")
    if numbers.get("adjust_factor", 1) != 1:  # a scale that never moves says nothing
        seen.append(f"scale {numbers['scaler']:g}")
    seen.append(f"{numbers['total']} steps skipped in all")
    skipped = (
        f"check_progress: the last {numbers['in_a_row']} steps were skipped "
        f"({', '.join(seen)}). {cause}"
    )
    if cause is _SPIKES:
        return skipped
    state = "The parameters come from the last finite step."
    if not _tree.all_finite(params):
        state = "The parameters hold an inf or a NaN: restore an earlier checkpoint."
    return (
        f"{skipped} {state} To find where the fault begins, call "
        f"print(flax_amp.find_nonfinite({call})) with the batch of a skipped step: "
        "the report names the operation and tells a bad batch from an overflow."
    )
