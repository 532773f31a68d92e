"""Functions of `nnx.Module` arguments as pure functions, and the way back.

A jaxpr transform sees arrays only. Without this bridge a module argument would be
rebuilt for the trace and thrown away with its new batch statistics and random state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import jax
from flax import nnx

from flax_amp._rewriter.nnx_scopes import Scopes, forget_names, with_names
from flax_amp._tree import is_array


@dataclasses.dataclass(frozen=True)
class FunctionalCall:
    """A call of a user's function, in terms of a flat list of inputs.

    Attributes:
      function: takes the inputs; returns the result, and the variables of the modules
        that it changed.
      inputs: the leaves of the arguments and of the state of the modules.
      finish: takes what `function` returned, updates the modules, returns the result.
      rebuild_arguments: takes one value for each input; returns `(args, kwargs)` with
        these values. Its second argument maps the `nnx.State` of each module to what
        stands for the module there.
      old_leaves: returns, once `function` was traced, the inputs that its new leaves
        replace, each with the name of its variable.
      array_paths: returns the path of each array among the inputs.
    """

    function: Callable[[list[Any]], tuple[Any, list[Any]]]
    inputs: list[Any]
    finish: Callable[[tuple[Any, list[Any]]], Any]
    rebuild_arguments: Callable[
        [Sequence[Any], Callable[[nnx.State], Any]], tuple[Any, Any]
    ]
    old_leaves: Callable[[], list[tuple[str, Any]]]
    array_paths: Callable[[], list[str]]


def is_node(x: Any) -> bool:
    """Whether `x` is an object of NNX, which may change while a function runs."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def is_module(x: Any) -> bool:
    """Whether `x` is an object of NNX that is more than one variable."""
    return isinstance(x, nnx.Pytree)


def functional(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: bool = False,
    where: str | None = None,
) -> FunctionalCall:
    """Makes `fun(*args, **kwargs)` a pure function of a flat list of leaves.

    Args:
      fun: the user's function.
      args: its arguments; modules and variables may stand anywhere in them, and may
        share state.
      kwargs: its keyword arguments, likewise.
      names: open a scope around each call of a module.
      where: what calls it, for messages.

    Raises:
      ValueError: when `function` is called, if that changes the structure of a module.
    """
    where = where or f"amp: {getattr(fun, '__name__', fun)!s}"
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = [x for x in leaves if is_node(x)]
    if not nodes:
        return FunctionalCall(
            lambda inputs: (_call(fun, treedef, inputs), []),
            leaves,
            lambda result: result[0],
            lambda values, of_module: jax.tree.unflatten(treedef, values),
            list,
            lambda: _paths((args, kwargs)),
        )
    graphdef, state = nnx.split(nodes)
    state_leaves, state_def = jax.tree.flatten(state)
    others = [x for x in leaves if not is_node(x)]
    changed_paths: list[Any] = []

    def attempt(inputs: list[Any], scopes: Scopes) -> Any:
        rest = iter(inputs[len(state_leaves) :])
        new_state = jax.tree.unflatten(state_def, inputs[: len(state_leaves)])
        merged = nnx.merge(graphdef, new_state, copy=True)
        modules = iter(merged)
        filled = [next(modules) if is_node(x) else next(rest) for x in leaves]
        with scopes(merged):
            out = _call(fun, treedef, filled)
        forget_names(list(filter(is_node, jax.tree.leaves(out, is_leaf=is_node))))
        after, updated = nnx.split(merged)
        if after != graphdef:
            raise ValueError(_changed_structure(where, state, updated))
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
        return _paths(state) + _paths((args, kwargs), is_leaf=is_node)

    def rebuild_arguments(
        values: Sequence[Any], of_module: Callable[[nnx.State], Any]
    ) -> tuple[Any, Any]:
        count = len(state_leaves)
        states = jax.tree.unflatten(state_def, values[:count])
        rest = iter(values[count:])
        of_nodes = (
            states[i]
            if isinstance(node, nnx.Variable)
            else of_module(states.get(i, nnx.State({})))
            for i, node in enumerate(nodes)
        )
        filled = [next(of_nodes) if is_node(x) else next(rest) for x in leaves]
        return jax.tree.unflatten(treedef, filled)

    def old_leaves() -> list[tuple[str, Any]]:
        before = dict(nnx.to_flat_state(state))
        return [
            (_variable_name(nodes[path[0]], path[1:]), leaf)
            for path in changed_paths
            for leaf in jax.tree.leaves(before[path])
        ]

    inputs = [*state_leaves, *others]
    return FunctionalCall(
        function, inputs, finish, rebuild_arguments, old_leaves, paths
    )


def _variable_name(node: Any, path: Sequence[Any]) -> str:
    return ".".join([type(node).__name__, *map(str, path)])


def _paths(tree: Any, is_leaf: Any = None) -> list[str]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    keystr = jax.tree_util.keystr
    return [keystr(p, simple=True, separator="/") for p, x in found if is_array(x)]


def changes_in(tree: Any, name: str) -> Callable[[], list[str]]:
    """Returns a function that names the variables of a tree that have changed since
    this call.

    Args:
      tree: arguments of a function, modules and variables among them.
      name: what to call the tree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    nodes = [(path, node) for path, node in leaves if is_node(node)]
    # A copy: the variables of a module change with it.
    before = [jax.tree.map(lambda x: x, nnx.state([node])) for _, node in nodes]

    def changes() -> list[str]:
        return [
            f"{name}{jax.tree_util.keystr(path)} ({_variable_name(node, variable[1:])})"
            for (path, node), old in zip(nodes, before, strict=True)
            for variable in _changed(nnx.state([node]), old)
        ]

    return changes


def _changed_structure(where: str, old: nnx.State, new: nnx.State) -> str:
    """Says what a function did to the structure of its modules."""
    before, after = (
        {"/".join(map(str, path[1:])) for path, _ in nnx.to_flat_state(state)}
        for state in (old, new)
    )
    if before == after:
        return (
            f"{where} changed a static attribute of its nnx.Module argument, as "
            "model.eval() does; expected changes of variables only. Change it before "
            "the call, or use nnx.view."
        )
    return (
        f"{where} changed the structure of its nnx.Module argument (it added the "
        f"variables {sorted(after - before)} and removed {sorted(before - after)}); "
        "expected changes of values only. Create all variables in __init__, or call "
        "the function once before, so that they exist."
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
        if path not in before
        or any(map(is_not, jax.tree.leaves(variable), jax.tree.leaves(before[path])))
    }


def _call(fun: Callable[..., Any], treedef: Any, leaves: list[Any]) -> Any:
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    return fun(*args, **kwargs)
