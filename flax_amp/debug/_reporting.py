"""`report_nonfinite`: a training step that runs `find_nonfinite` on skipped batches."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import Options, check_concrete, scaler_of
from flax_amp.debug._nonfinite import NonfiniteReport, find_nonfinite

# The scaler looks for its scale: so many skips in a row need no report.
_MAX_SEARCH = 8
_NOT_AGAIN = (
    "the step was skipped, which this run does not show: fused code rounds otherwise, "
    "accum_steps draws other random numbers, or other options were given"
)


def report_nonfinite(
    train_step: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *,
    report: Callable[[NonfiniteReport], Any] = print,
    limit: int = 3,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """Wraps a training step so that it explains the steps that it skips.

    After a step that was skipped it runs `flax_amp.find_nonfinite` on that batch, with
    the random keys and the scale of that step. It stays silent while the scaler looks
    for its scale, which skips a few steps by design. It waits for each step, until it
    has reported `limit` times.

    Sharp edges:
      With `accum_steps` the whole batch runs in one pass, with other random numbers. A
      step inside of `jit`, `shard_map` or `vmap` cannot be wrapped.

    Args:
      train_step: a step of `make_train_step` or `make_nnx_train_step`.
      loss_fn: its loss.
      report: what is called with each `NonfiniteReport`.
      limit: the number of reports. After them, steps are not looked at.
      **options: those of `find_nonfinite`; pass `amp_policy` as to the step.

    Returns:
      The step, which takes and returns what `train_step` does.

    Raises:
      TypeError: if an option is unknown, or if the step gets no arrays with values.

    Example:
      >>> import jax.numpy as jnp, optax, flax_amp
      >>> from flax_amp.debug import report_nonfinite
      >>> def loss_fn(params, x):
      ...     return jnp.log(params["w"] * x).mean()
      >>> state = flax_amp.AmpTrainState.create(
      ...     params={"w": jnp.ones(3)}, tx=optax.sgd(0.1), apply_fn=None)
      >>> step = report_nonfinite(
      ...     flax_amp.make_train_step(loss_fn), loss_fn,
      ...     report=lambda found: print(found.verdict, found.finding.text))
      >>> for x in (jnp.ones(3), jnp.zeros(3)):
      ...     state, metrics = step(state, x)
      mathematics log(0) = -inf
    """
    find_nonfinite(loss_fn, **options)  # checks them
    left, in_a_row, fine = limit, itertools.count(1), 0.0

    @functools.wraps(train_step)
    def step(*args: Any) -> Any:
        nonlocal left, in_a_row, fine
        if left <= 0:
            return train_step(*args)
        check_concrete("report_nonfinite: the step", args)
        is_state = isinstance(args[0], AmpTrainState)
        scale = _scale(args[0] if is_state else args[1])
        out = train_step(*args)
        state: Any = out[0] if is_state else None
        metrics = out[1] if is_state else out
        if metrics["grads_finite"]:
            in_a_row, fine = itertools.count(1), scale
            return out
        # Only a scale that is too large falls, and no scaler looks for one at which a
        # step was finite before.
        falls = _scale(state or args[1]) < scale
        may_search = falls and next(in_a_row) < _MAX_SEARCH
        if may_search and scale > fine:
            return out
        # A skipped step has changed nothing else that the loss depends on.
        before = state.replace(step=state.step - 1) if is_state else args[:2]
        given: Any = {"scale": scale} | options
        try:
            rest = args[1:] if is_state else args[2:]
            found = find_nonfinite(before, loss_fn, *rest, **given)
        except Exception as error:  # which is no reason to end the training
            text = f"{type(error).__name__}: {error}"
            what = "a step was skipped, and find_nonfinite failed"
            warnings.warn(f"report_nonfinite: {what}: {text}", stacklevel=2)
            left -= 1
            return out
        if not (may_search and found.verdict == "scale"):
            left -= 1
            if found.verdict == "nothing":
                found = dataclasses.replace(found, notes=(*found.notes, _NOT_AGAIN))
            report(found)
        return out

    return step


def _scale(holder: Any) -> float:
    """Returns the scale of a state or an optimizer; 1 if it has none."""
    scale = scaler_of(holder).get("scaler", jnp.ones(()))
    return float(np.max(scale[...]))
