"""The steps in a directory of checkpoints, and what each says that it holds.

Nothing here writes.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp import _lock
from flax_amp._integrity import (
    CheckpointWarning,
    CorruptCheckpointError,
    Record,
    check_layout,
    read_record,
    unreadable,
)
from flax_amp._layout import layout_of

T = TypeVar("T")

ITEM = "default"  # where CheckpointManager puts what is not given a name
METRICS = "metrics"
_HALF = ".orbax-checkpoint-tmp"  # in the name of what is half-written
_STEP_FILE = "_CHECKPOINT_METADATA"  # in which Orbax keeps our record

# By directory: the steps that this process found damaged.
_damaged: dict[str, set[int]] = {}


def finish_saving(manager: Any) -> epath.Path:
    """Waits for a manager's last save and returns its directory."""
    if isinstance(manager, ocp.CheckpointManager):
        manager.wait_until_finished()
        manager = manager.directory
    return epath.Path(manager).expanduser().resolve()


def steps_in(directory: epath.Path) -> list[int]:
    """Returns the complete steps in a directory, the oldest first.

    Raises:
      FileNotFoundError: if there is no such directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"checkpoint: {directory} is not a directory; expected one that "
            "a manager has saved to. Check the path."
        )
    return sorted(ocp.utils.checkpoint_steps(directory))


def candidates(
    steps: Iterable[int], directory: epath.Path, step: int | None
) -> list[int]:
    """Returns which of the steps of a directory to try, the best first."""
    steps = sorted(steps, reverse=True)
    if not steps or (step is not None and step not in steps):
        wanted = "a checkpoint" if step is None else f"step {step}"
        raise FileNotFoundError(
            f"checkpoint: {directory} holds the steps {sorted(steps)}; "
            f"expected {wanted}. Save one first, or choose one of these."
        )
    return steps if step is None else [step]


def newest_intact(
    steps: Iterable[int],
    attempt: Callable[[int], T],
    directory: epath.Path,
    stacklevel: int,
) -> T:
    """Returns what `attempt` makes of the first step that is not damaged.

    Raises:
      CorruptCheckpointError: if all of them are.
    """
    damaged: list[str] = []
    for step in steps:
        try:
            result = attempt(step)
        except CorruptCheckpointError as error:
            damaged.append(f"step {step} is damaged: {error}")
            known_damaged(directory).add(step)
            continue
        known_damaged(directory).discard(step)
        if damaged:
            warnings.warn(
                f"checkpoint: {directory}: {'; '.join(damaged)}. Restored step {step} "
                "instead.",
                CheckpointWarning,
                stacklevel=stacklevel + 1,
            )
        return result
    raise CorruptCheckpointError(
        f"checkpoint: {directory}: {'; '.join(damaged)}; expected a step as it was "
        "written. Restore another step, or these files from a backup."
    )


def known_damaged(directory: epath.Path) -> set[int]:
    """Returns the set of steps of a directory that this process found damaged."""
    return _damaged.setdefault(str(directory), set())


def reader(handler: Callable[..., Any]) -> ocp.Checkpointer:
    """Returns what reads in this process without waiting for the others.

    Orbax lets all wait for each other after each read, and one that failed never comes.

    Args:
      handler: a handler of Orbax, but for its `multiprocessing_options`.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
    )
    return ocp.Checkpointer(
        handler(multiprocessing_options=alone), multiprocessing_options=alone
    )


def agreed(read: Callable[[], T]) -> T:
    """Returns what `read` does, if it succeeds in every process.

    Raises:
      CorruptCheckpointError: if some process found damage.
      RuntimeError: if something else failed in another one.
    """
    if jax.process_count() == 1:
        return read()
    error: Exception | None = None
    try:
        result = read()
    except Exception as caught:  # the others must hear of any
        error = caught
    kind = 0 if error is None else 1 if isinstance(error, CorruptCheckpointError) else 2
    kinds = multihost_utils.process_allgather(np.int32(kind)).ravel().tolist()
    if error is not None:
        raise error
    if 2 in kinds:
        raise RuntimeError(
            f"checkpoint: process {kinds.index(2)} failed; expected all processes to "
            "read the same files. Its own error says why."
        )
    if 1 in kinds:
        raise CorruptCheckpointError(f"process {kinds.index(1)} found damage")
    return result


def describe(directory: epath.Path, step: int) -> tuple[dict[str, Any], Record | None]:
    """Returns the shapes and dtypes on disk, as a nested dict, and the record."""
    where = f"step {step} in {directory}"
    folder = directory / str(step)
    try:
        items = {path.name for path in folder.iterdir() if path.is_dir()} - {METRICS}
    except FileNotFoundError as error:
        raise CorruptCheckpointError("it has gone") from error
    if all(_HALF in item for item in items):
        raise CorruptCheckpointError(f"its folder {ITEM!r} is missing")
    if ITEM not in items:
        raise ValueError(
            f"checkpoint: {where} holds no item {ITEM!r} but {sorted(items)}; expected "
            "a state saved with StandardSave. Restore it with the Orbax calls that "
            "match how it was saved, or read it with checkpoint.migrate."
        )
    _check_metadata(directory, folder)
    try:
        with reader(_step_handler) as checkpointer:
            metadata = checkpointer.metadata(folder)
        tree = getattr(metadata.item_metadata[ITEM], "tree", None)
    except Exception as error:  # whatever a damaged file makes of Orbax
        raise unreadable(error) from error
    record = read_record(metadata.custom_metadata, where)
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError("the description of its arrays cannot be read")
    if record is not None:
        check_layout(record, layout_of(tree))
    return dict(tree), record


def _step_handler(**options: Any) -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        **{
            ITEM: ocp.StandardCheckpointHandler(**options),
            METRICS: ocp.JsonCheckpointHandler(**options),
        }
    )


def _check_metadata(directory: epath.Path, folder: epath.Path) -> None:
    """Raises an error if the file with the digests is damaged.

    Orbax takes no notice. A file that is missing is no damage where something else than
    `checkpoint.save` may have written the step.
    """
    file = folder / _STEP_FILE
    try:
        json.loads(file.read_text())
    except FileNotFoundError as error:
        if (directory / _lock.NAME).exists():
            raise CorruptCheckpointError("its digests are missing") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{_STEP_FILE} cannot be read") from error
