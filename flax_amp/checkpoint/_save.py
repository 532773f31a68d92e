"""Saving a state, in the background."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp._training.train_state import AmpTrainState
from flax_amp.checkpoint import _steps
from flax_amp.checkpoint._arrays import check_state, description_of, path_text
from flax_amp.checkpoint._errors import CheckpointSaveError, CheckpointWarning
from flax_amp.checkpoint._manager import Manager, finish_at_exit, save_error


def save(
    manager: ocp.CheckpointManager,
    state: AmpTrainState,
    metrics: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
) -> bool:
    """Saves a state under its own step, in the background.

    The state may be donated to the next step as soon as this returns. A program that
    ends waits until the state is written.

    Args:
      manager: the result of `manager`. Any `orbax.checkpoint.CheckpointManager` works;
        its steps have no checksums.
      state: the state that the last step returned.
      metrics: scalars to save with the state, for `best_metric`. Orbax writes them
        only if the manager has a `best_metric`.
      force: saves although `save_interval_steps` says not to.

    Returns:
      Whether the state was saved. It is not saved between intervals, nor if its step is
      not newer than the newest checkpoint; an older step also causes a warning, as does
      an equal one that this process neither saved nor restored. Newer steps that
      `restore` found damaged are renamed to `<step>.damaged`, with a warning.

    Raises:
      TypeError: if an argument or the step of the state has a wrong type.
      ValueError: if leaves cannot be saved (the error lists all of them), if the step
        is negative, if the runs of a vmapped state are at different steps, or if the
        `best_metric` of the manager is missing. Nothing is written then.
      RuntimeError: if another process saves into the same directory.
      CheckpointSaveError: if this state cannot be written, or if the save before it
        failed in the background. Earlier checkpoints are as they were.

    Example:
      >>> import tempfile, optax, jax.numpy as jnp
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         saved = checkpoint.save(manager, state)
      ...     restored = checkpoint.restore(directory, state)
      >>> saved, restored.params["w"].tolist()
      (True, [1.0, 1.0])
    """
    if not isinstance(manager, ocp.CheckpointManager):
        raise TypeError(
            f"checkpoint.save: the first argument is a {type(manager).__name__}; "
            "expected a manager. Open one with checkpoint.manager(directory)."
        )
    check_state(
        state,
        "checkpoint.save: state",
        " Save parts of a loop of your own with plain Orbax: "
        "manager.save(step, args=orbax.checkpoint.args.StandardSave(parts)).",
    )
    leaves = ocp.tree.to_flat_dict(state)
    problems = {path_text(path): _problem(leaf) for path, leaf in leaves.items()}
    if bad := [f"{name}: {problem}" for name, problem in problems.items() if problem]:
        raise ValueError(
            f"checkpoint.save: {'; '.join(bad)}; expected arrays with elements. "
            "Save the state that the last step returned, not the one it was given."
        )
    numbers = _numbers(metrics, getattr(manager, "best_metric", None))
    ours = manager if isinstance(manager, Manager) else None
    with ours.mutex if ours else contextlib.nullcontext():
        return _save(manager, ours, state, numbers, force)


def _save(
    manager: ocp.CheckpointManager,
    ours: Manager | None,
    state: AmpTrainState,
    metrics: dict[str, float] | None,
    force: bool,
) -> bool:
    step = _step_of(state)
    if ours:
        ours.make_room(step, force)
    if not _is_due(manager, step, force):
        return False
    if ours:
        ours.wait_until_finished()
        ours.begin()
    _steps.met[manager.directory].add(step)
    return _write(manager, ours, step, state, metrics, force)


def _is_due(manager: ocp.CheckpointManager, step: int, force: bool) -> bool:
    """Whether a step is to be saved; a warning tells what the caller may not expect."""
    newest = manager.latest_step()
    if newest is None or step > newest:
        return force or bool(manager.should_save(step))
    if problem := _why_not(step, newest, manager.directory):
        warnings.warn(
            f"checkpoint.save: {manager.directory} holds step {newest}, {problem}",
            CheckpointWarning,
            stacklevel=4,
        )
    return False


def _write(
    manager: ocp.CheckpointManager,
    ours: Manager | None,
    step: int,
    state: AmpTrainState,
    metrics: dict[str, float] | None,
    force: bool,
) -> bool:
    """Starts to write a step; whatever Orbax raises is one kind of error."""
    try:
        saved: bool = manager.save(
            step,
            args=ocp.args.StandardSave(state),
            metrics=metrics,
            force=force,
            # Only our manager lists checksums, as this record promises. An item of our
            # own would hold both, but plain Orbax reads no step with a second item.
            custom_metadata=_steps.record_of(step) if ours else None,
        )
        if not ours:
            finish_at_exit(manager)
    except CheckpointSaveError:
        raise
    except Exception as error:  # Orbax raises whatever its parts raise.
        failed = ours.failure(error) if ours else save_error(manager, error)
        raise failed from error
    return saved


def _why_not(step: int, newest: int, directory: Any) -> str:
    """Returns what to tell of a state that is not saved, or the empty string."""
    if step < newest:
        return (
            "newer than the state; nothing is saved until the state has passed it. To "
            "branch off from an older step, save into another directory."
        )
    # A run that saves its last state again, or resumes at its end, does no harm.
    if step in _steps.met[directory]:
        return ""
    return (
        "which this process neither saved nor restored; it is kept, and the state is "
        "not saved. Save a new run into another directory."
    )


def _step_of(state: AmpTrainState) -> int:
    """Returns the step of a state; that of several runs, which `vmap` makes, is one."""
    # Runs at one step are one checkpoint, so that nothing else has to know of a sweep.
    name, steps = "checkpoint.save: the state's step", np.unique(state.step)
    if len(steps) > 1:
        raise ValueError(
            f"{name} has the values {steps.tolist()}; expected runs that are at one "
            "step, since they are saved together. Save each of them into a directory "
            "of its own: jax.tree.map(lambda leaf: leaf[i], state)."
        )
    # What is no integer is described as the user has it.
    is_integer = steps.dtype.kind in "iu"
    return _steps.whole_number(steps[0] if is_integer else state.step, name, 0)


def _numbers(
    metrics: Mapping[str, Any] | None, best: str | None
) -> dict[str, float] | None:
    """Returns metrics as floats, or raises an error if the best one is missing."""
    if not isinstance(metrics, Mapping | None):
        raise TypeError(
            f"checkpoint.save: metrics is a {type(metrics).__name__}; expected a dict "
            'of numbers, such as {"loss": loss}.'
        )
    names = sorted(metrics or ())
    if best is not None and best not in names:
        raise ValueError(
            f"checkpoint.save: metrics has {names}; expected the best_metric {best!r} "
            f"of the manager. Pass metrics={{{best!r}: ...}}."
        )
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"checkpoint.save: the metric {name!r} is {description_of(value)}; "
                "expected one number."
            ) from error
    return None if metrics is None else numbers


def _problem(leaf: Any) -> str:
    """Returns why Orbax cannot save a leaf, or the empty string if it can."""
    if not _tree.is_array(leaf):
        return f"a {type(leaf).__name__}"
    if isinstance(leaf, jax.core.Tracer):
        return "traced"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "deleted, its memory was donated"
    return "" if leaf.size else f"empty, its shape is {leaf.shape}"
