"""The steps in a directory of checkpoints: their folders and their contents.

Arrays are read after the files of their step have been checked. Nothing here writes.
"""

import contextlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp._checks import check_count
from flax_amp.checkpoint import _damage, _trees
from flax_amp.checkpoint._damage import (
    ITEM,
    CheckpointWarning,
    CorruptCheckpointError,
    IncompleteError,
    is_missing,
    outage,
    reason_of,
)

P = ParamSpec("P")
T = TypeVar("T")

HALF = ".orbax-checkpoint-tmp"  # Orbax puts this into the names of half-written steps

_KEY = "flax_amp"  # of our record in the metadata of a step
_FORMAT = 3  # of our steps; `record` refuses a step of another format
_STEP_FILE = "_CHECKPOINT_METADATA"
_ALL = slice(None)  # of the files
# The kinds of errors on which processes agree; the largest is the worst.
_NO_ERROR = 0
_DAMAGE = 1
_OTHER_ERROR = 2
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)

# The steps that this process has restored, by directory. They are no field of a
# manager, because a run may restore with a path and save with a manager.
restored_steps: dict[epath.Path, set[int]] = defaultdict(set)


def record_of(step: int, optimizer: list[str]) -> dict[str, Any]:
    """Returns our record of a step for the metadata of Orbax; see `Step.record`."""
    return {_KEY: {"format": _FORMAT, "step": step, "optimizer": optimizer}}


class Step(NamedTuple):
    """The folder of a step. Steps are ordered by their numbers."""

    number: int
    folder: epath.Path

    def __str__(self) -> str:
        return f"step {self.number} in {self.folder.parent}"

    @property
    def has_checksums(self) -> bool:
        """Whether the step has a list of checksums for its files."""
        return (self.folder / _damage.NAME).exists()

    def verify(self, part: slice = _ALL) -> None:
        """Checks the files of the step, or a part of them: processes share the work.

        A ValueError says that the step holds no state of this package, or that another
        version of flax_amp wrote the step.
        """
        record = self.record()
        if not (self.folder / ITEM).is_dir():
            files = self.folder.glob("*/_METADATA")
            if others := sorted(path.parent.name for path in files):
                raise ValueError(
                    f"checkpoint: {self} holds no item {ITEM!r} but {others}; expected "
                    "a state saved with StandardSave. Restore the step with the calls "
                    "of Orbax, or pass checkpoint.migrate the folder of one item."
                )
            raise IncompleteError(f"its folder {ITEM!r} is missing")
        # All files are checked before Orbax opens an array: about a damaged array,
        # Orbax prints a hundred lines of its threads, and reading while checking gains
        # nothing.
        if self.has_checksums:
            _damage.check(self.folder, part)
        elif record:
            raise IncompleteError("its list of checksums is missing")

    def tree(self) -> dict[str, Any]:
        """Returns Orbax's description of the arrays, after all processes verified."""
        with self._reading():
            tree = _trees.read_metadata(self.folder / ITEM)
        if not isinstance(tree, Mapping):
            raise CorruptCheckpointError("the description of its arrays cannot be read")
        return dict(tree)

    def read(self, tree: Any, like: Mapping[_trees.Path, Any]) -> _trees.Leaves:
        """Returns the arrays by path, on the devices of the arrays in `like`."""
        with self._reading():
            return _trees.read_tree(self.folder / ITEM, tree, like)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns an error of Orbax into an error that tells damage from an outage."""
        try:
            yield
        except Exception as error:  # A damaged file makes Orbax raise any error.
            if self.has_checksums:
                self.verify()  # A writer may have removed files meanwhile.
            elif not isinstance(error, OSError | MemoryError) or is_missing(error):
                raise CorruptCheckpointError(reason_of(error)) from error
            raise outage(error) from error

    def record(self) -> dict[str, Any]:
        """Returns our record of the step; the record of a plain Orbax step is empty."""
        content = _damage.read_file(self.folder / _STEP_FILE)
        try:
            metadata = json.loads(content)
            # Orbax names the handlers of the items in the metadata of every step, also
            # without a record of ours.
            metadata["item_handlers"].keys()
            plain = {"format": _FORMAT, "step": self.number}
            record = dict((metadata["custom_metadata"] or {}).get(_KEY, plain))
            format_ = int(record["format"])
            step = int(record["step"])
        except _MALFORMED as error:
            raise CorruptCheckpointError(f"{_STEP_FILE} is damaged") from error
        if format_ != _FORMAT:
            raise ValueError(
                f"checkpoint: {self} has format {format_}; expected {_FORMAT}. Update "
                "flax_amp, or read the step with the version that wrote it."
            )
        if step != self.number:
            raise CorruptCheckpointError(
                f"its files are the files of step {step}, and were renamed or copied"
            )
        return record if "optimizer" in record else {}


def steps_in(directory: epath.Path) -> list[Step]:
    """Returns the steps in a directory, the oldest first: the folders of a manager."""
    if not directory.is_dir():
        raise FileNotFoundError(
            f"checkpoint: {directory} is not a directory; expected a directory that a "
            "manager has saved to."
        )
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(Step(x.step, x.path) for x in found if x.path.is_dir())


def read_newest_intact(
    directory: epath.Path, read: Callable[[Step], T], wanted: Any, stacklevel: int
) -> T:
    """Returns the result of `read` for the newest intact step, or for step `wanted`.

    All processes must succeed. A warning names the damaged steps. The step that was
    read is added to `restored_steps`.
    """
    number = None
    if wanted is not None:
        number = check_count(wanted, f"checkpoint: step={wanted!r}", "of a step", 0)
    damaged: dict[Step, str] = {}
    steps = _candidates(directory, number)
    while step := next((step for step in steps if step not in damaged), None):
        try:
            verify_together(step)
            result = call_on_all_processes(read, step)
            break
        except CorruptCheckpointError as error:
            damaged[step] = f"step {step.number} is damaged: {error}"
        # While this process was reading, a writer may have removed the step for a newer
        # step. Several processes list the steps once, to agree on the same steps.
        if jax.process_count() == 1:
            steps = _candidates(directory, number)
    problems = [damaged[step] for step in steps if step in damaged]
    told = f"checkpoint: {directory}: {'; '.join(problems)}"
    if step is None:
        raise CorruptCheckpointError(
            f"{told}; expected a step as it was written. Restore another step, or "
            "these files from a backup."
        )
    restored_steps[directory].add(step.number)
    if problems:
        told = f"{told}. Restored step {step.number} instead."
        # The frame of this function comes before the frames that the caller counts.
        warnings.warn(told, CheckpointWarning, stacklevel=stacklevel + 1)
    return result


def _candidates(directory: epath.Path, number: int | None) -> list[Step]:
    """Returns the steps to try, the newest first, or the single step `number`."""
    steps = steps_in(directory)
    chosen = [step for step in steps if number in (None, step.number)]
    if not chosen:
        wanted = "a checkpoint" if number is None else f"step {number}"
        raise FileNotFoundError(
            f"checkpoint: {directory} holds the steps {[x.number for x in steps]}; "
            f"expected {wanted}. Save a checkpoint first, or choose one of these steps."
        )
    return chosen[::-1]


def call_on_all_processes(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns the result of `function`, or raises an error if some process fails.

    Every process makes this call with arguments of its own. The processes work alone
    and agree afterwards: with Orbax's barriers, they would wait forever for a process
    that failed.
    """
    if jax.process_count() == 1:
        return function(*args, **kwargs)
    error: Exception | None = None
    try:
        result = function(*args, **kwargs)
    except Exception as caught:  # All processes must hear of any error.
        error = caught
    # All processes raise the worst kind of error.
    kind = _kind_of(error)
    worst = int(multihost_utils.process_allgather(np.int32(kind)).max())
    if error is not None and kind == worst:
        raise error
    # The processes go on together or not at all.
    told = "checkpoint: another process failed; its own error says why"
    if worst == _DAMAGE:
        raise CorruptCheckpointError(told)
    if worst == _OTHER_ERROR:
        raise RuntimeError(told)
    return result


def _kind_of(error: Exception | None) -> int:
    if error is None:
        return _NO_ERROR
    return _DAMAGE if isinstance(error, CorruptCheckpointError) else _OTHER_ERROR


def verify_together(step: Step) -> None:
    """Checks the files of a step: no process goes on before all have checked."""
    part = slice(jax.process_index(), None, jax.process_count())
    call_on_all_processes(step.verify, part)
