"""Raw figures on disk: one JSON file for each command and environment.

    {"command": "tpu", "target": "v5e", "size": "full",
     "runs": [{"command": "python -m benchmarks tpu", "date": ..., "versions": ...}],
     "cells": {"mlp": {"amp_bf16": {"run": 0, "temp_mb": 135.2, ...}}}}

A cell is one variant of one model: for the corpus a program, for the convergence a
precision of a task. It is written as soon as it is measured and replaces an
older one, so that a run may be interrupted, or repeated for some cells only. Each cell
names the run that it comes from.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from typing import Any

import flax_amp
from flax_amp.debug._processor import about_cpu, half_instructions

FOLDER = pathlib.Path(__file__).with_name("results")
_PACKAGES = """
    jax jaxlib flax optax numpy libtpu jax-cuda12-plugin jax-cuda12-pjrt
    jax-cuda13-plugin jax-cuda13-pjrt jmp mixed-precision-for-JAX jaxamp equinox
"""

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
        version = importlib.metadata.version("jax")
        parts = [command, target, f"jax{version}", *(["tiny"] * (size == "tiny"))]
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', '-'.join(parts))}.json"
        return cls.read(path) if path.exists() else cls(path, command, target, size)

    @classmethod
    def read(cls, path: pathlib.Path) -> "Results":
        """Reads a file that is there."""
        return cls(path, **json.loads(path.read_text()))

    def put(self, model: str, variant: str, figures: Figures) -> None:
        """Stores a cell and writes the file."""
        if self._own_run is None:
            self._own_run = len(self.runs)
            self.runs.append(this_run())
        self.cells.setdefault(model, {})[variant] = {"run": self._own_run, **figures}
        self._write()

    def has(self, model: str, variant: str) -> bool:
        """Returns whether a cell was measured without error, with what is here now."""
        figures = self.cells.get(model, {}).get(variant)
        if figures is None or "error" in figures:
            return False
        return self.runs[figures["run"]]["versions"] == versions()

    def made_with(self) -> str:
        """Returns the dates, the machines and the versions behind the figures."""
        used = {cell["run"] for cells in self.cells.values() for cell in cells.values()}
        dates: dict[str, set[str]] = {}
        for run in (self.runs[index] for index in sorted(used)):
            text = f"{run['machine']}; {_listed(dict(sorted(run['versions'].items())))}"
            text = re.sub(r" \(sources \w+\)", "", text)
            dates.setdefault(text, set()).add(run["date"][:10])
        lines = [f"- {', '.join(sorted(x))}, {text}" for text, x in dates.items()]
        return "\n".join(lines)

    def about_cpus(self) -> str:
        """Returns sentences about half precision on the machines of the figures."""
        lines: dict[str, None] = {}
        for run in self.runs:
            told = "; ".join(about_cpu(run["half_instructions"]))
            lines[f"- {run['machine']}: {told}."] = None
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


# --- what a figure was measured with -------------------------------------------------


def made_by(packages: str = "jax") -> str:
    """Returns by which command, on what machine and with which packages."""
    return f"Made by `{_command()}`, {_machine()}, {_listed(_installed(packages))}"


def this_run() -> dict[str, object]:
    """Returns what a stored figure says about the run that measured it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "command": _command(),
        "date": now,
        "machine": _machine(),
        "half_instructions": half_instructions(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of each package that is installed.

    Of flax_amp also a digest of its sources: it tells one state of a checkout from
    another, with or without git.
    """
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(flax_amp.__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    own = f"{flax_amp.__version__} (sources {digest.hexdigest()[:8]})"
    found = {"python": platform.python_version(), "flax_amp": own}
    return found | _installed(_PACKAGES)


def _installed(packages: str) -> dict[str, str]:
    found = {}
    for package in packages.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _machine() -> str:
    """Returns the kind and number of the processors of this machine."""
    return f"{os.cpu_count()} x {processor()}"


def processor() -> str:
    """Returns the name of the processor of this machine."""
    cpus = pathlib.Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    found = re.search(r"model name\s*: (.*)", text)
    return found[1] if found else platform.machine()


def _command() -> str:
    """Returns the command as it was typed; of an absolute path, only the last part."""
    typed = [pathlib.Path(x).name if x[:1] == "/" else x for x in sys.orig_argv[1:]]
    return shlex.join(["python", *typed])
