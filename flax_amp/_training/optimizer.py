"""The optimizer of a train state: made safe, asked for its numbers, and explained.

`AmpTrainState.create` puts it inside `apply_if_finite` and keeps integers away from it.
A training step is skipped as a whole, by the one select in `core.py`, which also counts
the skips. Where no step does that, in `AmpTrainState.apply_gradients`, the optimizer of
this module skips the update by itself.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from flax_amp import _tree
from flax_amp._training.arguments import (
    Array,
    PyTree,
    check_optimizer,
    check_order,
    describe,
    differences,
    first_of,
)
from flax_amp.optim._optimizer import INJECTED, Optimizer, pure, update_state
from flax_amp.optim._small_state import (
    has_two_dimensions,
    no_moments,
    rounds_parameters,
    small_state,
)

OWN_STATE = (
    "Make the state of the optimizer anew for these parameters, with "
    "AmpTrainState.create or nnx.Optimizer."
)


# Updates that are skipped


@dataclasses.dataclass(frozen=True)
class _ApplyIfFinite:
    """An optimizer whose updates are skipped if they are not finite.

    It computes them anyway, and then selects. `optax.apply_if_finite` branches instead.
    A branch saves the work of a skipped step, but XLA cannot fuse across it or update
    in place. A float16 step of a 3 x 4096 MLP compiled for a TPU v5e takes 975 MB of
    temporary memory and an estimated 13.9 ms with the branch, 178 MB and 10.7 ms with
    the select. `optax.apply_if_finite` also gives up after some skips in a row, but the
    scaler needs them to find its scale. Both have an `optax.ApplyIfFiniteState`, so a
    checkpoint of one fits the other.

    It is static data, not a pair of closures. Two of them are equal if their fields
    are, so two states of one optimizer have the same tree structure and share a
    compiled step.
    """

    inner_init: Callable[..., PyTree]
    inner_update: Callable[..., tuple[PyTree, PyTree]]
    takes_extra_args: bool  # whether the update takes further keyword arguments
    masked: bool  # whether integer parameters are kept away from the optimizer
    checks_finite: bool = True

    def init(self, params: PyTree) -> optax.ApplyIfFiniteState:
        """Returns the state of a new run."""
        return optax.ApplyIfFiniteState(
            notfinite_count=jnp.zeros((), jnp.int32),
            last_finite=jnp.array(True),
            total_notfinite=jnp.zeros((), jnp.int32),
            inner_state=self._inner().init(params),
        )

    def update(
        self,
        updates: PyTree,
        state: optax.ApplyIfFiniteState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.ApplyIfFiniteState]:
        """Returns the updates, zeros if they are not finite, and the next state."""
        # `optax.masked` keeps integers away from the optimizer, but hands their updates
        # on as they are.
        if self.masked and params is not None:
            updates = jax.tree.map(_without_integers, params, updates)
        new, inner_state = self._inner().update(
            updates, state.inner_state, params, **extra_args
        )
        if not self.checks_finite:
            return new, state._replace(inner_state=inner_state)
        finite = _tree.all_finite((updates, new))
        # An update may be finite and its moments not: squares of 1e20 overflow.
        finite &= _tree.stays_finite(inner_state, state.inner_state)
        new = jax.tree.map(lambda u: jnp.where(finite, u, 0).astype(u.dtype), new)
        inner_state = _tree.select(finite, inner_state, state.inner_state)
        counters = apply_if_finite_counters(state, finite)
        return new, state._replace(inner_state=inner_state, **counters)

    def _inner(self) -> optax.GradientTransformationExtraArgs:
        kind = (
            optax.GradientTransformationExtraArgs
            if self.takes_extra_args
            else optax.GradientTransformation
        )
        tx = optax.with_extra_args_support(kind(self.inner_init, self.inner_update))
        # The moments of an optimizer have the dtype of the parameters, but its updates
        # are floats, so the state of an integer parameter would change its dtype.
        return optax.masked(tx, _is_trainable) if self.masked else tx


def _without_integers(param: Any, update: Any) -> Any:
    """Returns zeros for an integer, whatever its gradient: a float, float0, zeros."""
    return update if _tree.is_inexact_array(param) else jnp.zeros_like(param)


def _is_trainable(tree: PyTree) -> PyTree:
    """Returns for each leaf whether an optimizer can train it."""
    return jax.tree.map(_tree.is_inexact_array, tree)


def apply_if_finite(
    inner: Any, *, masked: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer; with `masked`, integer parameters are kept away from it."""
    takes_extra_args = isinstance(inner, optax.GradientTransformationExtraArgs)
    return _as_optax(_ApplyIfFinite(inner.init, inner.update, takes_extra_args, masked))


def _as_optax(of: _ApplyIfFinite) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(
        _tree.Method(of, "init"), _tree.Method(of, "update")
    )


def without_finite_check(tx: Any) -> Any:
    """Returns `tx` without its own check of the gradients; its state is the same.

    A training step makes the check itself, since it also skips the update of variables.
    Optimizers that `apply_if_finite` did not make are returned unchanged.
    """
    found = getattr(tx.update, "of", None)
    if not isinstance(found, _ApplyIfFinite):
        return tx
    return _as_optax(dataclasses.replace(found, checks_finite=False))


def apply_if_finite_counters(state: Any, finite: Array) -> dict[str, Array]:
    """Returns the counters of an `optax.ApplyIfFiniteState` after one more step."""
    in_a_row, total = count_skips(state.notfinite_count, state.total_notfinite, finite)
    return {
        "notfinite_count": in_a_row,
        "last_finite": finite,
        "total_notfinite": total,
    }


def count_skips(in_a_row: Array, total: Array, finite: Array) -> tuple[Array, Array]:
    """Returns how many steps were skipped in a row, and in all, after one more."""
    return (
        jnp.where(finite, 0, optax.safe_increment(in_a_row)),
        jnp.where(finite, total, optax.safe_increment(total)),
    )


# The optimizer of `create`


def wrap_optimizer(tx: Any, params: PyTree) -> tuple[Any, Any]:
    """Returns what makes the state of the optimizer `tx`, and what updates it.

    Both are inside `apply_if_finite`, unless `tx` is one of optax already.
    """
    is_new = isinstance(tx, Optimizer) and tx.opt_state is None
    if is_new and tx._factory is optax.apply_if_finite:
        tx = tx.inner
    inner = tx.to_optax(in_state=True) if isinstance(tx, Optimizer) else tx
    check_optimizer(inner)
    masked = not all(map(_tree.is_inexact_array, jax.tree.leaves(params)))
    wrapped: Any = apply_if_finite(inner, masked=masked)
    # What it is wrapped in shows only in its state: optax's functions are closures.
    inner_state = jax.eval_shape(wrapped.init, params).inner_state
    check_order(inner_state)
    if isinstance(inner_state, optax.ApplyIfFiniteState):
        wrapped = inner
    if not isinstance(tx, Optimizer):
        return wrapped, wrapped
    # What updates a pytree optimizer is the same for all of them. The functions of one
    # would be a static field with its hyper-parameters: that would compile again for
    # each state, keep an optimizer's state alive, and leak tracers out of a `create`
    # under `vmap`.
    shared = optax.GradientTransformationExtraArgs(_no_init, update_state)
    return wrapped, apply_if_finite(shared, masked=masked)


def store_in_half(params: PyTree, tx: Any) -> tuple[PyTree, Any]:
    """Returns parameters in bfloat16, and the optimizer that rounds them.

    Parameters with fewer than two dimensions, and Flax's fp8 statistics, stay as they
    are. The optimizer is put in `small_state`, unless that is its outermost part.
    """

    def stored(keys: Any, leaf: Any) -> Any:
        is_statistic = getattr(keys[0], "key", "") == OVERWRITE_WITH_GRADIENT
        is_float = getattr(leaf, "dtype", None) == jnp.float32
        if is_statistic or not is_float or not has_two_dimensions("", leaf):
            return leaf
        return jnp.asarray(leaf).astype(jnp.bfloat16)

    params = jax.tree_util.tree_map_with_path(stored, params)
    inner = tx.to_optax(in_state=True) if isinstance(tx, Optimizer) else tx
    check_optimizer(inner)
    if not rounds_parameters(jax.eval_shape(inner.init, params)):
        tx = small_state(tx, where=no_moments)
    return params, tx


def _no_init(params: PyTree) -> Any:
    raise TypeError(
        "state.tx.init: the optimizer of flax_amp.optim is in state.opt_state, not "
        "in state.tx; expected a call of its own init. Make a new state with "
        "AmpTrainState.create(tx=...)."
    )


def resume_opt_state(opt_state: PyTree, tx: Any) -> PyTree:
    """Returns a new state in which an optimizer continues from the state it has."""
    if not isinstance(tx, Optimizer) or tx.opt_state is None:
        return opt_state
    nodes = _tree.nodes(opt_state, Optimizer)
    for node in nodes:
        if differences(node.opt_state, tx.opt_state, describe):
            raise ValueError(
                f"AmpTrainState.create: tx, {tx._name}, has the state of "
                "other parameters; expected one of these, or none. Pass it before "
                "init, or with tx.replace(opt_state=None)."
            )
    return _tree.replace_nodes(opt_state, Optimizer, [tx] * len(nodes))


# The hyper-parameters of all optimizers inside of a state


def collect_hyperparams(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns `hyperparams` of the optimizers in a state.

    They are those of `flax_amp.optim`, and of `optax.inject_hyperparams`. The names of
    several optimizers are preceded by their numbers.
    """
    return {
        f"{prefix}{name}": value
        for prefix, node in _holders(pure(opt_state))
        for name, value in _hyperparams_of(node).items()
    }


def hyperparam_metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns the numbers among `collect_hyperparams`, under names of metrics."""
    found = collect_hyperparams(opt_state)
    return {
        f"hyperparams/{name}": value for name, value in found.items() if not value.shape
    }


def replace_hyperparams(
    opt_state: PyTree, changes: Mapping[str, Any], caller: str
) -> PyTree:
    """Returns a state with new values for names of `collect_hyperparams`.

    Those of `optax.inject_hyperparams` cannot be replaced.
    """
    nodes, left = [], dict(changes)
    for prefix, node in _holders(opt_state):
        if isinstance(node, Optimizer):
            of_node = {
                name.removeprefix(prefix): left.pop(name)
                for name in changes
                if name.startswith(prefix)
            }
            nodes.append(node.replace(**of_node) if of_node else node)
    if not nodes:
        raise TypeError(
            f"{caller}: the optimizer has no hyper-parameters to replace (those of "
            "optax.inject_hyperparams cannot be); expected one of flax_amp.optim. "
            "Create the state with tx=flax_amp.optim.adamw(3e-4)."
        )
    if left:
        raise TypeError(
            f"{caller}: no {', '.join(left)}; expected some of "
            f"{', '.join(collect_hyperparams(opt_state))}, except what "
            "optax.inject_hyperparams keeps. Correct the names."
        )
    return _tree.replace_nodes(opt_state, Optimizer, nodes)


def _holders(opt_state: PyTree) -> list[tuple[str, Any]]:
    """Returns what has `hyperparams`, from the outside in.

    Each comes with what precedes its names where there are several.
    """

    def find(tree: PyTree) -> Iterator[Any]:
        for node in _tree.nodes(tree, (Optimizer, *INJECTED)):
            yield node
            if not isinstance(node, Optimizer):  # an Optimizer tells those inside of it
                yield from find(node.inner_state)

    found = list(find(opt_state))
    return [(f"{i}/" if len(found) > 1 else "", node) for i, node in enumerate(found)]


def _hyperparams_of(holder: Any) -> dict[str, jax.Array]:
    """Returns the hyper-parameters of one optimizer."""
    if isinstance(holder, Optimizer):
        return holder.hyperparams
    # Copies, because the state may be donated.
    return jax.tree.map(_tree.strong_copy, dict(holder.hyperparams))


# Updates that fail


@contextlib.contextmanager
def explain_update(
    caller: str, tx: Any, opt_state: PyTree, params: PyTree
) -> Iterator[None]:
    """Says why the update of an optimizer may have failed.

    The step may not pass it all arguments, or its state may be of other parameters.
    Only then is that state compared with a new one. The step compares the shapes after
    each update, which also sees what broadcasts.
    """
    try:
        yield
    except Exception as error:
        missing = re.search(r"missing \d+ required keyword-only argument.*", str(error))
        if not missing:
            if foreign := _foreign_leaves(tx, opt_state, params):
                raise ValueError(
                    f"{caller}: the state of the optimizer does not fit: it was made "
                    f"for another model or by another optimizer: {foreign}; expected "
                    f"the same leaves. {OWN_STATE}"
                ) from error
            error.add_note(
                f"flax_amp: {caller}: the update of the optimizer failed. If its state "
                "is one of other parameters or of another optimizer, make it anew, "
                "with AmpTrainState.create or nnx.Optimizer. The limit of an "
                "optax.apply_if_finite must fit into int32."
            )
            raise
        names = ", ".join(re.findall(r"'(\w+)'", missing[0]))
        raise TypeError(
            f"{caller}: the optimizer's update asks for {names} too, as optax.lbfgs "
            "and reduce_on_plateau do; expected one that needs only gradients, its "
            "state and the parameters, such as optax.adamw. Use this one in a loop of "
            "your own, with jax.value_and_grad(flax_amp.amp(loss_fn))."
        ) from error


def _foreign_leaves(tx: Any, opt_state: PyTree, params: PyTree) -> str:
    """Describes what of a state differs from a new one of these parameters."""
    try:
        new = jax.eval_shape(lambda: pure(tx.init(params)))
    except Exception:  # the error of the update says more
        return ""
    names = "in its state", "for these parameters"
    changed = differences(pure(opt_state), new, jnp.shape, "opt_state", names)
    return first_of(changed, separator="; ")
