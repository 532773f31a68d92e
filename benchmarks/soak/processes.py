"""Starts, kills and restarts the processes of the run, as a seed says.

What a process recorded stays in a folder, with a note of how it ended, so that a run
that is interrupted goes on with the same command.
"""

import json
import pathlib
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.process import Process, on_disk
from benchmarks.soak.rule import DYNAMIC

# The first ones are alike: they are compared with a run that nothing interrupts.
ALIKE = 4
_LONGEST = 60.0  # seconds; no interval between two saves takes so long


class Plan(NamedTuple):
    """What a process is to do.

    Attributes:
      precision: the word for its precision.
      devices: how many parts the CPU is divided into.
      saves: the number of its saves before it ends.
      end: "killed", "killed in a save" (soon after it began), "told" (by SIGTERM) or
        "done".
    """

    precision: str
    devices: int
    saves: int
    end: str


def plans(seed: int, longest: int) -> Iterator[Plan]:
    """Returns the plan of one process after the other, without end."""
    chance = random.Random(f"plans {seed}")
    precision, devices = DYNAMIC, 1
    number = 0
    while True:
        if number >= ALIKE and chance.random() < 0.6:
            words = [DYNAMIC, "bf16-mixed", "32-true"]
            (precision,) = chance.choices(words, [6, 1, 1])
            (devices,) = chance.choices([1, 2, 4], [5, 3, 2])
        ends = ["killed", "killed in a save", "told", "done"]
        (end,) = chance.choices(ends, [5, 3, 2, 1])
        kind = chance.random()
        if kind < 0.04 and end == "killed" and number:
            saves = 0  # while it is compiled
        elif kind < 0.86 or number < ALIKE:
            saves = chance.randint(1, 6)
        else:
            saves = chance.randint(longest // 3, longest)
        yield Plan(precision, devices, saves, end)
        number += 1


class Run:
    """The processes of one run in a folder."""

    def __init__(
        self, folder: pathlib.Path, seed: int, horizon: int, save_every: int
    ) -> None:
        self._folder, self._seed = folder, seed
        self._horizon, self._save_every = horizon, save_every
        self._steps = folder / "steps"
        (folder / "records").mkdir(parents=True, exist_ok=True)

    def processes(
        self, plans: Iterable[Plan]
    ) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
        """Yields the record and the note of each process after it ended."""
        for number, plan in enumerate(plans):
            record = self._folder / "records" / f"{number:03}.jsonl"
            note = record.with_suffix(".note")
            if not note.exists():
                end = plan.end
                if record.exists():  # of a run whose parent was interrupted
                    end = "killed"
                else:
                    self._run(plan, record, random.Random(f"{self._seed} {number}"))
                newest, torn = on_disk(self._steps)
                found = plan._asdict() | {"end": end, "newest": newest, "torn": torn}
                note.write_text(json.dumps(found))
            yield record, json.loads(note.read_text())

    def uninterrupted(self, until: int) -> pathlib.Path:
        """Runs the first steps once more, without a save; returns the record."""
        record = self._folder / "records" / "uninterrupted.jsonl"
        if not record.exists():
            half = record.with_suffix(".half")
            plan = Plan(DYNAMIC, devices=1, saves=0, end="done")
            self._start(plan, self._folder / "uninterrupted", half, until).hear_all()
            half.rename(record)
        return record

    def _run(self, plan: Plan, record: pathlib.Path, chance: random.Random) -> None:
        until = 10**9
        if plan.end == "done":
            until = on_disk(self._steps)[0] + plan.saves * self._save_every
        process = self._start(plan, self._steps, record, until)
        if plan.end == "done":
            process.hear_all()
            return
        interval = chance.uniform(0, 4)
        if plan.saves:
            process.hear()
        for _ in range(plan.saves):
            before = time.perf_counter()
            process.hear()
            interval = min(time.perf_counter() - before, _LONGEST)
        if plan.end == "killed in a save":
            interval = min(interval, 0.2)
        time.sleep(chance.uniform(0, interval))
        if plan.end == "told":
            process.terminate()
            process.hear_all()
        else:
            process.kill()

    def _start(
        self, plan: Plan, steps: pathlib.Path, record: pathlib.Path, until: int
    ) -> Process:
        settings = {
            "seed": self._seed,
            "precision": plan.precision,
            "until": until,
            "horizon": self._horizon,
            "save_every": self._save_every,
            "saves": plan.saves > 0 or plan.end != "done",
        }
        return Process(
            "benchmarks.soak.worker",
            [str(steps), str(record), json.dumps(settings)],
            XLA_FLAGS=f"--xla_force_host_platform_device_count={plan.devices}",
            JAX_COMPILATION_CACHE_DIR=str(self._folder / "cache"),
        )
