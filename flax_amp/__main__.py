"""Commands of flax_amp.

`python -m flax_amp checkpoint DIR` lists what a directory of checkpoints holds. The
exit code is 0 if every step is intact, 1 if a step is damaged, and 2 if there is no
such directory. An old step that was half deleted when a run was killed is not damaged.

`python -m flax_amp explain MODULE:FUNCTION` tells what mixed precision does to a loss,
and why. The function takes nothing and returns `(loss_fn, args)`, or `(state, loss_fn,
batch)` for a training state; the arguments may be abstract. Without a name, it is
`to_explain`; the module may be a path: `examples/digits`. The exit code is 0 if there
is no problem, 1 if there is one, and 2 if it cannot be explained.

`python -m flax_amp measure MODULE:FUNCTION` compiles and runs a step in float32,
bfloat16 and float16 on the device that is here, and prints what each takes. The
function is as for `explain`; if its arguments are abstract, nothing is run. The exit
code is 0, or 2 if something fails.

`python -m flax_amp plot RUN` draws what a run has logged with
`flax_amp.metrics.create_writer`: loss, scale, skipped steps, gradient norm and learning
rate. Several runs are compared. The exit code is 0, or 2 if they cannot be drawn.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

import flax_amp
from flax_amp.checkpoint._command import add_checkpoint
from flax_amp.debug._command import add_explain, add_measure
from flax_amp.metrics._command import add_plot

# Each adds its parser, whose `run` takes the arguments and returns the exit code.
COMMANDS = (add_checkpoint, add_explain, add_measure, add_plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flax_amp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"flax_amp {flax_amp.__version__}"
    parser.add_argument("--version", action="version", version=version)
    # A run may hold the accelerator at the same time.
    parser.set_defaults(platforms="cpu")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(arguments)
    if args.platforms:
        jax.config.update("jax_platforms", args.platforms)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
