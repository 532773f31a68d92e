"""The counters of skipped steps, and an optimizer that skips where no step does it.

The training steps skip as a whole, by one select of the old state against the new one,
and count. The counters are those of `optax.apply_if_finite`. Outside of a step,
`AmpTrainState.apply_gradients` skips by the optimizer of this module.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree

PyTree = Any


def counted(state: Any, finite: jax.Array) -> dict[str, jax.Array]:
    """Returns the counters of an `optax.ApplyIfFiniteState` after one more step."""
    in_a_row, total = state.notfinite_count, state.total_notfinite
    return {
        "notfinite_count": jnp.where(finite, 0, optax.safe_increment(in_a_row)),
        "last_finite": finite,
        "total_notfinite": jnp.where(finite, total, optax.safe_increment(total)),
    }


@dataclasses.dataclass(frozen=True)
class InnerOptimizer:
    """The optimizer inside of `apply_if_finite`.

    Two of them are equal if their parts are, so two states of one optimizer have the
    same tree structure and share a compiled step.

    Attributes:
      init: the init function of the optimizer.
      update: the update function of the optimizer.
      takes_extra: whether `update` takes further keyword arguments.
      masked: keep integer parameters away from it.
    """

    init: Any
    update: Any
    takes_extra: bool
    masked: bool

    def built(self) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer."""
        kind = (
            optax.GradientTransformationExtraArgs
            if self.takes_extra
            else optax.GradientTransformation
        )
        tx = optax.with_extra_args_support(kind(self.init, self.update))
        # Optimizers give an integer moment a float update; that differs from the dtype
        # of the gradient.
        return optax.masked(tx, _trains) if self.masked else tx


@dataclasses.dataclass(frozen=True)
class _Init:
    inner: InnerOptimizer

    def __call__(self, params: PyTree) -> optax.ApplyIfFiniteState:
        return optax.ApplyIfFiniteState(
            notfinite_count=jnp.zeros((), jnp.int32),
            last_finite=jnp.array(True),
            total_notfinite=jnp.zeros((), jnp.int32),
            inner_state=self.inner.built().init(params),
        )


@dataclasses.dataclass(frozen=True)
class _Update:
    inner: InnerOptimizer
    skips: bool

    def __call__(
        self,
        updates: PyTree,
        state: optax.ApplyIfFiniteState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.ApplyIfFiniteState]:
        new, inner_state = self.inner.built().update(
            updates, state.inner_state, params, **extra_args
        )
        if not self.skips:
            return new, state._replace(inner_state=inner_state)
        finite = _tree.all_finite(updates)
        new = jax.tree.map(lambda u: jnp.where(finite, u, 0).astype(u.dtype), new)
        kept = _tree.select(finite, inner_state, state.inner_state)
        return new, state._replace(inner_state=kept, **counted(state, finite))


def _trains(tree: PyTree) -> PyTree:
    """Returns whether each leaf is one that an optimizer can train."""
    return jax.tree.map(_tree.is_inexact_array, tree)


def apply_if_finite(
    inner: Any, *, masked: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Skips updates that are not finite: computes them all the same, and selects.

    `optax.apply_if_finite` branches, which saves the work of a skipped step but keeps
    XLA from fusing across the branch and from updating in place. A float16 step of a
    3 x 4096 MLP compiled for a TPU v5e: 975 MB of temporary memory and an estimated
    13.9 ms with the branch, 178 MB and 10.7 ms with the select. It also gives up after
    some errors in a row, which are the scaler's ordinary way to find its scale.

    Args:
      inner: the optimizer.
      masked: keep integer parameters away from it.

    Returns:
      The transformation. Its state is an `optax.ApplyIfFiniteState`, so checkpoints of
      the one fit the other.
    """
    takes_extra = isinstance(inner, optax.GradientTransformationExtraArgs)
    wrapped = InnerOptimizer(inner.init, inner.update, takes_extra, masked)
    return optax.GradientTransformationExtraArgs(
        _Init(wrapped), _Update(wrapped, skips=True)
    )


def unguarded(tx: Any) -> Any:
    """Returns `tx` without its own test of the gradients, its state the same.

    A training step skips the variables too, so it makes the test itself. Other
    optimizers are returned unchanged.
    """
    if not isinstance(tx.update, _Update):
        return tx
    return tx._replace(update=dataclasses.replace(tx.update, skips=False))
