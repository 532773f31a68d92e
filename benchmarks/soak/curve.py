"""The loss of float32 runs, and whether the run's is among theirs.

They are trained by JAX and optax alone. Five of them have no faults. Five others have
the faults of the run and skip the batches that it skipped: what a run loses by its
faults, it loses in every precision.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
_LARGEST = 65504.0  # what float16 makes of 1e30


class Curves(NamedTuple):
    """Mean losses by window, and how far the run lies from the others.

    Attributes:
      run: the run.
      others: float32 runs with its faults.
      clean: float32 runs without faults.
      far: the share of windows in which the run lies further than three standard
        deviations from the mean of `others`.
      each_far: the same for each of `others`, from the other ones.
    """

    run: np.ndarray
    others: np.ndarray
    clean: np.ndarray
    far: float
    each_far: list[float]

    @property
    def inside(self) -> bool:
        low, high = final(self.others).min(), final(self.others).max()
        room = (high - low) / 2  # of six runs, one of three is the first or the last
        within = low - room <= final(self.run) <= high + room
        return bool(within) and self.far <= max(_SHARE, *self.each_far)


def curves(history: History, seed: int, horizon: int, folder: pathlib.Path) -> Curves:
    """Trains the float32 runs, unless a folder has them, and compares."""
    steps = len(history.rows)
    done = np.array([row["metrics"]["grads_finite"] for row in history.rows])
    clean = _kept(
        folder / "float32.npy",
        steps,
        lambda: _train(stream.clean_batch, np.ones(steps, bool), horizon),
    )
    others = _kept(
        folder / "float32_faults.npy",
        steps,
        lambda: _train(lambda s, n: stream.batch(s, n, faults=seed), done, horizon),
    )
    return compare(history, seed, others, clean)


def _kept(path: pathlib.Path, steps: int, train: Callable[[], Any]) -> np.ndarray:
    if not path.exists() or np.load(path).shape[1] < steps:
        np.save(path, train())
    return np.load(path)


def _train(batch: Any, done: np.ndarray, horizon: int) -> np.ndarray:
    """Trains all seeds; returns a loss for each of them and each step.

    Args:
      batch: the batch of a seed and a number.
      done: for each step, whether it is not skipped.
      horizon: of the schedule.
    """
    tx = optimizer(horizon)

    def first(seed: Any) -> Any:
        params, variables = init(seed)
        return params, variables, tx.init(params)

    def step(carry: Any, found: Any) -> Any:
        params, variables, opt_state = carry
        batch, done, key = found

        def loss(params: Any) -> Any:
            return losses({"params": params, **variables}, batch, {"dropout": key})

        (_, (plain, updated)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, moments = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, changes), updated, moments
        return jax.tree.map(
            lambda new, old: jnp.where(done, new, old), new, carry
        ), plain

    scan = jax.jit(
        jax.vmap(
            lambda carry, found: jax.lax.scan(step, carry, found), (0, (0, None, 0))
        )
    )
    carry = jax.vmap(first)(np.array(SEEDS))
    each: list[np.ndarray] = []
    for start in range(0, len(done), _AT_ONCE):
        numbers = range(start, start + _AT_ONCE)
        keys = jax.random.split(jax.random.key(start), (len(SEEDS), _AT_ONCE))
        skips = np.resize(done[start : start + _AT_ONCE], _AT_ONCE)
        carry, some = scan(carry, (_stacked(batch, numbers), skips, keys))
        each.append(np.asarray(some))
    return np.concatenate(each, axis=1)[:, : len(done)]


def _stacked(batch: Any, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    each = [[batch(seed, number) for number in numbers] for seed in SEEDS]
    found = {
        name: np.array([[batch[name] for batch in batches] for batches in each])
        for name in each[0][0]
    }
    return found | {"x": np.clip(found["x"], -_LARGEST, _LARGEST)}


def compare(
    history: History, seed: int, others: np.ndarray, clean: np.ndarray
) -> Curves:
    """Compares the losses of batches without faults, by the number of updates.

    Args:
      history: the run.
      seed: of its faults.
      others: a loss for each seed and batch, of runs with its faults.
      clean: a loss for each seed and update, of runs without faults.
    """
    number = len(history.rows)
    plain = [stream.fault(seed, n) == stream.Fault() for n in range(number)]
    window = np.array([row["updates"][0] for row in history.rows])[plain] // WINDOW
    loss = np.array([row["metrics"]["plain_loss"] for row in history.rows])[plain]
    losses = np.concatenate([loss[None], others[:, :number][:, plain]])
    full = max(window.max(), 1)  # the last window may be too short
    sums = np.array([np.bincount(window, each)[:full] for each in losses])
    counts = np.bincount(window)[:full]
    # In a window of few batches without faults, the mean is noise.
    kept = counts >= min(WINDOW // 4, counts.max())
    run, *each = sums[:, kept] / counts[kept]
    means = np.array(
        [clean[:, i * WINDOW :][:, :WINDOW].mean(1) for i in range(full)]
    ).T
    alone = [_far(each[i], np.delete(each, i, 0)) for i in range(len(SEEDS))]
    several = np.array(each)
    return Curves(run, several, means[:, kept], _far(run, several), alone)


def _far(run: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of windows in which a run lies far from others."""
    around = 2 * _NEAR + 1
    variance = np.pad(others.var(0, ddof=1), _NEAR, mode="edge")
    scatter = np.sqrt(np.convolve(variance, np.ones(around) / around, "valid"))
    error = scatter * np.sqrt(1 + 1 / len(others))  # that of a mean comes on top
    return float(np.mean(np.abs(run - others.mean(0)) > _FAR * error))


def final(curve: np.ndarray) -> Any:
    """Returns the mean of the last fifth of each curve."""
    return curve[..., -max(1, curve.shape[-1] // 5) :].mean(-1)
