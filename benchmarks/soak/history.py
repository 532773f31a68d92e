"""Follows what the processes recorded, beside the model that they must agree with."""

import itertools
import json
import math
import pathlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from benchmarks.soak import stream
from benchmarks.soak.rule import DYNAMIC, FIRST, HIGHEST, LOWEST, Rule

# The largest float16, and by which factor the largest of the float32 gradients may lie
# from that of the step: within it, nothing is said of the flag. Rounding moves it by up
# to a seventh, where an element crosses the edge of a relu. The gradient before the
# residual block is a float16 sum that is cast up for BatchNorm. XLA may keep it in
# float32, and then it does not overflow.
_LARGEST, _BAND = 65504.0, 1.5
# Of fewer saves no slope is taken: a process still grows at first.
_MARKS = 60
# MB for each 1,000 steps without saves, and for each save with the steps before it.
# With plain Orbax a save takes 0.06 MB (benchmarks/README.md), more in a young process.
_OF_STEPS, _OF_SAVE = 0.2, 0.4
_SHOWN = 5  # problems of each check that are kept in full

CHECKS = {
    "scale": "scale and count are those of the reference model, at every step",
    "bounds": "the scale is within its limits, at every step",
    "bad batches": "every batch with a NaN or an inf is skipped, and its loss is not "
    "finite; one with 1e30, which float16 saturates, is skipped in bfloat16 and "
    "float32; those skip nothing else, and float16 no other batch for its loss",
    "overflows": "float16 skips a step if the scale times a float32 gradient that it "
    f"surely rounds to float16 is above 65504 by a factor of {_BAND}, and does not if "
    "the scale times each gradient that it may round is below by that factor, at every "
    "tenth step",
    "finite": "no leaf of parameters, optimizer state or statistics is ever non-finite",
    "counters": "`step` counts batches; the counts of adamw and of its schedule count "
    "updates; the counters of skips count skips, at every step",
    "skips": "a skipped step changes no bit of parameters, optimizer state, statistics "
    "or keys; every other step does",
    "replicas": "all devices hold the same bits, at every save",
    "compilations": "each process compiles the step once, and after its second save "
    "nothing",
    "memory": "each process has the same number of live arrays at every save; resident "
    f"memory grows by less than {_OF_STEPS} MB in 1,000 steps without saves, and by "
    f"less than {_OF_SAVE} MB with each save",
    "restarts": "each restart goes on from the newest complete step; no step that was "
    "complete is lost; the state has the bits that were saved; a warning if and only "
    "if the kind of the scaler changed",
    "repeated": "steps that a kill undid come out the same, bit for bit, where "
    "precision and devices stayed",
}


class History:
    """The steps that are not undone, and the problems that were found.

    Attributes:
      texts, rows: what was recorded of each step, as text and as a dict.
      kinds: precision and devices of each step.
      counts: what happened how often.
      problems: by the name of a check, the first of what disagrees.
      of_saves: how many MB each long process grew with each save.
      of_steps: how many MB a process grew in 1,000 steps without a save.
      scales: all scales of float16.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.texts: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.kinds: list[tuple[str, int]] = []
        self._rules: list[Rule] = []
        self._updates: list[int] = []
        self._fingerprints: dict[int, str] = {}
        self._on_disk = 0
        self._undone: dict[int, str] = {}
        self._rule = FIRST[DYNAMIC]
        self._first = True
        self.counts: Counter[str] = Counter()
        self.problems: defaultdict[str, list[str]] = defaultdict(list)
        self.of_saves: list[float] = []
        self.of_steps = 0.0
        self.scales: set[float] = set()

    @property
    def half(self) -> int:
        """The number of steps in float16."""
        return sum(precision == DYNAMIC for precision, _ in self.kinds)

    def check(self, name: str, holds: bool, problem: str) -> None:
        """Notes a problem of a check unless something holds."""
        assert name in CHECKS
        self.counts[f"checked {name}"] += 1
        if not holds:
            self.counts[f"problems {name}"] += 1
            if len(self.problems[name]) < _SHOWN:
                self.problems[name].append(problem)

    def add(self, record: pathlib.Path, note: dict[str, Any]) -> None:
        """Follows one process."""
        text = record.read_text() if record.exists() else ""
        lines = text.splitlines()[: text.count("\n")]  # a kill may cut the last one
        self.counts["processes"] += 1
        self.counts[f"ended: {note['end']}"] += 1
        self.counts["half-written steps"] += note["torn"]
        self.counts["ended with a half-written step"] += note["torn"] > 0
        marks: list[dict[str, Any]] = []
        if lines:
            self._restored(json.loads(lines[0]), record.name)
        for line in lines[1:]:
            found = json.loads(line)
            if "n" in found:
                self._step(found, line)
            elif "saved" in found:
                self._saved(found)
                marks.append(found)
        self._of_process(marks, record.name)
        self._on_disk = note["newest"]
        saved = [0, *(mark["saved"] for mark in marks)]
        # The last one may be lost if it was being saved, but only by a kill.
        least = saved[-1] if note["end"] in ("told", "done") else saved[-2:][0]
        where = f"{record.name}: step {note['newest']} is on disk, {saved[-2:]} saved"
        self.check("restarts", note["newest"] >= least, where)

    def _restored(self, head: dict[str, Any], where: str) -> None:
        step, kind = head["restored"], (head["precision"], head["devices"])
        where = f"{where}: restored step {step}"
        self.check("restarts", step == self._on_disk, f"{where}, not {self._on_disk}")
        undone, was = self.texts[step:], (self.kinds[-1] if self.kinds else kind)
        self.counts["steps undone"] += len(undone)
        self._undone = dict(enumerate(undone, step)) if kind == was else {}
        for kept in (self.texts, self.rows, self.kinds, self._rules, self._updates):
            del kept[step:]
        saved = self._fingerprints.get(step, head["fingerprint"])
        self.check("restarts", head["fingerprint"] == saved, f"{where}: other bits")
        rule = self._rules[-1] if step else FIRST[kind[0]]
        self._rule = rule.resumed_as(FIRST[kind[0]])
        changed = rule.is_static != self._rule.is_static
        text = "the scaler of the target is used"
        told = [warning for warning in head["warnings"] if text in warning]
        right = len(told) == len(head["warnings"]) == changed
        self.check("restarts", right, f"{where}: warned {head['warnings']}")
        self.counts["restarts"] += not self._first
        self.counts["changes of precision"] += kind[0] != was[0]
        self.counts["changes of devices"] += kind[1] != was[1]
        self._first = False
        self._kind = kind

    def _step(self, row: dict[str, Any], text: str) -> None:
        number, metrics = row["n"], row["metrics"]
        assert number == len(self.rows)
        wrong = stream.fault(self._seed, number)
        finite = metrics["grads_finite"]
        before = self._rule
        self._rule = before.after(math.isfinite(metrics["loss"]), finite)
        if number in self._undone:
            same = text == self._undone[number]
            self.check("repeated", same, f"step {number}: {self._undone[number]}")
        self._check_scale(row, before)
        self._check_flag(row, wrong, before)
        self._check_state(row)
        self._count(row, wrong)
        self.texts.append(text)
        self.rows.append(row)
        self.kinds.append(self._kind)
        self._rules.append(self._rule)

    def _check_scale(self, row: dict[str, Any], before: Rule) -> None:
        rule, where = self._rule, f"step {row['n']}"
        seen = (row["scale"], row["count"])
        wanted = (rule.scale, rule.count)
        same = seen == wanted and row["metrics"]["scaler"] == rule.scale
        self.check("scale", same, f"{where}: {seen}, the model has {wanted}")
        within = LOWEST <= row["scale"] <= HIGHEST
        self.check("bounds", within, f"{where}: {row['scale']}")
        if not rule.is_static:
            self.scales.add(row["scale"])
            moved = (rule.scale > before.scale) - (rule.scale < before.scale)
            self.counts["the scale grew"] += moved > 0
            self.counts["the scale fell"] += moved < 0
            self.counts["steps at the lower limit"] += rule.scale == LOWEST
            self.counts["steps at the upper limit"] += rule.scale == HIGHEST

    def _check_flag(
        self, row: dict[str, Any], wrong: stream.Fault, before: Rule
    ) -> None:
        finite, loss = row["metrics"]["grads_finite"], row["metrics"]["loss"]
        where = f"step {row['n']}, {self._kind[0]}: {finite=}, {loss=}, {wrong}"
        dynamic = self._kind[0] == DYNAMIC
        if wrong.bad in ("NaN", "inf"):
            right = not (finite or math.isfinite(loss))
        elif dynamic:  # its flag is a matter of the scale, see `overflows`
            right = math.isfinite(loss) or (bool(wrong.bad) and not finite)
        else:
            right = finite == (not wrong.bad)
        self.check("bad batches", right, where)
        plain = row["plain"]
        if plain is None or wrong.bad:
            return
        scale = before.scale / _LARGEST if dynamic else 0.0
        rounded, largest = scale * plain["rounded"], scale * plain["largest"]
        where += f", {rounded=:.3f}, {largest=:.3f}, {plain['finite']=}"
        must, may = rounded > _BAND, largest >= 1 / _BAND
        self.counts["sampled overflows"] += must
        self.counts["sampled in the band"] += may and not must
        right = not finite if must else may or finite
        self.check("overflows", right and plain["finite"], where)

    def _check_state(self, row: dict[str, Any]) -> None:
        where, finite = f"step {row['n']}", row["metrics"]["grads_finite"]
        last = self.rows[-1] if self.rows else None
        self.check("finite", row["leaves_finite"], where)
        updates = (self._updates[-1] if self._updates else 0) + finite
        self._updates.append(updates)
        skipped = len(self._updates) - updates
        in_a_row = 0 if finite else 1 + (last["in_a_row"] if last else 0)
        seen = (row["step"], row["updates"], row["skipped"], row["in_a_row"])
        wanted = (row["n"] + 1, [updates, updates], skipped, in_a_row)
        right = seen == wanted and row["metrics"]["skipped_total"] == skipped
        self.check("counters", right, f"{where}: {seen}, not {wanted}")
        if last:
            same = row["digest"] == last["digest"]
            self.check("skips", same != finite, f"{where}: {finite=}, {same=}")

    def _count(self, row: dict[str, Any], wrong: stream.Fault) -> None:
        finite = row["metrics"]["grads_finite"]
        self.counts["steps run"] += 1
        self.counts[f"bad: {wrong.bad}"] += bool(wrong.bad)
        self.counts["bad batches"] += bool(wrong.bad)
        self.counts["skipped"] += not finite
        self.counts["true overflows"] += not (finite or wrong.bad)
        self.counts["batches with large losses"] += wrong.weight > 1
        self.counts["batches with small losses"] += wrong.weight < 1

    def _saved(self, mark: dict[str, Any]) -> None:
        self.counts["saves"] += 1
        self._fingerprints[mark["saved"]] = mark["fingerprint"]
        where = f"step {mark['saved']}"
        self.check("replicas", mark["replicas_equal"], where)
        steps = sum(n for name, n in mark["compiled"].items() if "train_step" in name)
        self.check("compilations", steps == 1, f"{where}: {mark['compiled']}")

    def _of_process(
        self, marks: list[dict[str, Any]], where: str, saves: bool = True
    ) -> None:
        if not marks:
            return
        programs, arrays = [[mark[k] for mark in marks] for k in ("compiled", "arrays")]
        later = [found for found in programs[2:] if found != programs[1]]
        self.check("compilations", not later, f"{where}: {later[:1]}")
        same = len({*arrays}) == 1
        self.check("memory", same, f"{where}: arrays {sorted({*arrays})}")
        if len(marks) >= _MARKS:
            growth, limit = _growth(marks), _OF_STEPS
            if saves:
                growth *= (marks[2]["saved"] - marks[1]["saved"]) / 1000
                limit = _OF_SAVE
                self.of_saves.append(growth)
            else:
                self.of_steps = growth
            self.check("memory", growth < limit, f"{where}: {growth:.2f} MB")

    def compare(self, record: pathlib.Path) -> int:
        """Compares the first steps with those of a process that nothing interrupted.

        Returns:
          how many there were, up to the first change of precision or of devices.
        """
        lines = record.read_text().splitlines()
        marks = [json.loads(line) for line in lines if line.startswith('{"saved"')]
        self._of_process(marks, record.name, saves=False)
        alike = itertools.takewhile(lambda kind: kind == self.kinds[0], self.kinds)
        steps = [line for line in lines if line.startswith('{"n"')]
        compared = 0
        for line, text, _ in zip(steps, self.texts, alike, strict=False):
            self.check("repeated", line == text, f"uninterrupted: {line}")
            compared += 1
        return compared


def _growth(marks: list[dict[str, Any]]) -> float:
    """Returns by how many MB a process grew in 1,000 steps, after its first third."""
    late = marks[len(marks) // 3 :]
    steps = [mark["saved"] / 1000 for mark in late]
    return float(np.polyfit(steps, [mark["megabytes"] for mark in late], 1)[0])
