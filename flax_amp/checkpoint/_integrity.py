"""The record that is saved beside a state, to tell a damaged checkpoint by.

It stands in the custom metadata of the step, which Orbax commits together with the
step, so plain Orbax calls read and write the same files. It names its step,
lists every leaf with shape, dtype and digest, and carries a checksum of itself.

    {"format": 1,
     "step": 300,
     "leaves": [[["params", "w"], [3], "float32", "82dc5114d2ba8310"], ...],
     "checksum": "..."}
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from flax_amp.checkpoint._digest import digests
from flax_amp.checkpoint._layout import (
    Layout,
    Leaf,
    Path,
    differences,
    layout_of,
    name_of,
)

PyTree = Any

_NOT_DAMAGE = (MemoryError, PermissionError, ConnectionError, TimeoutError)
_OUTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO)
# How TensorStore's and XLA's errors begin.
_STATUSES = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
)
# TensorStore says NOT_FOUND for a missing file, and for a missing JSON member.
_MISSING = re.compile(r"NOT_FOUND: (?!.*JSON Pointer)")

_DAMAGED = "its list of digests is damaged"

KEY = "flax_amp"  # of the record in the metadata
FORMAT = 1


class CorruptCheckpointError(Exception):
    """A checkpoint that was complete once and cannot be read as it was written."""


class IncompleteError(CorruptCheckpointError):
    """Some of its files are missing."""


class CheckpointWarning(UserWarning):
    """Something was left out or passed over to restore a state."""


class Record(NamedTuple):
    """What was saved."""

    layout: Layout
    digests: dict[Path, str]


def record_of(tree: PyTree, step: int) -> dict[str, Any]:
    """Returns the record of a step that holds a tree of arrays, ready for JSON."""
    layout = layout_of(tree)
    found = ocp.tree.to_flat_dict(digests(tree))
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "leaves": [
            [list(path), list(leaf.shape), leaf.dtype, found[path]]
            for path, leaf in sorted(layout.items())
        ],
    }
    return content | {"checksum": _checksum(content)}


def read_record(
    metadata: Mapping[str, Any] | None, step: int, where: str
) -> Record | None:
    """Returns the record in the metadata of a step; `None` if there is none.

    Raises:
      CorruptCheckpointError: if it is not as it was written, or that of another step.
      ValueError: if a newer version wrote it.
    """
    if metadata is None or KEY not in metadata:
        return None
    content = metadata[KEY]
    if not isinstance(content, Mapping) or not isinstance(content.get("format"), int):
        raise CorruptCheckpointError(_DAMAGED)
    if content["format"] > FORMAT:
        raise ValueError(
            f"checkpoint: {where} has format {content['format']}; expected at most "
            f"{FORMAT}, all that this version of flax_amp knows. Update flax_amp."
        )
    try:
        record = _parse(content)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(_DAMAGED) from error
    # Records that lack it are older than this rule.
    if (saved := content.get("step", step)) != step:
        raise CorruptCheckpointError(
            f"its files are those of step {saved}, and were renamed or copied"
        )
    return record


def _parse(content: Mapping[str, Any]) -> Record:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    if content["checksum"] != _checksum(rest):
        raise ValueError("checksum")
    layout, digests = {}, {}
    for names, shape, dtype, digest in content["leaves"]:
        path = tuple(map(str, names))
        layout[path] = Leaf(tuple(map(int, shape)), str(dtype))
        digests[path] = str(digest)
    return Record(layout, digests)


def check_layout(record: Record, on_disk: Layout) -> None:
    """Raises a CorruptCheckpointError if the description of the arrays is damaged."""
    if lines := differences(on_disk, record.layout, here="what was saved"):
        raise CorruptCheckpointError(_few(lines))


def check_arrays(record: Record, arrays: Mapping[Path, Any]) -> None:
    """Raises a CorruptCheckpointError that names the arrays that changed on disk."""
    found = digests(list(arrays.values()))
    changed = [
        name_of(path)
        for path, digest in zip(arrays, found, strict=True)
        if digest != record.digests.get(path, digest)
    ]
    if changed:
        raise CorruptCheckpointError(f"{_few(changed)} changed on disk")


def unreadable(error: BaseException) -> Exception:
    """Returns the error for files that could not be read: are they damaged, or not?

    Out of memory, out of file descriptors, no permission, no connection: the files may
    be as they were, and another step is not what the user wants.
    """
    text = reason_of(error)
    causes = list(_causes(error))
    if any(isinstance(cause, _NOT_DAMAGE) or _is_outage(cause) for cause in causes):
        return OSError(
            f"checkpoint: the files could not be read: {text}; they may be intact all "
            "the same. Mend the cause and try again."
        )
    if any(isinstance(x, FileNotFoundError) or _MISSING.match(str(x)) for x in causes):
        return IncompleteError(text)
    return CorruptCheckpointError(text)


def reason_of(error: BaseException) -> str:
    """Returns what lies at the root of an error of Orbax, in one line, not too long."""
    *_, root = _causes(error)
    lines = str(root).strip().splitlines()
    text = f"{type(root).__name__}: {lines[0]}" if lines else type(root).__name__
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-145:]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _OUTAGES:
        return True
    return str(error).startswith(_STATUSES)


def _few(names: list[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more arrays" if more > 0 else "")


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
