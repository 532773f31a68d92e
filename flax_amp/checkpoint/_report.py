"""A report on every step of a directory: whether its files are as they were saved."""

import argparse
from typing import Any, NamedTuple

from flax_amp.checkpoint import _steps
from flax_amp.checkpoint._damage import CorruptCheckpointError, IncompleteError
from flax_amp.checkpoint._directory import finish_saving


class StepReport(NamedTuple):
    """The result of `verify` for a step.

    Attributes:
      step: the number of the step.
      problem: a description of the damage; the empty string for an intact step.
      has_checksums: whether the step is intact and has checksums. Steps of plain Orbax
        have no checksums.
      half_deleted: whether files are missing while a newer step is intact: the removal
        of the step was interrupted.
    """

    step: int
    problem: str
    has_checksums: bool
    half_deleted: bool = False


def verify(manager: Any) -> list[StepReport]:
    """Reads every step of a directory and compares its files with their checksums.

    Returns a report for each step, the oldest first. The arrays are read into the
    memory of the host. In a run of several processes, a single process should call
    `verify`.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         _ = checkpoint.save(manager, state)
      ...     (report,) = checkpoint.verify(directory)
      >>> report.problem, report.has_checksums
      ('', True)
    """
    directory = finish_saving(manager)
    reports = [(step, _report(step)) for step in _steps.steps_in(directory)]
    newest = max((x.step for _, x in reports if not x.problem), default=-1)
    return [
        report._replace(half_deleted=report.half_deleted and report.step < newest)
        for step, report in reports
        # Another process may have removed a step meanwhile.
        if not report.problem or step.folder.exists()
    ]


def _report(step: _steps.Step) -> StepReport:
    """Returns the report of a step, `half_deleted` if any of its files are missing."""
    try:
        step.verify()
        step.read(step.tree(), {})
    except (CorruptCheckpointError, OSError, ValueError) as error:
        is_incomplete = isinstance(error, IncompleteError)
        return StepReport(step.number, str(error), False, is_incomplete)
    return StepReport(step.number, "", step.has_checksums)


def add_checkpoint(commands: Any) -> None:
    """Adds the command `checkpoint` to the parsers of `python -m flax_amp`."""
    command = commands.add_parser("checkpoint", help="list steps and their integrity")
    command.add_argument("directory", help="a directory, or gs://bucket/folder")
    command.set_defaults(run=_checkpoint)


def _checkpoint(args: argparse.Namespace) -> int:
    reports = verify(args.directory)
    print(f"{'step':>8}  integrity")
    for report in reports:
        state = "intact" if report.has_checksums else "readable, no checksums"
        if report.problem:
            state = f"DAMAGED: {report.problem}"
        if report.half_deleted:
            state = "half deleted, a newer step is intact"
        print(f"{report.step:8}  {state}")
    if not reports:
        print(f"no steps in {args.directory}")
    return int(any(report.problem and not report.half_deleted for report in reports))
