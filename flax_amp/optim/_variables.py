"""The variables in which `nnx.Optimizer` keeps the arrays of an optimizer."""

from typing import Any

import jax
from flax import nnx

from flax_amp import _tree

PyTree = Any


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def pure(tree: PyTree) -> PyTree:
    """Returns a tree with arrays for variables, which `nnx.Optimizer` makes of them."""
    return nnx.as_pure(tree) if _tree.nodes(tree, nnx.Variable) else tree


def as_variables(like: PyTree, tree: PyTree, where: str) -> PyTree:
    """Undoes `pure`.

    Raises:
      ValueError: if there are other leaves than those that the variables stand for.
    """

    def variable(old: Any, new: Any) -> Any:
        return old.replace(new) if _is_variable(old) else new

    now: Any
    now, new = jax.tree.structure(pure(like)), jax.tree.structure(tree)
    if now != new:
        raise ValueError(
            f"{where}: another structure, in the variables of nnx.Optimizer; expected "
            "numbers in place of numbers. Make a new one: "
            "nnx.Optimizer(model, tx.to_optax(), wrt=...)."
        )
    return jax.tree.map(variable, like, tree, is_leaf=_is_variable)
