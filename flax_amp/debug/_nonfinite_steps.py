"""`report_nonfinite`: a training step that runs `find_nonfinite` on skipped batches."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._training.arguments import check_count, check_function
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._nonfinite import find_nonfinite
from flax_amp.debug._nonfinite_report import NonfiniteReport

StateT = TypeVar("StateT", bound=AmpTrainState)

# The scaler looks for its scale: so many skips in a row need no report.
_MAX_SEARCH = 8
_NOT_AGAIN = (
    "the step was skipped, which this run does not show: fused code rounds otherwise, "
    "accum_steps draws other random numbers, or other options were given"
)


class _Pending(NamedTuple):
    """A step whose result was not read yet; its batch and further arguments."""

    given: tuple[Any, ...]
    scale: Any
    metrics: Any


class ReportingStep:
    """The step that `report_nonfinite` returns.

    Call it as the step that it was made from, and `check(state)` after the last step.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        loss_fn: Callable[..., Any],
        report: Callable[[NonfiniteReport], Any],
        limit: int,
        options: dict[str, Any],
    ):
        self._step, self._loss_fn, self._report = train_step, loss_fn, report
        self._left, self._options = limit, options
        self._pending: _Pending | None = None
        self._skips = 0  # in a row, which a lower scale may end
        self._fine: Any = 0.0  # the scale of the last finite step

    def __call__(self, state: StateT, batch: Any, *args: Any) -> tuple[StateT, Any]:
        """Looks at the step before; returns what the training step returns.

        Raises:
          TypeError: if it is not given an `AmpTrainState` and a batch, with values.
        """
        given = (batch, *args)
        if not isinstance(state, AmpTrainState):
            names = ", ".join(type(x).__name__ for x in (state, *given))
            raise TypeError(
                f"report_nonfinite: the step got {names}; expected an AmpTrainState, a "
                "batch, and what else the loss takes. For the step of "
                "make_nnx_train_step, call find_nonfinite(loss_fn)(model, batch) on "
                "the batch of a skipped step."
            )
        leaves = jax.tree.leaves((state, given))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise TypeError(
                "report_nonfinite: the step got a tracer; expected arrays with values: "
                "call it in a Python loop, outside of jax.jit and jax.lax.scan."
            )
        if self._left > 0:
            self.check(state)
        if self._left <= 0:
            return self._step(state, *given)
        # Copies: the step deletes the state, and a loader may use its memory again.
        scale = jnp.copy(state.scaler["scaler"])
        given = jax.tree.map(lambda x: x.copy() if type(x) is np.ndarray else x, given)
        new_state, metrics = self._step(state, *given)
        self._pending = _Pending(given, scale, metrics)
        return new_state, metrics

    def check(self, state: AmpTrainState) -> None:
        """Reports the last step if it was skipped; `state` is what it returned."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with jax.transfer_guard("allow"):
                self._check(state, pending)

    def _check(self, state: AmpTrainState, pending: _Pending) -> None:
        if pending.metrics["grads_finite"]:
            self._skips, self._fine = 0, pending.scale
            return
        # The scale falls only if the loss and the variables are finite.
        falls = bool(state.scaler["scaler"] < pending.scale)
        self._skips = self._skips + 1 if falls else 0
        may_search = falls and self._skips < _MAX_SEARCH
        # No scaler looks for a scale at which a step was finite before.
        if may_search and pending.scale > self._fine:
            return
        # A skipped step has changed nothing else that the loss depends on.
        scaler = {**state.scaler, "scaler": pending.scale}
        before = state.replace(step=state.step - 1, scaler=scaler)
        try:
            given = pending.given
            found = find_nonfinite(before, self._loss_fn, *given, **self._options)
        except Exception as error:  # which is no reason to end the training
            self._left -= 1
            warnings.warn(
                "report_nonfinite: a step was skipped, and find_nonfinite failed: "
                f"{type(error).__name__}: {error}",
                stacklevel=4,
            )
            return
        if may_search and found.verdict == "scale":
            return
        self._left -= 1
        if found.verdict == "nothing":
            found = dataclasses.replace(found, notes=(*found.notes, _NOT_AGAIN))
        self._report(found)


def report_nonfinite(
    train_step: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *,
    report: Callable[[NonfiniteReport], Any] = print,
    limit: int = 3,
    **options: Any,
) -> ReportingStep:
    """Wraps a training step so that it explains the steps that it skips.

    Before each step it reads whether the step before was skipped. If so, it runs
    `flax_amp.find_nonfinite` on that batch, with the random keys and the scale of that
    step. It stays silent while the scaler looks for its scale, which skips a few steps
    by design. Steps that are fine cost the reading of one bool, and the batch before is
    kept.

    Sharp edges:
      With `accum_steps` the whole batch runs in one pass, with other random numbers. A
      step inside of `shard_map` or `vmap` (`axis_name`) cannot be wrapped.

    Args:
      train_step: a step of `make_train_step`.
      loss_fn: its loss.
      report: what is called with each `NonfiniteReport`.
      limit: the number of reports. After them, steps are not looked at.
      **options: those of `find_nonfinite`; pass `amp_policy` as to `make_train_step`.

    Returns:
      `step(state, batch, *args) -> (state, metrics)`. Call `step.check(state)` after
      the last step.

    Raises:
      TypeError: if `train_step` or `loss_fn` is no function, or an option is unknown.
      ValueError: if `limit` is not a positive integer, or an option has a wrong value.

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
      >>> step.check(state)
      mathematics log(0) = -inf
    """
    if not callable(train_step):
        raise TypeError(
            f"report_nonfinite: train_step is a {type(train_step).__name__}; expected "
            "a step of flax_amp.make_train_step."
        )
    check_function(loss_fn, "report_nonfinite: loss_fn")
    check_count(limit, f"report_nonfinite: {limit=}", "of reports")
    find_nonfinite(loss_fn, **options)  # checks them
    return ReportingStep(train_step, loss_fn, report, limit, options)
