"""The runs on disk, in one JSON file.

{"made": [{"command": ..., "date": ..., "machine": ..., "versions": ...}],
 "shares": {"gan": {"float16": [1.0, 1.0]}},
 "runs": {"gan": {"float16": {"0": {"made": 0, "curve": [...], ...}}}}}
"""

import dataclasses
import json
import os
import pathlib
import shlex
import sys
from typing import Any

from benchmarks import environment
from benchmarks.convergence.run import Run
from benchmarks.results import as_json


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

    def _here(self) -> int:
        """Returns the index of an entry of `made` for this process."""
        here = environment.this_run()
        here["command"] = shlex.join(
            ["python", "-m", "benchmarks.convergence", *sys.argv[1:]]
        )
        same = [here | {"date": made["date"]} == made for made in self.made]
        if True not in same:
            self.made.append(here)
            same.append(True)
        return same.index(True)

    def _write(self) -> None:
        kept = {key: getattr(self, key) for key in ("made", "shares", "runs")}
        partial = self.path.with_suffix(".partial")
        partial.write_text(as_json(kept))
        os.replace(partial, self.path)
