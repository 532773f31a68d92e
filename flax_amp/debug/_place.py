"""Where an equation stands: its module, the loops around it, and its source line.

The scopes around an equation tell its module.

Flax opens the scope `embed.attend` for the method `attend` of the module `embed`. Other
names have dots, too: `eqx.nn.Linear`. A dot separates a method only if Flax runs a
method of that name at the equation, as the traceback tells. All else is one name.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import flax
import optax
from flax.linen import module as linen_module

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._jaxpr.walk import walk
from flax_amp._rewriter import nnx_scopes
from flax_amp._rewriter.outline.scopes import resolved

# Where Flax's modules, and those of NNX here, call the methods that users have written.
_CALLERS = (linen_module.__file__, nnx_scopes.__file__)
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (flax, optax)
)
# Scopes that JAX opens around what a backward pass computes again.
_RECOMPUTED = "rematted_computation"
_OF_CHECKPOINTS = ("checkpoint", _RECOMPUTED)

# The scopes of methods that were found, in one call of a tool.
_known: ContextVar[set[str]] = ContextVar("known")


@contextlib.contextmanager
def known_methods() -> Iterator[None]:
    """Keeps what is found of methods, for the equations of derivatives."""
    token = _known.set(set())
    try:
        yield
    finally:
        _known.reset(token)


class _Method(str):
    """The scope of a method of a module."""


def scopes_of(eqn: Eqn) -> tuple[str, ...]:
    """Returns the scopes around an equation in its jaxpr, for `module_path`.

    What stands inside of a transformation may repeat what is around it: it is listed
    once.
    """
    scopes: list[str] = []
    entries = _compat.scopes(eqn)
    if all(_is_scope(entry) and entry.name != _RECOMPUTED for entry in entries):
        # As keys of a policy match them: a user's module may be called `checkpoint`.
        scopes = [entry.name for entry in entries]
    else:
        group: list[str] = []
        for entry in (*entries, None):
            if _is_scope(entry):
                group += [entry.name] if entry.name not in _OF_CHECKPOINTS else []
                continue
            # A transformation, or the end.
            scopes = group if group[: len(scopes)] == scopes else scopes + group
            group = []
    half = len(scopes) // 2
    if eqn.primitive.name == "remat2" and scopes[:half] == scopes[half:]:
        scopes = scopes[:half]  # what is computed again
    return _mark_methods(tuple(scopes), eqn)


def _is_scope(entry: Any) -> bool:
    return type(entry).__name__ == "Scope"


def _mark_methods(scopes: tuple[str, ...], eqn: Eqn) -> tuple[str, ...]:
    """Marks those scopes of an equation that are methods of modules."""
    if not any("." in scope for scope in scopes):
        return scopes
    # The rule of a derivative runs after Flax has returned, in the scopes of its call.
    methods = known = _known.get(set())
    running = _running_methods(eqn)
    if running is not None:
        methods = {scope for scope in scopes if scope.rpartition(".")[2] in running}
        known |= methods
    return tuple(_Method(scope) if scope in methods else scope for scope in scopes)


def _running_methods(eqn: Eqn) -> set[str] | None:
    """Returns the methods that Flax runs at an equation; `None` if it runs none."""
    running, is_inside, is_called = set(), False, False
    for file, function in _compat.outer_functions(eqn):
        owner, _, name = function.rpartition(".")  # `Embed.attend`
        is_caller = file in _CALLERS
        is_inside |= is_caller
        # What Flax calls may be any function, and a decorator may call the method.
        is_method = owner != "" and not owner.endswith("<locals>")
        if name.isidentifier() and (is_called or (is_inside and is_method)):
            running.add(name)  # a key for the module would not match a `<lambda>`
        is_called = is_caller
    return running if is_inside else None


def module_path(scopes: tuple[str, ...]) -> str:
    """Returns the path of modules that scopes mean, without the names of methods."""
    names: list[str] = []
    was_method = False
    for scope in resolved(scopes):
        is_method = isinstance(scope, _Method)
        for name in (scope.rpartition(".")[0] if is_method else scope).split("/"):
            if "->" in name:  # `jnp.einsum` opens a scope with its formula
                continue
            # A method that calls another one of its own module, as Flax's RNN does.
            if not ((is_method or was_method) and names and names[-1] == name):
                names.append(name)
            was_method = is_method
    return "/".join(names)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a jaxpr stands, or an equation.

    Attributes:
      scopes: the scopes around it, that of the equation included.
      inside: the loops and other structured primitives around it, outermost first.
      times: how often it runs.
      eqn: the equation; of a jaxpr, the one that holds it.
      outer: the place of the jaxpr around the equation.
    """

    scopes: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    times: int = 1
    eqn: Eqn = None
    outer: "Place | None" = None

    @property
    def path(self) -> str:
        """The path of the module."""
        return module_path(self.scopes)

    @property
    def source(self) -> str:
        """The line of the user's code; if it is not known, that of what is around."""
        lines = (source_line(place.eqn) for place in self.chain())
        return next(filter(None, lines), "")

    def chain(self) -> "Iterator[Place]":
        """Yields the place and those of the equations around it, innermost first."""
        place: Place | None = self
        while place is not None and place.eqn is not None:
            yield place
            place = place.outer

    def of(self, eqn: Eqn) -> "Place":
        """Returns the place of an equation, which is that of a body that runs once."""
        scopes = self.scopes + scopes_of(eqn)
        return dataclasses.replace(self, scopes=scopes, eqn=eqn, outer=self)

    def noted(self, note: str) -> "Place":
        """Returns the place of one iteration of a loop, or of one branch."""
        return dataclasses.replace(self, inside=(*self.inside, note))

    def within(self, eqn: Eqn) -> "Place":
        """Returns the place of the bodies of an equation."""
        at, name = self.of(eqn), eqn.primitive.name
        if name in ("jit", "flax_amp_repeat"):
            return at
        if name != "scan":
            return at.noted(name)
        length = eqn.params["length"]
        times = self.times * known_size(length, 1)
        return dataclasses.replace(at.noted(f"scan x{length}"), times=times)


def places(
    jaxpr: Jaxpr,
    place: Place = Place(),
    enter: Callable[[Eqn], bool] = lambda eqn: True,
) -> Iterator[Place]:
    """Yields the places of all equations of a program, each as often as it is called.

    Args:
      jaxpr: the program.
      place: where it stands.
      enter: whether to walk the bodies of an equation.
    """
    within, last = place, ()
    for eqn, _, around in walk(jaxpr, every_call=True, enter=enter):
        if around is not last:  # the equations of one body share the tuple
            within, last = functools.reduce(Place.within, around, place), around
        yield within.of(eqn)


def known_size(number: Any, unknown: int = 0) -> int:
    """Returns a number, unless it is a symbol of `jax.export`."""
    return number if isinstance(number, int) else unknown


def source_line(eqn: Eqn) -> str:
    """Returns the line of the user's code that an equation comes from."""
    frames = _compat.user_frames(eqn)
    first = next(frames, None)
    if first is None:
        return ""
    of_users = (
        frame
        for frame in itertools.chain([first], frames)
        if not frame[0].startswith(_LIBRARIES)
    )
    file, line = next(of_users, first)
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line}"
