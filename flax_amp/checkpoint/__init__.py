"""Orbax helpers: a manager, saving, and a restore that says what does not fit.

The state itself saves and restores with plain Orbax calls; what stands here is what
people otherwise write around them. A restore compares first and reads afterwards, and
never writes: whatever fails, the state in hand and the files stay as they were. What
was read is held against digests that were saved with it; a step that was damaged on
disk is passed over for the newest one that was not, with a warning.

Sharp edges:
  Orbax casts silently to the dtype of its target and leaves sharding to it; `restore`
  checks the one and passes on the other.
  Checkpoints that plain Orbax calls wrote have no digests and are taken as they are.
"""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from flax_amp import _tree
from flax_amp._training.train_state import AmpTrainState
from flax_amp.checkpoint import _saved_scaler
from flax_amp.checkpoint._integrity import (
    KEY,
    CheckpointWarning,
    Record,
    check_arrays,
    record_of,
    unreadable,
)
from flax_amp.checkpoint._integrity import (
    CorruptCheckpointError as CorruptCheckpointError,
)
from flax_amp.checkpoint._layout import (
    Layout,
    Path,
    differences,
    kind_of,
    layout_of,
    leaf_of,
    name_of,
)
from flax_amp.checkpoint._manager import CheckpointSaveError as CheckpointSaveError
from flax_amp.checkpoint._manager import Manager, finish_at_exit, save_error
from flax_amp.checkpoint._manager import manager as manager
from flax_amp.checkpoint._migrate import migrate as migrate
from flax_amp.checkpoint._placement import (
    abstract,
    commit_like,
    indivisible,
    place,
    rebuilt,
    samples,
)
from flax_amp.checkpoint._reader import restored
from flax_amp.checkpoint._sources import intact_on_host
from flax_amp.checkpoint._steps import (
    ITEM,
    agreed,
    candidates,
    describe,
    finish_saving,
    newest_intact,
    steps_in,
    whole_number,
)
from flax_amp.checkpoint._verify import StepReport as StepReport
from flax_amp.checkpoint._verify import verify as verify


def save(
    manager: ocp.CheckpointManager,
    state: AmpTrainState,
    metrics: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
) -> bool:
    """Saves a state under its own step, in the background.

    The state may be donated to the next step as soon as this returns. A program that
    ends waits until it is written.

    Args:
      manager: from `manager`, or any `orbax.checkpoint.CheckpointManager`.
      state: the state that the last step returned.
      metrics: scalars to keep beside it, for `best_metric`; Orbax keeps none without.
      force: save although `save_interval_steps` says not to.

    Returns:
      Whether it was saved: False between intervals and for a step that is not newer
      than the newest checkpoint; with a warning if it is older. Newer steps that
      `restore` found damaged are renamed to `<step>.damaged`, with a warning.

    Raises:
      TypeError: if an argument has a wrong type, or the step of the state.
      ValueError: if a leaf cannot be saved (all of them are listed), if the step is
        negative, or if the `best_metric` of the manager is missing; nothing is written
        then.
      RuntimeError: if another process saves into the same directory.
      CheckpointSaveError: if it cannot be written, or the save before it, in the
        background, could not. What had been saved before is as it was.

    Example:
      >>> import tempfile, optax, jax.numpy as jnp
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with manager(directory) as checkpoints:
      ...         saved = save(checkpoints, state)
      ...     restored = restore(directory, state)
      >>> saved, float(restored.scaler["scaler"])
      (True, 32768.0)
    """
    if not isinstance(manager, ocp.CheckpointManager):
        raise TypeError(
            f"checkpoint.save: the first argument is a {type(manager).__name__}; "
            "expected a manager. Open one with checkpoint.manager(directory)."
        )
    _check_state(state, "checkpoint.save: state")
    if bad := [
        f"{name_of(path)}: {problem}"
        for path, leaf in ocp.tree.to_flat_dict(state).items()
        if (problem := _unsaveable(leaf))
    ]:
        raise ValueError(
            f"checkpoint.save: {'; '.join(bad)}; expected arrays that hold something. "
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
    step = whole_number(state.step, "checkpoint.save: the state's step", 0)
    finish_at_exit(manager)
    if ours:
        ours.make_room(step, force)
    newest = manager.latest_step()
    if newest is not None and step <= newest:
        if step < newest:
            warnings.warn(
                f"checkpoint.save: {manager.directory} holds step {newest}, newer than "
                "the state; nothing is saved until the state has passed it. To branch "
                "off from an older step, save into another directory.",
                CheckpointWarning,
                stacklevel=3,
            )
        return False
    if not force and not manager.should_save(step):
        return False
    record = record_of(state, step)
    if ours:
        ours.wait_until_finished()
        ours.begin(step)
    try:
        return manager.save(
            step,
            args=ocp.args.StandardSave(state),
            metrics=metrics,
            force=force,
            custom_metadata={KEY: record},
        )
    except CheckpointSaveError:
        raise
    except Exception as error:  # Orbax raises whatever its parts raise
        failed = ours.failure(error) if ours else save_error(manager, error)
        raise failed from error


def restore(manager: Any, target: AmpTrainState, *, step: Any = None) -> AmpTrainState:
    """Reads a checkpoint into a state like `target`.

    The arrays get the shardings of `target`, so that a checkpoint fits another mesh,
    and the first step on them is not traced again. Keys of the scaler that are missing
    on disk, because an older version saved it, keep those of `target`; keys that this
    version does not know are dropped with a warning. If one of the scalers is static
    and the other dynamic, because `compute_dtype` was changed, the target's is used,
    with a warning.

    Args:
      manager: from `manager`, any `orbax.checkpoint.CheckpointManager`, or the path of
        its directory.
      target: a state of the same model and optimizer, or its `jax.eval_shape`; it is
        not changed, and its arrays may have been donated.
      step: which step, also as an array that holds one; by default the newest that is
        intact. A `CheckpointWarning` names those that were passed over.

    Returns:
      `target` with every array replaced.

    Raises:
      TypeError: if `target` is no `AmpTrainState`, or another argument of a wrong type.
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if it does not fit; every path that differs is listed. Also if a newer
        version of flax_amp wrote it.
      CorruptCheckpointError: if the step, or every step, was damaged on disk.
      OSError: if its files cannot be read for another reason.
    """
    _check_state(target, "checkpoint.restore: target")
    directory = finish_saving(manager)

    def attempt(candidate: int) -> AmpTrainState:
        return _restore_step(directory, candidate, target)

    def steps() -> list[int]:
        return candidates(steps_in(directory), directory, step)

    return newest_intact(steps, attempt, directory, stacklevel=2)


def _check_state(state: Any, name: str) -> None:
    if not isinstance(state, AmpTrainState):
        raise TypeError(
            f"{name} is a {type(state).__name__}; expected an AmpTrainState. Make it "
            "with AmpTrainState.create, as for a new run."
        )


def _restore_step(
    directory: epath.Path,
    step: int,
    target: AmpTrainState,
) -> AmpTrainState:
    where = f"step {step} in {directory}"
    wanted = samples(target, "checkpoint.restore")
    read, record = agreed(lambda: _read_step(directory, step, wanted))
    if record is not None:
        check_arrays(record, read)
    likes = ocp.tree.to_flat_dict(target)
    values = {
        path: commit_like(read[path], likes[path]) for path in read if path in likes
    }

    saved = {path[1]: leaf for path, leaf in read.items() if path[0] == "scaler"}
    if unknown := sorted(saved.keys() - _saved_scaler.KEYS):
        _warn(f"{where}: dropped {unknown} of the scaler, unknown to this version.")
    saved = {
        key: values.get(("scaler", key), saved[key])
        for key in saved.keys() & _saved_scaler.KEYS
    }
    taken, remark = _saved_scaler.to_take(saved, target.scaler)
    if remark:
        _warn(f"{where}: {remark}; the target's is used.")
    scaler = _saved_scaler.completed(target.scaler) | taken
    _saved_scaler.checked(scaler, f"checkpoint.restore: {where}: scaler")
    return rebuilt(target, values).replace(scaler=scaler)


def _read_step(
    directory: epath.Path,
    step: int,
    wanted: Mapping[Path, Any],
) -> tuple[dict[Path, Any], Record | None]:
    """Returns the arrays of a step by path, where the target has them.

    Each process reads for itself.
    """
    where = f"step {step} in {directory}"
    tree, record = describe(directory, step)
    _check_fit(layout_of(tree), wanted, where)
    # In the structure that is on disk: an empty dict or a list more is no difference.
    leaves, structure = jax.tree.flatten(tree)
    paths = list(ocp.tree.to_flat_dict(tree))
    asked = [
        abstract(wanted.get(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    folder = directory / str(step) / ITEM
    like = jax.tree.unflatten(structure, asked)
    how = ocp.checkpoint_utils.construct_restore_args(like)
    try:
        read = restored(folder, item=like, restore_args=how)
    except Exception as error:  # Orbax raises whatever its parts raise
        failed = unreadable(error)
        if isinstance(failed, OSError):
            raise failed from error
        # The arrays may be intact although what is beside them is not.
        values = intact_on_host(folder, tree, record)
        likes = dict(zip(paths, asked, strict=True))
        return {
            path: place(value, likes[path]) for path, value in values.items()
        }, record
    return dict(zip(paths, jax.tree.leaves(read), strict=True)), record


def _warn(text: str) -> None:
    # The frames between are those of `restore`, and one for each function below it.
    warnings.warn(f"checkpoint.restore: {text}", CheckpointWarning, stacklevel=6)


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
    return None if metrics is None else {k: _number(k, v) for k, v in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"checkpoint.save: the metric {name!r} is {kind_of(value)}; expected one "
            "number."
        ) from error


def _unsaveable(leaf: Any) -> str:
    """Says why Orbax could not save a leaf; the empty string if it could."""
    if not _tree.is_array(leaf):
        return f"a {type(leaf).__name__}"
    if isinstance(leaf, jax.core.Tracer):
        return "traced"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "deleted, its memory was donated"
    return "" if leaf.size else f"empty, its shape is {leaf.shape}"


def _check_fit(on_disk: Layout, wanted: Mapping[Path, Any], where: str) -> None:
    """Raises one ValueError that lists all that differs, with both sides."""
    layout = {path: leaf_of(leaf) for path, leaf in wanted.items()}
    # A scaler may lack keys that are new, and have some that are newer still.
    layout = {p: x for p, x in layout.items() if p[0] != "scaler" or p in on_disk}
    on_disk = {p: x for p, x in on_disk.items() if p[0] != "scaler" or p in layout}
    problems = differences(on_disk, layout) + indivisible(wanted)
    if problems:
        raise ValueError(
            f"checkpoint.restore: {where} does not fit the target:\n  "
            + "\n  ".join(problems)
            + "\nexpected the checkpoint of the same model and optimizer. Make the "
            "target with the model and tx that were saved, restore another step, or "
            "read what else wrote it, or only a part, with checkpoint.migrate."
        )
