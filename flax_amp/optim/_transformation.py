"""What goes to optax, and what comes back."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_amp.optim._exact import Exact

PyTree = Any


def as_transformation(made: Any) -> optax.GradientTransformationExtraArgs:
    """Returns what a factory made, if it is an optimizer of any kind.

    Raises:
      TypeError: if it is none.
    """
    if hasattr(made, "as_argument"):
        made = made.as_argument()
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise TypeError(
            f"optim: the factory returned a {type(made).__name__}; expected an "
            "optax.GradientTransformation. Return what optax.chain(...) returns."
        )
    if not isinstance(made, optax.GradientTransformation):  # as optax.MultiSteps
        made = optax.GradientTransformation(made.init, made.update)
    return optax.with_extra_args_support(made)


def first_update(tx: Any, grads: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what an update returns, with the extra arguments that it asks for."""

    def total(params: PyTree, *_: Any, **__: Any) -> jax.Array:
        return sum(map(jnp.sum, jax.tree.leaves(params)), jnp.zeros(()))

    state = tx.init(params)
    value = {"value": total(params)}
    known: dict[str, Any] = {"grad": grads, "value_fn": total}
    for extra_args in ({}, value, value | known, {"obj_fn": total}):
        with contextlib.suppress(Exception):  # whatever says that it asks for others
            return tx.update(grads, state, params, **extra_args)
    return tx.update(grads, state, params, loss=total(params))


def settled(tree: PyTree) -> PyTree:
    """Returns what optax computed, as strongly typed arrays."""
    return jax.tree.map(settled_leaf, tree, is_leaf=_is_exact)


def _is_exact(node: Any) -> bool:
    return isinstance(node, Exact)


def settled_leaf(leaf: Any) -> Any:
    """Returns a leaf as a strongly typed array."""
    if _is_exact(leaf):
        leaf = jnp.asarray(leaf)
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


@contextlib.contextmanager
def explaining(name: str) -> Iterator[None]:
    """Says what to do about a number that had to be known."""
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"{name}: a traced value was used in Python, "
            "for a branch or a shape; expected numbers that are only computed with. If "
            "it is a hyper-parameter, keep it fixed: optim.wrap(factory, "
            "static_args='its name')."
        ) from error
