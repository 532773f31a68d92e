"""The line of the user's code that an equation comes from."""

import os
from pathlib import Path
from typing import NamedTuple

import flax
import optax

from flax_amp import _source
from flax_amp._compat import Eqn

# Lines of these packages count only where no line of the user is known.
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (flax, optax)
)


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        if not self.file:
            return ""
        relative = os.path.relpath(self.file)
        path = self.file if relative.startswith("..") else relative
        return f"{path}:{self.line}"


def line_of(eqn: Eqn) -> SourceLine | None:
    """Returns the innermost line of the user, or else of Flax or optax."""
    frames = list(_source.user_frames(eqn))
    of_user = (frame for frame in frames if not frame[0].startswith(_LIBRARIES))
    found = next(of_user, next(iter(frames), None))
    return None if found is None else SourceLine(*found)
