"""The counters of skipped steps, and an optimizer that skips updates by itself.

A training step is skipped as a whole: one select of the old state against the new one.
The step counts skips in the counters of `optax.apply_if_finite`. Where no step does it,
in `AmpTrainState.apply_gradients`, the optimizer of this module skips the update.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp._training.aliases import Array, PyTree


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


@dataclasses.dataclass(frozen=True)
class _Inner:
    """The optimizer inside `apply_if_finite`, by its functions.

    Two of them are equal if their fields are, so two states of one optimizer have the
    same tree structure and share a compiled step.
    """

    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    takes_extra_args: bool  # whether `update` takes further keyword arguments
    masked: bool  # whether integer parameters are kept away from the optimizer

    def build(self) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer."""
        kind = (
            optax.GradientTransformationExtraArgs
            if self.takes_extra_args
            else optax.GradientTransformation
        )
        tx = optax.with_extra_args_support(kind(self.init, self.update))
        # The moments of an optimizer have the dtype of the parameters, but its updates
        # are floats, so the state of an integer parameter would change its dtype.
        return optax.masked(tx, _is_trainable) if self.masked else tx


@dataclasses.dataclass(frozen=True)
class _Init:
    inner: _Inner

    def __call__(self, params: PyTree) -> optax.ApplyIfFiniteState:
        return optax.ApplyIfFiniteState(
            notfinite_count=jnp.zeros((), jnp.int32),
            last_finite=jnp.array(True),
            total_notfinite=jnp.zeros((), jnp.int32),
            inner_state=self.inner.build().init(params),
        )


@dataclasses.dataclass(frozen=True)
class _Update:
    inner: _Inner
    checks_finite: bool

    def __call__(
        self,
        updates: PyTree,
        state: optax.ApplyIfFiniteState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.ApplyIfFiniteState]:
        if self.inner.masked and params is not None:
            updates = jax.tree.map(_without_integers, params, updates)
        new, inner_state = self.inner.build().update(
            updates, state.inner_state, params, **extra_args
        )
        if not self.checks_finite:
            return new, state._replace(inner_state=inner_state)
        finite = _tree.all_finite((updates, new))
        finite &= _tree.stays_finite(inner_state, state.inner_state)
        new = jax.tree.map(lambda u: jnp.where(finite, u, 0).astype(u.dtype), new)
        inner_state = _tree.select(finite, inner_state, state.inner_state)
        counters = apply_if_finite_counters(state, finite)
        return new, state._replace(inner_state=inner_state, **counters)


def _without_integers(param: Any, update: Any) -> Any:
    """Returns zeros for an integer, whatever its gradient: a float, float0, zeros."""
    return update if _tree.is_inexact_array(param) else jnp.zeros_like(param)


def _is_trainable(tree: PyTree) -> PyTree:
    """Returns for each leaf whether an optimizer can train it."""
    return jax.tree.map(_tree.is_inexact_array, tree)


def apply_if_finite(
    inner: Any, *, masked: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Skips updates that are not finite: it computes them anyway, and then selects.

    `optax.apply_if_finite` branches instead. A branch saves the work of a skipped step,
    but XLA cannot fuse across it or update in place. A float16 step of a 3 x 4096 MLP
    compiled for a TPU v5e takes 975 MB of temporary memory and an estimated 13.9 ms
    with the branch, 178 MB and 10.7 ms with the select. `optax.apply_if_finite` also
    gives up after some skips in a row, but the scaler needs them to find its scale.
    Both have an `optax.ApplyIfFiniteState`, so a checkpoint of one fits the other.

    With `masked`, integer parameters are kept away from `inner`.
    """
    takes_extra_args = isinstance(inner, optax.GradientTransformationExtraArgs)
    wrapped = _Inner(inner.init, inner.update, takes_extra_args, masked)
    return optax.GradientTransformationExtraArgs(
        _Init(wrapped), _Update(wrapped, checks_finite=True)
    )


def without_finite_check(tx: Any) -> Any:
    """Returns `tx` without its own check of the gradients; its state is the same.

    A training step makes the check itself, since it also skips the update of variables.
    Optimizers that `apply_if_finite` did not make are returned unchanged.
    """
    if not isinstance(tx.update, _Update):
        return tx
    return tx._replace(update=dataclasses.replace(tx.update, checks_finite=False))
