"""One process writes to a directory of checkpoints.

Two runs that save into one directory by mistake delete and hide each other's steps. The
lock is the operating system's (`flock`), so it ends with the process, however that
ends. The managers of one process share it, and save one after the other.

Systems and file systems without `flock` have no lock, nor have buckets: an object in
one would still lock out others after a kill, and a lease needs a clock and a thread.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".flax_amp.lock"


class Lock:
    """This process as the writer of a directory, while it is referred to."""

    def __init__(self, directory: str, lock: bool) -> None:
        self.is_new = True  # no manager of this process has saved with it yet
        self.is_locked = False  # no other process can have it
        self.mutex = threading.RLock()  # held while a manager starts a save
        # Returns the manager that started the last save, if it still exists.
        self.last: Callable[[], Any] = lambda: None
        if not lock or fcntl is None or "://" in directory:
            return
        # The file is neither read nor written, so a foreign file is not harmed.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(os.path.join(directory, NAME), flags, 0o666)
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


def acquire(directory: Any, *, lock: bool) -> Lock:
    """Returns the lock of a directory that exists; without `lock`, only to share it.

    Raises:
      RuntimeError: if another process is the writer.
      OSError: if the directory cannot be written.
    """
    path = os.fspath(directory)
    with _mutex:
        if (held := _held.get(path)) is None:
            _held[path] = held = Lock(path, lock)
        return held
