"""One process of a disturbed run.

Usage: python -m benchmarks.faults.worker TASK DIRECTORY WIDTH STEPS

It says on its standard output what it is about to do, a line of JSON for each thing,
so that the process that started it knows when to strike.
"""

import contextlib
import pathlib
import sys
import warnings

from benchmarks.faults.training import fingerprint, new_state, train
from benchmarks.process import say, work
from flax_amp import AmpTrainState, checkpoint


def resume(directory: str, state: AmpTrainState) -> AmpTrainState:
    """Goes on from the newest checkpoint, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        state = checkpoint.restore(directory, state)
    say(restored=int(state.step), fingerprint=fingerprint(state))
    return state


def run(directory: str, state: AmpTrainState, steps: int) -> None:
    """Saves every step, until it is killed or has done them all."""
    state = resume(directory, state)
    with checkpoint.manager(directory) as manager:

        def save(state: AmpTrainState) -> None:
            say(saving=int(state.step))
            checkpoint.save(manager, state)

        state = train(state, steps, save)
    say(done=int(state.step), fingerprint=fingerprint(state))


def hold(directory: str, state: AmpTrainState, steps: int) -> None:
    """Saves one more step and keeps the directory to itself until it is told to end."""
    state = resume(directory, state)
    with checkpoint.manager(directory) as manager:
        state = train(state, int(state.step) + 1)
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        say(holding=int(state.step))
        sys.stdin.readline()
        state = train(state, steps)
        checkpoint.save(manager, state)
    say(done=int(state.step), fingerprint=fingerprint(state))


def fill(directory: str, state: AmpTrainState, steps: int) -> None:
    """Saves every step until the disk is full; makes room and goes on."""
    ballast = pathlib.Path(directory) / "ballast"
    state = resume(directory, state)
    with checkpoint.manager(directory, max_to_keep=None) as manager:
        try:
            while True:
                state = train(state, int(state.step) + 1)
                checkpoint.save(manager, state)
                manager.wait_until_finished()
        except checkpoint.CheckpointSaveError as error:
            say(told=str(error), full_at=int(state.step), kept=manager.all_steps())
        intact = [not report.problem for report in checkpoint.verify(manager)]
        ballast.unlink()
        say(intact=all(intact), saved=checkpoint.save(manager, state))
        state = train(state, steps)
        checkpoint.save(manager, state)
    state = checkpoint.restore(directory, state)  # nobody else sees this disk
    say(done=int(state.step), fingerprint=fingerprint(state))


def read_only(directory: str, state: AmpTrainState, steps: int) -> None:
    """Restores from a directory that cannot be written, and tries to save there."""
    state = resume(directory, state)
    state = train(state, steps)
    try:
        with checkpoint.manager(directory) as manager:
            checkpoint.save(manager, state)
    except checkpoint.CheckpointSaveError as error:
        say(told=str(error))
    say(done=int(state.step), fingerprint=fingerprint(state))


def main(task: str, directory: str, width: str, steps: str) -> None:
    warnings.simplefilter("error", checkpoint.CheckpointWarning)
    tasks = {"run": run, "hold": hold, "fill": fill, "read_only": read_only}
    work(lambda: tasks[task](directory, new_state(int(width)), int(steps)))


if __name__ == "__main__":
    main(*sys.argv[1:])
