"""Scopes around the calls of `nnx.Module` objects, which NNX itself does not open.

Linen runs every method of a module under `jax.named_scope`, so that profiles and policy
keys can name it. NNX leaves no trace of its modules in a jaxpr. Here they get the same
scopes: `Model/layers/0/attention`, the class of the outermost module, then the
attributes that lead from one called module to the next; `attention.project` for methods
other than `__call__`.

It is done with two things that go away again when the trace ends. Every module carries
its name as a static attribute, which is how names survive the splitting and merging of
`nnx.jit`, `nnx.scan` and their like; these are copies that no user sees. And the
methods of their classes are wrapped; a module without a name, of another thread, say,
goes through the wrapper as if it were not there.

A name makes two modules that are equal but for it different structures. Code that takes
them for equal (stacks layers, maps over two of them at once) fails then, and is traced
once more without names. So names are given only where a policy asks for scopes.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

T = TypeVar("T")
Scopes = Callable[[Any], contextlib.AbstractContextManager[Any]]

_NAME = "_flax_amp_scope"
# The first two are not called; the last iterates over its own attributes.
_NAMELESS = (nnx.List, nnx.Dict, nnx.bridge.ToNNX)


def with_names(attempt: Callable[[Scopes], T], *, wanted: bool) -> T:
    """Traces with names; without them, and with a warning, if that fails.

    Args:
      attempt: makes its own copies of the modules and traces with them under the
        context manager that it is given. Errors that have nothing to do with names are
        those of the second attempt.
      wanted: False to trace without names at once.
    """
    if not wanted:
        return attempt(contextlib.nullcontext)
    try:
        return attempt(module_scopes)
    except Exception as error:
        failure = error
    result = attempt(contextlib.nullcontext)
    lines = str(failure).splitlines() or [""]
    warnings.warn(
        "amp: this function fails when its nnx.Modules carry names "
        f"({type(failure).__name__}: {lines[0][:120]}), so it was traced without them: "
        "the policy's scope keys see no module paths in it. Use jax.named_scope around "
        "the code that they are for.",
        UserWarning,
        stacklevel=2,
    )
    return result


@contextlib.contextmanager
def module_scopes(node: Any) -> Iterator[None]:
    """Opens a scope around every method call of the modules in `node`.

    Args:
      node: a module, or a structure of them. They must be copies: they carry their
        names for as long as this lasts.
    """
    names = _names(node)
    modules = [module for module, _ in names]
    for module, name in names:
        # Past the methods of NNX: a name is no state, whatever the level of the trace,
        # and NNX takes an attribute that it was not told of for a static one.
        object.__setattr__(module, _NAME, name)
    with _wrapped({cls for module in modules for cls in _classes_of(module)}):
        try:
            yield
        finally:
            forget_names(modules)


def forget_names(tree: Any) -> None:
    """Takes the names off all modules in a tree: copies may have been made of some."""
    for _, value in nnx.iter_graph(tree, graph=True):
        if isinstance(value, nnx.Module):
            vars(value).pop(_NAME, None)


def _names(node: Any) -> list[tuple[nnx.Module, str]]:
    """Returns every module with its path from the module that holds it."""
    modules = {
        path: value
        for path, value in nnx.iter_graph(node, graph=True)
        if isinstance(value, nnx.Module) and not isinstance(value, _NAMELESS)
    }
    names = []
    for path, module in modules.items():
        above = (path[:depth] for depth in reversed(range(len(path))))
        holder = next((prefix for prefix in above if prefix in modules), None)
        if holder is None:
            names.append((module, type(module).__name__))
        else:
            names.append((module, "/".join(map(str, path[len(holder) :]))))
    return names


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
_users: dict[type, int] = {}  # traces that go on, in any thread


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
        # Nameless within its own scope: methods that call one another open one scope,
        # and equal layers under `nnx.jit` are traced once.
        object.__setattr__(self, _NAME, "")
        try:
            with jax.named_scope(name + suffix):
                return bound(*args, **kwargs)
        finally:
            object.__setattr__(self, _NAME, name)

    return scoped
