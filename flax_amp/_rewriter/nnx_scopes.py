"""Scopes around the calls of `nnx.Module` objects, as Linen opens them.

`Model/layers/0/attention` is the class of the outermost module, and then the attributes
that lead from each called module to the next. The scope of a method besides `__call__`
ends in the name of the method: `attention.project`.

Two changes make these scopes, and both are undone when the trace ends. First, each
module has its name as a static attribute. Static attributes survive the splitting and
merging in `nnx.jit`, `nnx.scan` and the like, and a table of names by identity would
not. The modules are copies that no user sees. Second, the methods of the modules'
classes are wrapped, because a subclass made on the fly would run the user's
`__init_subclass__`. For a module without a name, such as a module of another thread,
the wrapper opens no scope.

Two modules that differ in their names only have different structures, and code that
needs equal structures fails. So modules have names only where a policy has scope keys,
or a tool of `debug` asks for names.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx

_NAME = "_flax_amp_scope"
# `nnx.List` and `nnx.Dict` are not called; `ToNNX` iterates over its own attributes.
_NAMELESS = (nnx.List, nnx.Dict, nnx.bridge.ToNNX)

SCOPES_NOTE = (
    "amp gives each nnx.Module a static attribute with its name, because amp_policy "
    "has scope keys, or a tool such as flax_amp.explain asks for names: two layers of "
    "one class have different structures here. Code that needs them equal can use "
    "their states, which have no names (graphdef, state = nnx.split(layer)), or a "
    "policy without scope keys."
)


@contextlib.contextmanager
def module_scopes(node: Any, *, wanted: bool) -> Iterator[None]:
    """Opens a scope around every method call of the modules in `node`, if wanted.

    The modules must be copies, because they have their names while the context lasts.
    """
    if not wanted:
        yield
        return
    paths = _paths(node)
    for module, path in paths:
        # `object.__setattr__` avoids the methods of NNX, which refuse to change a
        # module of an outer trace. NNX takes an attribute that was set in this way for
        # a static attribute.
        object.__setattr__(module, _NAME, path)
    with _wrapped([module for module, _ in paths]):
        try:
            yield
        except Exception as error:
            if _NAME in str(error):  # JAX shows the attribute that differs
                error.add_note(SCOPES_NOTE)
            raise
        finally:
            forget_names(node)


def forget_names(tree: Any) -> None:
    """Takes the names off all modules in a tree, copies included."""
    for _, value in nnx.iter_graph(tree, graph=True):
        if isinstance(value, nnx.Module):
            vars(value).pop(_NAME, None)


def _paths(node: Any) -> list[tuple[nnx.Module, str]]:
    """Returns every module with its path from the nearest module around.

    The outermost module has the name of its class instead of a path.
    """
    modules = {
        path: value
        for path, value in nnx.iter_graph(node, graph=True)
        if isinstance(value, nnx.Module) and not isinstance(value, _NAMELESS)
    }
    found = []
    for path, module in modules.items():
        starts = (n for n in reversed(range(len(path))) if path[:n] in modules)
        start = next(starts, None)
        own = [type(module).__name__] if start is None else path[start:]
        found.append((module, "/".join(map(str, own))))
    return found


# --- wrapping the methods of classes, and unwrapping the methods ---------------------

_lock = threading.Lock()
_traces = 0  # the number of traces that use the wrappers, in all threads
_classes: set[type] = set()  # the classes whose methods are wrapped
_undo = contextlib.ExitStack()  # puts the original methods back


@contextlib.contextmanager
def _wrapped(modules: Iterable[nnx.Module]) -> Iterator[None]:
    """Wraps the methods that users may have written, methods of mixins included."""
    global _traces
    mixed = {cls for module in modules for cls in type(module).__mro__}
    own = {cls for cls in mixed if cls.__module__ != "builtins"}
    with _lock:
        _traces += 1
    try:
        with _lock:
            for cls in own.difference(nnx.Module.__mro__, _classes):
                _classes.add(cls)
                methods = {k: v for k, v in vars(cls).items() if _is_method(k, v)}
                for name, method in methods.items():
                    _undo.callback(setattr, cls, name, method)
                    setattr(cls, name, _scoped(name, method))
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                _undo.close()
                _classes.clear()


def _is_method(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a public method, decorated or not."""
    is_public = name == "__call__" or not name.startswith("_")
    is_function = callable(value) and hasattr(value, "__get__")
    is_other = isinstance(value, staticmethod | classmethod | type)
    return is_public and is_function and not is_other


def _scoped(method_name: str, method: Any) -> Callable[..., Any]:
    suffix = "" if method_name == "__call__" else f".{method_name}"

    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        name = getattr(self, "__dict__", {}).get(_NAME)  # a mixin may have slots
        if not name:
            return bound(*args, **kwargs)
        # A module has no name in its own scope. So a method that the module calls on
        # itself opens no second scope, and equal layers under `nnx.jit` are traced only
        # once.
        object.__setattr__(self, _NAME, "")
        try:
            with jax.named_scope(name + suffix):
                return bound(*args, **kwargs)
        finally:
            object.__setattr__(self, _NAME, name)

    return scoped
