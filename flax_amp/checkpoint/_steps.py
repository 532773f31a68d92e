"""The steps in a directory of checkpoints: where they are, and what each holds.

Everything that reads a directory asks here: `restore` and `migrate` try its steps with
`newest_intact`, `verify` reads all of them, and each sees the arrays of a `Step` after
the files of the step have been checked. Nothing here writes.
"""

import json
import operator
import os
import posixpath
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp.checkpoint import _arrays, _checksums, _lock
from flax_amp.checkpoint._checksums import ITEM
from flax_amp.checkpoint._errors import (
    CheckpointWarning,
    CorruptCheckpointError,
    IncompleteError,
    explained,
)

P = ParamSpec("P")
T = TypeVar("T")

KEY = "flax_amp"  # of our record in the metadata of a step
# Format 1 had digests of arrays in the record. They are not read any more, so that
# there is one format of integrity: such a step counts as one without checksums.
FORMAT = 2

HALF = ".orbax-checkpoint-tmp"  # Orbax puts it into the names of what is half-written

_METRICS = "metrics"
_STEP_FILE = "_CHECKPOINT_METADATA"

# By directory: the steps that this process found damaged, and those that it saved or
# restored. A run may restore without the manager that it saves with.
found_damaged: dict[epath.Path, set[int]] = defaultdict(set)
met: dict[epath.Path, set[int]] = defaultdict(set)

# A scheme, which has two letters or more: `C:/` is a disk.
_REMOTE = re.compile(r"\w[\w+.-]+:/")


# The directory


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
    # Orbax takes `s3://`, `az://` and `hf://` for local paths, and would save there.
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
            f"{name} is {_arrays.description_of(value)}; expected an integer, or an "
            "array without axes that holds one. Pass an int."
        ) from error
    if least is not None and number < least:
        raise ValueError(
            f"{name} is {number}; expected at least {least}. Use {least} or more."
        )
    return number


# A step


class Step(NamedTuple):
    """The folder of a step. Steps are ordered by their numbers."""

    number: int
    folder: epath.Path

    def __str__(self) -> str:
        return f"step {self.number} in {self.folder.parent}"

    @property
    def has_checksums(self) -> bool:
        """Whether the step has a list that its files can be compared with."""
        return (self.folder / _checksums.NAME).exists()

    @explained
    def items(self) -> set[str]:
        """Returns the names of the complete items of the step, without its metrics."""
        inside = {path.name for path in self.folder.iterdir() if path.is_dir()}
        return {name for name in inside if HALF not in name} - {_METRICS}

    def verified_tree(self, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        """Checks the files of the step, and returns Orbax's description of its arrays.

        Args:
          part: the files to check, see `_checksums.check`.

        Raises:
          CorruptCheckpointError: if the step is damaged.
          OSError: if its files cannot be read for another reason.
          ValueError: if something else was saved, or a newer version saved it.
        """
        items, metadata = self.items(), self._metadata()
        if ITEM not in items:
            if metadata is None or not items:
                raise IncompleteError(f"its folder {ITEM!r} is missing")
            raise ValueError(
                f"checkpoint: {self} holds no item {ITEM!r} but {sorted(items)}; "
                "expected a state saved with StandardSave. Restore it with the Orbax "
                "calls that match how it was saved, or read it with checkpoint.migrate."
            )
        # Something other than `checkpoint.save` may have written the step. There is no
        # lock in a bucket.
        has_checksums = self.has_checksums
        is_ours = has_checksums or (self.folder.parent / _lock.NAME).exists()
        if metadata is None and is_ours:
            raise IncompleteError(f"its file {_STEP_FILE} is missing")
        promised = self._promises_checksums((metadata or {}).get(KEY, {}))
        # All files are checked before Orbax opens an array: it prints a hundred lines
        # of its threads about damaged ones, and reading while checking gains nothing.
        if has_checksums:
            _checksums.check(self.folder, part)
        elif promised:
            raise IncompleteError("its list of checksums is missing")
        tree = _arrays.read_metadata(self.folder / ITEM)
        if not isinstance(tree, Mapping):
            raise CorruptCheckpointError("the description of its arrays cannot be read")
        return dict(tree)

    def arrays(self, part: tuple[int, int] = (0, 1)) -> _arrays.NumpyLeaves:
        """Checks the files of the step, and reads its arrays, as `verified_tree`."""
        return _arrays.read_on_host(self.folder / ITEM, self.verified_tree(part))

    @explained
    def _metadata(self) -> dict[str, Any] | None:
        """Returns the user's part of the metadata; `None` if the file is missing."""
        try:
            content = json.loads((self.folder / _STEP_FILE).read_text())
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

    def _promises_checksums(self, record: Any) -> bool:
        """Checks our record, and returns whether it says that there are checksums."""
        if record == {}:
            return False
        if not isinstance(record, Mapping) or not isinstance(record.get("format"), int):
            raise CorruptCheckpointError("its record in the metadata is damaged")
        if record["format"] > FORMAT:
            raise ValueError(
                f"checkpoint: {self} has format {record['format']}; expected at most "
                f"{FORMAT}, the newest that this version of flax_amp knows. Update "
                "flax_amp."
            )
        # The oldest records do not name their step.
        if (saved := record.get("step", self.number)) != self.number:
            raise CorruptCheckpointError(
                f"its files are those of step {saved}, and were renamed or copied"
            )
        return bool(record["format"] == FORMAT)


def record_of(step: int) -> dict[str, Any]:
    """Returns what the metadata of a step says about it."""
    return {KEY: {"format": FORMAT, "step": step}}


# The steps


def steps_in(directory: epath.Path) -> list[Step]:
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
    return sorted(Step(x.step, x.path) for x in found if x.path.is_dir())


def newest_intact(
    directory: epath.Path,
    steps_of: Callable[[epath.Path], list[Step]],
    read: Callable[[Step], T],
    wanted: Any,
    stacklevel: int,
) -> T:
    """Returns what `read` makes of the newest step that is not damaged.

    Args:
      directory: the directory of the steps.
      steps_of: lists the steps in it.
      read: reads a step. All processes must succeed.
      wanted: the number of the only step to try, if it is not `None`.
      stacklevel: for the warning about damaged steps.

    Raises:
      FileNotFoundError: if there is no such step.
      TypeError: if `wanted` is no integer.
      CorruptCheckpointError: if all steps are damaged.
    """
    number = None if wanted is None else whole_number(wanted, "checkpoint: step")
    damaged: dict[Step, str] = {}
    steps: list[Step] = []
    while True:
        # A writer beside this process may have removed a step for a newer one while it
        # was read. Several processes list once, to agree on what they see.
        if not damaged or jax.process_count() == 1:
            steps = _candidates(directory, sorted(steps_of(directory)), number)
        step = next((step for step in steps if step not in damaged), None)
        if step is None:
            break
        try:
            result = agreed(read, step)
            break
        except CorruptCheckpointError as error:
            damaged[step] = f"step {step.number} is damaged: {error}"
    problems = {step.number: damaged[step] for step in steps if step in damaged}
    told = f"checkpoint: {directory}: {'; '.join(problems.values())}"
    found_damaged[directory].update(problems)
    if step is None:
        raise CorruptCheckpointError(
            f"{told}; expected a step as it was written. Restore another step, or "
            "these files from a backup."
        )
    found_damaged[directory].discard(step.number)
    met[directory].add(step.number)
    if problems:
        warnings.warn(
            f"{told}. Restored step {step.number} instead.",
            CheckpointWarning,
            stacklevel=stacklevel + 1,
        )
    return result


def _candidates(
    directory: epath.Path, steps: list[Step], number: int | None
) -> list[Step]:
    """Returns the steps to try, the newest first, or the one that was asked for."""
    chosen = [step for step in steps if number in (None, step.number)]
    if not chosen:
        wanted = "a checkpoint" if number is None else f"step {number}"
        raise FileNotFoundError(
            f"checkpoint: {directory} holds the steps {[x.number for x in steps]}; "
            f"expected {wanted}. Save one first, or choose one of these."
        )
    return chosen[::-1]


def agreed(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what `read` does, if it succeeds in every process.

    The processes work alone and agree afterwards: with Orbax's barriers, they would
    wait forever for one that failed.

    Raises:
      CorruptCheckpointError: if some process found damage.
      RuntimeError: if something else failed in another one.
    """
    if jax.process_count() == 1:
        return read(*args, **kwargs)
    error: Exception | None = None
    try:
        result = read(*args, **kwargs)
    except Exception as caught:  # The others must hear of any.
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
