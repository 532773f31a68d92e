"""Commands of flax_amp, as `flax_amp COMMAND` or `python -m flax_amp COMMAND`.

The exit code is 0 if there is nothing to act on, 1 if there is (a damaged step, a
problem, an inf or a NaN, an error that is too large), and 2 if something fails.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

import flax_amp
from flax_amp.checkpoint._report import add_checkpoint
from flax_amp.debug._command import add_commands
from flax_amp.metrics._plot import add_plot


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="flax_amp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"flax_amp {flax_amp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    # The commands run on the CPU, because a training run may hold the accelerator.
    parser.set_defaults(platforms="cpu")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    # Each function adds parsers. The `run` of a parser takes the arguments and returns
    # the exit code.
    for add in (add_checkpoint, add_commands, add_plot):
        add(commands)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the usage of the command
        words = " ".join(unknown)
        commands.choices[args.command].error(f"unrecognized arguments: {words}")
    if args.platforms:
        jax.config.update("jax_platforms", args.platforms)
    try:
        return args.run(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
