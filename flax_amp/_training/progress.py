"""`check_progress`: tells a run that is stuck from one that searches for its scale.

The user calls it. An error inside of the step would need a callback or a transfer in
each step.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._training.arguments import check_count, check_type, first_of
from flax_amp._training.scaler import LOWEST, check_scaler, values_out_of_range
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
        the pair `(model, optimizer)`. For a loop of your own, the pair `(opt_state,
        scaler)`, where `tx` is an `optax.apply_if_finite(tx, 2**31 - 1)`.
      metrics: the metrics of the last step, which tell what is not finite; and which
        gradients, if they hold those of `flax_amp.metrics.finite_by_leaf`.
      max_skips: how many steps in a row may be skipped. The default is 50 while the
        scale may fall, whose search may take 48 steps, or else 20.

    Raises:
      StuckError: with the cause, and the call of `find_nonfinite` that says where it
        is. The state is that of the last finite step.
      TypeError: if `state` is none of these or is traced, or if its optimizer does not
        count skipped steps.
      RuntimeError: if a later step has deleted `state`.
      ValueError: if `max_skips` is not an integer of at least 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> check_progress(state)
    """
    run = _read(state)
    expected = "the dict of metrics that the step returns."
    check_type(metrics, Mapping | None, "check_progress: metrics", expected)
    if max_skips is not None:
        check_count(max_skips, f"check_progress: {max_skips=}", "of steps")
    if isinstance(run.skips.notfinite_count, jax.core.Tracer):
        raise TypeError(
            "check_progress: the state is traced; expected one with values. Call it "
            "outside of jit, where the loop logs metrics."
        )
    check_not_deleted("check_progress", "state", run)
    # All numbers in one transfer, which waits for the step once.
    fetched = jax.device_get(
        {
            **run.scaler,
            "step": run.step,
            "in_a_row": run.skips.notfinite_count,
            "total": run.skips.total_notfinite,
            **{k: (metrics or {}).get(k, ()) for k in ("loss", "grad_norm")},
        }
    )
    # Each is one number, or one for each run (`vmap`) or copy (`pmap`) of the state.
    runs, worst = np.size(fetched["in_a_row"]), int(np.argmax(fetched["in_a_row"]))
    numbers = {key: _number_of(worst, runs, x) for key, x in fetched.items()}
    cause, limit = _find_cause(numbers)
    if numbers["in_a_row"] >= (max_skips or limit):
        of_run = "" if runs == 1 else f" of run {worst}"
        leaves = _bad_leaves(worst, runs, metrics or {})
        raise StuckError(_describe(run, numbers, cause + leaves, of_run))


class _Run(NamedTuple):
    """What there is to know of a run; `step` is () if there is none."""

    step: Any
    skips: optax.ApplyIfFiniteState
    scaler: Mapping[str, Any]
    call: str  # what `find_nonfinite` takes
    params: Any


def _read(state: Any) -> _Run:
    """Returns what there is to know of a run."""
    call, params = "loss_fn)(params, batch", None
    step: Any = ()
    if isinstance(state, AmpTrainState):
        call, params = "state, loss_fn, batch", state.params
        step, skips, scaler = state.step, state.opt_state, state.scaler
    else:
        if isinstance(state, tuple) and isinstance(state[-1], nnx.Optimizer):
            params = nnx.state(state[0], state[-1].wrt)
            state = state[-1]
        if isinstance(state, nnx.Optimizer):
            call, step = "(model, optimizer), loss_fn, batch", state.step[...]
            skips = pure(state.opt_state)
            scaler = pure(getattr(state, "scaler", {}))
        elif type(state) is tuple and len(state) == 2:
            skips, scaler = state
            check_scaler(scaler, "check_progress: the scaler")
        else:
            expected = "an AmpTrainState, an AmpOptimizer, or (opt_state, scaler)."
            check_type(state, AmpTrainState, "check_progress: state", expected)
    check_type(
        skips,
        optax.ApplyIfFiniteState,
        "check_progress: the optimizer does not count skipped steps: its state",
        "that of an AmpOptimizer, or of tx=optax.apply_if_finite(tx, 2**31 - 1).",
    )
    return _Run(step, skips, scaler, call, params)


def _number_of(run: int, runs: int, values: Any) -> Any:
    """Returns the number of one run, or `None` if there is none.

    If a metric holds the values of several steps, this is the value of the last step.
    """
    values = np.ravel(values)
    if not len(values):
        return None
    # From the end: with two runs, the values of three steps are (a0, b0, a1, b1, a2,
    # b2). A scale that all runs share is one value for both.
    return values[max(run - runs, -len(values))].item()


def _find_cause(numbers: Mapping[str, Any]) -> tuple[str, int]:
    """Returns why the last step was skipped, and how many may be skipped in a row."""
    # It makes all gradients wrong, so the rest would mislead.
    if wrong := values_out_of_range(numbers):
        text = ", ".join(wrong)
        return f"The scaler cannot find its scale: {text}. Correct it.", _MAX_SKIPS
    # From here on in the order of the step: the gradients of a loss that is not finite
    # are not finite either. If both are finite, something after them was to blame.
    loss, norm = numbers["loss"], numbers["grad_norm"]
    moves = numbers.get("adjust_factor", 1) > 1
    no_scale = " No loss scale helps." if moves else ""
    if loss is not None and not np.isfinite(loss):
        return f"The loss is not finite.{no_scale}", _MAX_SKIPS
    if loss is not None and norm is not None and np.isfinite(norm):
        text = "Loss and gradients are finite, but updated variables, such as batch "
        return f"{text}statistics, are not.{no_scale}", _MAX_SKIPS
    may_fall = moves and numbers["scaler"] > LOWEST
    limit = _MAX_SKIPS_IN_SEARCH if may_fall else _MAX_SKIPS
    if loss is None:
        return "Pass the metrics of the step to learn what is not finite.", limit
    text = "as those of a sqrt, norm or division at 0"
    if moves:
        text = "and the search for a scale has not ended"
        text = text if may_fall else "and there is no lower scale to try"
    return (
        f"The loss is finite, the gradients are not, {text}. A parameter that the "
        "optimizer freezes still has a gradient, and an inf there skips every step: "
        "put jax.lax.stop_gradient around it in the loss.",
        limit,
    )


def _bad_leaves(run: int, runs: int, metrics: Mapping[str, Any]) -> str:
    """Names the gradients that are not finite, if the metrics tell."""
    # Fetched only now: a run that goes on does not need them.
    flags = {k: jax.device_get(x) for k, x in metrics.items() if k.startswith(_LEAVES)}
    bad = [k for k, x in flags.items() if not _number_of(run, runs, x)]
    names = first_of([name.removeprefix(_LEAVES) for name in bad], 5)
    return f" Not finite are the gradients of {names}." if bad else ""


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
