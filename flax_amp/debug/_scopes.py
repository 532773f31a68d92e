"""Which module the code of an equation belongs to, by the scopes around it.

Flax opens the scope `embed.attend` for the method `attend` of the module `embed`. Other
names have dots, too: `eqx.nn.Linear`. A dot separates a method only if Flax runs a
method of that name at the equation, as the traceback tells. All else is one name.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from flax.linen import module as linen_module

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._rewriter import nnx_scopes
from flax_amp._rewriter.outline.scopes import resolved

# Where Flax's modules, and those of NNX here, call the methods that users have written.
_CALLERS = (linen_module.__file__, nnx_scopes.__file__)


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
    """Returns the scopes around an equation in its jaxpr, for `module_path`."""
    return mark_methods(_compat.scope_names(eqn), eqn)


def mark_methods(scopes: tuple[str, ...], eqn: Eqn) -> tuple[str, ...]:
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
    """Where a jaxpr stands.

    Attributes:
      scopes: the scopes around it.
      inside: the structured primitives around it.
      times: how often it runs.
    """

    scopes: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    times: int = 1

    def path(self, eqn: Eqn) -> str:
        """Returns the path of the module that an equation stands in."""
        return module_path(self.scopes + scopes_of(eqn))

    def within(self, eqn: Eqn) -> "Place":
        """Returns the place of the bodies of an equation."""
        name, times = eqn.primitive.name, self.times
        inside = self.inside
        if name == "scan":
            times *= known_size(eqn.params["length"], 1)
            inside = (*inside, f"scan x{eqn.params['length']}")
        elif name not in ("jit", "flax_amp_repeat"):
            inside = (*inside, name)
        return Place(self.scopes + scopes_of(eqn), inside, times)


def known_size(number: Any, unknown: int = 0) -> int:
    """Returns a number, unless it is a symbol of `jax.export`."""
    return number if isinstance(number, int) else unknown
