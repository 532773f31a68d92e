"""Orbax's manager with defaults for training, one writer and errors that say more."""

import re
import shutil
import warnings
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp import _lock
from flax_amp._integrity import CheckpointWarning
from flax_amp._steps import known_damaged, reason_of

_DAMAGED = ".damaged"
_LEFTOVER = re.compile(r".*\.orbax-checkpoint-tmp.*")


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class Manager(ocp.CheckpointManager):
    """See `manager`.

    Attributes:
      best_metric: the one that its steps are kept by.
      tidy: whether nothing half-written can be in the directory.
    """

    best_metric: str | None = None
    _locked = False
    tidy = False

    def lock(self) -> None:
        """Makes this process the only one to save into the directory."""
        if jax.process_index() != 0:
            return
        try:
            self._locked = self._locked or _lock.acquire(self.directory)
        except OSError as error:
            raise save_error(self, error) from error
        if self._locked and not self.tidy:
            # Of runs that were killed, or out of space: nobody else is saving here.
            _remove_leftovers(self.directory)
            self.tidy = True

    def make_room(self, step: int) -> None:
        """Moves damaged steps out of the way of an older one, and says so.

        A run that went on from an older step would not be saved until it had passed
        them.
        """
        newer = {other for other in self.all_steps() if other >= step}
        if not newer or not newer <= known_damaged(self.directory):
            return
        self.wait_until_finished()
        self.lock()
        if jax.process_index() == 0:
            for other in newer:
                aside = self.directory / f"{other}{_DAMAGED}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / str(other)).rename(aside)
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
      ValueError: if `best_mode` is neither "max" nor "min".
    """
    if best_mode not in ("max", "min"):
        raise ValueError(
            f"checkpoint.manager: {best_mode=}; expected 'max' or 'min'. Say whether "
            "a larger or a smaller metric is better."
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
        manager.tidy = False
    return CheckpointSaveError(
        f"checkpoint.save: {manager.directory} could not be written: "
        f"{reason_of(error)}; expected a directory with room, which this process "
        f"may write to. The steps {sorted(manager.all_steps())} are as they were, and "
        "so is the state: mend the cause, and save it again."
    )


def _remove_leftovers(directory: epath.Path) -> None:
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
