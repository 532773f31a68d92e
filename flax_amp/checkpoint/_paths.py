"""The directory of a manager, or of a path, local or in a bucket; and whole numbers."""

import operator
import os
import posixpath
import re
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from flax_amp.checkpoint._trees import description_of

# A scheme, which has two letters or more: `C:/` is a disk.
_REMOTE = re.compile(r"\w[\w+.-]+:/")


def finish_saving(manager: Any) -> epath.Path:
    """Waits for a manager's last save and returns its directory, or that of a path."""
    if isinstance(manager, ocp.CheckpointManager):
        manager.wait_until_finished()
        manager = manager.directory
    return directory_of(manager)


def directory_of(path: Any) -> epath.Path:
    """Returns an absolute path, or a folder in a bucket, which is listed anew."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"checkpoint: the directory is a {type(path).__name__}; expected a path or "
            "a manager, before the state. Pass what checkpoint.manager was given, or "
            "what it returned."
        )
    text = os.fspath(path)
    if _REMOTE.match(text):
        return _in_bucket(text)
    if not text:
        raise ValueError(
            "checkpoint: the directory ''; expected the path of a folder. Pass '.' for "
            "the working directory."
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
            "as 'gs://bucket/folder', from which pathlib.Path takes one of the slashes "
            "away. Orbax saves to no other storage: mount it, or choose one of these."
        )
    try:
        listings = epath.backend.fsspec_backend.fs(text).dircache
    except ImportError as error:
        raise ImportError(
            f"checkpoint: {text} cannot be read without gcsfs ({error}); in a clone "
            "of flax_amp, run: pip install '.[gcs]'"
        ) from error
    # With this cache, nothing is seen of what TensorStore or another process writes
    # there. gcsfs has an option for it, but etils makes the file system, and keeps it.
    listings.use_listings_cache = False
    listings.clear()
    # A bucket has names and no folders: `a/../b` would be another name than `b`.
    return epath.Path("gs://" + posixpath.normpath(text.removeprefix("gs://")))


def whole_number(value: Any, name: str, least: int) -> int:
    """Returns an integer, or what an array of one integer holds, as an int."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError) as error:  # RuntimeError: it was donated
        raise TypeError(
            f"{name} is {description_of(value)}; expected an integer. Pass an int."
        ) from error
    if number < least:
        raise ValueError(f"{name} is {number}; expected at least {least}.")
    return number
