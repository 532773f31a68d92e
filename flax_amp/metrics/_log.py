"""The log of a run, which `create_writer` writes and `read` reads.

`metrics.jsonl` is the log: a line is on disk when the call returns, and a kill cuts at
most the last line. TensorBoard and the terminal get the same numbers.
"""

import contextlib
import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_NAME = "metrics.jsonl"
_NUMBER = int | float | None


class MetricWriter(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """Writes the metrics of a run, with the methods of clu's `MetricWriter`.

    The methods for anything but numbers and hyper-parameters do nothing.
    """

    def __init__(self, path: Path | None, board: Any, terminal: str | None) -> None:
        self._path = path
        self._board = board
        self._terminal = terminal

    def write_scalars(self, step: Any, scalars: Mapping[str, Any]) -> None:
        """Writes a real number for each name, or raises an error and writes nothing."""
        step = operator.index(step)
        numbers = _to_numbers(scalars)
        # The time is in seconds since 1970, rounded to a millisecond.
        now = {"step": step, "wall_time": round(time.time(), 3)}
        self._write_line(now | numbers | now)
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._terminal is not None:
            shown = [n for n in numbers if "hyperparams/" not in n]
            texts = [f"{name} {numbers[name]:.4g}" for name in shown]
            print(f"step {step}{self._terminal}", *texts, sep="  ", flush=True)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._write_line({"hparams": dict(hparams)})

    def _write_line(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            text = json.dumps(_without_nan(line), allow_nan=False, default=str)
            # Opened for each line: another writer may replace the file, and a file that
            # stayed open would then be the old file.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("write_") and name != "flush":
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return lambda *args, **kwargs: None

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def create_writer(
    logdir: str | os.PathLike[str],
    *,
    first_step: int | None = None,
    total_steps: int | None = None,
    tensorboard: bool = True,
    terminal: bool = True,
) -> MetricWriter:
    """Makes a writer for TensorBoard, for `metrics.jsonl` and for the terminal.

    In a run of several processes, only the first process writes.

    Args:
      logdir: the folder of the run, which may be a run that is resumed.
      first_step: the first step that will be written, `int(state.step) + 1`. Values
        that an earlier run wrote for this step and later steps are dropped from
        `metrics.jsonl`, and hidden by TensorBoard.
      total_steps: the last step of the run, for the terminal.
      tensorboard: write event files, which takes tensorboardX.
      terminal: print a line for each call.

    Example:
      >>> import tempfile
      >>> logdir = tempfile.mkdtemp()
      >>> with create_writer(logdir, tensorboard=False, total_steps=60) as writer:
      ...     writer.write_scalars(10, {"loss": 0.5})
      step 10/60  loss 0.5
      >>> read(logdir)
      {'loss': [(10, 0.5)]}
    """
    if jax.process_index() != 0:
        return MetricWriter(None, None, None)
    folder = Path(logdir)
    board = None
    if tensorboard:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "create_writer needs tensorboardX, which is not installed. In a clone "
                "of flax_amp, run: pip install '.[logs]'. Or pass tensorboard=False."
            ) from error
        # Files made in the same second must differ in the rest of their names.
        end = f".{time.time_ns()}.{os.getpid()}"
        # tensorboardX flushes every 5 seconds, and not every 120 as by default: a kill
        # loses less.
        options = dict(purge_step=first_step, filename_suffix=end, flush_secs=5)
        board = SummaryWriter(str(folder), **options)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    _drop_lines(path, math.inf if first_step is None else first_step)
    if not terminal:
        return MetricWriter(path, board, None)
    return MetricWriter(path, board, f"/{total_steps}" if total_steps else "")


def _drop_lines(path: Path, first_step: float) -> None:
    """Removes the lines of this step and later steps, and a line cut by a kill."""
    path.touch()
    text = "".join(line for line, step, _ in _lines(path) if step < first_step)
    if text != path.read_text("utf-8", "replace"):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)


def read(run: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars that a run has logged: `{name: [(step, value), ...]}`.

    The steps of a name rise, also if they were written in another order. Where a step
    was written twice, because a run was resumed without a `first_step`, the later value
    counts, and the values that the earlier run wrote for later steps are dropped. NaN
    stands for `null`. `run` is the folder of the run, or the file.
    """
    path = Path(run)
    if path.is_dir():
        path /= _NAME
    found: dict[str, dict[int, float]] = {}
    for _, step, scalars in _lines(path):
        for name, value in scalars.items():
            series = found.setdefault(name, {})
            if step in series:  # The run was resumed before this step.
                found[name] = series = {s: v for s, v in series.items() if s < step}
            series[step] = math.nan if value is None else value
    return {name: sorted(series.items()) for name, series in found.items()}


def _lines(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields the text, the step and the scalars of each whole line.

    For a line without a step, the step is -1, and there are no scalars.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if text.endswith("\n") and isinstance(line, dict):
                step = line.pop("step", None)
                line.pop("wall_time", None)
                if not isinstance(step, int):
                    yield text, -1, {}
                    continue
                numbers = {n: x for n, x in line.items() if isinstance(x, _NUMBER)}
                yield text, step, numbers


def _to_numbers(scalars: Mapping[str, Any]) -> dict[str, int | float]:
    """Fetches all scalars at once, as numbers of Python."""
    # As a list, since a dict would come back with its keys sorted.
    fetched = map(np.asarray, jax.device_get(list(scalars.values())))
    numbers = {}
    for name, value in zip(scalars, fetched, strict=True):
        try:
            # The shortest text of a float32: 0.9, not 0.8999999761581421.
            is_whole = value.dtype.kind in "iub"
            numbers[name] = int(value) if is_whole else float(str(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"write_scalars: {name!r} is {value!r}; expected one real number."
            ) from error
    return numbers


# `null`, since JSON has no NaN: a column stays a column of numbers in pandas.
def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
