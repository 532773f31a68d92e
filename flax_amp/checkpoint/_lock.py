"""One process writes to a directory of checkpoints.

Two runs that save into one directory by mistake delete and hide each other's steps. The
lock is the operating system's (`flock`), so it ends with the process, however that
ends. The managers of one process share it: Python releases it with the last reference.
A forked process that outlives its parent holds the lock until it ends.

Systems and file systems without `flock` have no lock, nor have buckets: an object in
one would still lock out others after a kill, and a lease needs a clock and a thread.
"""

import os
import threading
import weakref
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".flax_amp.lock"


class Lock:
    """An open file; it is locked where the file system has locks."""

    def __init__(self, directory: str) -> None:
        # The file is neither read nor written, so a foreign file is not harmed.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(os.path.join(directory, NAME), flags, 0o666)
        weakref.finalize(self, os.close, file)
        self.is_locked = False
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


def acquire(directory: Any) -> tuple[Lock | None, bool]:
    """Makes this process the writer of a directory, while the lock is referred to.

    Args:
      directory: an absolute path that exists.

    Returns:
      The lock, and whether this process has just become the writer.

    Raises:
      RuntimeError: if another process is the writer.
      OSError: if the directory cannot be written.
    """
    path = os.fspath(directory)
    if fcntl is None or "://" in path:
        return None, False
    with _mutex:
        if lock := _held.get(path):
            return lock, False
        _held[path] = lock = Lock(path)
        return lock, lock.is_locked
