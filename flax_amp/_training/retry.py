"""Decides whether a pass is finite, and repeats it with a lower scale."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _tree
from flax_amp._training.aliases import Array, PyTree, check_count
from flax_amp._training.averaging import PassResult
from flax_amp._training.scaler import Scaler, update_scaler

# The scaler, whether the scale fell, the arrays of the last attempt, and how many
# retries there were.
_Carry = tuple[Scaler, Array, PyTree, Array]


class Attempt(NamedTuple):
    """The result of a pass, with two flags, bool[].

    `forward_finite` is whether the loss and the updated variables are finite,
    `grads_finite` whether the gradients are.
    """

    forward_finite: Array
    grads_finite: Array
    result: PassResult

    @classmethod
    def judge(cls, result: PassResult, variables: PyTree) -> "Attempt":
        """Returns the result with its flags.

        `variables` are those before the pass.
        """
        return cls(
            forward_finite=_tree.all_finite(result.loss)
            & _tree.stays_finite(result.variables, variables),
            # The fp8 statistics of cotangents depend on the scale, as gradients do.
            grads_finite=_tree.all_finite((result.grads, result.overwrite)),
            result=result,
        )

    @property
    def finite(self) -> Array:
        return self.forward_finite & self.grads_finite


def retry_until_finite(
    attempt: Callable[[Scaler], Attempt], scaler: Scaler, retries: int
) -> tuple[Scaler, Array, PassResult]:
    """Runs one pass, and repeats it as long as lowering the scale may help.

    Args:
      attempt: runs one pass with a scaler.
      scaler: the scaler of the first pass.
      retries: the number of times that the pass may be repeated.

    Returns:
      `(new_scaler, finite, result)` of the last pass.
    """

    def run(scaler: Scaler) -> tuple[Scaler, Array, Attempt]:
        last = attempt(scaler)
        new_scaler = update_scaler(
            scaler, last.grads_finite, loss_finite=last.forward_finite
        )
        # The scale also stays where it is at its lower limit.
        failed = last.forward_finite & ~last.grads_finite
        return new_scaler, failed & (new_scaler["scaler"] < scaler["scaler"]), last

    scaler, lowered, last = run(scaler)
    if retries == 0:
        return scaler, last.finite, last.result
    # A loop can carry arrays only. The other leaves are the same in every pass.
    arrays, static = _tree.partition(last, _tree.is_array)

    def should_retry(carry: _Carry) -> Array:
        _, lowered, _, retried = carry
        return lowered & (retried < retries)

    def retry(carry: _Carry) -> _Carry:
        scaler, lowered, last = run(carry[0])
        arrays, _ = _tree.partition(last, _tree.is_array)
        return scaler, lowered, arrays, carry[3] + 1

    # The first pass stands before the loop, because its results give the carry its
    # types, and under `shard_map` its varying axes.
    scaler, _, arrays, _ = jax.lax.while_loop(
        should_retry, retry, (scaler, lowered, arrays, jnp.int32(0))
    )
    last = _tree.combine(arrays, static)
    return scaler, last.finite, last.result


def check_retries(redo_on_nan: object, caller: str) -> int:
    """Returns `redo_on_nan` as an integer, or raises an error that names `caller`."""
    # The signature of jaxamp annotates this argument as a bool.
    given = int(redo_on_nan) if isinstance(redo_on_nan, bool) else redo_on_nan
    what = "of times that gradients are computed again with a lower scale"
    return check_count(given, f"{caller}: {redo_on_nan=}", what, least=0)
