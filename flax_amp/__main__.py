"""Commands of flax_amp, as `flax_amp COMMAND` or `python -m flax_amp COMMAND`.

`checkpoint DIR` lists what a directory of checkpoints holds. The exit code is 0 if
every step is intact, 1 if a step is damaged, and 2 if there is no such directory. An
old step that was half deleted when a run was killed is not damaged.

`explain MODULE:FUNCTION` tells what mixed precision does to a loss, and why.
`nonfinite` names what made an inf or a NaN. `compare` tells how far its gradients are
from those in float32, and what helps. `measure` times a step in float32, bfloat16 and
float16. `flax_amp explain --help` says what the function returns. The exit code is 0 if
there is nothing to act on, 1 if there is, and 2 if something fails.

`plot RUN` draws what a run has logged with `flax_amp.metrics.create_writer`: loss,
scale, skipped steps, gradient norm and learning rate. Several runs are compared. The
exit code is 0, or 2 if they cannot be drawn.
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
    # A run may hold the accelerator at the same time.
    parser.set_defaults(platforms="cpu")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    # Each adds parsers, whose `run` takes the arguments and returns the exit code.
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
