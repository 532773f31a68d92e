"""Orbax's manager with defaults for training, one writer and errors that say more."""

import itertools
import math
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp import _lock
from flax_amp._integrity import CheckpointWarning, reason_of
from flax_amp._steps import agreed, known_damaged

_DAMAGED = ".damaged"
_NAMES = {"step_prefix", "step_format_fixed_length", "step_name_format"}
_LEFTOVER = re.compile(r"(\d+)\.orbax-checkpoint-tmp")


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class Manager(ocp.CheckpointManager):
    """See `manager`.

    Attributes:
      best_metric: the one that its steps are kept by.
      interval: of the steps that are saved.
      mutex: held while a step is saved, for several threads.
    """

    best_metric: str | None = None
    interval = 1
    _locked = False
    _closed = False
    _saving: int | None = None
    _failed: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mutex = threading.RLock()
        super().__init__(*args, **kwargs)

    def begin(self, step: int) -> None:
        """Makes this process the only writer, and removes what is half-written.

        Raises:
          RuntimeError: if another process is the writer, or the manager is closed.
          CheckpointSaveError: if the directory cannot be written.
        """
        if self._closed:
            raise RuntimeError(
                f"checkpoint.save: the manager of {self.directory} is closed; expected "
                "an open one. Save inside of `with checkpoint.manager(...)`."
            )
        agreed(self._begin)
        self._saving = step

    def _begin(self) -> None:
        if jax.process_index() != 0:
            return
        if not self._locked:
            try:
                first = _lock.acquire(self.directory)
            except OSError as error:
                raise self.failure(error) from error
            self._locked = True
            if first:  # of runs that were killed: nobody else saves here with a lock
                _remove_leftovers(self.directory)
        if self._failed is not None:
            _remove_leftovers(self.directory, self._failed)
            self._failed = None

    def failure(self, error: Exception) -> CheckpointSaveError:
        """Notes that the last save failed, and returns the error that says so."""
        self._failed = self._saving
        # Orbax has taken the steps that were to be removed for removed already.
        self.reload()
        return save_error(self, error)

    def make_room(self, step: int, force: bool) -> None:
        """Moves damaged steps out of the way of an older one, and says so.

        A run that went on from an older step would not be saved until it had passed
        them.
        """
        if step % self.interval and not force:
            return
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
            stacklevel=4,
        )

    def wait_until_finished(self) -> None:
        try:
            super().wait_until_finished()
        except Exception as error:  # Orbax raises whatever its parts raise
            raise self.failure(error) from error

    def metrics(self, step: int) -> Any:
        try:
            return super().metrics(step)
        except Exception as error:  # whatever a damaged file makes of Orbax
            warnings.warn(
                f"checkpoint.manager: {self.directory}: the metrics of step {step} "
                f"cannot be read: {reason_of(error)}; it counts as the worst.",
                CheckpointWarning,
                stacklevel=2,
            )
            return None

    def close(self) -> None:
        self._closed = True
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
        best_fn=best_metric and _score(best_metric, best_mode),
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
    opened.interval = save_interval_steps
    return opened


def _score(name: str, mode: str) -> Callable[[Mapping[str, Any]], float]:
    """Returns what steps are ordered by: what is missing or NaN comes last."""
    worst = -math.inf if mode == "max" else math.inf

    def score(metrics: Mapping[str, Any]) -> float:
        value = float(metrics.get(name, worst))
        return worst if math.isnan(value) else value

    return score


def save_error(manager: ocp.CheckpointManager, error: Exception) -> CheckpointSaveError:
    """Returns the error for a save that failed, whatever Orbax raised."""
    return CheckpointSaveError(
        f"checkpoint.save: {manager.directory} could not be written: "
        f"{reason_of(error)}. The steps {sorted(manager.all_steps())} are as they "
        "were, and so is the state: mend the cause (room on the disk, permissions), "
        "and save it again."
    )


def _remove_leftovers(directory: epath.Path, step: int | None = None) -> None:
    """Removes half-written steps: all of them, or one."""
    for path in directory.iterdir():
        name = _LEFTOVER.fullmatch(path.name)
        if name and step in (None, int(name[1])):
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(step: epath.Path) -> None:
    """Renames a damaged step; what was set aside before stays."""
    names = itertools.chain([_DAMAGED], (f"{_DAMAGED}-{i}" for i in itertools.count(2)))
    free = (step.with_name(step.name + name) for name in names)
    step.rename(next(path for path in free if not path.exists()))
