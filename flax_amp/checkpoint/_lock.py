"""One writer to a directory of checkpoints.

Two runs that save into one directory by mistake delete and hide each other's steps.
The lock is the operating system's (`flock`), so it ends with the process, however the
process ends; processes that it forks do not hold it. Remote directories, and systems
and file systems without `flock`, go without.
"""

import contextlib
import errno
import os
import stat
import threading
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".flax_amp.lock"

# By directory: the open file, and how many managers of this process hold it.
_held: dict[str, tuple[int, int]] = {}
_mutex = threading.RLock()


def acquire(directory: Any) -> bool:
    """Makes this process the writer of a directory.

    Args:
      directory: an absolute path that exists.

    Returns:
      Whether this process has just become it, and was not so already. Also False where
      there are no locks.

    Raises:
      RuntimeError: if another process is its writer.
      OSError: if it cannot be written.
    """
    path = os.fspath(directory)
    if fcntl is None or "://" in path:
        return False
    with _mutex:
        if path in _held and _is_there(path):
            file, count = _held[path]
            _held[path] = file, count + 1
            return False
        return _open(path)


def release(directory: Any) -> None:
    """Undoes one `acquire`."""
    path = os.fspath(directory)
    with _mutex:
        if path not in _held:
            return
        file, count = _held.pop(path)
        if count > 1:
            _held[path] = file, count - 1
            return
        with contextlib.suppress(OSError):
            os.close(file)


def _open(path: str) -> bool:
    # The file is neither read nor written, so a foreign file is not harmed.
    # The umask decides who else may write it.
    name = os.path.join(path, NAME)
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    regular, locked = stat.S_ISREG(os.fstat(file).st_mode), False
    try:
        if regular:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
    except BlockingIOError as error:
        raise RuntimeError(
            f"checkpoint.save: another process saves into {path}; expected one run for "
            "each directory. Choose another directory, or end the other run."
        ) from error
    except OSError:  # a file system without locks
        pass
    finally:
        if not locked:
            os.close(file)
    if not regular:
        raise FileExistsError(errno.EEXIST, "not a regular file", name)
    if locked:
        _held[path] = file, 1
    return locked


def _is_there(path: str) -> bool:
    """Whether the lock that is held is still the file in the directory."""
    try:
        mine, there = os.fstat(_held[path][0]), os.lstat(os.path.join(path, NAME))
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _forget() -> None:
    for file, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
