"""Where an equation stands: its module, the loops around it, and its source line.

The scopes around an equation tell its module. Flax opens the scope `embed.attend` for
the method `attend` of the module `embed`: a name with one dot is that of a method, as
it is for the keys of a policy. A name with more dots, such as `eqx.nn.Linear`, is one
name.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import optax
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._rewriter.primitives import bodies, traits_of
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

    scopes: tuple[str, ...] = ()  # around it, those of the equation included
    inside: tuple[str, ...] = ()  # loops and the like around it, outermost first
    times: int = 1  # how often it runs
    eqns: tuple[Eqn, ...] = ()  # the equation and those around it, innermost first

    @property
    def eqn(self) -> Eqn:
        """The equation; of a jaxpr, the one that holds it."""
        return self.eqns[0]

    @property
    def path(self) -> str:
        """The path of the module."""
        return module_path(self.scopes)

    @property
    def source(self) -> str:
        """The line of the user's code; if it is not known, that of what is around."""
        return next(filter(None, map(source_line, self.eqns)), "")

    def of(self, eqn: Eqn) -> "Location":
        """Returns the location of an equation in this jaxpr."""
        scopes = self.scopes + scopes_of(eqn)
        return self._replace(scopes=scopes, eqns=(eqn, *self.eqns))

    def noted(self, note: str) -> "Location":
        """Returns the location of one iteration of a loop, or of one branch."""
        return self._replace(inside=(*self.inside, note))

    def within(self, eqn: Eqn) -> "Location":
        """Returns the location of the bodies of an equation."""
        at, name = self.of(eqn), eqn.primitive.name
        if name == "jit":
            return at
        if name != "scan":
            return at.noted(name)
        length = eqn.params["length"]
        times = self.times * known_size(length, 1)
        return at.noted(f"scan x{length}")._replace(times=times)


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


def known_size(number: Any, unknown: int = 0) -> int:
    """Returns a number, unless it is a symbol of `jax.export`."""
    return number if isinstance(number, int) else unknown


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


class LineScopes:
    """Makes scopes of lines that stand outside of modules, for the keys of a policy.

    y = mul x 3e4      at train.py:12, in no scope     =>     in the scope `train:12`

    Attributes:
      sources: the line that a scope stands for, `train.py:12`, by its name.
    """

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    def __call__(self, closed: Jaxpr, outer: tuple[str, ...] = ()) -> Jaxpr:
        """Returns an open or closed jaxpr with the scopes."""
        jaxpr = _compat.open_jaxpr(closed)[0]
        jaxpr = jaxpr.replace(eqns=[self._equation(eqn, outer) for eqn in jaxpr.eqns])
        # Before JAX 0.12, a closed jaxpr holds an open one.
        return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr

    def _equation(self, eqn: Eqn, outer: tuple[str, ...]) -> Eqn:
        scopes, line = outer + scopes_of(eqn), source_line(eqn)
        if bodies(eqn):
            name = traits_of(eqn).body
            value = eqn.params[name]
            if isinstance(value, tuple):
                value = tuple(self(body, scopes) for body in value)
            elif _compat.is_jaxpr(value):
                value = self(value, scopes)
            eqn = eqn.replace(params={**eqn.params, name: value})
        if module_path(scopes) or not line:
            return eqn
        file, _, number = line.rpartition("/")[2].rpartition(":")
        # A name with a dot would be that of a method.
        name = f"{file.partition('.')[0]}:{number}"
        self.sources[name] = line
        return _compat.with_scopes(eqn, (*_compat.scopes(eqn), _entry(name)))


@functools.cache
def _entry(name: str) -> Any:
    """Returns what JAX puts into the scopes of an equation for a `jax.named_scope`."""
    traced = jax.make_jaxpr(jax.named_call(lambda x: x + 1, name=name))(0.0)
    return _compat.scopes(_compat.open_jaxpr(traced)[0].eqns[0])[0]
