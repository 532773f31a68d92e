"""Raw figures on disk: one JSON file for each command and environment.

    {"command": "tpu", "target": "v5e", "size": "full",
     "runs": [{"command": "python -m benchmarks tpu", "date": ..., "versions": ...}],
     "cells": {"mlp": {"amp_bf16": {"run": 0, "temp_mb": 135.2, ...}}}}

A cell is one variant of one model: for the corpus a program, for the convergence a
precision and a seed of a task. It is written as soon as it is measured and replaces an
older one, so that a run may be interrupted, or repeated for some cells only. Each cell
names the run that it comes from.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import environment, models, variants

FOLDER = pathlib.Path(__file__).with_name("results")

Figures = dict[str, Any]


@dataclasses.dataclass
class Results:
    """The figures of one command in one environment, in memory and on disk."""

    path: pathlib.Path
    command: str
    target: str
    size: str
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    cells: dict[str, dict[str, Figures]] = dataclasses.field(default_factory=dict)
    _own_run: int | None = None

    @classmethod
    def open(
        cls, folder: pathlib.Path, command: str, target: str, size: str = "full"
    ) -> "Results":
        """Reads the file of a command and a target, or begins a new one."""
        version = environment.versions()["jax"]
        parts = [command, target, f"jax{version}", *(["tiny"] * (size == "tiny"))]
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', '-'.join(parts))}.json"
        if path.exists():
            return cls(path, **json.loads(path.read_text()))
        return cls(path, command, target, size)

    def put(self, model: str, variant: str, figures: Figures) -> None:
        """Stores a cell and writes the file."""
        if self._own_run is None:
            self._own_run = len(self.runs)
            self.runs.append(environment.this_run())
        self.cells.setdefault(model, {})[variant] = {"run": self._own_run, **figures}
        self._write()

    def has(self, model: str, variant: str) -> bool:
        """Returns whether a cell was measured without error, with what is here now."""
        figures = self.cells.get(model, {}).get(variant)
        if figures is None or "error" in figures:
            return False
        return self.runs[figures["run"]]["versions"] == environment.versions()

    def models(self) -> Iterator[tuple[str, dict[str, Figures]]]:
        """Yields each model and its cells by variant, in a fixed order."""
        for model in _ordered(self.cells, models.NAMES):
            cells = self.cells[model]
            yield model, {name: cells[name] for name in _ordered(cells, variants.NAMES)}

    def made_with(self) -> str:
        """Returns the dates, the machines and the versions behind the figures."""
        used = {cell["run"] for cells in self.cells.values() for cell in cells.values()}
        dates: dict[str, set[str]] = {}
        for run in (self.runs[index] for index in sorted(used)):
            versions = ", ".join(f"{k} {v}" for k, v in sorted(run["versions"].items()))
            text = re.sub(r" \(sources \w+\)", "", f"{run['machine']}; {versions}")
            dates.setdefault(text, set()).add(run["date"][:10])
        lines = [f"- {', '.join(sorted(x))}, {text}" for text, x in dates.items()]
        return "\n".join(lines)

    def _write(self) -> None:
        """Replaces the file at once, or not at all; a list of numbers is one line."""
        stored = ("command", "target", "size", "runs", "cells")
        text = json.dumps({key: getattr(self, key) for key in stored}, indent=1)
        text = re.sub(r"\[[\d\s,.e+-]*\]", lambda m: " ".join(m[0].split()), text)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n")
        os.replace(partial, self.path)


def read_all(folder: pathlib.Path) -> list[Results]:
    """Reads the files of a folder, in the order of their names."""
    paths = sorted(folder.glob("*.json"))
    return [Results(path, **json.loads(path.read_text())) for path in paths]


def _ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Sorts as the names are listed."""
    return sorted(names, key=known.index)
