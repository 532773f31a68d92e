"""Orbax's manager with defaults for training, one writer and checksums."""

import atexit
import contextlib
import math
import re
import shutil
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp._checks import check_count
from flax_amp.checkpoint import _damage, _directory, _steps
from flax_amp.checkpoint._damage import (
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
    reason_of,
)
from flax_amp.checkpoint._directory import directory_of

# The options that this manager sets itself.
_OWN = {"step_prefix", "step_format_fixed_length", "step_name_format"}
_OWN |= {"async_options", "enable_async_checkpointing"}
_LEFTOVER = re.compile(rf"(0|[1-9][0-9]*){re.escape(_steps.HALF)}")

# CPython issue 113964: after the last line of a program, some versions start no thread.
# No save can be finished then, so `save` waits in these versions.
_STARTS_THREADS_AT_EXIT = not (3, 12) <= sys.version_info < (3, 12, 3)

# The managers that have saved something.
_open: weakref.WeakSet[ocp.CheckpointManager] = weakref.WeakSet()


class Manager(ocp.CheckpointManager):
    """The result of `manager`: saves a state newer than every intact step on disk."""

    _held: _directory.Lock | None = None
    _closed = False
    _saving: int | None = None

    def __init__(
        self,
        directory: epath.Path,
        options: ocp.CheckpointManagerOptions,
        best_metric: str | None,
    ) -> None:
        self.best_metric = best_metric
        self.read_only = options.read_only
        self._saved: set[int] = set()
        self._interval = options.save_interval_steps
        # Orbax calls `post_finalization_callback` only in an asynchronous save.
        options.enable_async_checkpointing = True
        options.async_options = ocp.AsyncOptions(
            # If a save fails at once while its directory is created in the background,
            # a thread keeps the process from ending for five minutes.
            create_directories_asynchronously=False,
            post_finalization_callback=self._before_commit,
        )
        super().__init__(directory, options=options)

    def _before_commit(self) -> None:
        """Lists the checksums of the step that Orbax is about to commit.

        A kill between a commit and a list would leave a step that nothing can check.
        """
        folder = self.directory / f"{self._saving}{_steps.HALF}"
        # Some remote directories have no half-written steps.
        if not folder.exists():
            folder = self.directory / str(self._saving)
        _damage.write(folder)

    def is_due(self, step: int, force: bool) -> bool:
        """Whether a step is to be saved, provided that no intact step is as new."""
        # Orbax would save no step before these steps, which may be damaged.
        if self._steps_not_older_than(step):
            return force or step % self._interval == 0
        return force or bool(self.should_save(step))

    def save(self, step: int, *args: Any, force: bool = False, **how: Any) -> bool:
        if not self.is_due(step, force):
            return False
        with self._as_writer():
            if not self._is_newest(step):
                return False
            self._saving = step
            try:
                saved = super().save(step, *args, force=force, **how)
            except Exception as error:  # Orbax raises any error of its parts.
                raise self._failure(error) from error
            self._saved.add(step)
        _open.add(self)
        if not _STARTS_THREADS_AT_EXIT:
            self.wait_until_finished()
        return bool(saved)

    @contextlib.contextmanager
    def _as_writer(self) -> Iterator[None]:
        """Makes this process the only writer, and lists the steps on disk again."""
        if self._closed:
            raise RuntimeError(
                f"checkpoint.save: the manager of {self.directory} is closed; expected "
                "an open manager. Save inside of `with checkpoint.manager(...)`."
            )
        try:
            lock = self._held = _steps.call_on_all_processes(
                _directory.acquire,
                self.directory,
                lock_file=jax.process_index() == 0,
            )
        except OSError as error:
            raise self._failure(error) from error
        with lock.mutex:
            for manager in filter(None, (lock.last(), self)):
                manager.wait_until_finished()
            lock.last = weakref.ref(self)
            # No process saves here now: half-written steps are from failed saves.
            if lock.is_locked:
                _remove_leftovers(self.directory)
            self.reload()
            yield

    def _steps_not_older_than(self, step: int) -> list[int]:
        return [other for other in self.all_steps() if other >= step]

    def _is_newest(self, step: int) -> bool:
        """Whether no intact step is as new; then renames damaged steps that are as new.

        A warning tells of an intact step that is as new, or of the renamed steps.
        """
        others = self._steps_not_older_than(step)[::-1]
        newest = next(filter(self._is_intact, others), None)
        if newest is not None:
            self._tell_of_newer(step, newest)
        elif others:
            self._set_aside(others, step)
        return newest is None

    def _set_aside(self, damaged: list[int], step: int) -> None:
        # Orbax would save no step before the damaged steps, and would count the damaged
        # steps among the steps to keep. They are not deleted: somebody may need them.
        if jax.process_index() == 0:
            for other in damaged:
                name = f"{other}.damaged-{time.time_ns()}"
                (self.directory / str(other)).rename(self.directory / name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("flax_amp: damaged steps moved")
        self.reload()
        self._warn(
            f"the damaged steps {sorted(damaged)} are renamed to <step>.damaged-<time>"
            f", to save step {step} of the run that went on from an older step."
        )

    def _is_intact(self, number: int) -> bool:
        step = _steps.Step(number, self.directory / str(number))
        try:
            _steps.verify_together(step)
            _steps.call_on_all_processes(step.tree)
        except CorruptCheckpointError:
            return False
        # The step holds another item, or another version of flax_amp wrote the step.
        except ValueError:
            pass
        return True

    def _tell_of_newer(self, step: int, newest: int) -> None:
        relation = "newer than the state"
        if newest == step:
            # A run that saves its last state again, or ends where it began, is fine.
            if step in self._saved | _steps.restored_steps[self.directory]:
                return
            relation = "which this run neither saved nor restored"
        self._warn(
            f"the directory holds step {newest}, {relation}; this step stays, and the "
            "state is not saved. Save a new run, or a run that goes on from an older "
            "step, into another directory."
        )

    def _warn(self, text: str) -> None:
        told = f"checkpoint.save: {self.directory}: {text}"
        # The line that calls `checkpoint.save`: its frame is the sixth, after `_warn`,
        # `_set_aside` or `_tell_of_newer`, `_is_newest`, `Manager.save` and `save`.
        warnings.warn(told, CheckpointWarning, stacklevel=6)

    def _failure(self, error: Exception) -> CheckpointSaveError:
        """Returns the error that reports the failure of the last save."""
        if isinstance(error, CheckpointSaveError):
            return error  # `wait_until_finished` has made this error.
        # Several writes of a save may fail.
        with contextlib.suppress(Exception):
            super().wait_until_finished()
        # Orbax already counts the steps that were to be removed as removed steps.
        self.reload()
        return CheckpointSaveError(
            f"checkpoint.save: {self.directory} could not be written: "
            f"{reason_of(error)}. The steps {sorted(self.all_steps())} are as they "
            "were, and so is the state: correct the cause (disk space, permissions, "
            "connection), and save the state again."
        )

    def wait_until_finished(self) -> None:
        try:
            super().wait_until_finished()
        except Exception as error:  # Orbax raises any error of its parts.
            raise self._failure(error) from error

    def metrics(self, step: int) -> Any:
        try:
            return {str(k): float(x) for k, x in super().metrics(step).items()}
        except Exception:  # A damaged file makes Orbax raise errors of any kind.
            return None  # A step without metrics counts as the worst.

    def close(self) -> None:
        self._closed = True
        try:
            super().close()
        except CheckpointSaveError:
            super().close()  # The first call closed nothing; the error comes only once.
            raise
        finally:
            self._held = None  # Another process may save now.


def _remove_leftovers(directory: epath.Path) -> None:
    """Removes half-written steps."""
    if jax.process_index() != 0:
        return
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _finish() -> None:
    """Finishes the saves of a program that ends without closing its managers."""
    for manager in list(_open):
        try:
            manager.wait_until_finished()
        except Exception:  # Nobody is left to catch an error, of any kind.
            traceback.print_exc()


# Orbax saves with executors. Python shuts executors down before joining the remaining
# threads, and before calling the hooks of `atexit`: only this hook comes earlier.
getattr(threading, "_register_atexit", atexit.register)(_finish)


def manager(
    directory: Any,
    *,
    # The exact number does not matter, if it is above 1: `restore` reads an older step
    # if the newest step is damaged.
    max_to_keep: int | None = 3,
    save_interval_steps: int = 1,
    best_metric: str | None = None,
    best_mode: str = "max",
    **options: Any,
) -> Manager:
    """Opens an `orbax.checkpoint.CheckpointManager` with defaults for training.

    The manager saves in the background, with a list of checksums. Use the manager in a
    `with` statement: at its end, the manager waits for the last save and is closed. A
    program that ends without closing the manager waits for the last save as well.

    Args:
      directory: the folder of the steps. The path may be relative, and the folder is
        made if needed. A folder in a bucket is `gs://bucket/folder`, which takes
        `pip install '.[gcs]'` in a clone.
      max_to_keep: how many checkpoints to keep, at least 1; `None` keeps all.
      save_interval_steps: `save` saves the first step and multiples of this number.
      best_metric: the name of a metric that `save` gets. The `max_to_keep` checkpoints
        that are best by this metric stay. The newest checkpoint stays as well, so that
        a run can go on from there.
      best_mode: "max" if the largest value of the metric is the best, or "min".
      **options: further `orbax.checkpoint.CheckpointManagerOptions`.

    Raises:
      TypeError: if the directory is no path.
      ValueError: if an option is out of range or contradicts another, or if Orbax
        cannot save to the directory.
      NotADirectoryError: if the directory is a file, or a link that leads nowhere.
      ImportError: if the directory is in a bucket and gcsfs is not installed.
    """
    where = "checkpoint.manager"
    interval = check_count(
        save_interval_steps, f"{where}: {save_interval_steps=}", "of steps"
    )
    if max_to_keep is not None:
        seen = f"{where}: {max_to_keep=}"
        max_to_keep = check_count(max_to_keep, seen, "of checkpoints")
    if named := sorted(options.keys() & _OWN):
        raise ValueError(
            f"{where}: {', '.join(named)} given; expected steps under their plain "
            "numbers, saved by threads of this manager. Leave these options out."
        )
    folder = directory_of(directory)
    if set("[]") & set(str(folder)):
        told = f"{where}: {folder} has brackets in its path, which Orbax takes for a "
        raise ValueError(f"{told}pattern. Rename the directory.")
    settings: dict[str, Any] = dict(
        max_to_keep=max_to_keep,
        save_interval_steps=interval,
        best_mode=best_mode,
        **options,
    )
    if best_metric is not None:
        worst = -math.inf if best_mode == "max" else math.inf

        def key(metrics: Any) -> float:
            value = metrics.get(best_metric, math.nan)
            return worst if math.isnan(value) else value

        best = ocp.checkpoint_managers.BestN(
            get_metric_fn=key,
            reverse=best_mode == "min",
            n=settings.pop("max_to_keep"),
            keep_checkpoints_without_metrics=False,
        )
        newest = ocp.checkpoint_managers.LatestN(1)
        both = ocp.checkpoint_managers.AnyPreservationPolicy([newest, best])
        settings |= dict(best_fn=key, preservation_policy=both)
    # `folder` is absolute: Orbax would reject a relative path, but only in a save.
    return Manager(folder, ocp.CheckpointManagerOptions(**settings), best_metric)
