"""Orbax's manager with defaults for training, one writer and checksums."""

import atexit
import contextlib
import dataclasses
import math
import re
import shutil
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp.checkpoint import _checksums, _lock, _steps
from flax_amp.checkpoint._errors import (
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
    reason_of,
)
from flax_amp.checkpoint._paths import directory_of, whole_number

_NAMES = {"step_prefix", "step_format_fixed_length", "step_name_format"}
_LEFTOVER = re.compile(rf"(0|[1-9][0-9]*){re.escape(_steps.HALF)}")

# CPython issue 113964: some versions start no thread once the last line has run. No
# save can be finished then, so `save` waits.
_STARTS_THREADS_AT_EXIT = not (3, 12) <= sys.version_info < (3, 12, 3)

# The managers that have saved something.
_open: weakref.WeakSet[ocp.CheckpointManager] = weakref.WeakSet()


class Manager(ocp.CheckpointManager):
    """See `manager`. It saves what is newer than all that is on disk, and only that."""

    _held: _lock.Lock | None = None
    _closed = False
    _saving: int | None = None
    _failed: int | None = None

    def __init__(
        self,
        directory: epath.Path,
        options: ocp.CheckpointManagerOptions,
        best_metric: str | None,
    ) -> None:
        self.best_metric, self.read_only = best_metric, options.read_only
        self._saved: set[int] = set()
        self._interval = options.save_interval_steps
        self._in_background = options.enable_async_checkpointing
        asked = options.async_options or ocp.AsyncOptions()
        self._then = asked.post_finalization_callback
        hook = dict(post_finalization_callback=self._before_commit)
        options = dataclasses.replace(
            options,
            enable_async_checkpointing=True,  # Orbax has this hook only then.
            async_options=dataclasses.replace(asked, **hook),
        )
        super().__init__(directory, options=options)

    def _before_commit(self) -> None:
        """Lists the checksums of the step that Orbax is about to commit.

        A kill between a commit and a list would leave a step that nothing can check.
        """
        half = self.directory / f"{self._saving}{_steps.HALF}"
        # Some remote directories have no half-written steps.
        _checksums.write(half if half.exists() else self.directory / str(self._saving))
        if self._then is not None:
            self._then()

    def save(self, step: int, *args: Any, force: bool = False, **how: Any) -> bool:
        if not self.is_wanted(step, force):
            return False
        with self._as_writer():
            if not self._is_newer(step):  # than what others have saved meanwhile
                return False
            self._set_damaged_aside(step)
            self._saving = step
            try:
                saved = super().save(step, *args, force=force, **how)
            except Exception as error:  # Orbax raises whatever its parts raise.
                raise self._failure(error) from error
            self._saved.add(step)
        _open.add(self)
        if not (self._in_background and _STARTS_THREADS_AT_EXIT):
            self.wait_until_finished()
        return bool(saved)

    def _not_older(self, step: int) -> list[int]:
        return [other for other in self.all_steps() if other >= step]

    def _is_newer(self, step: int) -> bool:
        """Whether no intact step is as new; a warning tells what may be a surprise."""
        damaged = _steps.found_damaged[self.directory]
        if not (there := {*self._not_older(step)} - damaged):
            return True
        # A run that saves its last state again, or resumes at its end, does no harm.
        known = self._saved | _steps.restored[self.directory]
        if (newest := max(there)) > step or step not in known:
            what = "newer than the state"
            if newest == step:
                what = "which this run neither saved nor restored"
            warnings.warn(
                f"checkpoint.save: {self.directory} holds step {newest}, {what}; it is "
                "kept, and the state is not saved. Save a new run, or one that goes on "
                "from an older step, into another directory.",
                CheckpointWarning,
                stacklevel=4,
            )
        return False

    def is_wanted(self, step: int, force: bool) -> bool:
        """Whether a step is due, and newer than what is known to be on disk."""
        if not self._is_newer(step):
            return False
        if self._not_older(step):  # They are damaged, and Orbax would save nothing.
            return force or step % self._interval == 0
        return force or bool(self.should_save(step))

    @contextlib.contextmanager
    def _as_writer(self) -> Iterator[None]:
        """Makes this process the only writer, and reads anew what is on disk."""
        if self._closed:
            raise RuntimeError(
                f"checkpoint.save: the manager of {self.directory} is closed; expected "
                "an open one. Save inside of `with checkpoint.manager(...)`."
            )
        lock = _steps.agreed(self._acquire)
        with lock.mutex:
            for manager in filter(None, (lock.last(), self)):
                manager.wait_until_finished()
            lock.last = weakref.ref(self)
            if self._failed is not None:
                _remove_leftovers(self.directory, self._failed)
                self._failed = None
            # A folder of a bucket is none before it holds something.
            there = _steps.steps_in(self.directory) if self.directory.exists() else []
            if [step.number for step in there] != sorted(self.all_steps()):
                self.reload()
            damaged = _steps.found_damaged[self.directory]
            for step in (x for x in there if x.number in damaged):
                with contextlib.suppress(CorruptCheckpointError):
                    step.verified_tree()
                    damaged.discard(step.number)  # Another run has saved it anew.
            yield

    def _acquire(self) -> _lock.Lock:
        if self._held is None:
            is_first = jax.process_index() == 0
            try:
                self._held = _lock.acquire(self.directory, lock=is_first)
            except OSError as error:
                raise self._failure(error) from error
            if self._held.is_new and self._held.is_locked:
                # Nobody else saves here: these are of runs that were killed.
                _remove_leftovers(self.directory)
            self._held.is_new = False
        return self._held

    def _set_damaged_aside(self, step: int) -> None:
        """Renames damaged steps that are not older than one, with a warning."""
        # Orbax would save nothing before them, and count them among those to keep. They
        # are not deleted: somebody may need them.
        # All processes know them before the first one renames them.
        if not (damaged := _steps.agreed(self._not_older, step)):
            return
        if jax.process_index() == 0:
            for other in damaged:
                name = f"{other}.damaged-{time.time_ns()}"
                (self.directory / str(other)).rename(self.directory / name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("flax_amp: damaged steps moved")
        _steps.found_damaged[self.directory].difference_update(damaged)
        self.reload()
        warnings.warn(
            f"checkpoint.save: {self.directory}: the damaged steps {damaged} are "
            f"renamed to <step>.damaged-<time>, to save step {step} of the run that "
            "went on from an older one.",
            CheckpointWarning,
            stacklevel=4,
        )

    def _failure(self, error: Exception) -> CheckpointSaveError:
        """Notes that the last save failed, and returns the error that says so."""
        if isinstance(error, CheckpointSaveError):
            return error
        self._failed = self._saving
        # Several writes of one save may fail. The save is reported as failed once.
        with contextlib.suppress(Exception):
            super().wait_until_finished()
        # Orbax has taken the steps that were to be removed for removed already.
        self.reload()
        return CheckpointSaveError(
            f"checkpoint.save: {self.directory} could not be written: "
            f"{reason_of(error)}. The steps {sorted(self.all_steps())} are as they "
            "were, and so is the state: mend the cause (disk space, permissions, "
            "connection), and save the state again."
        )

    def wait_until_finished(self) -> None:
        try:
            super().wait_until_finished()
        except Exception as error:  # Orbax raises whatever its parts raise.
            raise self._failure(error) from error

    def metrics(self, step: int) -> Any:
        try:
            return super().metrics(step)
        except Exception:  # A damaged file makes Orbax raise anything.
            return None  # which counts as the worst

    def close(self) -> None:
        self._closed = True
        try:
            super().close()
        except CheckpointSaveError:
            super().close()  # The first call closed nothing; the error comes once.
            raise
        finally:
            self._held = None  # Another process may save now.


def _remove_leftovers(directory: epath.Path, step: int | None = None) -> None:
    """Removes half-written steps: all of them, or one."""
    for path in directory.iterdir() if jax.process_index() == 0 else ():
        name = _LEFTOVER.fullmatch(path.name)
        if name and step in (None, int(name[1])):
            shutil.rmtree(path, ignore_errors=True)


def _finish() -> None:
    """Finishes the saves of a program that ends without closing its managers."""
    for manager in list(_open):
        try:
            manager.wait_until_finished()
        except Exception:  # Nobody is left to catch it, whatever it is.
            traceback.print_exc()


# Orbax saves with executors, which Python shuts down before it joins the threads that
# are left, and before it calls `atexit`: only this hook comes earlier.
getattr(threading, "_register_atexit", atexit.register)(_finish)


def manager(
    directory: Any,
    *,
    max_to_keep: int | None = 3,
    save_interval_steps: int = 1,
    best_metric: str | None = None,
    best_mode: str = "max",
    **options: Any,
) -> Manager:
    """Opens an `orbax.checkpoint.CheckpointManager` with defaults for training.

    The manager saves in the background, with a list of checksums. Use it as a context
    manager, which waits for the last save and closes it. A program that ends without
    closing it waits as well. Python 3.12.0 to 3.12.2 start no thread when a program
    ends: with them, every save waits until it is written.

    Args:
      directory: the folder of the steps. It may be relative, and is made if needed; or
        `gs://bucket/folder`, with `pip install '.[gcs]'` in a clone.
      max_to_keep: how many checkpoints to keep, at least 1; `None` keeps all.
      save_interval_steps: `save` saves the first step and multiples of this number.
      best_metric: the name of a metric that `save` gets. The checkpoints that are best
        by this metric are kept, and the newest one, to go on from.
      best_mode: "max" or "min", whichever is best.
      **options: further `orbax.checkpoint.CheckpointManagerOptions`.

    Raises:
      TypeError: if a number is no integer, or the directory no path.
      ValueError: if a number is less than 1, if an option changes the names of the
        steps or contradicts another, or if the path of the directory is empty, has
        brackets or is on storage that Orbax cannot save to.
      NotADirectoryError: if the directory is a file, or a link that leads nowhere.
      ImportError: if the directory is in a bucket and gcsfs is not installed.
    """
    where = "checkpoint.manager"
    interval = whole_number(save_interval_steps, f"{where}: save_interval_steps", 1)
    if max_to_keep is not None:
        max_to_keep = whole_number(max_to_keep, f"{where}: max_to_keep", 1)
    if named := sorted(options.keys() & _NAMES):
        raise ValueError(
            f"{where}: {', '.join(named)} given; expected steps under their "
            "plain numbers, by which restore and verify find them. Leave it out."
        )
    folder = directory_of(directory)
    if set("[]") & set(str(folder)):
        raise ValueError(
            f"{where}: the directory {str(folder)!r} has brackets in its path. Orbax "
            "takes them for a pattern and would save steps that cannot be read; "
            "expected a path without '[' and ']'. Rename the directory."
        )
    settings: dict[str, Any] = dict(
        max_to_keep=max_to_keep,
        save_interval_steps=interval,
        best_mode=best_mode,
        # If a save fails at once while its directory is created in the background, a
        # thread keeps the process from ending for five minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    settings |= options
    if best_metric is not None:
        settings["best_fn"] = key = _key_of_metric(best_metric, best_mode)
        policies, kept = ocp.checkpoint_managers, settings.pop("max_to_keep")
        best = policies.BestN(get_metric_fn=key, reverse=best_mode == "min", n=kept)
        settings["preservation_policy"] = policies.AnyPreservationPolicy(
            [policies.LatestN(1), best]
        )
    # Orbax would reject a relative path, but only at the first save.
    return Manager(folder, ocp.CheckpointManagerOptions(**settings), best_metric)


def _key_of_metric(name: str, mode: str) -> Callable[[Any], float]:
    """Returns the key that orders steps by a metric; a missing or NaN one is worst."""
    worst = -math.inf if mode == "max" else math.inf

    def key(metrics: Any) -> float:
        with contextlib.suppress(LookupError, TypeError, ValueError):
            return worst if math.isnan(metrics[name]) else float(metrics[name])
        return worst

    return key
