"""A report on every step of a directory: is it still what was saved?"""

import argparse
import contextlib
import os
import sys
from typing import Any, NamedTuple

from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._checksums import files_of
from flax_amp.checkpoint._errors import CorruptCheckpointError, IncompleteError
from flax_amp.checkpoint._paths import finish_saving


class StepReport(NamedTuple):
    """What `verify` found out about a step.

    Attributes:
      step: the number of the step.
      size: the size of its files, in bytes.
      problem: what is damaged; the empty string if nothing is.
      has_checksums: whether its files were compared with checksums. Steps that plain
        Orbax wrote have none.
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

    Returns a report for each step, the oldest first. The arrays are read into the
    memory of the host, one step at a time. In a run of several processes, one of them
    should call this.

    Args:
      manager: any `orbax.checkpoint.CheckpointManager`, or the path of its directory.

    Raises:
      FileNotFoundError: if there is no such directory.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         _ = checkpoint.save(manager, state)
      ...     (report,) = checkpoint.verify(directory)
      >>> report.problem, report.has_checksums, report.scaler["scaler"]
      ('', True, 1.0)
    """
    directory = finish_saving(manager)
    reports: dict[_steps.Step, StepReport] = {}
    for _ in range(2):  # Another process may save and remove steps meanwhile.
        for step in _steps.steps_in(directory):
            if step not in reports:
                reports[step] = _report(step)
    there = _steps.steps_in(directory)
    newest = max((x.step for x in reports.values() if not x.problem), default=-1)
    return [
        report._replace(half_deleted=report.half_deleted and report.step < newest)
        for step, report in sorted(reports.items())
        if step in there or not report.problem
    ]


def _report(step: _steps.Step) -> StepReport:
    """Returns the report of a step, `half_deleted` if any of its files are missing."""
    size = 0
    with contextlib.suppress(OSError):  # Another process may remove the step meanwhile.
        for path in files_of(step.folder):
            size += 0 if os.path.islink(path) else path.stat().length
    report = StepReport(step.number, size, "", False, {})
    try:
        tree = step.verified_tree()
        read = _trees.read_on_host(step.folder / _steps.ITEM, tree)
    except (CorruptCheckpointError, OSError, ValueError) as error:
        is_incomplete = isinstance(error, IncompleteError)
        return report._replace(problem=str(error), half_deleted=is_incomplete)
    scaler = {
        key: float(read[path])
        for key, path in _trees.scaler_in(read).items()
        if read[path].shape == () and read[path].dtype.kind in "fiu"
    }
    return report._replace(has_checksums=step.has_checksums, scaler=scaler)


# The command `python -m flax_amp checkpoint`


def add_checkpoint(commands: Any) -> None:
    """Adds the command to the parsers of all commands."""
    command = commands.add_parser(
        "checkpoint", help="list steps, sizes, scaler values and integrity"
    )
    command.add_argument("directory", help="a directory, or gs://bucket/folder")
    command.set_defaults(run=_checkpoint)


def _checkpoint(args: argparse.Namespace) -> int:
    try:
        reports = verify(args.directory)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'step':>8} {'MB':>10} {'scale':>12}  integrity")
    for report in reports:
        scale = f"{report.scaler.get('scaler', 1):g}"
        size = f"{report.size / 1e6:.3f}"
        print(f"{report.step:8} {size:>10} {scale:>12}  {_state(report)}")
    if not reports:
        print(f"no steps in {args.directory}")
    return int(any(report.problem and not report.half_deleted for report in reports))


def _state(report: StepReport) -> str:
    if report.half_deleted:
        return "half deleted, a newer step is intact"
    if report.problem:
        return f"DAMAGED: {report.problem}"
    return "intact" if report.has_checksums else "readable, no checksums"
