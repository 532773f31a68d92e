"""Raw figures on disk: one JSON file for each command and environment.

    {"command": "tpu", "target": "v5e", "size": "full",
     "runs": [{"command": "python -m benchmarks tpu", "date": ..., "versions": ...}],
     "cells": {"mlp": {"amp_bf16": {"run": 0, "temp_mb": 135.2, ...}}}}

A cell is one variant of one model. It is written as soon as it is measured and replaces
an older one, so that a run may be interrupted, or repeated for some cells only. Each
cell names the run that it comes from.
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
            labels = _ordered(cells, variants.NAMES)
            yield model, {label: cells[label] for label in labels}

    def _write(self) -> None:
        kept = ("command", "target", "size", "runs", "cells")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(as_json({key: getattr(self, key) for key in kept}))
        os.replace(partial, self.path)


def read_all(folder: pathlib.Path) -> list[Results]:
    """Reads the files that hold cells in a folder, in the order of their names."""
    found = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [
        Results(path, **content)
        for path, content in sorted(found.items())
        if "cells" in content  # the runs that train to the end have a form of their own
    ]


def _ordered(labels: Iterable[str], known: Sequence[str]) -> list[str]:
    """Sorts as the names are listed; a name with options comes after the name."""
    places = {name: place for place, name in enumerate(known)}
    return sorted(labels, key=lambda x: (places.get(x.split("[")[0], len(known)), x))


def as_json(content: Any) -> str:
    """Returns JSON with each list of numbers in one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[\d\s,.e+-]*\]", lambda m: " ".join(m[0].split()), text) + "\n"
