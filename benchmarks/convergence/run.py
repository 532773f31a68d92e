"""The runs of a task: how they are trained, and when an end is in."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import flax_amp
from benchmarks.convergence.task import Carry, Task, Way
from benchmarks.results import Results

LAST = 5  # evaluations that are averaged
EVALUATIONS = 20  # at equal distances
_DEVIATIONS = 3.0
Run = dict[str, Any]


def train(
    task: Task, way: Way, seeds: Sequence[int], steps: int | None = None
) -> Iterator[tuple[int, Run]]:
    """Yields the seed and the figures of each run.

    The seed determines the first parameters and the batches, whatever the way. The
    steps are not in one scan: XLA's convolutions for CPUs are slow inside of loops.
    """
    program = task.make(way, task.steps)
    every = max(1, (steps or task.steps) // EVALUATIONS)
    count = (steps or task.steps) // every

    def numbered(carry: Carry, data: Any, key: jax.Array, index: Any) -> Carry:
        return program.step(carry, data, jax.random.fold_in(key, index))

    start, step = jax.jit(program.start), jax.jit(numbered, donate_argnums=0)
    evaluate, data = jax.jit(program.evaluate), jax.device_put(program.data)
    for seed in seeds:
        began, key = time.process_time(), jax.random.key(seed)
        carry, curve = start(key), []
        for index in range(count * every):
            carry = step(carry, data, key, index)
            if (index + 1) % every == 0:
                curve.append(float(f"{float(evaluate(carry, data)):.5g}"))
        states = [x for x in carry.values() if isinstance(x, flax_amp.AmpTrainState)]
        run = {
            "curve": curve,
            "every": every,
            "skipped": [int(s.opt_state.total_notfinite) for s in states],
            "scale": [float(s.scaler["scaler"]) for s in states],
            "seconds": round(time.process_time() - began, 1),
        }
        yield seed, run


def runs_of(results: Results, task: str, way: str) -> dict[str, Run]:
    """Returns the runs of a task in one way, by seed."""
    labels = {label: label.split() for label in results.cells.get(task, ())}
    runs = {seed: label for label, (of, seed) in labels.items() if of == way}
    return {seed: results.cells[task][label] for seed, label in runs.items()}


def ends_of(results: Results, task: str, way: str) -> dict[str, float]:
    """Returns the metric at the end of each run, by seed."""
    runs = runs_of(results, task, way)
    return {seed: final(run["curve"]) for seed, run in runs.items()}


def final(curve: Sequence[float]) -> float:
    """Returns the metric at the end of a run: the mean of the last evaluations."""
    return statistics.fmean(curve[-LAST:])


def limit(task: Task, ends: Sequence[float]) -> float:
    """Returns the worst end that is in, from those of the float32 runs.

    The margin is three standard deviations of one run, or the resolution of the metric
    if that is more.
    """
    margin = max(_DEVIATIONS * statistics.stdev(ends), task.resolution)
    return statistics.fmean(ends) + (-margin if task.higher else margin)


def is_in(task: Task, ends: Sequence[float], end: float) -> bool:
    """Returns whether an end is in; it may be better, not worse. NaN is not."""
    worst = limit(task, ends)
    return end >= worst if task.higher else end <= worst
