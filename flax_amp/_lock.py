"""One writer to a directory of checkpoints.

Two runs that save into one directory by mistake delete and hide each other's steps.
The lock is the operating system's (`flock`), so it ends with the process, however the
process ends. Remote directories, and systems without `flock`, go without.
"""

import contextlib
import os
import pathlib
import socket
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".flax_amp.lock"

# By directory: the open file, and how many managers of this process hold it.
_held: dict[str, tuple[int, int]] = {}


def acquire(directory: Any) -> bool:
    """Makes this process the writer of a directory.

    Args:
      directory: an absolute path that exists.

    Returns:
      Whether this process has just become it, and was not so already. Also False where
      there are no locks.

    Raises:
      RuntimeError: if another process is its writer.
    """
    path = os.fspath(directory)
    if fcntl is None or "://" in path:
        return False
    if path in _held:
        file, count = _held[path]
        _held[path] = file, count + 1
        return False
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
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[path] = file, 1
    return True


def release(directory: Any) -> None:
    """Undoes one `acquire`."""
    path = os.fspath(directory)
    if path not in _held:
        return
    file, count = _held.pop(path)
    if count > 1:
        _held[path] = file, count - 1
        return
    with contextlib.suppress(OSError):
        os.close(file)
