"""How the scope keys of a policy match the paths of scopes in a program.

Flax names the scope of a call after the module. Any method but `__call__` adds its name
as a suffix: `LM/embed.attend`. A key names modules, so each segment of a key matches
with and without such a suffix. Where a method calls another method of its own module,
Linen opens an additional scope (`LM/LM.logits/embed.attend`). These two scopes count as
the same module.
"""

import fnmatch
import re
from collections.abc import Iterator

# A method's name is no number: a number behind a dot (`layer.0`) belongs to the module.
_METHOD = r"(?:\.[^\W\d]\w*)?"
_SEGMENT = re.compile(rf"(.*?)({_METHOD})", re.DOTALL)


def split_method(segment: str) -> tuple[str, str]:
    """Splits a segment into the name of a module and `.method`, which may be empty."""
    return _SEGMENT.fullmatch(segment).groups()  # type: ignore[union-attr, return-value]


def pattern(key: str) -> re.Pattern[str]:
    """Returns the regular expression for the whole paths of scopes that a key means.

    A key is a glob whose `*` crosses slashes. A key may leave out the outer scopes.
    """
    # `fnmatch.translate` adds `\Z` to each part, but only the last part ends the path.
    parts = [fnmatch.translate(part)[: -len(r"\Z")] for part in key.split("/")]
    return re.compile(rf"(?:.*/)?{f'{_METHOD}/'.join(parts)}{_METHOD}", re.DOTALL)


def paths(scopes: tuple[str, ...]) -> Iterator[set[str]]:
    """Yields, for each nested scope, the set of paths by which a key may name it.

    The first path has all scopes. In the second path, a module is named only once where
    its methods call its own methods. A name with slashes stands for several scopes.
    """
    segments: list[str] = []
    modules: list[str] = []
    for scope in scopes:
        for segment in scope.split("/"):
            name, method = split_method(segment)
            if method and modules and split_method(modules[-1])[0] == name:
                modules.pop()
            segments.append(segment)
            modules.append(segment)
            yield {"/".join(segments), "/".join(modules)}
