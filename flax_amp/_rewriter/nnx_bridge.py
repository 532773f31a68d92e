"""Functions of `nnx.Module` arguments as pure functions, and the way back.

A jaxpr transform sees arrays only. Without this bridge a module argument would be
rebuilt for the trace and thrown away with its new batch statistics and random state.
"""

from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import jax
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp._rewriter.nnx_scopes import forget_names, module_scopes
from flax_amp._tree import PyTree


def is_node(x: Any) -> bool:
    """Whether `x` is an object of NNX, which may change while a function runs."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


class FunctionalCall:
    """A call `fun(*args, **kwargs)` as a pure function of a flat list of inputs.

    Modules and variables may stand anywhere in the arguments, and may share state. The
    inputs are the leaves of their state, then the remaining leaves of the arguments.
    With `open_scopes`, a scope is around each call of a module. Error messages begin
    with `caller`.
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
        self.arguments = args, kwargs
        self._open_scopes = open_scopes
        self._caller = caller or f"amp: {getattr(fun, '__name__', fun)!s}"
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
        self._nodes = [x for x in self._leaves if is_node(x)]
        self._graphdef, self._state = nnx.split(self._nodes)
        # State that several modules share is a single input, wherever they stand.
        inputs = self._state, [x for x in self._leaves if not is_node(x)]
        self.inputs, self._inputs_def = jax.tree.flatten(inputs)

    def function(self, inputs: Sequence[Any]) -> tuple[Any, nnx.State]:
        """Returns the result of the call, and the variables that the call changed."""
        state, others = jax.tree.unflatten(self._inputs_def, inputs)
        # A copy: the user's modules never hold a tracer, even if the function raises.
        merged = nnx.merge(self._graphdef, state, copy=True)
        args, kwargs = self._fill(merged, others)
        with module_scopes(merged, wanted=self._open_scopes):
            out = self.fun(*args, **kwargs)
        # A module that is returned outlives the trace; its name must not.
        forget_names(list(filter(is_node, jax.tree.leaves(out, is_leaf=is_node))))
        after, updated = nnx.split(merged)
        if after != self._graphdef:
            old, new = (dict(nnx.to_flat_state(x)).keys() for x in (state, updated))
            names = sorted(_variable_name(merged, path) for path in old ^ new)
            changed = f"the variables {names}" if names else "a static attribute"
            raise ValueError(
                f"{self._caller} changed the structure of its nnx.Module argument: "
                f"{changed}; "
                "expected changes of values only. Create all variables in __init__, "
                "and change attributes, as model.eval() does, before the call."
            )
        return out, nnx.from_flat_state(list(_changed(updated, state).items()))

    def update_modules(self, result: tuple[Any, nnx.State]) -> Any:
        """Updates the user's modules, and returns the result of the call.

        `result` is the pair that `function` returned.
        """
        out, changed = result
        nnx.update(self._nodes, changed)
        return out

    def places_of(self, argnums: Sequence[int]) -> list[int]:
        """Returns the places of the inputs that stand in some positional arguments."""
        places = range(len(self.inputs))
        args, _ = self.rebuild_arguments(places, nnx.to_pure_dict)
        return sorted(jax.tree.leaves([args[n] for n in argnums]))

    def arguments_with(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Returns `(args, kwargs)` with new inputs, and with copies of the modules."""
        state, others = jax.tree.unflatten(self._inputs_def, inputs)
        merged = nnx.merge(self._graphdef, state, copy=True)
        return self._fill(merged, others)

    def rebuild_arguments(
        self, values: Sequence[Any], of_module: Callable[[nnx.State], Any]
    ) -> tuple[Any, Any]:
        """Returns `(args, kwargs)` with a value in the place of each input.

        `of_module` maps the `nnx.State` of a module to the object that takes the place
        of the module. State that several modules share is a part of the first module.
        """
        states, others = jax.tree.unflatten(self._inputs_def, values)
        nodes = []
        for i, node in enumerate(self._nodes):
            if isinstance(node, nnx.Variable):
                nodes.append(states[i])
            else:
                # A module without variables has no entry in `states`.
                nodes.append(of_module(states.get(i, nnx.State({}))))
        return self._fill(nodes, others)

    def _fill(self, nodes: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
        nodes_ = iter(nodes)
        others_ = iter(others)
        leaves = [next(nodes_) if is_node(x) else next(others_) for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


def watch_changes(tree: PyTree, name: str) -> Callable[[], list[str]]:
    """Returns a function that names the variables in `tree` that change from now on."""
    leaves = tree_leaves_with_path(tree, is_leaf=is_node)
    places = {keystr(path): node for path, node in leaves if is_node(node)}
    nodes = list(places.values())
    # A copy, because the variables of a module change with the module.
    before = jax.tree.map(lambda x: x, nnx.state(nodes))

    def changes() -> list[str]:
        return [
            f"{name}{list(places)[path[0]]} ({_variable_name(nodes, path)})"
            for path in _changed(nnx.state(nodes), before)
        ]

    return changes


def _variable_name(nodes: Sequence[Any], path: Sequence[Any]) -> str:
    """Returns the name of a variable, whose path begins with its module's number."""
    first, *rest = path
    return ".".join([type(nodes[first]).__name__, *map(str, rest)])


def _changed(new: nnx.State, old: nnx.State) -> dict[Any, Any]:
    """Returns the variables that hold new arrays or are new, by their paths."""
    # Unchanged variables must not be updated: in a trace, a module from outside of the
    # trace may be read, but not changed.
    before = dict(nnx.to_flat_state(old))
    return {
        path: variable
        for path, variable in nnx.to_flat_state(new)
        if path not in before
        or any(map(is_not, jax.tree.leaves(variable), jax.tree.leaves(before[path])))
    }
