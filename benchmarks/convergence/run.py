"""The runs of a task: how they are trained, where they are kept, when an end is in.

One JSON file holds all of them:

{"made": [{"command": ..., "date": ..., "machine": ..., "versions": ...}],
 "runs": {"gan": {"float16": {"0": {"made": 0, "curve": [...], ...}}}}}
"""

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import flax_amp
from benchmarks import environment
from benchmarks.convergence.task import Carry, Task, Way
from benchmarks.results import write_json

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
        yield (
            seed,
            {
                "curve": curve,
                "every": every,
                "skipped": [int(s.opt_state.total_notfinite) for s in states],
                "scale": [float(s.scaler["scaler"]) for s in states],
                "seconds": round(time.process_time() - began, 1),
            },
        )


@dataclasses.dataclass
class Results:
    """What was run, in memory and on disk; the file is written after every run."""

    path: pathlib.Path
    made: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    runs: dict[str, dict[str, dict[str, Run]]] = dataclasses.field(default_factory=dict)
    _own: int | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def open(cls, path: pathlib.Path) -> "Results":
        found = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, **found)

    def has(self, task: str, way: str, seed: int) -> bool:
        """Returns whether a run is there, made with the versions that are here."""
        run = self.runs.get(task, {}).get(way, {}).get(str(seed))
        here = environment.versions()
        return run is not None and self.made[run["made"]]["versions"] == here

    def put(self, task: str, way: str, seed: int, run: Run) -> None:
        if self._own is None:
            self._own = len(self.made)
            self.made.append(environment.this_run())
        run = {"made": self._own, **run}
        self.runs.setdefault(task, {}).setdefault(way, {})[str(seed)] = run
        write_json(self.path, {"made": self.made, "runs": self.runs})

    def ends(self, task: str, way: str) -> dict[str, float]:
        """Returns the metric at the end of each run, by seed."""
        runs = self.runs.get(task, {}).get(way, {})
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
