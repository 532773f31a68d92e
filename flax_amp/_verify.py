"""Is what is on disk still what was saved?"""

from typing import Any, NamedTuple

from etils import epath

from flax_amp._integrity import CorruptCheckpointError, check_arrays
from flax_amp._sources import arrays_on_host
from flax_amp._steps import ITEM, describe, finish_saving, steps_in


class StepReport(NamedTuple):
    """What `verify` found out about a step.

    Attributes:
      step: its number.
      size: of its files, in bytes.
      problem: what is damaged; empty if nothing is.
      has_digests: whether its arrays could be held against digests. Checkpoints that
        plain Orbax calls wrote have none.
      scaler: the values of its loss scaler, as far as they could be read.
    """

    step: int
    size: int
    problem: str
    has_digests: bool
    scaler: dict[str, float]


def verify(manager: Any) -> list[StepReport]:
    """Reads every step of a directory and holds it against its digests.

    The arrays are read one step at a time into the memory of the host. In a run of
    several processes, call it in one.

    Args:
      manager: from `flax_amp.checkpoint.manager`, any
        `orbax.checkpoint.CheckpointManager`, or the path of its directory.

    Returns:
      A report for each step, the oldest first.

    Raises:
      FileNotFoundError: if there is no such directory.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         _ = checkpoint.save(manager, state)
      ...     (report,) = verify(directory)
      >>> report.problem, report.has_digests, report.scaler["scaler"]
      ('', True, 32768.0)
    """
    directory = finish_saving(manager)
    return [_report(directory, step) for step in steps_in(directory)]


def _report(directory: epath.Path, step: int) -> StepReport:
    folder = directory / str(step)
    size = _size_of(folder)
    has_digests, scaler = False, {}
    try:
        tree, record = describe(directory, step)
        read = arrays_on_host(folder / ITEM, tree)
        scaler = {p[1]: float(x) for p, x in sorted(read.items()) if p[0] == "scaler"}
        if record is not None:
            has_digests = True
            check_arrays(record, read)
    except (CorruptCheckpointError, OSError, ValueError) as error:
        return StepReport(step, size, str(error), has_digests, scaler)
    return StepReport(step, size, "", has_digests, scaler)


def _size_of(path: epath.Path) -> int:
    if path.is_dir():
        return sum(map(_size_of, path.iterdir()))
    return path.stat().length
