"""The scopes of equal layers, and what a profile reads where their names differ.

Layers that are modules have the same scopes below a prefix of their own: their call has
the prefix, and the function has the rest. The parts of layers that are written inline
differ in the numbers that Flax gives them:

    first layer         second layer        call, and function
    Net/Dense_2         Net/Dense_4         Net/[Dense_2,Dense_3]  Net/[Dense_4,Dense_5]
    Net/Dense_3         Net/Dense_5             Dense_#1
                                                Dense_#2

So the call lists the names of its layer, and `#2` in the function stands for the number
of the second one. Only numbers at the end of a name may differ: what would stand for
`query` and `key` would mean nothing to a reader.
"""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Scopes = tuple[Any, ...]
Name = TypeVar("Name", bound=str)

# `Dense_3`, `layer.3`, and with a method, `Embed_3.attend`.
_NUMBERED = re.compile(r"([\w.-]*?)([0-9]+)((?:\.[^\W\d]\w*)?)")
_LIST = re.compile(r"\[([\w.-]*[0-9](?:,[\w.-]*[0-9])*)\]")
_PLACE = re.compile(r"#([0-9]+)")


class LayerScopes(NamedTuple):
    """The scopes of equal layers.

    Attributes:
      calls: the scopes around the call of each layer.
      depth: how many of the scopes around the first layer are not in the function.
      renamed: the scopes of the function that differ from those of the first layer, by
        the path in the first layer that ends with the scope in question.
    """

    calls: list[Scopes]
    depth: int
    renamed: Mapping[Scopes, Any]

    def inside(self, path: Scopes) -> Scopes:
        """Returns the scopes in the function for scopes of the first layer."""
        return tuple(
            self.renamed.get(path[:end], path[end - 1])
            for end in range(self.depth + 1, len(path) + 1)
        )


def layer_scopes(layers: Sequence[Sequence[Scopes]]) -> LayerScopes | None:
    """Returns the scopes of some layers, `None` if one function cannot show them.

    Args:
      layers: for each layer, the scopes of its equations in their order.
    """
    prefixes = [_common_prefix(paths) for paths in layers]
    below = [
        [path[len(prefix) :] for path in paths]
        for prefix, paths in zip(prefixes, layers, strict=True)
    ]
    if all(paths == below[0] for paths in below):
        return LayerScopes(prefixes, len(prefixes[0]), {})
    # The names differ below the prefixes, too. They may, but in numbers alone.
    try:
        stand_ins, lists = _stand_ins(_names(below))
    except _UnlikeError:
        return None
    scope = type(next(iter(stand_ins.values())))  # the class of JAX's scopes
    calls = [(*path, scope(text)) for path, text in zip(prefixes, lists, strict=True)]
    renamed = {prefixes[0] + path: scope for path, scope in stand_ins.items()}
    return LayerScopes(calls, len(prefixes[0]), renamed)


class _UnlikeError(Exception):
    """Raised where one function cannot show the scopes of all layers."""


def _names(layers: Sequence[Sequence[Scopes]]) -> dict[Scopes, Scopes]:
    """Maps each path of the first layer to its last scope in all layers.

    Raises:
      _UnlikeError: if one path of the first layer is two in another one.
    """
    found: dict[Scopes, Scopes] = {}
    for paths in dict.fromkeys(zip(*layers, strict=True)):
        if len(set(map(len, paths))) > 1:
            raise _UnlikeError
        for depth, scopes in enumerate(zip(*paths, strict=True), 1):
            if found.setdefault(paths[0][:depth], scopes) != scopes:
                raise _UnlikeError
    return found


def _stand_ins(
    names: Mapping[Scopes, Scopes],
) -> tuple[dict[Scopes, Any], list[str]]:
    """Returns the scopes of the function that differ, and the list of each layer.

    With the layers of the example above, these are

        {(Dense_2,): Dense_#1, (Dense_3,): Dense_#2}
        "[Dense_2,Dense_3]", "[Dense_4,Dense_5]"

    Raises:
      _UnlikeError: if the names differ in more than numbers, or `resolved` could not
        read them.
    """
    # It would be read as a place in the list.
    if any(_PLACE.search(scope.name) for scopes in names.values() for scope in scopes):
        raise _UnlikeError
    listed: dict[Sequence[str], int] = {}
    found = {
        path: _stand_in(scopes, listed)
        for path, scopes in names.items()
        if len(set(scopes)) > 1
    }
    lists = [f"[{','.join(of_layer)}]" for of_layer in zip(*listed, strict=True)]
    if not all(map(_LIST.fullmatch, lists)):
        raise _UnlikeError
    return found, lists


def _stand_in(scopes: Scopes, listed: dict[Sequence[str], int]) -> Any:
    """Returns one scope in the place of different ones.

    Args:
      scopes: the scope in each layer.
      listed: the names that calls list, with their places. It gets new ones.

    Raises:
      _UnlikeError: if there is none.
    """
    paths = [scope.name.split("/") for scope in scopes]
    # The names that JAX's transformations add are no scopes.
    is_added = any(type(scope).__name__ != "Scope" for scope in scopes)
    if is_added or len(set(map(len, paths))) > 1:
        raise _UnlikeError
    ends = range(1, len(paths[0]) + 1)
    parts = [_part([path[:end] for path in paths], listed) for end in ends]
    return type(scopes[0])("/".join(parts))


def _part(paths: Sequence[list[str]], listed: dict[Sequence[str], int]) -> str:
    """Returns one name in the place of the last names of some paths: `Dense_#1`."""
    names = [path[-1] for path in paths]
    if len(set(names)) == 1:
        return names[0]
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    around = {(match[1], match[3]) for match in matches}
    if len(matches) < len(names) or len(around) > 1:
        raise _UnlikeError
    # With what is above: in `layers/3`, the number is a name of its own.
    key = tuple(
        ".".join([*path[:-1], match[1] + match[2]])
        for path, match in zip(paths, matches, strict=True)
    )
    place = listed.setdefault(key, len(listed) + 1)
    ((before, behind),) = around
    return f"{before}#{place}{behind}"


def resolved(scopes: tuple[Name, ...]) -> tuple[Name, ...]:
    """Returns scopes of a rewritten program as they were before layers were merged.

        Net  [Dense_4,Dense_5]  Dense_#2    ->    Net  Dense_5

    Args:
      scopes: the names of all scopes around an equation, outermost first.
    """
    found: list[Name] = []
    listed: list[str] = []
    for scope in scopes:
        if match := _LIST.fullmatch(scope):
            listed = match[1].split(",")
            continue
        text = _PLACE.sub(functools.partial(_number, listed), scope)
        found.append(scope if text == scope else type(scope)(text))
    return tuple(found)


def _number(listed: Sequence[str], place: re.Match[str]) -> str:
    index = int(place[1]) - 1
    if not 0 <= index < len(listed):  # a user's name
        return place[0]
    return listed[index][len(listed[index].rstrip("0123456789")) :]


def _common_prefix(scopes: Sequence[Scopes]) -> Scopes:
    """Returns the longest common prefix of some paths."""
    return functools.reduce(_common_of_two, set(scopes))


def _common_of_two(scopes: Scopes, others: Scopes) -> Scopes:
    pairs = zip(scopes, others, strict=False)
    return tuple(
        a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    )
