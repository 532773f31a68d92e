"""Decides whether a pass is finite, and repeats it with a lower scale."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _tree
from flax_amp._training.aliases import Array, PyTree
from flax_amp._training.scaler import Scaler, update_scaler

# The scaler, whether the scale fell, the arrays of an attempt, and how many there were.
_Carry = tuple[Scaler, Array, PyTree, Array]


class Attempt(NamedTuple):
    """One forward and backward pass, and whether its results are finite.

    Attributes:
      forward_finite: bool[], whether the loss and the updated variables are finite.
      grads_finite: bool[], whether the gradients are finite.
      outputs: the results of the pass.
    """

    forward_finite: Array
    grads_finite: Array
    outputs: PyTree

    @property
    def finite(self) -> Array:
        return self.forward_finite & self.grads_finite


def retry_until_finite(
    attempt: Callable[[Scaler], Attempt], scaler: Scaler, retries: int
) -> tuple[Scaler, Array, PyTree]:
    """Runs `attempt`, and repeats it as long as lowering the scale may help.

    Args:
      attempt: runs one pass with a scaler.
      scaler: the scaler of the first pass.
      retries: the number of times that the pass may be repeated.

    Returns:
      `(new_scaler, finite, outputs)` of the last pass.
    """

    def run(scaler: Scaler) -> tuple[Scaler, Array, Attempt]:
        tried = attempt(scaler)
        new_scaler = update_scaler(
            scaler, tried.grads_finite, loss_finite=tried.forward_finite
        )
        # The scale also stays where it is at its lower limit.
        failed = tried.forward_finite & ~tried.grads_finite
        return new_scaler, failed & (new_scaler["scaler"] < scaler["scaler"]), tried

    scaler, lowered, tried = run(scaler)
    if retries == 0:
        return scaler, tried.finite, tried.outputs
    # A loop can carry arrays only. The other leaves are the same in every pass.
    arrays, static = _tree.partition(tried, _tree.is_array)

    def should_retry(carry: _Carry) -> Array:
        _, lowered, _, retried = carry
        return lowered & (retried < retries)

    def retry(carry: _Carry) -> _Carry:
        scaler, lowered, tried = run(carry[0])
        arrays, _ = _tree.partition(tried, _tree.is_array)
        return scaler, lowered, arrays, carry[3] + 1

    # The first pass stands before the loop, because its results give the carry its
    # types, and under `shard_map` its varying axes.
    scaler, _, arrays, _ = jax.lax.while_loop(
        should_retry, retry, (scaler, lowered, arrays, jnp.int32(0))
    )
    tried = _tree.combine(arrays, static)
    return scaler, tried.finite, tried.outputs


def forward_is_finite(loss: Array, new: PyTree, old: PyTree) -> Array:
    """Returns bool[]: whether the loss and the updated variables are finite.

    Args:
      loss: the loss.
      new: the updated variables, `None` for those that did not change.
      old: the variables before the pass. Elements that were not finite before, such as
        a mask of -inf, are ignored.
    """

    def ignore_old_infs(new: Any, old: Any) -> Any:
        if new is None or not _tree.is_inexact_array(new):
            return None
        return jnp.where(jnp.isfinite(old), new, 0)

    return _tree.all_finite((loss, _tree.map_or_none(ignore_old_infs, new, old)))


def check_retries(redo_on_nan: object, caller: str) -> int:
    """Returns `redo_on_nan` as an integer, or raises an error that names `caller`."""
    # A bool is an int, and the signature of jaxamp annotates this argument as one.
    if not isinstance(redo_on_nan, int) or redo_on_nan < 0:
        raise ValueError(
            f"{caller}: {redo_on_nan=}; expected an integer of at least 0, the number "
            "of times that gradients are computed again with a lower scale."
        )
    return int(redo_on_nan)
