"""A report on every step of a directory: is it still what was saved?"""

import contextlib
import os
from typing import Any, NamedTuple

from flax_amp.checkpoint._arrays import NumpyLeaves
from flax_amp.checkpoint._checksums import files_of
from flax_amp.checkpoint._errors import CorruptCheckpointError, IncompleteError
from flax_amp.checkpoint._steps import Step, finish_saving, steps_in


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
    reports: dict[Step, StepReport] = {}
    for _ in range(2):  # Another process may save and remove steps meanwhile.
        for step in steps_in(directory):
            if step not in reports:
                reports[step] = _report(step)
    there = steps_in(directory)
    newest = max((s.number for s, of in reports.items() if not of.problem), default=-1)
    return [
        report._replace(half_deleted=report.half_deleted and step.number < newest)
        for step, report in sorted(reports.items())
        if step in there or not report.problem
    ]


def _report(step: Step) -> StepReport:
    """Returns the report of a step, `half_deleted` if any of its files are missing."""
    report = StepReport(step.number, _size_of(step), "", False, {})
    try:
        scaler = _scaler_of(step.arrays())
    except (CorruptCheckpointError, OSError, ValueError) as error:
        is_incomplete = isinstance(error, IncompleteError)
        return report._replace(problem=str(error), half_deleted=is_incomplete)
    return report._replace(has_checksums=step.has_checksums, scaler=scaler)


def _scaler_of(read: NumpyLeaves) -> dict[str, float]:
    """Returns the numbers in the field `scaler`, whatever program saved it."""
    found = {path[1]: x for path, x in sorted(read.items()) if path[:-1] == ("scaler",)}
    return {
        key: float(x)
        for key, x in found.items()
        if x.shape == () and x.dtype.kind not in "OUSc"
    }


def _size_of(step: Step) -> int:
    size = 0
    with contextlib.suppress(OSError):  # Another process may remove the step meanwhile.
        for path in files_of(step.folder):
            size += 0 if os.path.islink(path) else path.stat().length
    return size
