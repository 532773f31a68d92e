"""The loss of float32 runs, and whether the run's is among theirs.

They are trained by JAX and optax alone, have the faults of the run and skip the batches
that it skipped: what a run loses by its faults, it loses in every precision. Ten have
its seed, hence its batches, its dropout and its first parameters, but in nine of them
each parameter is moved by less than a rounding to float16. How far these part is what
rounding does by itself; of five, the scatter would be too uncertain for a bound. Five
have other seeds. The run is not compared with them, because another seed moves the loss
by more than rounding does: they only show by how much.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.soak import stream
from benchmarks.soak.history import History
from benchmarks.soak.training import init, losses, optimizer

SAME, OTHERS = 10, 5  # float32 runs of the seed of the run, and of others
WINDOW = 500  # updates whose mean loss is one point of a curve
_AT_ONCE = 500  # steps of one compiled loop
_NEAR = 4  # windows on each side that share their estimate of the scatter
_FAR = 3.0  # standard deviations
_SHARE = 0.02  # of the windows may lie further away
_LARGEST = 65504.0  # what float16 makes of 1e30
_ROUNDING = 2.0**-11  # the largest relative error of a rounding to float16


class Curves(NamedTuple):
    """Mean losses by window, and how far the run lies from float32 runs of its seed.

    Attributes:
      run: the run.
      same: float32 runs with its seed and faults.
      others: float32 runs with other seeds and its faults.
      far: the share of windows in which the run lies further than three standard
        deviations from the mean of `same`.
      each_far: the same for each of `same`, from the other nine.
      end: how many standard deviations the mean of the last fifth of the run lies above
        that of `same`.
    """

    run: np.ndarray
    same: np.ndarray
    others: np.ndarray
    far: float
    each_far: list[float]
    end: float

    @property
    def inside(self) -> bool:
        return abs(self.end) <= _FAR and self.far <= max(_SHARE, *self.each_far)


def curves(history: History, seed: int, horizon: int, folder: pathlib.Path) -> Curves:
    """Trains the float32 runs, unless a folder has them, and compares."""
    done = np.array([row["metrics"]["grads_finite"] for row in history.rows])

    def kept(name: str, seeds: np.ndarray, moves: np.ndarray) -> np.ndarray:
        path = folder / f"{name}.npy"
        if not path.exists() or np.load(path).shape[1] < len(done):
            np.save(path, _train(seeds, moves, seed, done, horizon))
        return np.load(path)

    same = kept("same", np.full(SAME, seed), np.arange(SAME))
    others = kept("others", seed + 1 + np.arange(OTHERS), np.zeros(OTHERS, int))
    return compare(history, seed, same, others)


def _train(
    seeds: np.ndarray, moves: np.ndarray, faults: int, done: np.ndarray, horizon: int
) -> np.ndarray:
    """Trains runs of some seeds; returns a loss for each of them and each step.

    Args:
      seeds: of the runs.
      moves: how the first parameters of each are moved, see `_moved`.
      faults: the seed of the faults.
      done: for each step, whether it is not skipped.
      horizon: of the schedule.
    """
    tx = optimizer(horizon)

    def first(seed: Any, move: Any) -> Any:
        params, variables = init(seed)
        params = _moved(params, move)
        return params, variables, tx.init(params)

    @jax.jit
    def scan(carry: Any, batches: Any, done: Any, numbers: Any) -> Any:
        def one(carry: Any, batches: Any, seed: Any) -> Any:
            key = jax.random.key(seed + 1)  # as the run's is in training.py
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
            step = functools.partial(_step, tx)
            return jax.lax.scan(step, carry, (batches, done, keys))

        return jax.vmap(one)(carry, batches, seeds)

    carry = jax.vmap(first)(seeds, moves)
    each: list[np.ndarray] = []
    for start in range(0, len(done), _AT_ONCE):
        numbers = np.arange(start, start + _AT_ONCE)
        # The last steps are filled up, so that all are one program.
        filled = np.resize(done[start : start + _AT_ONCE], _AT_ONCE)
        carry, some = scan(carry, _batches(seeds, numbers, faults), filled, numbers)
        each.append(np.asarray(some))
    return np.concatenate(each, axis=1)[:, : len(done)]


def _step(tx: optax.GradientTransformation, carry: Any, found: Any) -> Any:
    """Makes a step unless the run skipped it; returns its loss, too."""
    params, variables, opt_state = carry
    batch, done, key = found

    def loss(params: Any) -> Any:
        return losses({"params": params, **variables}, batch, {"dropout": key})

    (_, (plain, updated)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    changes, moments = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, changes), updated, moments
    return jax.tree.map(lambda new, old: jnp.where(done, new, old), new, carry), plain


def _moved(params: Any, move: Any) -> Any:
    """Moves each parameter by less than a rounding; `move` is a seed, 0 is no move."""
    chance = optax.tree_utils.tree_random_like(
        jax.random.key(move), params, jax.random.uniform
    )
    size = _ROUNDING * (move > 0)
    return jax.tree.map(lambda x, u: x * (1 + size * (2 * u - 1)), params, chance)


def _batches(seeds: np.ndarray, numbers: np.ndarray, faults: int) -> dict[str, Any]:
    """Returns batches with the faults of one seed, as float16 sees them."""
    unique, which = np.unique(seeds, return_inverse=True)
    each = [[stream.batch(int(s), int(n), faults) for n in numbers] for s in unique]
    found = {
        name: np.array([[batch[name] for batch in batches] for batches in each])[which]
        for name in each[0][0]
    }
    return found | {"x": np.clip(found["x"], -_LARGEST, _LARGEST)}


def compare(
    history: History, seed: int, same: np.ndarray, others: np.ndarray
) -> Curves:
    """Compares the losses of batches without faults, by the number of updates.

    Args:
      history: the run.
      seed: of the run.
      same, others: a loss for each float32 run and each batch.
    """
    number = len(history.rows)
    plain = [stream.fault(seed, n) == stream.Fault() for n in range(number)]
    window = np.array([row["updates"][0] for row in history.rows])[plain] // WINDOW
    loss = np.array([row["metrics"]["plain_loss"] for row in history.rows])[plain]
    full = max(window.max(), 1)  # the last window may be too short
    counts = np.bincount(window)[:full]
    # In a window of few batches without faults, the mean is noise.
    kept = counts >= min(WINDOW // 4, counts.max())
    both = np.concatenate([same, others])
    losses = [loss, *both[:, :number][:, plain]]
    sums = np.array([np.bincount(window, each)[:full] for each in losses])
    run, *each = sums[:, kept] / counts[kept]
    means, rest = np.array(each[: len(same)]), np.array(each[len(same) :])
    alone = [_far(means[i], np.delete(means, i, 0)) for i in range(len(means))]
    ends = final(means)
    end = (final(run) - ends.mean()) / _error(ends.std(ddof=1), len(ends))
    return Curves(run, means, rest, _far(run, means), alone, float(end))


def _far(run: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of windows in which a run lies far from others."""
    around = 2 * _NEAR + 1
    variance = np.pad(others.var(0, ddof=1), _NEAR, mode="edge")
    scatter = np.sqrt(np.convolve(variance, np.ones(around) / around, "valid"))
    error = _error(scatter, len(others))
    return float(np.mean(np.abs(run - others.mean(0)) > _FAR * error))


def _error(scatter: Any, count: int) -> Any:
    """Returns the standard error of a run's distance from the mean of others."""
    return scatter * np.sqrt(1 + 1 / count)


def final(curve: np.ndarray) -> Any:
    """Returns the mean of the last fifth of each curve."""
    return curve[..., -max(1, curve.shape[-1] // 5) :].mean(-1)
