"""`check_progress`: tells a run that is stuck from one that searches for its scale.

The user calls it: an error inside of each step would need a callback or a transfer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._training.arguments import check_count, check_type, first_of
from flax_amp._training.scaler import LOWEST, values_out_of_range
from flax_amp._training.step_call import check_not_deleted
from flax_amp._training.train_state import AmpTrainState
from flax_amp.optim._optimizer import pure


class StuckError(RuntimeError):
    """Raised by `check_progress` when one step after the other is skipped."""


# The search for a scale from 2**24 down to 2**-24 skips 48 steps.
_MAX_SKIPS_IN_SEARCH = 50
# A few bad batches in a row are no reason to stop a run.
_MAX_SKIPS = 20

# The names of the metrics of `flax_amp.metrics.finite_by_leaf` begin with this.
_LEAVES = "grads_finite/"


def check_progress(
    state: Any,
    metrics: Mapping[str, Any] | None = None,
    *,
    max_skips: int | None = None,
) -> None:
    """Raises an error if one step after the other is skipped.

    The scaler finds its scale by skipping steps, so a step never raises an error. Where
    no scale helps, the parameters never change again, and nobody notices. Call this
    function every N steps, where you log metrics: it waits for the state and fetches a
    few numbers.

    Args:
      state: the `AmpTrainState` that the last step returned, or the `AmpOptimizer`, or
        the pair `(model, optimizer)`.
      metrics: the metrics of the last step, which tell what is not finite; and which
        gradients, if they hold those of `flax_amp.metrics.finite_by_leaf`.
      max_skips: how many steps in a row may be skipped. The default is 50 while the
        scale may fall, whose search may take 48 steps, or else 20.

    Raises:
      StuckError: with the cause, and the call of `find_nonfinite` that says where it
        is. The state is that of the last finite step.
      TypeError, ValueError: if an argument is none of these.
      RuntimeError: if a later step has deleted `state`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    run, metrics = _read(state), metrics or {}
    if max_skips is not None:
        check_count(max_skips, f"check_progress: {max_skips=}", "of steps")
    check_not_deleted("check_progress", "state", run)
    # All numbers in one transfer, which waits for the step once.
    fetched = jax.device_get(
        {
            **run.scaler,
            "step": run.step,
            "in_a_row": run.skips.notfinite_count,
            "total": run.skips.total_notfinite,
            **{k: metrics[k] for k in ("loss", "grad_norm") if k in metrics},
        }
    )
    # Each is one number, or one for each run (`vmap`) or copy (`pmap`) of the state.
    worst, runs = int(np.argmax(fetched["in_a_row"])), np.size(fetched["in_a_row"])

    def number(values: Any) -> Any:
        """Returns the number of the worst run; of several steps, that of the last."""
        values = np.ravel(values)
        # From the end: with two runs, the values of three steps are (a0, b0, a1, b1,
        # a2, b2). A scale that all runs share is one value for both.
        return values[max(worst - runs, -len(values))].item() if len(values) else None

    numbers = {key: number(values) for key, values in fetched.items()}
    cause, limit = _find_cause(numbers)
    if numbers["in_a_row"] < (max_skips or limit):
        return
    # Fetched only now: a run that goes on does not need them.
    flags = {k: jax.device_get(x) for k, x in metrics.items() if k.startswith(_LEAVES)}
    bad = [k.removeprefix(_LEAVES) for k, x in flags.items() if not number(x)]
    if bad:
        cause += f" Not finite are the gradients of {first_of(bad, 5)}."
    of_run = "" if runs == 1 else f" of run {worst}"
    raise StuckError(_describe(run, numbers, cause, of_run))


class _Run(NamedTuple):
    """What there is to know of a run."""

    step: Any
    skips: optax.ApplyIfFiniteState
    scaler: Mapping[str, Any]
    call: str  # what `find_nonfinite` takes
    params: Any


def _read(state: Any) -> _Run:
    """Returns what there is to know of a run."""
    model, held = state if type(state) is tuple and len(state) == 2 else (None, state)
    expected = "an AmpTrainState, an AmpOptimizer, or (model, optimizer)."
    check_type(held, AmpTrainState | nnx.Optimizer, "check_progress: state", expected)
    if isinstance(held, AmpTrainState):
        call, params = "state, loss_fn, batch", held.params
    else:
        call = "(model, optimizer), loss_fn, batch"
        params = None if model is None else nnx.state(model, held.wrt)
    skips, scaler = pure(held.opt_state), pure(getattr(held, "scaler", {}))
    check_type(
        skips,
        optax.ApplyIfFiniteState,
        "check_progress: the optimizer does not count skipped steps: its state",
        "that of an AmpOptimizer, or of tx=optax.apply_if_finite(tx, 2**31 - 1).",
    )
    return _Run(pure(held.step), skips, scaler, call, params)


def _find_cause(numbers: Mapping[str, Any]) -> tuple[str, int]:
    """Returns why the last step was skipped, and how many may be skipped in a row."""
    # It makes all gradients wrong, so the rest would mislead.
    if wrong := values_out_of_range(numbers):
        text = ", ".join(wrong)
        return f"The scaler cannot find its scale: {text}. Correct it.", _MAX_SKIPS
    # From here on in the order of the step: the gradients of a loss that is not finite
    # are not finite either. If both are finite, something after them was to blame.
    loss, norm = numbers.get("loss"), numbers.get("grad_norm", np.nan)
    moves = numbers.get("adjust_factor", 1) > 1
    no_scale = " No loss scale helps." if moves else ""
    if loss is not None and not np.isfinite(loss):
        return f"The loss is not finite.{no_scale}", _MAX_SKIPS
    if loss is not None and np.isfinite(norm):
        text = "Loss and gradients are finite, but updated variables, such as batch "
        return f"{text}statistics, are not.{no_scale}", _MAX_SKIPS
    may_fall = moves and numbers["scaler"] > LOWEST
    limit = _MAX_SKIPS_IN_SEARCH if may_fall else _MAX_SKIPS
    if loss is None:
        return "Pass the metrics of the step to learn what is not finite.", limit
    if may_fall:
        text = "and the search for a scale has not ended"
    elif moves:
        text = "and there is no lower scale to try"
    else:
        text = "as those of a sqrt, norm or division at 0"
    return (
        f"The loss is finite, the gradients are not, {text}. A parameter that the "
        "optimizer freezes still has a gradient, and an inf there skips every step: "
        "put jax.lax.stop_gradient around it in the loss.",
        limit,
    )


def _describe(run: _Run, numbers: Mapping[str, Any], cause: str, of_run: str) -> str:
    """Returns the message about a run that is stuck."""
    seen = [
        f"{name} {numbers[key]:g}"
        for name, key in (("step", "step"), ("loss", "loss"), ("scale", "scaler"))
        # A scale that never moves says nothing.
        if numbers.get(key) is not None
        and (key != "scaler" or numbers.get("adjust_factor") != 1)
    ]
    seen.append(f"{numbers['total']} steps skipped in all")
    state = "The parameters are those of the last finite step."
    if not _tree.all_finite(run.params):
        state = "The parameters hold an inf or a NaN: restore an earlier checkpoint."
    return (
        f"check_progress: the last {numbers['in_a_row']} steps{of_run} were skipped "
        f"({', '.join(seen)}). {cause} {state} To find where it begins, call "
        f"print(flax_amp.find_nonfinite({run.call})) with the batch of a skipped step: "
        "it names the operation and tells a bad batch from an overflow."
    )
