"""The runs of a task: how they are trained, where they are kept, when an end is in.

One JSON file holds all of them:

{"made": [{"command": ..., "date": ..., "machine": ..., "versions": ...}],
 "shares": {"gan": {"float16": [1.0, 1.0]}},
 "fp8": {"char_lm": {"fp8": [{"fp8": 12, "all": 17, "share": 0.6}]}},
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
from flax_amp.policy import PolicyEntries

LAST = 5  # evaluations that are averaged
_DEVIATIONS = 3.0
EVALUATIONS = 20  # at equal distances
Run = dict[str, Any]


def train(
    task: Task, way: Way, seeds: Sequence[int], steps: int | None = None
) -> Iterator[tuple[int, Run]]:
    """Yields the seed and the figures of each run.

    The seed determines the first parameters and the batches, whatever the way. The
    steps are not in one scan: XLA's convolutions for CPUs are slow inside of loops.
    """
    program = task.build(way)
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
        took = time.process_time() - began
        yield seed, {"curve": curve, "every": every, **_told(program, carry, took)}


def _told(program: Program, carry: Carry, took: float) -> Run:
    states = [carry[name] for name in program.losses]
    return {
        "skipped": [int(s.opt_state.total_notfinite) for s in states],
        "scale": [float(s.scaler["scaler"]) for s in states],
        "seconds": round(took, 1),
    }


def low_share(program: Program) -> list[float]:
    """Returns the share of FLOPs of products in half precision, for each state."""
    return [_rounded(told.totals.low_share) for told in _explained(program)]


def in_fp8(program: Program, amp_policy: PolicyEntries) -> list[dict[str, float]]:
    """Returns how many products of a forward pass run in fp8, for each state.

    Products by the layers of a loop count as often as it turns. `share` is that of the
    FLOPs of products, which is the same in the backward pass.
    """
    found = []
    for told in _explained(program, amp_policy):
        products = [row for row in told.equations if row.flops]
        fp8 = [row for row in products if row.is_in_fp8]
        share = sum(row.flops for row in fp8) / told.totals.flops
        counts = [sum(row.times for row in rows) for rows in (fp8, products)]
        found.append({"fp8": counts[0], "all": counts[1], "share": _rounded(share)})
    return found


def _explained(
    program: Program, amp_policy: PolicyEntries | None = None
) -> Iterator[flax_amp.debug.Explanation]:
    key = jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    batches = jax.eval_shape(program.batches, carry, program.data, key)
    options: Any = dict(amp_policy=amp_policy, backward=False)
    for name, loss_fn in program.losses.items():
        yield flax_amp.explain(carry[name], loss_fn, batches[name], **options)


def _rounded(share: float | None) -> float:
    return float(f"{share:.4g}")


@dataclasses.dataclass
class Results:
    """What was run, in memory and on disk; the file is written after every run."""

    path: pathlib.Path
    made: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    shares: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    fp8: dict[str, dict[str, list[Any]]] = dataclasses.field(default_factory=dict)
    runs: dict[str, dict[str, dict[str, Run]]] = dataclasses.field(default_factory=dict)

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
        run = {"made": self._here(), **run}
        self.runs.setdefault(task, {}).setdefault(way, {})[str(seed)] = run
        self._write()

    def put_share(self, task: str, way: str, shares: list[float]) -> None:
        self.shares.setdefault(task, {})[way] = shares
        self._write()

    def put_fp8(self, task: str, way: str, counts: list[dict[str, float]]) -> None:
        self.fp8.setdefault(task, {})[way] = counts
        self._write()

    def _here(self) -> int:
        """Returns the index of an entry of `made` for this process."""
        here = environment.this_run()
        same = [here | {"date": made["date"]} == made for made in self.made]
        if True not in same:
            self.made.append(here)
            same.append(True)
        return same.index(True)

    def _write(self) -> None:
        kept = ("made", "shares", "fp8", "runs")
        write_json(self.path, {key: getattr(self, key) for key in kept})


def final(curve: Sequence[float]) -> float:
    """Returns the metric at the end of a run: the mean of the last evaluations."""
    return statistics.fmean(curve[-LAST:])


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the float32 runs of a task end, and how far from them another may."""

    mean: float
    deviation: float
    margin: float
    higher: bool

    @property
    def limit(self) -> float:
        """The worst end that is inside."""
        return self.mean - self.margin if self.higher else self.mean + self.margin

    def holds(self, end: float) -> bool:
        """Returns whether an end is inside; it may be better, not worse. NaN is not."""
        return end >= self.limit if self.higher else end <= self.limit


def spread(task: Task, finals: Sequence[float]) -> Spread:
    """Returns the spread of a task from the ends of its float32 runs.

    The margin is three standard deviations of one run, or the resolution of the metric
    if that is more.
    """
    deviation = statistics.stdev(finals)
    margin = max(_DEVIATIONS * deviation, task.resolution)
    return Spread(statistics.fmean(finals), deviation, margin, task.better == "higher")
