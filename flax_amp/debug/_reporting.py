"""`report_nonfinite`: a training step that runs `find_nonfinite` on skipped batches."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Unpack

from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import Asked, Options
from flax_amp.debug._nonfinite import NonfiniteReport, find_nonfinite

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
    the random keys and the scale of that step. It stays silent if only the scale was
    too large, which the scaler lowers by design. It waits for each step, until it has
    reported `limit` times.

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
    left = limit

    @functools.wraps(train_step)
    def step(*args: Any) -> Any:
        nonlocal left
        if left <= 0:
            return train_step(*args)
        is_state = isinstance(args[0], AmpTrainState)
        holder, rest = args[0 if is_state else 1], args[1 if is_state else 2 :]
        scale = Asked("report_nonfinite", loss_fn, holder=holder).scale()
        out = train_step(*args)
        metrics = out[1] if is_state else out
        if metrics["grads_finite"]:
            return out
        # A skipped step has changed nothing else that the loss depends on.
        before = out[0].replace(step=out[0].step - 1) if is_state else args[:2]
        given: Any = {"scale": scale} | options
        try:
            found = find_nonfinite(before, loss_fn, *rest, **given)
        except Exception as error:  # which is no reason to end the training
            what = "report_nonfinite: a step was skipped, and find_nonfinite failed: "
            warnings.warn(f"{what}{type(error).__name__}: {error}", stacklevel=2)
            left -= 1
            return out
        if found.verdict == "nothing":
            found = dataclasses.replace(found, notes=(*found.notes, _NOT_AGAIN))
        if found.verdict != "scale":
            left -= 1
            report(found)
        return out

    return step
