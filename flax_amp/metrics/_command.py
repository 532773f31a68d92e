"""`python -m flax_amp plot RUN`: a picture of what runs have logged."""

import argparse
import sys
from typing import Any

from flax_amp.metrics._plot import plot


def add_plot(commands: Any) -> None:
    """Adds the command to the subparsers of `python -m flax_amp`."""
    command = commands.add_parser("plot", help="draw what runs have logged")
    command.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    command.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf")
    command.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> int:
    try:
        print(f"wrote {plot(*args.runs, out=args.out)}")
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
