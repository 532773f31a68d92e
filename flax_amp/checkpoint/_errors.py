"""The errors and the warning of this room, and what tells damage from an outage."""

import errno
import functools
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NOT_DAMAGE = (MemoryError, PermissionError, ConnectionError, TimeoutError)
_OUTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO)
# Status names of gRPC, the first words of the errors of TensorStore and XLA; and what
# gcsfs says of a bucket that may not be read.
_STATUSES = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "Forbidden: ",
)
# Who raises errors of their own about a connection to a bucket.
_CLIENTS = ("aiohttp.", "gcsfs.", "google.api_core.", "google.auth.", "requests.")
# TensorStore says NOT_FOUND for a missing file, and for a missing JSON member.
_MISSING = re.compile(r"NOT_FOUND: (?!.*JSON Pointer)")


class CorruptCheckpointError(Exception):
    """A checkpoint was complete once and cannot be read as it was written."""


class IncompleteError(CorruptCheckpointError):
    """Some files of a checkpoint are missing."""


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class CheckpointWarning(UserWarning):
    """Something was passed over, renamed, not saved, or is not what the code says."""


def explained(read: Callable[P, T]) -> Callable[P, T]:
    """Makes a function that reads files explain every error that it raises.

    A step counts as damaged only if its files say so: then it is a
    `CorruptCheckpointError`. Without memory, permission, file descriptors or a
    connection the files may be intact, and another step is not what the user wants:
    then it is an `OSError`.
    """

    @functools.wraps(read)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except CorruptCheckpointError:
            raise
        except Exception as error:  # A damaged file makes its reader raise anything.
            raise _explained(error) from error

    return wrapped


def _explained(error: BaseException) -> Exception:
    text, causes = reason_of(error), list(_causes(error))
    if any(map(_is_outage, causes)):
        return OSError(
            f"checkpoint: the files could not be read: {text}; they may be intact all "
            "the same. Mend the cause and try again."
        )
    if any(isinstance(x, FileNotFoundError) or _MISSING.match(str(x)) for x in causes):
        return IncompleteError(text)
    return CorruptCheckpointError(text)


def reason_of(error: BaseException) -> str:
    """Returns the root of an error of Orbax in one line that is not too long."""
    *_, root = _causes(error)
    lines = str(root).strip().splitlines()
    text = f"{type(root).__name__}: {lines[0]}" if lines else type(root).__name__
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-145:]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_outage(error: BaseException) -> bool:
    """Whether an error says that the files could not be reached."""
    is_known = isinstance(error, _NOT_DAMAGE) or getattr(error, "errno", 0) in _OUTAGES
    is_client = type(error).__module__.startswith(_CLIENTS)
    return is_known or is_client or str(error).startswith(_STATUSES)
