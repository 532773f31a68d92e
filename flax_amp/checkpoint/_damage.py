"""Damage and outages: their errors, and checksums of the files of a state.

A file that is missing, or that differs from our list of checksums, is damage: the error
is a `CorruptCheckpointError`, and another step is restored. Every further failure
(memory, permission, a connection) is an outage: the error is an `OSError`, because the
files may be intact.

Orbax restores a flipped byte of an array without an error. So `write` lists the size
and the CRC-32 of each file in the background, before Orbax commits a step:

    {"default/manifest.ocdbt": [114, 2745823021], ...}

A CRC-32 guards against broken disks, not against malice.
"""

import errno
import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from flax_amp._checks import first_of

NAME = "flax_amp_checksums.json"
ITEM = "default"  # CheckpointManager saves an item without a name under this name

# The files of a step are read in parallel. The exact number does not matter: at 5 GB/s
# per core (`_of_file`), 16 threads check 80 GB/s, more than a disk delivers.
_THREADS = min(16, os.cpu_count() or 1)
# Characters of a reason. The exact number does not matter: the reason then takes about
# four lines of a terminal.
_LONGEST_REASON = 300


class CorruptCheckpointError(Exception):
    """A checkpoint was complete once and cannot be read as it was written."""


class IncompleteError(CorruptCheckpointError):
    """Some files of a checkpoint are missing."""


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; all earlier checkpoints are unchanged."""


class CheckpointWarning(UserWarning):
    """A step was passed over, renamed or not saved, or differs from the code."""


def is_missing(error: BaseException) -> bool:
    """Whether an error says that a path leads to no file, such as to a folder."""
    kinds = FileNotFoundError, IsADirectoryError, NotADirectoryError
    # ELOOP: the path leads through a loop of links.
    return isinstance(error, kinds) or getattr(error, "errno", 0) == errno.ELOOP


def outage(error: BaseException) -> OSError:
    return OSError(
        f"checkpoint: the files could not be read: {reason_of(error)}; they may be "
        "intact all the same. Correct the cause and try again."
    )


def reason_of(error: BaseException) -> str:
    """Returns the root of an error of Orbax in one line that is not too long."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    text = type(error).__name__
    if lines:
        text = f"{text}: {lines[0]}"
    if len(text) <= _LONGEST_REASON:
        return text
    # A longer text keeps its start and its end: 150 + len(" ... ") + 145 = 300.
    return f"{text[:150]} ... {text[-145:]}"


# Checksums


def _files_of(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_of(path)
        else:
            yield path


def write(step: epath.Path) -> None:
    """Writes the list of checksums into the folder of a step that holds a state."""
    # Every file of the state counts, also a file that Orbax can do without.
    if (step / ITEM).is_dir():
        names = sorted(str(path.relative_to(step)) for path in _files_of(step / ITEM))
        (step / NAME).write_text(json.dumps(_checksums(step, names)))


def check(step: epath.Path, part: slice) -> None:
    """Raises an error unless a part of the files agrees with the list of checksums."""
    try:
        listed = dict(json.loads(read_file(step / NAME)))
        names = sorted(listed)[part]
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError("its list of checksums is damaged") from error
    if not listed:
        raise CorruptCheckpointError(
            "its list of checksums is damaged: the list is empty"
        )
    found = _checksums(step, names)
    missing = sorted(name for name, sums in found.items() if sums is None)
    if changed := sorted({n for n in names if found[n] != listed[n]} - {*missing}):
        raise CorruptCheckpointError(f"{first_of(changed)} changed on disk")
    if missing:
        raise IncompleteError(f"{first_of(missing)} missing on disk")


def read_file(path: epath.Path) -> bytes:
    """Returns the bytes of a file, which damage may have changed."""
    try:
        return path.read_bytes()
    except Exception as error:  # Clients of buckets have errors of their own.
        if is_missing(error):
            raise IncompleteError(f"its file {path.name} is missing") from error
        raise outage(error) from error


def _checksums(step: epath.Path, names: list[str]) -> dict[str, list[int] | None]:
    """Returns the size and the checksum of each file; `None` for a missing file."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(_of_file, (step / name for name in names))
        return dict(zip(names, found, strict=True))


def _of_file(path: epath.Path) -> list[int] | None:
    # `zlib.crc32` (5 GB/s per core) is the fastest checksum that sees every small
    # change. A `mmap` would gain a fifth, but a failing disk would kill the process.
    size = value = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(2**18):  # a piece fits in the processor's cache
                value = zlib.crc32(piece, value)
                size += len(piece)
    except Exception as error:  # Clients of buckets have errors of their own.
        if is_missing(error):
            return None
        raise outage(error) from error
    return [size, value]
