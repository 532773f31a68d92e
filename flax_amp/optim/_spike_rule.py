"""The rule for a spike: a loss or a gradient norm that is far above the recent values.

A value is a spike if the value is more than `factor` standard deviations above the mean
of the last `window` values. A spike is recorded as at most six standard deviations
above the mean. After 128 values near 1.0, whose standard deviation is 0.048, and with a
factor of 20:

    value       1.0     1000     1.0    1000
    limit       1.96    1.96     2.09   2.08
    recorded    1.0     1.29     1.0    1.33

So a spike raises the limit a little. With its full value in the record, the first spike
would hide the second spike. If spikes were not recorded, no new level could ever become
normal: here a level that lasts raises the limit step by step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree

Array = jax.Array
PyTree = Any

# With fewer values than this number, the standard deviation of the values says little:
# no value is a spike, and each value is recorded in full. With a factor of 6, a next
# value of the same normal distribution is a spike with a probability of 6e-3 after 4
# values, 4e-4 after 8, and 2e-5 after 16; with a factor of 20, 2e-4, 1e-7 and 2e-12.
FEWEST = 8
# The least standard deviation, as a share of the mean. Without this bound, a single bit
# more is a spike if all losses were equal before. With a factor of 20, a spike takes a
# rise by a fifth.
_LEAST_SPREAD = np.float32(0.01)
# A value is recorded as at most so many standard deviations above the mean. The limit
# rises on and on where more than 1 in 37 values is a spike: 37 is `1 + 6**2`. So a new
# level becomes normal, and bad batches of 1000 times the loss, 1 in every 40 steps,
# never do. With a larger number, a new level becomes normal sooner, and so do rarer
# batches.
_MOST_RECORDED = np.float32(6)
_LARGEST = np.finfo(np.float32).max


class History(NamedTuple):
    """The recent values of one quantity."""

    values: Array  # float32[window], a ring: the oldest value is replaced
    # int32[], the number of values so far. Above `window` only its remainder matters,
    # so the number falls back from `2 * window` to `window`, and never overflows. The
    # field is not named `count`: `_optimizer.py` takes a field of this name in a state
    # for the count of a schedule.
    seen: Array


class SpikeState(NamedTuple):
    """The state of an optimizer that `skip_spikes` wraps."""

    losses: History
    grad_norms: History  # the norms that the caller gave as `grad_norm`
    update_norms: History  # the norms of the updates that came in
    spikes_total: Array  # int32[], the number of skipped steps
    spikes_in_a_row: Array  # int32[], the spikes since the last step without a spike
    inner_state: PyTree  # the state of the optimizer


def empty_history(window: int) -> History:
    """Returns a history without values."""
    return History(jnp.zeros(window, jnp.float32), jnp.zeros((), jnp.int32))


def judge(
    history: History, value: Array, factor: float | Array, warmup: int
) -> tuple[Array, History]:
    """Returns whether a value is a spike, bool[], and the history with this value.

    A value that is not finite is no spike, and is not recorded.

    Args:
      history: the values before this value.
      value: a real scalar.
      factor: how many standard deviations above the mean a spike begins.
      warmup: the number of values before any value is a spike.
    """
    is_finite = jnp.isfinite(value)
    # A finite float64 number may be an inf in float32.
    value = jnp.clip(jnp.asarray(value, jnp.float32), -_LARGEST, _LARGEST)
    mean, spread = _mean_and_spread(history)
    # If all values are 0, nothing can be compared, and nothing is a spike.
    is_known = (history.seen >= FEWEST) & (spread > 0)
    limit = mean + jnp.asarray(factor, jnp.float32) * spread
    is_spike = is_finite & is_known & (value > limit) & (history.seen >= warmup)
    most = mean + _MOST_RECORDED * spread
    recorded = jnp.where(is_known & (value > most), most, value)
    return is_spike, _tree.select(is_finite, _with_value(history, recorded), history)


def _mean_and_spread(history: History) -> tuple[Array, Array]:
    """Returns the mean of the values, and their standard deviation, with its bound."""
    values, seen = history
    is_value = jnp.arange(values.size) < seen
    # At least 2, so that nothing is divided by 0. From 2 values on the count is exact,
    # and `judge` uses the mean from `FEWEST` values on.
    count = jnp.clip(seen, 2, values.size).astype(jnp.float32)
    # In units of the largest value: the squares of 1e20 and of 1e-25 are no float32
    # numbers.
    largest = jnp.max(jnp.where(is_value, jnp.abs(values), 0))
    unit = jnp.where(largest > 0, largest, 1)
    scaled = jnp.where(is_value, values / unit, 0)
    mean = jnp.sum(scaled) / count
    # In two passes: the mean of the squares minus the square of the mean cancels.
    squares = jnp.where(is_value, jnp.square(scaled - mean), 0)
    spread = jnp.sqrt(jnp.sum(squares) / (count - 1))
    spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(mean))
    return unit * mean, unit * spread


def _with_value(history: History, value: Array) -> History:
    """Returns the history with one more value."""
    values, seen = history
    window = values.size
    # A select in place of a scatter: a select fuses, and keeps the values' sharding.
    is_next = jnp.arange(window) == seen % window
    following = jnp.where(seen + 1 < 2 * window, seen + 1, window)
    return History(jnp.where(is_next, value, values), following)
