"""Orbax's manager with defaults for training, one writer and errors that say more."""

import itertools
import shutil
import warnings
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp import _lock
from flax_amp._integrity import CheckpointWarning, reason_of
from flax_amp._steps import known_damaged

_DAMAGED = ".damaged"
_NAMES = {"step_prefix", "step_format_fixed_length", "step_name_format"}
_LEFTOVER = "*.orbax-checkpoint-tmp*"


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class Manager(ocp.CheckpointManager):
    """See `manager`.

    Attributes:
      best_metric: the one that its steps are kept by.
      saving: the step of the last save that was begun.
    """

    best_metric: str | None = None
    saving: int | None = None
    _locked = False
    _failed: int | None = None

    def begin(self, step: int) -> None:
        """Makes this process the only writer, and removes what is half-written."""
        if jax.process_index() == 0:
            if not self._locked:
                try:
                    first = _lock.acquire(self.directory)
                except OSError as error:
                    raise save_error(self, error) from error
                self._locked = True
                if first:  # of runs that were killed: nobody else is saving here
                    _remove_leftovers(self.directory, _LEFTOVER)
            if self._failed is not None:
                _remove_leftovers(self.directory, f"{self._failed}{_LEFTOVER[1:]}")
                self._failed = None
        self.saving = step

    def failed(self) -> None:
        """Notes that the last save failed."""
        self._failed = self.saving

    def make_room(self, step: int) -> None:
        """Moves damaged steps out of the way of an older one, and says so.

        A run that went on from an older step would not be saved until it had passed
        them.
        """
        newer = {other for other in self.all_steps() if other >= step}
        if not newer or not newer <= known_damaged(self.directory):
            return
        self.wait_until_finished()
        self.begin(step)
        if jax.process_index() == 0:
            for other in newer:
                _set_aside(self.directory / str(other))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("flax_amp: damaged steps moved")
        known_damaged(self.directory).difference_update(newer)
        self.reload()
        warnings.warn(
            f"checkpoint.save: {self.directory}: the damaged steps {sorted(newer)} are "
            f"renamed to <step>{_DAMAGED}, to save step {step} of the run that went on "
            "from an older one.",
            CheckpointWarning,
            stacklevel=3,
        )

    def wait_until_finished(self) -> None:
        try:
            super().wait_until_finished()
        except Exception as error:  # Orbax raises whatever its parts raise
            raise save_error(self, error) from error

    def close(self) -> None:
        try:
            super().close()
        except CheckpointSaveError:
            super().close()  # raised before it had closed anything, and raises once
            raise
        finally:
            if self._locked:
                _lock.release(self.directory)
                self._locked = False


def manager(
    directory: Any,
    *,
    max_to_keep: int | None = 3,
    save_interval_steps: int = 1,
    best_metric: str | None = None,
    best_mode: str = "max",
    **options: Any,
) -> ocp.CheckpointManager:
    """Opens an `orbax.checkpoint.CheckpointManager` with defaults for training.

    It saves in the background. Use it as a context manager, which waits for the last
    save and closes it.

    Args:
      directory: where the steps are kept; may be relative, is made if it is absent.
      max_to_keep: how many checkpoints to keep; `None` keeps all.
      save_interval_steps: `save` does nothing for steps between; the first is saved.
      best_metric: keep the checkpoints that are best by this metric, not the newest;
        `save` then needs it among its metrics.
      best_mode: "max" or "min".
      **options: further `orbax.checkpoint.CheckpointManagerOptions`.

    Returns:
      The manager, with all of Orbax's own methods.

    Raises:
      ValueError: if `best_mode` is neither "max" nor "min", or if an option gives the
        steps other names than their numbers.
    """
    if best_mode not in ("max", "min"):
        raise ValueError(
            f"checkpoint.manager: {best_mode=}; expected 'max' or 'min'. Say whether "
            "a larger or a smaller metric is better."
        )
    if named := sorted(options.keys() & _NAMES):
        raise ValueError(
            f"checkpoint.manager: {', '.join(named)} given; expected steps under their "
            "plain numbers, by which restore and verify find them. Leave it out."
        )
    settings = dict(
        max_to_keep=max_to_keep,
        save_interval_steps=save_interval_steps,
        best_fn=None if best_metric is None else lambda metrics: metrics[best_metric],
        best_mode=best_mode,
        # Created in the background, a directory whose save fails at once leaves a
        # thread behind that keeps the process from ending for five minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    opened = Manager(
        # Orbax refuses a relative path, but only at the first save.
        epath.Path(directory).expanduser().resolve(),
        options=ocp.CheckpointManagerOptions(**(settings | options)),
    )
    opened.best_metric = best_metric
    return opened


def save_error(manager: ocp.CheckpointManager, error: Exception) -> CheckpointSaveError:
    """Returns the error for a save that failed, whatever Orbax raised."""
    if isinstance(manager, Manager):
        manager.failed()
    return CheckpointSaveError(
        f"checkpoint.save: {manager.directory} could not be written: "
        f"{reason_of(error)}; expected a directory with room, which this process "
        f"may write to. The steps {sorted(manager.all_steps())} are as they were, and "
        "so is the state: mend the cause, and save it again."
    )


def _remove_leftovers(directory: epath.Path, names: str) -> None:
    for path in directory.glob(names):
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(step: epath.Path) -> None:
    """Renames a damaged step; what was set aside before stays."""
    names = itertools.chain([_DAMAGED], (f"{_DAMAGED}-{i}" for i in itertools.count(2)))
    free = (step.with_name(step.name + name) for name in names)
    step.rename(next(path for path in free if not path.exists()))
