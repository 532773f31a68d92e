"""`soak`: a run in float16 that is killed, fed bad batches, and damaged on its disk.

It is compared, step by step, with the same run that nothing disturbs.
"""

import itertools
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from typing import Any

from benchmarks.request import Request
from benchmarks.results import made_by
from benchmarks.show import markdown_table, write_page
from benchmarks.soak import fault

_ROOT = pathlib.Path(__file__).parents[2]
_SAVE_EVERY = {"full": 50, "tiny": 10}
CHECKS = {
    "bad batches": "a batch with a NaN or an infinity is skipped",
    "skips": "a skipped step changes no bit of parameters, moments and statistics; "
    "every other step does",
    "restarts": "a restart goes on from the newest complete step, or, if a file of it "
    "was damaged, from that or from the one before it, with a warning that names it",
    "bits": "every restart and every step has the bits of the undisturbed run, and its "
    "scale",
    "memory": "a process has the same number of live arrays at every save",
}
# What becomes of the bytes of a file
_DAMAGE: dict[str, Any] = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "flipped": lambda content: bytes([content[0] ^ 0x10]) + content[1:],
}
Line = dict[str, Any]


def run(asked: Request, steps: int, seed: int) -> None:
    """Writes soak.md into the folder of results; exits with 1 if a check fails."""
    settings = [seed, steps, _SAVE_EVERY[asked.size]]
    with tempfile.TemporaryDirectory() as name:
        folder, chance = pathlib.Path(name), random.Random(seed)
        checks = Checks(_process(folder / "undisturbed", settings), seed)
        disk, step = folder / "killed", 0
        while step < steps:
            damage = _damage(disk, chance)
            newest = max(_complete(disk))
            lines = _process(disk, settings, chance)
            checks.process(lines, newest, damage)
            step = max((line.get("step", 0) for line in lines), default=0)
            print(f"step {step}: {dict(checks.problems) or 'no problem'}", flush=True)
    write_page(asked.folder / "soak.md", _page(checks))
    if checks.problems:
        sys.exit(f"failed: {dict(checks.problems)}")


class Checks:
    """How often each check was made, and what disagrees, by the name of a check.

    Attributes:
      states: what was seen of each state of the run that nothing disturbs.
      counts: what happened how often.
    """

    def __init__(self, lines: list[Line], seed: int) -> None:
        self.made: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.problems: defaultdict[str, list[str]] = defaultdict(list)
        self.states = [line for line in lines if "digest" in line]
        for number, (old, new) in enumerate(itertools.pairwise(self.states)):
            self._step(old, new, fault(seed, number)[0])
        arrays = {line["arrays"] for line in [x for x in lines if "arrays" in x][1:]}
        self._check("memory", len(arrays) <= 1, f"live arrays {arrays}")

    def process(self, lines: list[Line], newest: int, damage: str = "") -> None:
        """Checks a process that was killed, and that found a step on the disk."""
        self.counts["processes"] += 1
        for line in (line for line in lines if "digest" in line):
            wanted = self.states[line["step"]]
            same = all(line[key] == wanted[key] for key in ("digest", "scale"))
            self._check("bits", same, f"{line}, undisturbed {wanted}")
        for first in lines[:1]:
            step, told = first["step"], " ".join(first["told"])
            behind = damage and step < newest and str(newest) in told
            right = not told if step == newest else bool(behind)
            self._check("restarts", right, f"{step} of {newest}, {damage}, {told}")
            self.counts["restarts behind a damaged step"] += step != newest
        self.counts[f"files {damage}"] += bool(damage)

    def _check(self, name: str, holds: bool, problem: str) -> None:
        self.made[name] += 1
        if not holds:
            self.problems[name].append(problem)

    def _step(self, old: Line, new: Line, bad: float | None) -> None:
        skipped = new["skipped"] > old["skipped"]
        self._check("skips", skipped == (old["digest"] == new["digest"]), f"{new}")
        if bad is not None and not math.isfinite(bad):
            self._check("bad batches", skipped, f"{new}")
        self.counts["bad batches"] += bad is not None
        self.counts["skipped steps"] += skipped
        self.counts["the scale grew"] += new["scale"] > old["scale"]
        self.counts["the scale fell"] += new["scale"] < old["scale"]


def _complete(disk: pathlib.Path) -> list[int]:
    """Returns the steps that are complete, and 0."""
    return sorted([0, *(int(x.name) for x in disk.glob("*") if x.name.isdecimal())])


def _damage(disk: pathlib.Path, chance: random.Random) -> str:
    """Damages a file of the newest step, sometimes and if there is one before it.

    Returns what was done, or an empty string.
    """
    steps = _complete(disk)
    if len(steps) < 3 or chance.random() < 0.7:
        return ""
    found = (disk / str(steps[-1])).rglob("*")
    files = sorted(path for path in found if path.is_file() and path.stat().st_size)
    kind, file = chance.choice([*_DAMAGE]), chance.choice(files)
    file.write_bytes(_DAMAGE[kind](file.read_bytes()))
    return kind


def _process(
    disk: pathlib.Path, settings: list[int], chance: random.Random | None = None
) -> list[Line]:
    """Runs a process to its end, or kills it by chance; returns what it recorded."""
    disk.mkdir(exist_ok=True)
    record = disk.with_suffix(".jsonl")
    command = [sys.executable, "-m", "benchmarks.soak"]
    command += [str(disk), str(record), *map(str, settings)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(disk.parent / "cache")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
    options: Any = dict(stdout=subprocess.PIPE, cwd=_ROOT, env={**os.environ, **cache})
    with subprocess.Popen(command, **options) as process:
        if chance is None:
            process.communicate()
        else:
            _kill(process, chance)
    if process.returncode not in (0, -9):
        sys.exit(f"a process of the run failed: {process.returncode}")
    lines = record.read_text().splitlines(keepends=True)
    # A kill may cut the last line.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _kill(process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Kills a process after some saves, in one or before the next."""
    assert process.stdout is not None
    for _ in range(chance.randint(1, 12)):
        if not process.stdout.readline():
            return
    time.sleep(chance.uniform(0, chance.choice([0.2, 2.0])))
    process.kill()


def _page(checks: Checks) -> str:
    rows = []
    for name, text in CHECKS.items():
        found = len(checks.problems.get(name, []))
        verdict = f"{found} problems" if found else "holds"
        rows.append([name, text, verdict, str(checks.made[name])])
    counts = [[what, str(n)] for what, n in sorted(checks.counts.items()) if n]
    scales = [state["scale"] for state in checks.states]
    return f"""# Soak

{made_by()}.

{len(scales) - 1} steps in float16, once undisturbed, and once in processes that are
killed (`SIGKILL`) and whose checkpoints are damaged: [how](../README.md#the-soak). The
scale was between {min(scales):g} and {max(scales):g}.

{markdown_table(["check", "what must hold", "verdict", "times"], rows, words=3)}

{markdown_table(["what", "times"], counts, words=1)}
"""
