"""The steps in a directory of checkpoints, and what each says that it holds.

Nothing here writes.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

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

# By directory: the steps that this process found damaged.
_damaged: dict[str, set[int]] = {}


def finish_saving(manager: Any) -> epath.Path:
    """Waits for a manager's last save and returns its directory."""
    if isinstance(manager, ocp.CheckpointManager):
        manager.wait_until_finished()
        manager = manager.directory
    return epath.Path(manager).expanduser().resolve()


def open_reader(directory: epath.Path) -> ocp.CheckpointManager:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"checkpoint: {directory} is not a directory; expected one that "
            "a manager has saved to. Check the path."
        )
    return ocp.CheckpointManager(
        directory,
        # Not read_only, of which it warns three times: it writes nothing unasked.
        options=ocp.CheckpointManagerOptions(
            create=False, enable_async_checkpointing=False
        ),
        item_handlers=ocp.StandardCheckpointHandler(),
    )


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


def alone() -> ocp.options.MultiprocessingOptions:
    """Returns what makes a process read without waiting for the others.

    Orbax lets all wait for each other after each read, and one that failed never comes.
    """
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
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


def describe(
    reader: ocp.CheckpointManager, directory: epath.Path, step: int
) -> tuple[dict[str, Any], Record | None]:
    """Returns the shapes and dtypes on disk, as a nested dict, and the record."""
    folder = directory / str(step)
    items = {path.name for path in folder.iterdir() if path.is_dir()} - {METRICS}
    if not items:
        raise CorruptCheckpointError(f"its folder {ITEM!r} is missing")
    if ITEM not in items:
        raise ValueError(
            f"checkpoint: step {step} in {directory} holds no item {ITEM!r} "
            f"but {sorted(items)}; expected a state saved with StandardSave. Restore "
            "it with the Orbax calls that match how it was saved."
        )
    try:
        metadata = reader.metadata(step)
        tree = getattr(metadata.item_metadata, "tree", None)
    except Exception as error:  # whatever a damaged file makes of Orbax
        raise unreadable(error) from error
    record = read_record(metadata.custom_metadata, f"step {step} in {directory}")
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError("the description of its arrays cannot be read")
    if record is not None:
        check_layout(record, layout_of(tree))
    return dict(tree), record
