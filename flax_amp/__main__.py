"""`python -m flax_amp checkpoint DIR` lists what a directory of checkpoints holds.

The exit code is 0 if every step is intact, 1 if a step is damaged, and 2 if there is no
such directory. An old step that was half deleted when a run was killed is not damaged.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from flax_amp import checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m flax_amp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "checkpoint", help="list steps, sizes, scaler values and integrity"
    )
    command.add_argument("directory", help="the directory of a checkpoint manager")
    command.set_defaults(run=lambda args: _checkpoint(args.directory))
    args = parser.parse_args(arguments)
    return args.run(args)


def _checkpoint(directory: str) -> int:
    # A run may hold the accelerator at the same time.
    jax.config.update("jax_platforms", "cpu")
    try:
        reports = checkpoint.verify(directory)
    except FileNotFoundError as error:
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


def _state(report: checkpoint.StepReport) -> str:
    if report.half_deleted:
        return "half deleted, a newer step is intact"
    if report.problem:
        return f"DAMAGED: {report.problem}"
    return "intact" if report.has_checksums else "readable, no checksums"


if __name__ == "__main__":
    sys.exit(main())
