"""One writer to a directory of checkpoints.

Two runs that save into one directory by mistake delete and hide each other's steps.
The lock is the operating system's (`flock`), so it ends with the process, however the
process ends; processes that it forks do not hold it. Remote directories, and systems
and file systems without `flock`, go without.
"""

import contextlib
import os
import pathlib
import socket
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
    # Others who may write here may write the lock as well: the mask of the process,
    # as everywhere, says who.
    file = os.open(pathlib.Path(path) / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(file, 200).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise RuntimeError(
            f"checkpoint.save: {owner} saves into {path}; expected one run for each "
            "directory. Choose another directory, or end the other run."
        ) from error
    except OSError:  # a file system without locks
        os.close(file)
        return False
    with contextlib.suppress(OSError):  # the disk may be full
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[path] = file, 1
    return True


def _is_there(path: str) -> bool:
    """Whether the lock that is held is still the file in the directory."""
    try:
        mine, there = os.fstat(_held[path][0]), os.stat(pathlib.Path(path) / NAME)
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
