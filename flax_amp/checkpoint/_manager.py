"""Orbax's manager with defaults for training, one writer and checksums."""

import atexit
import contextlib
import dataclasses
import itertools
import math
import re
import shutil
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from flax_amp.checkpoint import _checksums, _lock
from flax_amp.checkpoint._errors import (
    CheckpointSaveError,
    CheckpointWarning,
    reason_of,
)
from flax_amp.checkpoint._steps import (
    HALF,
    agreed,
    directory_of,
    found_damaged,
    whole_number,
)

_DAMAGED = ".damaged"
_NAMES = {"step_prefix", "step_format_fixed_length", "step_name_format"}
_LEFTOVER = re.compile(rf"(0|[1-9][0-9]*){re.escape(HALF)}")

# CPython issue 113964: some versions start no thread once the last line has run. No
# save can be finished then, so `save` waits.
_STARTS_THREADS_AT_EXIT = not (3, 12) <= sys.version_info < (3, 12, 3)

# The managers that have saved something.
_open: weakref.WeakSet[ocp.CheckpointManager] = weakref.WeakSet()


class Manager(ocp.CheckpointManager):
    """See `manager`.

    Attributes:
      best_metric: the metric that decides which steps are kept.
      mutex: held while a step is saved, for several threads.
    """

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
        self.best_metric = best_metric
        self.mutex = threading.RLock()
        self._interval = options.save_interval_steps
        self._in_background = options.enable_async_checkpointing
        asked = options.async_options or ocp.AsyncOptions()
        self._then = asked.post_finalization_callback
        # Orbax has a hook before the commit only where it saves in the background.
        options = dataclasses.replace(
            options,
            enable_async_checkpointing=True,
            async_options=dataclasses.replace(
                asked, post_finalization_callback=self._before_commit
            ),
        )
        super().__init__(directory, options=options)

    def _before_commit(self) -> None:
        """Lists the checksums of the step that Orbax is about to commit.

        A kill between a commit and a list would leave a step that nothing can check.
        """
        half = self.directory / f"{self._saving}{HALF}"
        # Some remote directories have no half-written steps.
        _checksums.write(half if half.exists() else self.directory / str(self._saving))
        if self._then is not None:
            self._then()

    def save(self, step: int, *args: Any, **how: Any) -> bool:
        if how.get("force") or self.should_save(step):
            self.wait_until_finished()
            self._saving = step
        saved: bool = super().save(step, *args, **how)
        if not self._in_background:
            self.wait_until_finished()
        finish_at_exit(self)
        return saved

    def begin(self) -> None:
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

    def _begin(self) -> None:
        if jax.process_index() != 0:
            return
        if self._held is None:
            try:
                self._held, is_first = _lock.acquire(self.directory)
            except OSError as error:
                raise self.failure(error) from error
            if is_first:  # Nobody else saves here: these are of runs that were killed.
                _remove_leftovers(self.directory)
        if self._failed is not None:
            _remove_leftovers(self.directory, self._failed)
            self._failed = None

    def failure(self, error: Exception) -> CheckpointSaveError:
        """Notes that the last save failed, and returns the error that says so."""
        self._failed = self._saving
        # Several writes of one save may fail. The save is reported as failed once.
        with contextlib.suppress(Exception):
            super().wait_until_finished()
        # Orbax has taken the steps that were to be removed for removed already.
        self.reload()
        return save_error(self, error)

    def make_room(self, step: int, force: bool) -> None:
        """Renames damaged steps that are newer than this one, with a warning.

        Orbax would save nothing of a run that went on from an older step until the run
        had passed the damaged steps. They are not deleted: somebody may need them.
        """
        if step % self._interval and not force:
            return
        newer = {other for other in self.all_steps() if other >= step}
        if not newer or not newer <= found_damaged[self.directory]:
            return
        self.wait_until_finished()
        self.begin()
        if jax.process_index() == 0:
            for other in newer:
                _set_aside(self.directory / str(other))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("flax_amp: damaged steps moved")
        found_damaged[self.directory].difference_update(newer)
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
        except Exception as error:  # Orbax raises whatever its parts raise.
            raise self.failure(error) from error

    def metrics(self, step: int) -> Any:
        try:
            return super().metrics(step)
        except Exception as error:  # A damaged file makes Orbax raise anything.
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
            super().close()  # The first call closed nothing; the error comes once.
            raise
        finally:
            self._held = None  # Another process may save now.


def finish_at_exit(manager: ocp.CheckpointManager) -> None:
    """Finishes the last save of a manager before the program ends.

    It does so at once where Python starts no threads at exit.
    """
    if _STARTS_THREADS_AT_EXIT:
        _open.add(manager)
    else:
        manager.wait_until_finished()


def _finish() -> None:
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
    best_mode: str | None = None,
    **options: Any,
) -> ocp.CheckpointManager:
    """Opens an `orbax.checkpoint.CheckpointManager` with defaults for training.

    The manager saves in the background. Use it as a context manager, which waits for
    the last save and closes it. A program that ends without closing it waits as well;
    one that is killed does not. Python 3.12.0 to 3.12.2 start no thread when a program
    ends: with them, every save waits until it is written.

    Args:
      directory: the folder of the steps. It may be relative, and is made if needed; or
        `gs://bucket/folder`, with `pip install '.[gcs]'` in a clone.
      max_to_keep: how many checkpoints to keep, at least 1; `None` keeps all.
      save_interval_steps: `save` saves the first step and multiples of this number.
      best_metric: the name of a metric that `save` gets. The checkpoints that are best
        by this metric are kept, and the newest one, to go on from.
      best_mode: "max" (the default) or "min", with `best_metric` only.
      **options: further `orbax.checkpoint.CheckpointManagerOptions`.

    Returns:
      The manager, with all of Orbax's own methods. A list of checksums is written with
      every state that it saves.

    Raises:
      TypeError: if an argument has a wrong type.
      ValueError: if `best_mode` is neither "max" nor "min" or has no `best_metric`, if
        a number is less than 1, if an option changes the names of the steps, or if the
        path of the directory has brackets or is on storage that Orbax cannot save to.
      ImportError: if the directory is in a bucket and gcsfs is not installed.
    """
    where = "checkpoint.manager"
    interval = whole_number(save_interval_steps, f"{where}: save_interval_steps", 1)
    if max_to_keep is not None:
        max_to_keep = whole_number(max_to_keep, f"{where}: max_to_keep", 1)
    if not isinstance(best_metric, str | None):
        raise TypeError(
            f"{where}: {best_metric=}; expected the name of one of the metrics that "
            "are saved with a state."
        )
    if best_mode not in ("max", "min", None):
        raise ValueError(
            f"{where}: {best_mode=}; expected 'max' or 'min'. Say whether a larger or "
            "a smaller metric is better."
        )
    if best_mode and best_metric is None and "best_fn" not in options:
        raise ValueError(
            f"{where}: {best_mode=} was given without best_metric; expected the name "
            "of the metric that it is about. Pass best_metric, or leave best_mode out."
        )
    best_mode = best_mode or "max"
    if named := sorted(options.keys() & _NAMES):
        raise ValueError(
            f"checkpoint.manager: {', '.join(named)} given; expected steps under their "
            "plain numbers, by which restore and verify find them. Leave it out."
        )
    folder = directory_of(directory)
    if set("[]") & set(str(folder)):
        raise ValueError(
            f"{where}: the directory {str(folder)!r} has brackets in its path. Orbax "
            "takes them for a pattern and would save steps that cannot be read; "
            "expected a path without '[' and ']'. Rename the directory."
        )
    settings = dict(
        max_to_keep=max_to_keep,
        save_interval_steps=interval,
        best_mode=best_mode,
        # If a save fails at once while its directory is created in the background, a
        # thread keeps the process from ending for five minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    settings |= options
    if best_metric is not None:
        settings["best_fn"] = _key_of_metric(best_metric, best_mode)
        settings.setdefault("preservation_policy", _best_and_newest(settings))
    # Orbax would reject a relative path, but only at the first save.
    return Manager(folder, ocp.CheckpointManagerOptions(**settings), best_metric)


def _best_and_newest(
    settings: dict[str, Any],
) -> ocp.checkpoint_managers.PreservationPolicy:
    """Returns a policy that keeps the best steps and the newest one.

    Removes the options that it replaces.
    """
    policies = ocp.checkpoint_managers
    best = policies.BestN(
        get_metric_fn=settings["best_fn"],
        reverse=settings["best_mode"] == "min",
        n=settings.pop("max_to_keep"),
        keep_checkpoints_without_metrics=settings.get(
            "keep_checkpoints_without_metrics", True
        ),
    )
    kept: list[Any] = [policies.LatestN(1), best]
    if (steps := settings.pop("keep_period", None)) is not None:
        kept.append(policies.EveryNSteps(steps))
    if (time := settings.pop("keep_time_interval", None)) is not None:
        kept.append(policies.EveryNSeconds(int(time.total_seconds())))
    return policies.AnyPreservationPolicy(kept)


def _key_of_metric(name: str, mode: str) -> Callable[[Any], float]:
    """Returns the key that orders steps by a metric; a missing or NaN one is worst."""
    worst = -math.inf if mode == "max" else math.inf

    def key(metrics: Any) -> float:
        try:
            value = float(metrics[name])
        except (LookupError, TypeError, ValueError):
            return worst
        return worst if math.isnan(value) else value

    return key


def save_error(manager: ocp.CheckpointManager, error: Exception) -> CheckpointSaveError:
    """Returns the error for a save that failed, whatever Orbax raised."""
    return CheckpointSaveError(
        f"checkpoint.save: {manager.directory} could not be written: "
        f"{reason_of(error)}. The steps {sorted(manager.all_steps())} are as they "
        "were, and so is the state: mend the cause (disk space, permissions, "
        "connection), and save the state again."
    )


def _remove_leftovers(directory: epath.Path, step: int | None = None) -> None:
    """Removes half-written steps: all of them, or one."""
    for path in directory.iterdir():
        name = _LEFTOVER.fullmatch(path.name)
        if name and step in (None, int(name[1])):
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(step: epath.Path) -> None:
    """Renames a damaged step to a name that is free."""
    names = itertools.chain([_DAMAGED], (f"{_DAMAGED}-{i}" for i in itertools.count(2)))
    free = (step.with_name(step.name + name) for name in names)
    step.rename(next(path for path in free if not path.exists()))
