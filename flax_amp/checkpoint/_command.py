"""`python -m flax_amp checkpoint`: what a directory of checkpoints holds."""

import argparse
import sys
from typing import Any

from flax_amp.checkpoint._report import StepReport, verify


def add_checkpoint(commands: Any) -> None:
    """Adds the command to the parsers of all commands."""
    command = commands.add_parser(
        "checkpoint", help="list steps, sizes, scaler values and integrity"
    )
    command.add_argument("directory", help="a directory, or gs://bucket/folder")
    command.set_defaults(run=_checkpoint)


def _checkpoint(args: argparse.Namespace) -> int:
    directory = args.directory
    try:
        reports = verify(directory)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'step':>8} {'MB':>10} {'scale':>12} {'resets':>7}  integrity")
    for report in reports:
        scale, resets = (
            f"{report.scaler[key]:g}" if key in report.scaler else "-"
            for key in ("scaler", "total_resets")
        )
        size = f"{report.size / 1e6:.3f}"
        print(f"{report.step:8} {size:>10} {scale:>12} {resets:>7}  {_state(report)}")
    if not reports:
        print(f"no steps in {directory}")
    return int(any(report.problem and not report.half_deleted for report in reports))


def _state(report: StepReport) -> str:
    if report.half_deleted:
        return "half deleted, a newer step is intact"
    if report.problem:
        return f"DAMAGED: {report.problem}"
    return "intact" if report.has_checksums else "readable, no checksums"
