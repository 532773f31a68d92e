"""One job of the test of two jobs: opens managers and saves when it is told to.

Usage: python _job.py MARK. It reads lines such as `open DIRECTORY`, `save 3`, `end`,
and answers each with one: `True`, `False`, or the name of an error.
"""

import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from flax_amp import AmpTrainState, checkpoint  # noqa: E402


class Job:
    """A manager, and a run whose parameters are all the mark of the job."""

    def __init__(self, mark):
        params = {"w": jnp.full(2, float(mark))}
        self.state = AmpTrainState.create(params=params, tx=optax.sgd(0.1))

    def do(self, command, argument=""):
        """Does one thing; returns what `save` returned, or the name of its error."""
        try:
            if command == "open":
                self.manager = checkpoint.manager(argument, max_to_keep=None)
            elif command == "save":
                step = jnp.int32(argument)
                return str(checkpoint.save(self.manager, self.state.replace(step=step)))
            elif command == "wait":
                self.manager.wait_until_finished()
            else:
                self.manager.close()
        except (RuntimeError, ValueError) as error:
            return type(error).__name__
        return "True"


if __name__ == "__main__":
    warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
    job = Job(sys.argv[1])
    for line in sys.stdin:
        print(job.do(*line.split()), flush=True)
