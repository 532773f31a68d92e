"""The runs of a task: how they are trained, where they are kept, when an end is in.

One JSON file holds all of them:

{"made": [{"command": ..., "date": ..., "machine": ..., "versions": ...}],
 "shares": {"gan": {"float16": [1.0, 1.0]}},
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
from benchmarks.convergence.task import Carry, Program, Task, Way
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
        states = [carry[name] for name in program.losses]
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


def explained(program: Program, way: Way) -> Iterator[flax_amp.debug.Explanation]:
    """Yields what `explain` tells of the forward pass of each state."""
    key = jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    batches = jax.eval_shape(program.batches, carry, program.data, key)
    options: Any = dict(amp_policy=way.amp_policy, backward=False)
    for name, loss_fn in program.losses.items():
        yield flax_amp.explain(carry[name], loss_fn, batches[name], **options)


def low_share(task: Task, way: Way) -> list[float]:
    """Returns the share of FLOPs of matmuls in half or fp8, for each state."""
    shares = []
    for told in explained(task.make(way, task.steps), way):
        low = [row for row in told.equations if row.is_low or row.is_in_fp8]
        shares.append(round(sum(row.flops for row in low) / told.totals.flops, 4))
    return shares


@dataclasses.dataclass
class Results:
    """What was run, in memory and on disk; the file is written after every run."""

    path: pathlib.Path
    made: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    shares: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    runs: dict[str, dict[str, dict[str, Run]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: pathlib.Path) -> "Results":
        found = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, *(found.get(key) or type_() for key, type_ in _KEPT.items()))

    def has(self, task: str, way: str, seed: int) -> bool:
        """Returns whether a run is there, made with the versions that are here."""
        run = self.runs.get(task, {}).get(way, {}).get(str(seed))
        here = environment.versions()
        return run is not None and self.made[run["made"]]["versions"] == here

    def put(self, task: str, way: str, seed: int, run: Run) -> None:
        run = {"made": self._here(), **run}
        self.runs.setdefault(task, {}).setdefault(way, {})[str(seed)] = run
        self._write()

    def put_share(self, task: str, way: str, shares: list[float]) -> None:
        self.shares.setdefault(task, {})[way] = shares
        self._write()

    def ends(self, task: str, way: str) -> dict[str, float]:
        """Returns the metric at the end of each run, by seed."""
        runs = self.runs.get(task, {}).get(way, {})
        return {seed: final(run["curve"]) for seed, run in runs.items()}

    def _here(self) -> int:
        """Returns the index of an entry of `made` for this process."""
        here = environment.this_run()
        same = [here | {"date": made["date"]} == made for made in self.made]
        if True not in same:
            self.made.append(here)
            same.append(True)
        return same.index(True)

    def _write(self) -> None:
        write_json(self.path, {key: getattr(self, key) for key in _KEPT})


_KEPT: dict[str, type] = {"made": list, "shares": dict, "runs": dict}


def final(curve: Sequence[float]) -> float:
    """Returns the metric at the end of a run: the mean of the last evaluations."""
    return statistics.fmean(curve[-LAST:])


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the float32 runs of a task end, and how far from them another may.

    The margin is three standard deviations of one run, or the resolution of the metric
    if that is more.
    """

    task: Task
    finals: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.finals)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.finals)

    @property
    def limit(self) -> float:
        """The worst end that is inside."""
        margin = max(_DEVIATIONS * self.deviation, self.task.resolution)
        return self.mean - margin if self.task.higher else self.mean + margin

    def holds(self, end: float) -> bool:
        """Returns whether an end is inside; it may be better, not worse. NaN is not."""
        return end >= self.limit if self.task.higher else end <= self.limit
