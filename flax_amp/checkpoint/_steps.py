"""The steps in a directory of checkpoints, and what each says that it holds.

Nothing here writes.
"""

import json
import operator
import os
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp.checkpoint import _checksums, _lock
from flax_amp.checkpoint._arrays import description_of, read_metadata
from flax_amp.checkpoint._checksums import ITEM
from flax_amp.checkpoint._errors import (
    CheckpointWarning,
    CorruptCheckpointError,
    IncompleteError,
    read_or_explain,
)

T = TypeVar("T")

KEY = "flax_amp"  # of our record in the metadata of a step
FORMAT = 2  # 1 had digests of arrays, which are not read any more

HALF = ".orbax-checkpoint-tmp"  # Orbax puts it into the names of what is half-written

_METRICS = "metrics"
_STEP_FILE = "_CHECKPOINT_METADATA"

# A scheme, which has two letters or more: `C:/` is a disk.
_REMOTE = re.compile(r"\w[\w+.-]+:/")

_LISTINGS = 10  # attempts, in case another process removes steps meanwhile

# By directory: the steps that this process found damaged.
_damaged: dict[str, set[int]] = {}
# By directory: the steps that this process saved or restored.
_met: dict[str, set[int]] = {}


def finish_saving(manager: Any) -> epath.Path:
    """Waits for a manager's last save and returns its directory.

    Raises:
      TypeError: if it is neither a manager nor a path.
    """
    if isinstance(manager, ocp.CheckpointManager):
        manager.wait_until_finished()
        manager = manager.directory
    return directory_of(manager)


def directory_of(path: Any) -> epath.Path:
    """Returns an absolute path, or that of a folder in a bucket, which is listed anew.

    Raises:
      TypeError: if it is no path.
      ValueError: if it is on a file system that Orbax cannot save to.
      ImportError: if it is in a bucket, and what reads buckets is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"checkpoint: the directory is a {type(path).__name__}; expected a path or "
            "a manager, before the state. Pass what checkpoint.manager was given, or "
            "what it returned."
        )
    text = os.fspath(path)
    if not _REMOTE.match(text):
        return epath.Path(text).expanduser().resolve()
    if not re.match("gs://[^/]", text):
        if text.startswith("file:/"):
            why = "Pass the path without 'file://'."
        elif "://" not in text:
            why = "pathlib.Path takes one of the slashes away. Pass a str."
        elif text.startswith("gs://"):
            why = "Name the bucket."
        else:
            why = "Orbax saves to no other storage. Mount it, or choose one of these."
        raise ValueError(
            f"checkpoint: the directory {text!r}; expected a local path or "
            f"'gs://bucket/folder'. {why}"
        )
    _list_anew(text)
    # A bucket has names and no folders: `a/../b` would be another name than `b`.
    return epath.Path("gs://" + posixpath.normpath(text.removeprefix("gs://")))


def _list_anew(bucket: str) -> None:
    """Turns off the cache of the listings of buckets.

    With it, a folder is listed once and for all, and nothing is seen of what
    TensorStore or another process writes there.
    """
    try:
        listings = epath.backend.fsspec_backend.fs(bucket).dircache
    except ImportError as error:
        raise ImportError(
            f"checkpoint: {bucket} cannot be read without gcsfs ({error}); in a clone "
            "of flax_amp, run: pip install '.[gcs]'"
        ) from error
    listings.use_listings_cache = False
    listings.clear()


def steps_in(directory: epath.Path) -> list[int]:
    """Returns the complete steps in a directory, the oldest first.

    They are the folders that a manager would give these names to, and no others.

    Raises:
      FileNotFoundError: if there is no such directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"checkpoint: {directory} is not a directory; expected one that "
            "a manager has saved to. Check the path."
        )
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(x.step for x in found if x.path.is_dir())


def step_name(directory: epath.Path, step: int) -> str:
    """Returns what messages call a step."""
    return f"step {step} in {directory}"


def candidates(
    steps: Iterable[int], directory: epath.Path, step: Any = None
) -> list[int]:
    """Returns which of the steps of a directory to try, the best first.

    Raises:
      FileNotFoundError: if there is none.
      TypeError: if `step` is no integer.
    """
    steps = sorted(steps, reverse=True)
    number = None if step is None else whole_number(step, "checkpoint: step")
    if not steps or (number is not None and number not in steps):
        wanted = "a checkpoint" if number is None else f"step {number}"
        raise FileNotFoundError(
            f"checkpoint: {directory} holds the steps {sorted(steps)}; "
            f"expected {wanted}. Save one first, or choose one of these."
        )
    return steps if number is None else [number]


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Returns an integer, or what an array of one integer holds, as an int.

    Raises:
      TypeError: if it is neither.
      ValueError: if it is less than `least`.
    """
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError) as error:  # RuntimeError: it was donated
        raise TypeError(
            f"{name} is {description_of(value)}; expected an integer, or an array "
            "without axes that holds one. Pass an int."
        ) from error
    if least is not None and number < least:
        raise ValueError(
            f"{name} is {number}; expected at least {least}. Use {least} or more."
        )
    return number


def newest_intact(
    steps: Callable[[], list[int]],
    attempt: Callable[[int], T],
    directory: epath.Path,
    stacklevel: int,
) -> T:
    """Returns what `attempt` makes of the first step that is not damaged.

    Args:
      steps: lists the steps to try. It is asked again after a failure: a writer beside
        this process may have removed a step for a newer one meanwhile.
      attempt: reads a step.
      directory: the directory of the steps.
      stacklevel: for the warning about damaged steps.

    Raises:
      CorruptCheckpointError: if all steps are damaged.
    """
    for _ in range(_LISTINGS):
        listed = steps()
        damaged: dict[int, str] = {}
        for step in listed:
            try:
                result = attempt(step)
            except CorruptCheckpointError as error:
                damaged[step] = f"step {step} is damaged: {error}"
                # Several processes would have to agree on what they see then.
                if jax.process_count() == 1 and steps() != listed:
                    break
                continue
            known_damaged(directory).update(damaged)
            known_damaged(directory).discard(step)
            known_steps(directory).add(step)
            if damaged:
                warnings.warn(
                    f"checkpoint: {directory}: {'; '.join(damaged.values())}. Restored "
                    f"step {step} instead.",
                    CheckpointWarning,
                    stacklevel=stacklevel + 1,
                )
            return result
        else:
            break
    known_damaged(directory).update(damaged)
    raise CorruptCheckpointError(
        f"checkpoint: {directory}: {'; '.join(damaged.values())}; expected a step as "
        "it was written. Restore another step, or these files from a backup."
    )


def known_damaged(directory: epath.Path) -> set[int]:
    """Returns the set of steps of a directory that this process found damaged."""
    return _damaged.setdefault(str(directory), set())


def known_steps(directory: epath.Path) -> set[int]:
    """Returns the set of steps of a directory that this process saved or restored."""
    return _met.setdefault(str(directory), set())


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
        raise CorruptCheckpointError(
            f"process {kinds.index(1)} found damage. Its own error names the files"
        )
    return result


def describe(
    directory: epath.Path, step: int, part: tuple[int, int] = (0, 1)
) -> tuple[dict[str, Any], bool]:
    """Checks the files of a step and returns what it says that it holds.

    Args:
      directory: the directory of the steps.
      step: the number of the step.
      part: the files to check, see `_checksums.check`.

    Returns:
      Orbax's description of its arrays, as a nested dict, and whether its files were
      compared with checksums.

    Raises:
      CorruptCheckpointError: if the step is damaged.
      OSError: if its files cannot be read for another reason.
      ValueError: if something else was saved, or a newer version saved it.
    """
    where = step_name(directory, step)
    folder = directory / str(step)
    items = read_or_explain(lambda: items_of(folder))
    metadata = read_or_explain(lambda: _metadata(folder))
    if ITEM not in items:
        if metadata is None or not items:
            raise IncompleteError(f"its folder {ITEM!r} is missing")
        raise ValueError(
            f"checkpoint: {where} holds no item {ITEM!r} but {sorted(items)}; expected "
            "a state saved with StandardSave. Restore it with the Orbax calls that "
            "match how it was saved, or read it with checkpoint.migrate."
        )
    # Something other than `checkpoint.save` may have written the step. There is no lock
    # in a bucket.
    ours = (directory / _lock.NAME, folder / _checksums.NAME)
    if metadata is None and any(path.exists() for path in ours):
        raise IncompleteError(f"its file {_STEP_FILE} is missing")
    promised = _check_record((metadata or {}).get(KEY, {}), step, where)
    # Orbax reads only what was found intact: it prints a hundred lines about
    # damaged arrays.
    has_checksums = _checksums.check(folder, part)
    if promised and not has_checksums:
        raise IncompleteError("its list of checksums is missing")
    return read_or_explain(lambda: _tree(folder / ITEM)), has_checksums


def record_of(step: int) -> dict[str, Any]:
    """Returns what the metadata of a step says about it."""
    return {KEY: {"format": FORMAT, "step": step}}


def _check_record(record: Any, step: int, where: str) -> bool:
    """Returns whether the record of a step says that there are checksums."""
    if record == {}:
        return False
    if not isinstance(record, Mapping) or not isinstance(record.get("format"), int):
        raise CorruptCheckpointError("its record in the metadata is damaged")
    if record["format"] > FORMAT:
        raise ValueError(
            f"checkpoint: {where} has format {record['format']}; expected at most "
            f"{FORMAT}, the newest that this version of flax_amp knows. Update "
            "flax_amp."
        )
    # The oldest records do not name their step.
    if (saved := record.get("step", step)) != step:
        raise CorruptCheckpointError(
            f"its files are those of step {saved}, and were renamed or copied"
        )
    return bool(record["format"] == FORMAT)


def items_of(folder: epath.Path) -> set[str]:
    """Returns the names of the complete items of a step, without its metrics."""
    inside = {path.name for path in folder.iterdir() if path.is_dir()}
    return {name for name in inside if HALF not in name} - {_METRICS}


def _tree(folder: epath.Path) -> dict[str, Any]:
    tree = read_metadata(folder)
    if not isinstance(tree, Mapping):
        raise CorruptCheckpointError("the description of its arrays cannot be read")
    return dict(tree)


def _metadata(folder: epath.Path) -> dict[str, Any] | None:
    """Returns the user's part of a step's metadata; `None` if the file is missing."""
    try:
        content = json.loads((folder / _STEP_FILE).read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{_STEP_FILE} cannot be read") from error
    # Orbax names the handlers of its items in every one, whoever called it.
    if isinstance(content, dict) and "item_handlers" in content:
        custom = content.get("custom_metadata")
        if isinstance(custom, dict | None):
            return custom or {}
    raise CorruptCheckpointError(f"{_STEP_FILE} is not what Orbax wrote")
