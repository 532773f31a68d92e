"""Is what is on disk still what was saved?"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from flax_amp.checkpoint._integrity import (
    CorruptCheckpointError,
    IncompleteError,
    check_arrays,
)
from flax_amp.checkpoint._layout import Path
from flax_amp.checkpoint._sources import arrays_on_host
from flax_amp.checkpoint._steps import ITEM, describe, finish_saving, steps_in


class StepReport(NamedTuple):
    """What `verify` found out about a step.

    Attributes:
      step: its number.
      size: of its files, in bytes.
      problem: what is damaged; empty if nothing is.
      has_digests: whether its arrays could be held against digests. Checkpoints that
        plain Orbax calls wrote have none.
      scaler: the values of its loss scaler, as far as they could be read.
      half_deleted: whether its problem is that files are missing, while a newer step
        is intact. An interrupted removal of an old step leaves this.
    """

    step: int
    size: int
    problem: str
    has_digests: bool
    scaler: dict[str, float]
    half_deleted: bool = False


def verify(manager: Any) -> list[StepReport]:
    """Reads every step of a directory and holds it against its digests.

    The arrays are read one step at a time into the memory of the host. In a run of
    several processes, call it in one.

    Args:
      manager: from `flax_amp.checkpoint.manager`, any
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
      >>> report.problem, report.has_digests, report.scaler["scaler"]
      ('', True, 32768.0)
    """
    directory = finish_saving(manager)
    reports: dict[int, tuple[StepReport, bool]] = {}
    for _ in range(2):  # a run beside this process may save and remove some meanwhile
        for step in steps_in(directory):
            if step not in reports:
                reports[step] = _report(directory, step)
    there = steps_in(directory)
    newest = max(
        (s for s, (report, _) in reports.items() if not report.problem), default=-1
    )
    return [
        report._replace(half_deleted=incomplete and step < newest)
        for step, (report, incomplete) in sorted(reports.items())
        if step in there or not report.problem
    ]


def _report(directory: epath.Path, step: int) -> tuple[StepReport, bool]:
    """Returns the report of a step, and whether files of it are missing."""
    folder = directory / str(step)
    size = _size_of(folder)
    has_digests, scaler = False, {}
    try:
        tree, record = describe(directory, step)
        read = arrays_on_host(folder / ITEM, tree)
        scaler = _scaler_of(read)
        if record is not None:
            has_digests = True
            check_arrays(record, read)
    except (CorruptCheckpointError, OSError, ValueError) as error:
        report = StepReport(step, size, str(error), has_digests, scaler)
        return report, isinstance(error, IncompleteError)
    return StepReport(step, size, "", has_digests, scaler), False


def _scaler_of(read: Mapping[Path, np.ndarray]) -> dict[str, float]:
    """Returns the numbers among what was saved as a scaler, by whatever program."""
    found = {path[1]: x for path, x in sorted(read.items()) if path[:-1] == ("scaler",)}
    return {
        key: float(x) for key, x in found.items() if x.shape == () and x.dtype != str
    }


def _size_of(path: epath.Path) -> int:
    try:
        if os.path.islink(path):
            return 0
        if path.is_dir():
            return sum(map(_size_of, path.iterdir()))
        return path.stat().length
    except OSError:  # removed meanwhile
        return 0
