"""Writers of metrics, with the methods of clu's `MetricWriter`.

clu's own classes cannot be imported without TensorFlow. So these have its methods, and
everything that takes a writer of clu takes these, and the reverse.
"""

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Scalars = Mapping[str, Any]


class MetricWriter:
    """The methods of clu's `MetricWriter`; what a writer cannot show, it ignores.

    It is a context manager, too, which closes it.
    """

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Writes one number for each name."""

    def close(self) -> None:
        """Flushes and ends; nothing may be written afterwards."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("write_") and name != "flush":
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return functools.partial(self._other, name)

    def _other(self, method: str, *args: Any, **kwargs: Any) -> None:
        """What a method of clu does that the class does not define."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TerminalWriter(MetricWriter):
    """Prints a line for each call: the step, steps per second, and the metrics.

    Hyper-parameters are left out.

    Example:
      >>> TerminalWriter(total_steps=600).write_scalars(50, {"train/loss": 0.25})
      step 50/600  train/loss 0.25
    """

    def __init__(self, *, total_steps: int | None = None) -> None:
        self._of = f"/{total_steps}" if total_steps else ""
        self._last: tuple[int, float] | None = None

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        step, now = to_step(step), time.monotonic()
        shown = [f"step {step}{self._of}"]
        if self._last and step > self._last[0]:
            speed = (step - self._last[0]) / max(now - self._last[1], 1e-9)
            shown.append(f"{speed:.3g} steps/s")
        self._last = step, now
        numbers = to_numbers(scalars).items()
        shown += [f"{n} {x:.4g}" for n, x in numbers if "hyperparams/" not in n]
        print("  ".join(shown), flush=True)


class TensorBoardWriter(MetricWriter):
    """Writes scalars, texts and histograms for TensorBoard, with tensorboardX.

    Each call is on disk when it returns.

    Args:
      logdir: a folder; a resumed run adds a file of events to it.
      first_step: TensorBoard hides events of this step and later ones that earlier
        files hold.

    Example:
      >>> import tempfile
      >>> with TensorBoardWriter(tempfile.mkdtemp()) as writer:
      ...     writer.write_scalars(1, {"loss": 0.5})
    """

    def __init__(self, logdir: Any, *, first_step: int | None = None) -> None:
        try:
            from tensorboardX import event_file_writer, proto, summary
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter needs tensorboardX, which is not installed. In a "
                "clone of flax_amp, run: pip install '.[logs]'. Or call create_writer "
                "with tensorboard=False."
            ) from error
        os.makedirs(logdir, exist_ok=True)
        self._of, self._event = summary, proto.event_pb2.Event
        # Files made in the same second must differ in the rest of their names.
        prefix, end = os.path.join(logdir, "events"), f".{time.time_ns()}.{os.getpid()}"
        # `SummaryWriter` keeps events in a queue, which a kill loses.
        self._events = event_file_writer.EventsWriter(prefix, end)
        if first_step is not None:
            session = proto.event_pb2.SessionLog
            self._write(first_step, session_log=session(status=session.START))

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        step = to_step(step)
        for name, value in to_numbers(scalars).items():
            self._write(step, summary=self._of.scalar(name, value))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        rows = [f"| {name} | {value} |" for name, value in hparams.items()]
        self.write_texts(0, {"hparams": "\n".join(["| | |", "| --- | --- |", *rows])})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._write(step, summary=self._of.text(name, text))

    def write_histograms(self, step: int, arrays: Scalars, *_: Any, **__: Any) -> None:
        for name, array in arrays.items():
            values = np.asarray(array, np.float64)
            if (values := values[np.isfinite(values)]).size:
                self._write(step, summary=self._of.histogram(name, values, 30))

    def _write(self, step: int, **what: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **what)
        self._events.write_event(event)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _Writers(MetricWriter):
    """Several writers. Scalars leave the device once, for all of them."""

    def __init__(self, writers: Sequence[Any]) -> None:
        self._writers: list[Any] | None = list(writers)

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        self._other("write_scalars", to_step(step), to_numbers(scalars))

    def _other(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._writers is None:
            raise ValueError(f"{method}: the writer is closed; expected an open one.")
        for writer in self._writers:
            getattr(writer, method)(*args, **kwargs)

    def close(self) -> None:
        writers, self._writers = self._writers or [], None
        with contextlib.ExitStack() as stack:  # one that fails does not stop the others
            for writer in writers:
                stack.callback(writer.close)


class _RunWriter(MetricWriter):
    """Writes to a run of Weights & Biases, or to an object like it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._run.config.update(dict(hparams))

    def close(self) -> None:
        self._run.finish()


def to_step(step: Any) -> int:
    """Returns an integer, such as an array of one, as one of Python."""
    if not jax.dtypes.issubdtype(np.asarray(step).dtype, np.integer):
        raise TypeError(f"metrics: the step is {step!r}; expected an integer.")
    return int(step)


def to_numbers(scalars: Scalars) -> dict[str, Any]:
    """Fetches all scalars at once, as numbers of Python."""
    for name in scalars:
        if not isinstance(name, str) or name in ("step", "wall_time", ""):
            raise ValueError(
                f"write_scalars: a scalar is named {name!r}; expected a string, and "
                "not 'step' or 'wall_time', which metrics.jsonl adds to each line."
            )
    # As a list, since a dict would come back with its keys sorted.
    fetched = jax.device_get(list(scalars.values()))
    return {n: _number(n, x) for n, x in zip(scalars, fetched, strict=True)}


def _number(name: str, value: Any) -> Any:
    array = np.asarray(value)
    is_float = jax.dtypes.issubdtype(array.dtype, np.floating)
    is_whole = any(
        jax.dtypes.issubdtype(array.dtype, x) for x in (np.integer, np.bool_)
    )
    if array.size != 1 or not (is_float or is_whole):
        raise ValueError(
            f"write_scalars: {name!r} is {value!r}; expected one real number. Convert "
            "it, or leave it out."
        )
    # The shortest text of a float32: 0.9, not 0.8999999761581421.
    number = array.reshape(())[()]
    return float(str(number)) if is_float else int(number)


def create_writer(
    logdir: str | os.PathLike[str],
    *,
    first_step: int | None = None,
    total_steps: int | None = None,
    tensorboard: bool = True,
    terminal: bool = True,
    writers: Sequence[Any] = (),
) -> MetricWriter:
    """Makes a writer for TensorBoard, for `metrics.jsonl` and for the terminal.

    In a run of several processes, only the first one writes.

    Args:
      logdir: the folder of the run; it may hold the logs of a run that is resumed.
      first_step: the first step that will be written, `int(state.step) + 1`. What an
        earlier run wrote for this step and later ones is dropped. By default nothing
        is.
      total_steps: the last step of the run, for the terminal.
      tensorboard: write event files, which takes tensorboardX.
      terminal: print a line for each call, with steps per second.
      writers: more of them: writers of clu, your own, or runs of Weights & Biases.

    Returns:
      A writer with the methods of clu's `MetricWriter`, and a context manager.

    Raises:
      ImportError: if tensorboardX is not installed.
      TypeError: if `first_step` is no integer.

    Example:
      >>> import tempfile
      >>> logdir = tempfile.mkdtemp()
      >>> with create_writer(logdir, terminal=False) as writer:
      ...     writer.write_scalars(10, {"loss": 0.5})
      >>> from flax_amp import metrics
      >>> metrics.read(logdir)["loss"]
      [(10, 0.5)]
    """
    from flax_amp.metrics._jsonl import JsonlWriter  # which imports this file

    first_step = None if first_step is None else to_step(first_step)
    if jax.process_index() != 0:
        return _Writers([])
    # What fails, fails before a file is open.
    made: list[Any] = []
    if tensorboard:
        made.append(TensorBoardWriter(logdir, first_step=first_step))
    made.append(JsonlWriter(logdir, first_step=first_step))
    if terminal:
        made.append(TerminalWriter(total_steps=total_steps))
    given = [x if hasattr(x, "write_scalars") else _RunWriter(x) for x in writers]
    return _Writers([*made, *given])
