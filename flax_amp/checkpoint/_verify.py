"""A report on every step of a directory: is it still what was saved?"""

import os
from typing import Any, NamedTuple

from etils import epath

from flax_amp.checkpoint._arrays import NumpyLeaves, read_on_host
from flax_amp.checkpoint._errors import (
    CorruptCheckpointError,
    IncompleteError,
    read_or_explain,
)
from flax_amp.checkpoint._steps import ITEM, describe, finish_saving, steps_in


class StepReport(NamedTuple):
    """What `verify` found out about a step.

    Attributes:
      step: the number of the step.
      size: the size of its files, in bytes.
      problem: what is damaged; the empty string if nothing is.
      has_checksums: whether its files were compared with checksums. Steps that plain
        Orbax or flax_amp 0.1 wrote have none.
      scaler: the values of its loss scaler, if they could be read.
      half_deleted: whether files are missing while a newer step is intact. A removal of
        an old step that was interrupted leaves this.
    """

    step: int
    size: int
    problem: str
    has_checksums: bool
    scaler: dict[str, float]
    half_deleted: bool = False


def verify(manager: Any) -> list[StepReport]:
    """Reads every step of a directory and compares its files with their checksums.

    The arrays are read into the memory of the host, one step at a time. In a run of
    several processes, one of them should call this.

    Args:
      manager: the result of `flax_amp.checkpoint.manager`, any
        `orbax.checkpoint.CheckpointManager`, or the path of its directory.

    Returns:
      A report for each step, the oldest first.

    Raises:
      FileNotFoundError: if there is no such directory.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         _ = checkpoint.save(manager, state)
      ...     (report,) = verify(directory)
      >>> report.problem, report.has_checksums, report.scaler["scaler"]
      ('', True, 1.0)
    """
    directory = finish_saving(manager)
    reports: dict[int, StepReport] = {}
    for _ in range(2):  # Another process may save and remove steps meanwhile.
        for step in steps_in(directory):
            if step not in reports:
                reports[step] = _report(directory, step)
    there = steps_in(directory)
    newest = max((s for s, report in reports.items() if not report.problem), default=-1)
    return [
        report._replace(half_deleted=report.half_deleted and step < newest)
        for step, report in sorted(reports.items())
        if step in there or not report.problem
    ]


def _report(directory: epath.Path, step: int) -> StepReport:
    """Returns the report of a step, `half_deleted` if any of its files are missing."""
    folder = directory / str(step)
    size = _size_of(folder)
    try:
        tree, has_checksums = describe(directory, step)
        read = read_or_explain(lambda: read_on_host(folder / ITEM, tree))
    except (CorruptCheckpointError, OSError, ValueError) as error:
        is_incomplete = isinstance(error, IncompleteError)
        return StepReport(step, size, str(error), False, {}, is_incomplete)
    return StepReport(step, size, "", has_checksums, _scaler_of(read))


def _scaler_of(read: NumpyLeaves) -> dict[str, float]:
    """Returns the numbers in the field `scaler`, whatever program saved it."""
    found = {path[1]: x for path, x in sorted(read.items()) if path[:-1] == ("scaler",)}
    return {
        key: float(x)
        for key, x in found.items()
        if x.shape == () and x.dtype.kind not in "OUSc"
    }


def _size_of(path: epath.Path) -> int:
    try:
        if os.path.islink(path):
            return 0
        if path.is_dir():
            return sum(map(_size_of, path.iterdir()))
        return path.stat().length
    except OSError:  # It was removed meanwhile.
        return 0
