"""The loss of float32 runs without faults, and whether the run's is among theirs."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.soak import stream
from benchmarks.soak.history import History
from benchmarks.soak.training import init, losses, optimizer

SEEDS = (1, 2, 3, 4, 5)
WINDOW = 500  # updates whose mean loss is one point of a curve
_AT_ONCE = 500  # steps of one compiled loop
_NEAR = 4  # windows on each side that share their estimate of the scatter
_FAR = 3.0  # standard deviations
_SHARE = 0.02  # of the windows may lie further away


class Curves(NamedTuple):
    """Mean losses by window: of the run, and of each float32 run; how far it lies.

    `far` is the share of windows in which the run lies further than three standard
    deviations from the mean of the others, `each_far` the same for each of those.
    """

    run: np.ndarray
    others: np.ndarray
    far: float
    each_far: list[float]

    @property
    def inside(self) -> bool:
        return self.far <= max(_SHARE, *self.each_far)


def float32_losses(updates: int, horizon: int, kept: pathlib.Path) -> np.ndarray:
    """Trains without flax_amp and without faults; returns a loss for seed and step."""
    if kept.exists() and np.load(kept).shape[1] >= updates:
        return np.load(kept)
    tx = optimizer(horizon)

    def first(seed: Any) -> Any:
        params, variables = init(seed)
        return params, variables, tx.init(params), jax.random.key(seed + 1)

    def step(carry: Any, batch: Any) -> Any:
        params, variables, opt_state, key = carry
        key, dropout = jax.random.split(key)

        def loss(params: Any) -> Any:
            return losses({"params": params, **variables}, batch, {"dropout": dropout})

        (_, (plain, variables)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, changes)
        return (params, variables, opt_state, key), plain

    many = jax.jit(jax.vmap(lambda carry, batches: jax.lax.scan(step, carry, batches)))
    carry = jax.vmap(first)(np.array(SEEDS))
    found = []
    for start in range(0, updates, _AT_ONCE):
        carry, some = many(carry, _batches(start))
        found.append(np.asarray(some))
    result = np.concatenate(found, axis=1)
    np.save(kept, result)
    return result


def _batches(start: int) -> Any:
    numbers = range(start, start + _AT_ONCE)
    each = [[stream.clean_batch(seed, n) for n in numbers] for seed in SEEDS]
    return {
        name: np.array([[batch[name] for batch in batches] for batches in each])
        for name in each[0][0]
    }


def compare(history: History, seed: int, others: np.ndarray) -> Curves:
    """Compares the losses of batches without faults, by the number of updates."""
    sums = np.zeros((2, others.shape[1] // WINDOW))
    for number, row in enumerate(history.rows):
        window = row["updates"][0] // WINDOW
        plain = stream.fault(seed, number) == stream.Fault()
        if plain and window < sums.shape[1]:
            sums[:, window] += row["metrics"]["plain_loss"], 1
    # A window of few batches without faults is noise, and so is the last one.
    filled = sums[1] >= WINDOW // 4
    run = (sums[0] / np.maximum(sums[1], 1))[filled]
    means = others[:, : sums.shape[1] * WINDOW].reshape(len(SEEDS), -1, WINDOW)
    each = means.mean(2)[:, filled]
    alone = [_far(each[i], np.delete(each, i, 0)) for i in range(len(SEEDS))]
    return Curves(run, each, _far(run, each), alone)


def _far(run: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of windows in which a run lies far from others."""
    around = 2 * _NEAR + 1
    variance = np.pad(others.var(0, ddof=1), _NEAR, mode="edge")
    scatter = np.sqrt(np.convolve(variance, np.ones(around) / around, "valid"))
    error = scatter * np.sqrt(1 + 1 / len(others))  # that of a mean comes on top
    return float(np.mean(np.abs(run - others.mean(0)) > _FAR * error))


def final(curve: Sequence[float] | np.ndarray) -> float:
    """Returns the mean of the last fifth of a curve."""
    return float(np.mean(curve[-max(1, len(curve) // 5) :]))
