"""Functions of `nnx.Module` arguments as pure functions, and the way back.

A jaxpr transform sees arrays only. Without this bridge a module argument would be
rebuilt for the trace and thrown away with its new batch statistics and random state.
"""

import dataclasses
from collections.abc import Callable
from operator import is_not
from typing import Any

import jax
from flax import nnx

from flax_amp._tree import is_array
from flax_amp.nnx_scopes import Scopes, forget_names, with_names


@dataclasses.dataclass(frozen=True)
class FunctionalCall:
    """A call of a user's function, in terms of a flat list of inputs.

    Attributes:
      function: takes the inputs; returns the result and the new state of the modules.
      inputs: the leaves of the arguments and of the state of the modules.
      finish: takes what `function` returned, updates the modules, returns the result.
      array_paths: returns the path of each array among the inputs.
    """

    function: Callable[[list[Any]], Any]
    inputs: list[Any]
    finish: Callable[[Any], Any]
    array_paths: Callable[[], list[str]]


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def functional(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: bool = False,
) -> FunctionalCall:
    """Makes `fun(*args, **kwargs)` a pure function of a flat list of leaves.

    Args:
      fun: the user's function.
      args: its arguments; modules and variables may stand anywhere in them, and may
        share state.
      kwargs: its keyword arguments, likewise.
      names: open a scope around each call of a module.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = [x for x in leaves if _is_node(x)]
    if not nodes:
        return FunctionalCall(
            lambda inputs: _call(fun, treedef, inputs),
            leaves,
            lambda out: out,
            lambda: _paths((args, kwargs)),
        )
    graphdef, state = nnx.split(nodes)
    state_leaves, state_def = jax.tree.flatten(state)
    others = [x for x in leaves if not _is_node(x)]
    changed_paths: list[Any] = []

    def attempt(inputs: list[Any], scopes: Scopes) -> Any:
        rest = iter(inputs[len(state_leaves) :])
        new_state = jax.tree.unflatten(state_def, inputs[: len(state_leaves)])
        merged = nnx.merge(graphdef, new_state, copy=True)
        modules = iter(merged)
        filled = [next(modules) if _is_node(x) else next(rest) for x in leaves]
        with scopes(merged):
            out = _call(fun, treedef, filled)
        forget_names(list(filter(_is_node, jax.tree.leaves(out, is_leaf=_is_node))))
        after, updated = nnx.split(merged)
        if after != graphdef:
            raise ValueError(_changed_structure(fun, state, updated))
        changed = _changed(updated, new_state)
        changed_paths[:] = changed
        return out, list(changed.values())

    def function(inputs: list[Any]) -> Any:
        return with_names(lambda scopes: attempt(inputs, scopes), wanted=names)

    def finish(result: Any) -> Any:
        out, updated = result
        pairs = list(zip(changed_paths, updated, strict=True))
        nnx.update(nodes, nnx.from_flat_state(pairs))
        return out

    def paths() -> list[str]:
        return _paths(state) + _paths((args, kwargs), is_leaf=_is_node)

    return FunctionalCall(function, [*state_leaves, *others], finish, paths)


def _paths(tree: Any, is_leaf: Any = None) -> list[str]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    keystr = jax.tree_util.keystr
    return [keystr(p, simple=True, separator="/") for p, x in found if is_array(x)]


def _changed_structure(fun: Any, old: nnx.State, new: nnx.State) -> str:
    """Says what a function did to the structure of its modules."""
    name = getattr(fun, "__name__", fun)
    paths = [dict(nnx.to_flat_state(state)).keys() for state in (old, new)]
    if paths[0] == paths[1]:
        return (
            f"amp: {name!s} changed a static attribute of its nnx.Module argument, as "
            "model.eval() does; expected changes of variables only. Change it before "
            "the call, or use nnx.view."
        )
    return (
        f"amp: {name!s} changed the structure of its nnx.Module argument (it added or "
        "removed a variable or a module); expected changes of values only. Create all "
        "variables in __init__, or call the function once before amp so that they "
        "exist."
    )


def _changed(new: nnx.State, old: nnx.State) -> dict[Any, Any]:
    """Returns the variables that hold other arrays than before, by their paths.

    To update the others would do harm: a module that the caller has from outside of a
    trace may be read there, not changed.
    """
    before = dict(nnx.to_flat_state(old))
    return {
        path: variable
        for path, variable in nnx.to_flat_state(new)
        if any(map(is_not, jax.tree.leaves(variable), jax.tree.leaves(before[path])))
    }


def _call(fun: Callable[..., Any], treedef: Any, leaves: list[Any]) -> Any:
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    return fun(*args, **kwargs)
