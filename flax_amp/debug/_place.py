"""Where an equation stands: its module, the loops around it, and its source line.

The scopes around an equation tell its module. Flax opens the scope `embed.attend` for
the method `attend` of the module `embed`: a name with one dot is that of a method, as
it is for the keys of a policy. A name with more dots, such as `eqx.nn.Linear`, is one
name.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import optax
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._scope_paths import split_method

_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (flax, optax)
)
# Scopes that JAX opens around what a backward pass computes again.
_OF_CHECKPOINTS = ("checkpoint", "rematted_computation")


def scopes_of(eqn: Eqn) -> tuple[str, ...]:
    """Returns the scopes around an equation in its jaxpr, for `module_path`.

    What stands inside of a transformation may repeat what is around it: it is listed
    once.
    """
    scopes: list[str] = []
    group: list[str] = []
    for entry in (*_compat.scopes(eqn), None):
        if _is_scope(entry):
            group += [entry.name] if entry.name not in _OF_CHECKPOINTS else []
        else:  # a transformation, or the end
            scopes = group if group[: len(scopes)] == scopes else scopes + group
            group = []
    half = len(scopes) // 2
    if eqn.primitive.name == "remat2" and scopes[:half] == scopes[half:]:
        scopes = scopes[:half]  # what is computed again
    return tuple(scopes)


def _is_scope(entry: Any) -> bool:
    return type(entry).__name__ == "Scope"


def is_derivative(eqn: Eqn) -> bool:
    """Whether an equation is one of a gradient that the user's own function takes."""
    entries = (entry for entry in _compat.scopes(eqn) if not _is_scope(entry))
    return any(getattr(entry, "name", "") == "transpose" for entry in entries)


def module_path(scopes: tuple[str, ...]) -> str:
    """Returns the path of modules that scopes mean, without the names of methods."""
    names: list[str] = []
    was_method = False
    for segment in "/".join(scopes).split("/"):
        if not segment or "->" in segment:  # `jnp.einsum` opens a scope of its formula
            continue
        name, method = split_method(segment)
        if split_method(name)[1]:  # `eqx.nn.Linear`
            name, method = segment, ""
        # A method that calls another one of its own module, as Flax's RNN does.
        if not ((method or was_method) and names and names[-1] == name):
            names.append(name)
        was_method = bool(method)
    return "/".join(names)


class Location(NamedTuple):
    """Where a jaxpr stands, or an equation."""

    eqns: tuple[Eqn, ...] = ()  # those around it, and the equation, outermost first
    inside: tuple[str, ...] = ()  # loops and the like around it, outermost first

    @property
    def eqn(self) -> Eqn:
        """The equation; of a jaxpr, the one that holds it."""
        return self.eqns[-1]

    @property
    def path(self) -> str:
        """The path of the module."""
        return module_path(sum(map(scopes_of, self.eqns), ()))

    @property
    def times(self) -> int:
        """How often it runs; what stands in a `while` counts once."""
        return math.prod(x.params["length"] for x in self.eqns[:-1] if _is_scan(x))

    @property
    def source(self) -> str:
        """The line of the user's code; if it is not known, that of what is around."""
        return next(filter(None, map(source_line, reversed(self.eqns))), "")

    def of(self, eqn: Eqn) -> "Location":
        """Returns the location of an equation in this jaxpr."""
        return self._replace(eqns=(*self.eqns, eqn))

    def noted(self, note: str) -> "Location":
        """Returns the location of one iteration of a loop, or of one branch."""
        return self._replace(inside=(*self.inside, note))

    def within(self, eqn: Eqn) -> "Location":
        """Returns the location of the bodies of an equation."""
        at, name = self.of(eqn), eqn.primitive.name
        if name == "jit":
            return at
        return at.noted(f"scan x{eqn.params['length']}" if _is_scan(eqn) else name)


def _is_scan(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan"


_TOP = Location()


def places(
    jaxpr: Jaxpr,
    start: Location = _TOP,
    enter: Callable[[Eqn], bool] = lambda eqn: True,
) -> Iterator[Location]:
    """Yields the locations of all equations of a program, each as often as called.

    `enter` tells whether to walk the bodies of an equation.
    """
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        yield start.of(eqn)
        for body in jaxprs_in_params(eqn.params) if enter(eqn) else ():
            yield from places(body, start.within(eqn), enter)


def source_line(eqn: Eqn) -> str:
    """Returns the line of the user's code that an equation comes from."""
    found = None
    for frame in _compat.user_frames(eqn):
        is_users = not frame[0].startswith(_LIBRARIES)
        found = frame if is_users or found is None else found
        if is_users:
            break
    if found is None:
        return ""
    file, line = found
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line}"
