"""Functions of `nnx.Module` arguments as pure functions, and the way back.

A jaxpr transform sees arrays only. Without this bridge a module argument would be
rebuilt for the trace and thrown away with its new batch statistics and random state.
"""

from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import jax
from flax import nnx

from flax_amp import _compat
from flax_amp._rewriter.nnx_scopes import forget_names, module_scopes
from flax_amp._tree import PyTree, is_array


def is_node(x: Any) -> bool:
    """Whether `x` is an object of NNX, which may change while a function runs."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def is_module(x: Any) -> bool:
    """Whether `x` is an object of NNX that is more than one variable."""
    return isinstance(x, nnx.Pytree)


class FunctionalCall:
    """A call `fun(*args, **kwargs)` as a pure function of a flat list of inputs.

    Args:
      fun: the user's function.
      args: its arguments; modules and variables may stand anywhere in them, and may
        share state.
      kwargs: its keyword arguments, likewise.
      open_scopes: open a scope around each call of a module.
      caller: the function that makes the call, for messages.

    Attributes:
      fun: the user's function.
      inputs: the leaves of the state of the modules, then the other leaves of the
        arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        open_scopes: bool = False,
        caller: str | None = None,
    ):
        self.fun = fun
        self._arguments = args, kwargs
        self._open_scopes = open_scopes
        self._caller = caller or f"amp: {getattr(fun, '__name__', fun)!s}"
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
        self._nodes = [x for x in self._leaves if is_node(x)]
        self._graphdef, self._state = nnx.split(self._nodes)
        state_leaves, self._state_def = jax.tree.flatten(self._state)
        self._state_size = len(state_leaves)
        self._changed_paths: list[Any] = []
        # State first: what the modules share is one input, wherever they stand.
        self.inputs = [*state_leaves, *(x for x in self._leaves if not is_node(x))]

    def function(self, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Calls the user's function.

        Returns:
          Its result, and the variables of the modules that it changed.

        Raises:
          ValueError: if the function changes the structure of a module.
        """
        state, others = self._split(inputs)
        # The user's own modules never hold a tracer, whatever the function raises.
        merged = nnx.merge(self._graphdef, state, copy=True)
        args, kwargs = self._fill(merged, others)
        with module_scopes(merged, wanted=self._open_scopes):
            out = self.fun(*args, **kwargs)
        # A module that is returned outlives the trace; its name must not.
        forget_names(list(filter(is_node, jax.tree.leaves(out, is_leaf=is_node))))
        after, updated = nnx.split(merged)
        if after != self._graphdef:
            raise ValueError(_changed_structure(self._caller, self._state, updated))
        changed = _changed(updated, state)
        self._changed_paths = list(changed)
        return out, list(changed.values())

    def finish(self, result: tuple[Any, Sequence[Any]]) -> Any:
        """Updates the modules with what `function` returned; returns its result."""
        out, updated = result
        # Each path begins with the number of the module; if two arguments are one
        # module, with that of the first.
        pairs = list(zip(self._changed_paths, updated, strict=True))
        nnx.update(self._nodes, nnx.from_flat_state(pairs))
        return out

    def rebuild_arguments(
        self, values: Sequence[Any], of_module: Callable[[nnx.State], Any]
    ) -> tuple[Any, Any]:
        """Returns `(args, kwargs)` with other leaves.

        Args:
          values: one value for each input.
          of_module: maps the `nnx.State` of a module to what takes its place.
        """
        states, others = self._split(values)
        nodes = [
            states[i]
            if isinstance(node, nnx.Variable)
            # A module without variables has no state among them.
            else of_module(states.get(i, nnx.State({})))
            for i, node in enumerate(self._nodes)
        ]
        return self._fill(nodes, others)

    def old_leaves(self) -> list[tuple[str, Any]]:
        """Returns the inputs that the new variables replace, with their names.

        They are known once `function` was traced.
        """
        before = dict(nnx.to_flat_state(self._state))
        return [
            (_variable_name(self._nodes[path[0]], path[1:]), leaf)
            for path in self._changed_paths
            for leaf in jax.tree.leaves(before[path])
        ]

    def array_paths(self) -> list[str]:
        """Returns the path of each array among the inputs."""
        return _paths(self._state) + _paths(self._arguments, is_leaf=is_node)

    def leaves_by_argument(self) -> list[tuple[Any, list[Any]]]:
        """Returns each argument with its leaves, those of modules behind the others."""
        args, kwargs = self._arguments
        found = []
        for argument in (*args, *kwargs.values()):
            leaves = jax.tree.leaves(argument, is_leaf=is_node)
            # A module may hold itself, and is then no tree.
            of_nodes = jax.tree.leaves(nnx.state(list(filter(is_node, leaves))))
            others = [x for x in leaves if not is_node(x)]
            found.append((argument, [*others, *of_nodes]))
        return found

    def array_names(self) -> list[str]:
        """Returns what JAX's messages call each array among the inputs, `batch['x']`.

        A variable of a module is `model.dense.kernel`.
        """
        args, kwargs = self._arguments
        # In the order of the leaves: a dict is flattened with its keys sorted.
        arguments = [*args, *(kwargs[key] for key in sorted(kwargs))]
        of_nodes: list[str] = []
        of_others: list[str] = []
        names = _compat.name_arguments(self.fun, args, kwargs)
        for name, argument in zip(names, arguments, strict=True):
            leaves = jax.tree_util.tree_leaves_with_path(argument, is_leaf=is_node)
            for path, leaf in leaves:
                path_name = name + jax.tree_util.keystr(path)
                if is_node(leaf):
                    of_nodes.append(path_name)
                elif is_array(leaf):
                    of_others.append(path_name)
        variables = jax.tree_util.tree_leaves_with_path(self._state)
        of_variables = [
            _joined(of_nodes[first.key], path)
            for (first, *path), leaf in variables
            if is_array(leaf)
        ]
        return of_variables + of_others

    def _split(self, inputs: Sequence[Any]) -> tuple[nnx.State, Sequence[Any]]:
        size = self._state_size
        return jax.tree.unflatten(self._state_def, inputs[:size]), inputs[size:]

    def _fill(self, nodes: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
        nodes_, others_ = iter(nodes), iter(others)
        leaves = [next(nodes_) if is_node(x) else next(others_) for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


def _joined(name: str, path: Sequence[Any]) -> str:
    """Returns the name of a variable, `model.dense.kernel`."""
    # The last part of a path is the value inside of the variable, and no dict key.
    keys = [x.key for x in path if isinstance(x, jax.tree_util.DictKey)]
    return ".".join([name, *map(str, keys)])


def _variable_name(node: Any, path: Sequence[Any]) -> str:
    return ".".join([type(node).__name__, *map(str, path)])


def _paths(tree: PyTree, is_leaf: Any = None) -> list[str]:
    # In the form of a policy's keys: `layers/0/kernel`.
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    keystr = jax.tree_util.keystr
    return [keystr(p, simple=True, separator="/") for p, x in found if is_array(x)]


def changes_in(tree: PyTree, name: str) -> Callable[[], list[str]]:
    """Returns a function that names the variables that have changed since this call.

    The variables are those of the modules in `tree`, which messages call `name`.
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


def _changed_structure(caller: str, old: nnx.State, new: nnx.State) -> str:
    """Says what a function did to the structure of its modules."""
    # The first part of a path is the number of the module among the arguments.
    before, after = (
        {"/".join(map(str, path[1:])) for path, _ in nnx.to_flat_state(state)}
        for state in (old, new)
    )
    if before == after:
        return (
            f"{caller} changed a static attribute of its nnx.Module argument, as "
            "model.eval() does; expected changes of variables only. Change it before "
            "the call, or use nnx.view."
        )
    return (
        f"{caller} changed the structure of its nnx.Module argument (it added the "
        f"variables {sorted(after - before)} and removed {sorted(before - after)}); "
        "expected changes of values only. Create all variables in __init__, or call "
        "the function once before, so that they exist."
    )


def _changed(new: nnx.State, old: nnx.State) -> dict[Any, Any]:
    """Returns the variables that hold other arrays than before, by their paths.

    The others must not be updated: in a trace, a module from outside of it may be read,
    but not changed.
    """
    before = dict(nnx.to_flat_state(old))
    return {
        path: variable
        for path, variable in nnx.to_flat_state(new)
        if path not in before
        or any(map(is_not, jax.tree.leaves(variable), jax.tree.leaves(before[path])))
    }
