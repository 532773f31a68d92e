"""Scopes around the calls of `nnx.Module` objects, which NNX itself does not open.

Linen runs every method of a module under `jax.named_scope`, so that profiles and policy
keys can name it. NNX leaves no trace of its modules in a jaxpr. Here they get the same
scopes: `Model/layers/0/attention` is the class of the outermost module, and then the
attributes that lead from one called module to the next. For methods other than
`__call__` it is `attention.project`.

Two things make these scopes, and both are undone when the trace ends. Each module has
its name as a static attribute, because static attributes survive the splitting and
merging in `nnx.jit`, `nnx.scan` and the like; the modules are copies that no user sees.
And the methods of their classes are wrapped. A module without a name, such as one of
another thread, goes through the wrapper as if it were not there.

Two modules that differ in their names only have different structures. Code that needs
them equal (it stacks layers, or maps over two of them) fails then, and its error gets a
note that says so. So modules have names only where a policy has scope keys.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

_NAME = "_flax_amp_scope"
# The first two are not called; the last one iterates over its own attributes.
_NAMELESS = (nnx.List, nnx.Dict, nnx.bridge.ToNNX)

SCOPES_NOTE = (
    "amp gives each nnx.Module a static attribute with its name, because amp_policy "
    "has scope keys: two layers of one class have different structures here. Code that "
    "needs them equal can use their states, which have no names (graphdef, state = "
    "nnx.split(layer)), or a policy without scope keys."
)


class _Name(str):
    """The name of a module; it reports comparisons with other names."""

    was_compared: Callable[[], None]

    def __eq__(self, other: object) -> bool:
        is_equal = str.__eq__(self, other)
        if is_equal is False:  # `NotImplemented` if the other is no string
            self.was_compared()
        return is_equal

    __hash__ = str.__hash__


@contextlib.contextmanager
def module_scopes(node: Any, *, wanted: bool) -> Iterator[None]:
    """Opens a scope around every method call of the modules in `node`.

    Args:
      node: a module, or a structure of them. They must be copies, because they have
        their names as long as this lasts.
      wanted: False to do nothing.
    """
    if not wanted:
        yield
        return
    comparisons: list[None] = []
    modules = []
    for module, path in _paths(node):
        name = _Name(path)
        name.was_compared = functools.partial(comparisons.append, None)
        # Past the methods of NNX, which refuse to change a module of an outer trace.
        # NNX takes an attribute that it was not told of for a static one.
        object.__setattr__(module, _NAME, name)
        modules.append(module)
    with _wrapped({cls for module in modules for cls in _classes_of(module)}):
        try:
            yield
        except Exception as error:
            if comparisons:
                error.add_note(SCOPES_NOTE)
            raise
        finally:
            forget_names(modules)


def forget_names(tree: Any) -> None:
    """Takes the names off all modules in a tree, copies among them."""
    for _, value in nnx.iter_graph(tree, graph=True):
        if isinstance(value, nnx.Module):
            vars(value).pop(_NAME, None)


def _paths(node: Any) -> list[tuple[nnx.Module, str]]:
    """Returns every module with its path from the module that holds it."""
    modules = {
        path: value
        for path, value in nnx.iter_graph(node, graph=True)
        if isinstance(value, nnx.Module) and not isinstance(value, _NAMELESS)
    }
    paths = []
    for path, module in modules.items():
        above = (path[:depth] for depth in reversed(range(len(path))))
        holder = next((prefix for prefix in above if prefix in modules), None)
        if holder is None:
            paths.append((module, type(module).__name__))
        else:
            paths.append((module, "/".join(map(str, path[len(holder) :]))))
    return paths


def _classes_of(module: nnx.Module) -> list[type]:
    """Returns the classes that users may have written, mixins included."""
    return [
        cls
        for cls in type(module).__mro__
        if cls not in nnx.Module.__mro__
        if cls.__module__ not in ("builtins", "abc", "typing")
    ]


# Wrapping the methods of classes, and undoing it

_lock = threading.Lock()
_originals: dict[tuple[type, str], Any] = {}
_users: dict[type, int] = {}  # how many traces use the wrappers, in any thread


@contextlib.contextmanager
def _wrapped(classes: set[type]) -> Iterator[None]:
    with _lock:
        for cls in classes:
            if not _users.get(cls):
                for name, method in _methods(cls).items():
                    _originals[cls, name] = method
                    setattr(cls, name, _scoped(name, method))
            _users[cls] = _users.get(cls, 0) + 1
    try:
        yield
    finally:
        with _lock:
            for cls in classes:
                _users[cls] -= 1
                if not _users[cls]:
                    del _users[cls]
                    for key in [key for key in _originals if key[0] is cls]:
                        setattr(cls, key[1], _originals.pop(key))


def _methods(cls: type) -> dict[str, Any]:
    """Returns the public methods that a class defines, decorated ones included."""
    return {
        name: value
        for name, value in vars(cls).items()
        if name == "__call__" or not name.startswith("_")
        if callable(value) and hasattr(value, "__get__")
        if not isinstance(value, staticmethod | classmethod | type)
    }


def _scoped(method_name: str, method: Any) -> Callable[..., Any]:
    suffix = "" if method_name == "__call__" else f".{method_name}"

    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        name = getattr(self, "__dict__", {}).get(_NAME)  # a mixin may have slots
        if not name:
            return bound(*args, **kwargs)
        # It has no name in its own scope: methods that call one another open one scope,
        # and equal layers under `nnx.jit` are traced once.
        object.__setattr__(self, _NAME, "")
        try:
            with jax.named_scope(name + suffix):
                return bound(*args, **kwargs)
        finally:
            object.__setattr__(self, _NAME, name)

    # In a traceback, too, it has the name of the method. This tells which scopes are
    # those of methods, where a decorator such as `nnx.jit` calls the method later.
    named: Any = scoped
    names = {"co_name": method_name, "co_qualname": f"Module.{method_name}"}
    named.__code__ = named.__code__.replace(**names)
    return named
