"""Raw figures on disk: one JSON file for each command and environment.

    {"command": "tpu", "target": "v5e", "size": "full",
     "runs": [{"command": "python -m benchmarks tpu", "date": ..., "versions": ...}],
     "cells": {"mlp": {"amp_bf16": {"compiled": {"run": 0, "temp_mb": 135.2, ...}}}}}

A cell is one variant of one model; it has a part for each kind of measurement. Parts
are written as soon as they are measured and replace older ones, so that a run may be
interrupted, or repeated for some cells only. Each part names the run it comes from.
"""

import datetime
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import environment, models, variants

FOLDER = pathlib.Path(__file__).with_name("results")

Figures = dict[str, Any]


class Results:
    """The figures of one command in one environment, in memory and on disk."""

    def __init__(self, content: dict[str, Any], path: pathlib.Path | None = None):
        self.command: str = content["command"]
        self.target: str = content["target"]
        self.size: str = content["size"]
        self.runs: list[dict[str, Any]] = content["runs"]
        self.cells: dict[str, dict[str, dict[str, Figures]]] = content["cells"]
        self._path = path
        self._own_run: int | None = None

    @classmethod
    def open(
        cls, folder: pathlib.Path, command: str, target: str, size: str = "full"
    ) -> "Results":
        """Reads the file of a command and a target, or begins a new one."""
        version = environment.versions()["jax"]
        parts = [command, target, f"jax{version}", *(["tiny"] * (size == "tiny"))]
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', '-'.join(parts))}.json"
        if path.exists():
            return cls(json.loads(path.read_text()), path)
        header = {"command": command, "target": target, "size": size}
        return cls({**header, "runs": [], "cells": {}}, path)

    def put(self, model: str, variant: str, part: str, figures: Figures) -> None:
        """Stores a part of a cell and writes the file."""
        if self._own_run is None:
            self._own_run = len(self.runs)
            self.runs.append(_this_run())
        cell = self.cells.setdefault(model, {}).setdefault(variant, {})
        cell[part] = {"run": self._own_run, **figures}
        self._write()

    def has(self, model: str, variant: str, part: str) -> bool:
        """Returns whether a part was measured without error, with what is here now."""
        figures = self.cells.get(model, {}).get(variant, {}).get(part)
        if figures is None or "error" in figures:
            return False
        return self.runs[figures["run"]]["versions"] == environment.versions()

    def parts(self, part: str) -> Iterator[tuple[str, dict[str, Figures]]]:
        """Yields each model and, by variant, a part of its cells, in a fixed order."""
        for model in _ordered(self.cells, models.NAMES):
            cells = self.cells[model]
            labels = [v for v in _ordered(cells, variants.NAMES) if part in cells[v]]
            if labels:
                yield model, {label: cells[label][part] for label in labels}

    def _write(self) -> None:
        assert self._path is not None, "read by `read_all`, which is for reports"
        content = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(_as_json(content))
        os.replace(partial, self._path)


def read_all(folder: pathlib.Path) -> list[Results]:
    """Reads every file of results in a folder, in the order of their names."""
    return [Results(json.loads(p.read_text())) for p in sorted(folder.glob("*.json"))]


def _ordered(labels: Iterable[str], known: Sequence[str]) -> list[str]:
    """Sorts as the names are listed; a name with options comes after the name."""
    places = {name: place for place, name in enumerate(known)}
    return sorted(labels, key=lambda x: (places.get(x.split("[")[0], len(known)), x))


def _as_json(content: Any) -> str:
    """Returns JSON with each list of numbers in one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[\d\s,.e+-]*\]", lambda m: " ".join(m[0].split()), text) + "\n"


def _this_run() -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "command": environment.command_line(),
        "date": now.isoformat(timespec="seconds"),
        "machine": environment.machine(),
        "versions": environment.versions(),
    }
