"""The directory of a manager: its path, local or in a bucket, and its only writer.

Two runs that share a directory by mistake delete and hide each other's steps. The
lock is the operating system's (`flock`), so the lock ends with the process, however the
process ends. The managers of a process share the lock, and save in turn. Systems and
file systems without `flock` have no lock. Buckets have no lock either: after a kill, an
object in the bucket would still lock out every later run, and a lease needs a clock and
a thread.
"""

import os
import posixpath
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from flax_amp._checks import check_type

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".flax_amp.lock"
# A scheme has two letters or more: `C:/` is a disk.
_REMOTE = re.compile(r"\w[\w+.-]+:/")
_EXPECTED = "a path, such as 'run' or pathlib.Path('run')"


def finish_saving(manager: Any) -> epath.Path:
    """Returns the directory of a manager, after its last save, or of a path."""
    if isinstance(manager, ocp.CheckpointManager):
        manager.wait_until_finished()
        manager = manager.directory
    return directory_of(manager, f"{_EXPECTED}, or a manager")


def directory_of(path: Any, expected: str = _EXPECTED) -> epath.Path:
    """Returns an absolute path, or a folder in a bucket, without cached listings."""
    told = f"{expected}. Pass the folder of the steps."
    check_type(path, str | os.PathLike, "checkpoint: the directory", told)
    text = os.fspath(path)
    if _REMOTE.match(text):
        return _in_bucket(text)
    if not text:
        raise ValueError(
            "checkpoint: the directory is ''; expected a path, such as '.'"
        )
    local = epath.Path(text).expanduser()
    if os.path.lexists(local) and not os.path.isdir(local):
        raise NotADirectoryError(
            f"checkpoint: {local} is a file, or a link that leads nowhere; expected a "
            "folder. Check the path, and whether its disk is mounted."
        )
    return local.resolve()


def _in_bucket(text: str) -> epath.Path:
    # Orbax takes `s3://`, `az://` and `hf://` for local paths, and would save there.
    if not re.match("gs://[^/]", text):
        raise ValueError(
            f"checkpoint: the directory {text!r}; expected a local path or a str such "
            "as 'gs://bucket/folder', from which pathlib.Path takes a slash away. "
            "Orbax saves to no other storage."
        )
    # The cache of listings hides the files that TensorStore or another process writes
    # into the bucket. gcsfs has an option without this cache, but etils makes the file
    # system.
    listings = epath.backend.fsspec_backend.fs(text).dircache
    listings.use_listings_cache = False
    listings.clear()
    # A bucket has names and no folders: `a/../b` would be another name than `b`.
    return epath.Path("gs://" + posixpath.normpath(text.removeprefix("gs://")))


# The lock


class Lock:
    """This process as the writer of a directory, while this object is referred to."""

    def __init__(self, directory: str, lock_file: bool) -> None:
        self.is_locked = False  # no other process can have it
        self.mutex = threading.RLock()  # held while a manager starts a save
        # Returns the manager that started the last save, if that manager still exists.
        self.last: Callable[[], Any] = lambda: None
        if not lock_file or fcntl is None or "://" in directory:
            return
        # The file is neither read nor written, so a foreign file is not harmed.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        # 0o666 is the mode of `open`, which the umask limits.
        file = os.open(os.path.join(directory, LOCK), flags, 0o666)
        weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_locked = True
        except BlockingIOError as error:
            raise RuntimeError(
                f"checkpoint.save: another process saves into {directory}; expected "
                "one run for each directory. Choose another directory, or end the "
                "other run."
            ) from error
        except OSError:  # The file system has no locks.
            pass


_held: weakref.WeakValueDictionary[str, Lock] = weakref.WeakValueDictionary()
_mutex = threading.Lock()


def acquire(directory: Any, *, lock_file: bool) -> Lock:
    """Returns the lock of an existing directory.

    Without `lock_file`, the lock is for this process only: the managers of the process
    share the object, and the lock file is left to the first process of the run.
    """
    path = os.fspath(directory)
    with _mutex:
        if (held := _held.get(path)) is None:
            _held[path] = held = Lock(path, lock_file)
        return held
