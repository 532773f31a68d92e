"""What must hold of the processes of the run, and a model of its scale in NumPy."""

import dataclasses
import json
import math
import pathlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from benchmarks.soak.worker import FIRST_SCALE, PATIENCE, fault

_MARKS = 60  # saves of a process of which a slope is taken: it grows at first
_OF_SAVE = 0.4  # MB; with plain Orbax a save of this state takes 0.06 MB, young 0.24

CHECKS = {
    "scale": "the scale, its counter and the skips are those of a model in NumPy",
    "bad batches": "a batch with a NaN or an infinity is skipped",
    "skips": "a skipped step changes no bit of parameters, moments and statistics; "
    "every other step does",
    "restarts": "a restart goes on from the newest complete step, or, if a file of it "
    "was damaged, from that or from the one before it, with a warning that names it; "
    "its bits are those that the run had",
    "repeated": "steps that a kill undid come out the same, bit for bit",
    "memory": "a process has the same number of live arrays at every save, and grows "
    f"by less than {_OF_SAVE} MB with each",
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The rule of the scale once more, from docs/scaler.md."""

    scale: float = FIRST_SCALE
    count: int = 0
    skipped: int = 0

    def after(self, loss_finite: bool, grads_finite: bool) -> "Scale":
        """Returns the scale after a step."""
        if not (loss_finite and grads_finite):
            halved = self.scale / 2 if loss_finite else self.scale
            count = 0 if loss_finite else self.count
            return Scale(_within(halved), count, self.skipped + 1)
        if self.count < PATIENCE:
            return Scale(self.scale, self.count + 1, self.skipped)
        return Scale(_within(2 * self.scale), 0, self.skipped)


def _within(scale: float) -> float:
    return float(np.clip(scale, 2.0**-24, 2.0**24))


class History:
    """The steps that are not undone, and the problems that were found.

    Attributes:
      rows: what was recorded of each step.
      checked: how often each check was made.
      counts: what happened how often.
      problems: by the name of a check, what disagrees.
      slopes: the MB with each save, of each process with many.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.rows: list[dict[str, Any]] = []
        self.checked: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.problems: defaultdict[str, list[str]] = defaultdict(list)
        self.slopes: list[float] = []
        # After so many steps; the first process tells the first digest.
        self._scales = [Scale()]
        self._digests: list[str] = []

    def check(self, name: str, holds: bool, problem: str) -> None:
        """Notes a problem of a check unless something holds."""
        self.checked[name] += 1
        if not holds:
            self.problems[name].append(problem)

    def add(self, record: pathlib.Path, newest: int, damaged: bool) -> None:
        """Follows one process, which found `newest` on the disk."""
        text = record.read_text() if record.exists() else ""
        # A kill may cut the last line.
        lines = [json.loads(x) for x in text.splitlines()[: text.count("\n")]]
        self.counts["processes"] += 1
        if not lines:
            return
        undone = self._restored(lines[0], newest, damaged)
        for line in lines[1:]:
            if "n" in line:
                self._step(line, undone)
        self._memory([line for line in lines if "saved" in line], record.name)

    def _restored(
        self, head: dict[str, Any], newest: int, damaged: bool
    ) -> list[dict[str, Any]]:
        step, told = head["restored"], head["told"]
        self._digests = self._digests or [head["digest"]]
        right = head["digest"] == self._digests[step]
        if step == newest:
            right &= not told
        else:
            right &= damaged and step < newest and str(newest) in " ".join(told)
        where = f"step {step} of {newest}, {damaged=}, told {told}"
        self.check("restarts", right, where)
        self.counts["restarts behind a damaged step"] += step != newest
        undone = self.rows[step:]
        self.counts["steps that a kill undid"] += len(undone)
        del self.rows[step:], self._scales[step + 1 :], self._digests[step + 1 :]
        return [{}] * step + undone

    def _step(self, row: dict[str, Any], undone: list[dict[str, Any]]) -> None:
        number, where = row["n"], f"step {row['n']}: {row}"
        if number < len(undone):
            same = json.dumps(row) == json.dumps(undone[number])
            self.check("repeated", same, f"{where}, before {undone[number]}")
        was, loss_finite = self._scales[-1], math.isfinite(row["loss"])
        now = was.after(loss_finite, row["finite"])
        seen = Scale(row["scale"], row["count"], row["skipped"])
        right = seen == now and row["step"] == number + 1
        self.check("scale", right, f"{where}, the model has {now}")
        skipped = now.skipped > was.skipped
        bad, _ = fault(self._seed, number)
        self.counts["bad batches"] += bad is not None
        if bad is not None and not math.isfinite(bad):
            self.check("bad batches", skipped, where)
        same = row["digest"] == self._digests[-1]
        self.check("skips", skipped == same, where)
        self.rows.append(row)
        self._scales.append(now)
        self._digests.append(row["digest"])
        self.counts["steps"] += 1
        self.counts["skipped steps"] += skipped
        self.counts["the scale grew"] += now.scale > was.scale
        self.counts["the scale fell"] += now.scale < was.scale

    def _memory(self, marks: list[dict[str, Any]], name: str) -> None:
        arrays = {mark["arrays"] for mark in marks[1:]}
        self.check("memory", len(arrays) <= 1, f"{name}: live arrays {arrays}")
        late = [mark["megabytes"] for mark in marks[len(marks) // 3 :]]
        if len(marks) >= _MARKS:
            slope = float(np.polyfit(np.arange(len(late)), late, 1)[0])
            self.slopes.append(slope)
            self.check("memory", slope < _OF_SAVE, f"{name}: {slope:.2f} MB a save")
