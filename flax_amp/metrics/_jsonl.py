"""Metrics as JSON lines: written so that a kill does no harm, and read back."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax_amp.metrics._writers import MetricWriter, Scalars, to_numbers, to_step

_NAME = "metrics.jsonl"


class JsonlWriter(MetricWriter):
    """Appends a line to `metrics.jsonl` for each call, and leaves none in memory.

    A line is `{"step": 50, "wall_time": 1767225600.5, "loss": 0.25, ...}`, or
    `{"hparams": {...}}`. NaN and infinities are `null`, since JSON has no other word.
    The file is opened for each line: other writers may add to it, or replace it.

    Args:
      logdir: the folder.
      first_step: lines of this step and later ones are dropped first, in one atomic
        replacement of the file. A line that a kill has cut is always dropped.

    Example:
      >>> import tempfile
      >>> logdir = tempfile.mkdtemp()
      >>> with JsonlWriter(logdir) as writer:
      ...     writer.write_scalars(1, {"loss": math.nan})
      >>> read(logdir)["loss"]
      [(1, nan)]
    """

    def __init__(
        self, logdir: str | os.PathLike[str], *, first_step: int | None = None
    ) -> None:
        self._path = Path(logdir) / _NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # In place: another writer may add lines at the same time.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        if first_step is not None:
            _drop_lines(self._path, first_step)

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        now = {"step": to_step(step), "wall_time": round(time.time(), 3)}
        self._write({**now, **to_numbers(scalars)})

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._write({"hparams": dict(hparams)})

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(_without_nan(line), allow_nan=False, default=str)
        # A file that stays open would be one that another writer has replaced.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def read(run: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars that a run has logged: `{name: [(step, value), ...]}`.

    Steps rise, in whatever order they were written. Of a step that was written twice,
    because a run was resumed without a `first_step`, the later value counts, and what
    the earlier run wrote for later steps is dropped.
    A line that a kill has cut is skipped. `null` becomes NaN.

    Args:
      run: the folder of the run, or the file.

    Raises:
      FileNotFoundError: if there is no `metrics.jsonl`.
      ValueError: if a step or a value is no number, such as a string.
    """
    path = Path(run)
    path = path / _NAME if path.is_dir() else path
    found: dict[str, dict[int, float]] = {}
    for _, line in _lines(path):
        if "step" not in line:
            continue
        step, _ = line.pop("step"), line.pop("wall_time", None)
        for name, value in line.items():
            series = found.setdefault(name, {})
            if step in series:  # the run was resumed before it
                found[name] = series = {s: v for s, v in series.items() if s < step}
            series[step] = math.nan if value is None else value
    return {name: sorted(series.items()) for name, series in found.items()}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each whole line, as it is and decoded."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not text.endswith("\n") or not isinstance(line, dict):
                continue
            for name, value in line.items() if "step" in line else ():
                is_gap = value is None and name != "step"
                if not (is_gap or isinstance(value, int | float)):
                    raise ValueError(
                        f"{path}:{number}: {name!r} is {value!r}; expected a number. "
                        "Correct or remove this line."
                    )
            yield text, line


def _drop_lines(path: Path, first_step: int) -> None:
    lines = list(_lines(path))
    kept = [text for text, line in lines if line.get("step", -math.inf) < first_step]
    if len(kept) == len(lines):
        return
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# `null`, and no string "NaN": a column stays a column of numbers in pandas.
def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
