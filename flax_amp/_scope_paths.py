"""How the scope keys of a policy match the paths of scopes in a program.

Flax names the scope of a call after the module, and also after its method if that is
not `__call__`: `LM/embed.attend`. A key names modules, so each of its segments matches
with and without such a suffix. Where a method calls another one of its own module,
Linen opens one more scope (`LM/LM.logits/embed.attend`). These two scopes count as one
module.
"""

import fnmatch
import re
from collections.abc import Iterator

# A number behind a dot (`layer.0`) is a part of the name.
_METHOD = r"(?:\.[^\W\d]\w*)?"
_SEGMENT = re.compile(rf"(.*?)({_METHOD})", re.DOTALL)


def split_method(segment: str) -> tuple[str, str]:
    """Returns the name of a module, and `.method` or nothing."""
    return _SEGMENT.fullmatch(segment).groups()  # type: ignore[union-attr, return-value]


def pattern(key: str) -> re.Pattern[str]:
    """Returns the regular expression for the whole paths of scopes that a key means.

    A key is a glob whose `*` crosses slashes. It may leave out the outer scopes.
    """
    parts = [fnmatch.translate(part)[: -len(r"\Z")] for part in key.split("/")]
    return re.compile(rf"(?:.*/)?{f'{_METHOD}/'.join(parts)}{_METHOD}", re.DOTALL)


def paths(scopes: tuple[str, ...]) -> Iterator[set[str]]:
    """Yields, for each nested scope, the set of paths by which a key may name it.

    One is the path as it is. In the other one, a module whose methods call each other
    is named only once. A name with slashes stands for several scopes.
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
