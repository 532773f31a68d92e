"""The optimizer of a train state: inside `apply_if_finite`, away from integers."""

from typing import Any

import jax
import optax

from flax_amp import _tree
from flax_amp._training.aliases import PyTree
from flax_amp._training.finite import apply_if_finite
from flax_amp.optim._optimizer import Optimizer, update_state


def has_integers(params: PyTree) -> bool:
    """Whether there are parameters that no optimizer can train."""
    return not all(map(_tree.is_inexact_array, jax.tree.leaves(params)))


def wrap_optimizer(tx: Any, params: PyTree) -> Any:
    """Puts `tx` inside `apply_if_finite`, and keeps integer parameters away from it."""
    if isinstance(tx, Optimizer):
        tx = tx.to_optax(in_state=True)
    if hasattr(tx, "wrapped_factory"):
        raise TypeError(
            f"AmpTrainState.create: tx is the function {tx.__name__}; expected an "
            f"optimizer. Call it: optim.{tx.__name__}(...)."
        )
    if isinstance(tx, type) or not (
        callable(getattr(tx, "init", None)) and hasattr(tx, "update")
    ):
        raise TypeError(
            f"AmpTrainState.create: tx is a {type(tx).__name__}; expected an optax "
            "optimizer with init and update, such as optax.adamw(3e-4)."
        )
    masked = has_integers(params)
    wrapped = apply_if_finite(tx, masked=masked)
    state = jax.eval_shape(wrapped.init, params).inner_state
    _check_order(state)
    if isinstance(state, optax.ApplyIfFiniteState):
        return tx
    return wrapped


def unwrapped(tx: Any) -> Any:
    """Returns the optimizer inside of a new `optim.apply_if_finite`, or `tx`."""
    is_new = isinstance(tx, Optimizer) and tx.opt_state is None
    return tx.inner if is_new and tx._factory is optax.apply_if_finite else tx


def shared_update_fn(masked: bool) -> Any:
    """Returns what updates a state of pytree optimizers: the same for all of them.

    It holds no hyper-parameters, which are in the state, so a step that is compiled
    for one serves others.
    """
    tx = optax.GradientTransformationExtraArgs(_no_init, update_state)
    return apply_if_finite(tx, masked=masked)


def _no_init(params: PyTree) -> Any:
    raise TypeError(
        "state.tx.init: the optimizer of flax_amp.optim is in state.opt_state, not "
        "in state.tx; expected a call of its own init. Make a new state with "
        "AmpTrainState.create(tx=...)."
    )


def resume_opt_state(opt_state: PyTree, initialized: Optimizer) -> PyTree:
    """Returns a new state in which an optimizer continues from the state it has."""
    nodes = _tree.nodes(opt_state, Optimizer)
    for node in nodes:
        new, old = map(_shapes, (node.opt_state, initialized.opt_state))
        if new != old:
            raise ValueError(
                f"AmpTrainState.create: tx, {initialized._name}, has the state of "
                "other parameters; expected one of these, or none. Pass it before "
                "init, or with tx.replace(opt_state=None)."
            )
    return _tree.replace_nodes(opt_state, Optimizer, [initialized] * len(nodes))


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def _check_order(opt_state: PyTree) -> None:
    """Raises a ValueError if gradients are added up before they are tested."""
    for node in _tree.nodes(opt_state, optax.MultiStepsState):
        if _tree.nodes(node.inner_opt_state, optax.ApplyIfFiniteState):
            raise ValueError(
                "AmpTrainState.create: tx is MultiSteps around apply_if_finite, which "
                "tests gradients after they were added up: one inf would stay in the "
                "sum forever. Expected apply_if_finite outermost: pass "
                "optax.MultiSteps(optimizer, k), create wraps it."
            )
