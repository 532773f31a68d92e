"""What users say about paths: which ones they mean, and what they are called."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from flax_amp.checkpoint._arrays import Path, path_text

T = TypeVar("T")

Patterns = str | Sequence[str]


class Choice:
    """The paths that the user's patterns choose."""

    def __init__(self, include: Patterns, exclude: Patterns):
        self._include = _as_patterns(include, "include")
        self._exclude = _as_patterns(exclude, "exclude")

    def takes(self, *names: Path) -> bool:
        """Whether something is to be read that goes by these paths."""
        included = not self._include or _any(names, self._include)
        return included and not _any(names, self._exclude)

    def check(self, paths: Iterable[Path]) -> None:
        """Raises a ValueError if a pattern matches none of the paths."""
        paths = list(paths)
        for pattern in (*self._include, *self._exclude):
            if not _any(paths, [pattern]):
                tops = sorted({path[0] for path in paths})
                raise ValueError(
                    f"checkpoint.migrate: the pattern {pattern!r} matches no path; "
                    f"expected one such as 'params/*/kernel', below one of {tops}. "
                    "Correct or remove it."
                )


def _as_patterns(patterns: Patterns, argument: str) -> tuple[str, ...]:
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    if isinstance(patterns, Sequence) and all(isinstance(p, str) for p in patterns):
        return tuple(patterns)
    raise TypeError(
        f"checkpoint.migrate: {argument}={patterns!r}; expected glob patterns of "
        f"paths. Pass strings, such as {argument}=['params/head']."
    )


def _any(paths: Iterable[Path], patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a path, or something that the path lies below."""
    names = {path_text(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names
    )


def renamed(leaves: Mapping[Path, T], rename: Mapping[str, str]) -> dict[Path, T]:
    """Applies the user's regular expressions to whole segments of paths."""
    if not isinstance(rename, Mapping):
        raise TypeError(
            f"checkpoint.migrate: rename is a {type(rename).__name__}; expected a dict "
            "of regular expressions and what to put in their place, such as "
            "{'Dense_0': 'linear1'}."
        )
    names = {path: path_text(path) for path in leaves}
    for pattern, replacement in rename.items():
        try:
            whole = re.compile(f"(?<![^/])(?:{pattern})(?![^/])")
            changed = {path: whole.sub(replacement, n) for path, n in names.items()}
        except (re.error, IndexError) as error:
            raise ValueError(
                f"checkpoint.migrate: rename has {pattern!r}: {replacement!r}, which "
                f"does not compile: {error}; expected a regular expression and its "
                "replacement. Correct it."
            ) from error
        if changed == names:
            raise ValueError(
                f"checkpoint.migrate: rename has {pattern!r}, which matches no path on "
                f"disk; expected whole segments of paths such as "
                f"{sorted(names.values())[:3]}. Correct or remove it."
            )
        names = changed
    result: dict[Path, T] = {}
    for path, leaf in leaves.items():
        # As it is where nothing changed: a name may have slashes of its own.
        unchanged = names[path] == path_text(path)
        new = path if unchanged else tuple(filter(None, names[path].split("/")))
        if not new:
            raise ValueError(
                f"checkpoint.migrate: rename leaves nothing of {path_text(path)}; "
                "expected a path. Correct the expressions."
            )
        if new in result:
            raise ValueError(
                "checkpoint.migrate: rename gives two arrays the path "
                f"{path_text(new)}, {path_text(path)} and another; expected one. Make "
                "the expressions more specific."
            )
        result[new] = leaf
    return result
