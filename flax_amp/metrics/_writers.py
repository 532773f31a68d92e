"""Writers of metrics, with the methods of clu's `MetricWriter`.

clu's own class cannot be imported without TensorFlow. So these have its methods and
signatures, which a test compares, and everything that takes a writer of clu takes
these, and the reverse.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Scalars = Mapping[str, Any]
REAL = (np.floating, np.integer, np.bool_)


class MetricWriter:
    """The methods of clu's `MetricWriter`; what a writer cannot show, it ignores.

    It is a context manager, too, which closes it. A writer of this package raises
    ValueError when it is used after `close`; to close it again does nothing.
    """

    _is_closed = False

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Writes one number for each name."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes settings of the run, once."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts in Markdown."""

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Writes images of shape `[N, H, W, C]` or `[H, W, C]`."""

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Writes histograms of the finite values of arrays."""

    def write_audios(
        self, step: int, audios: Mapping[str, Any], *, sample_rate: int
    ) -> None:
        """Writes sounds of shape `[N, T, C]`."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Writes videos of shape `[N, T, H, W, C]`."""

    def write_summaries(
        self,
        step: int,
        values: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes tensors for a plugin of TensorBoard."""

    def flush(self) -> None:
        """Writes what is still in memory."""

    def close(self) -> None:
        """Flushes and ends; nothing may be written afterwards."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(
                f"{type(self).__name__}: the writer is closed; expected an open one. "
                "Write before close(), or create another."
            )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _for_all(name: str) -> Any:
    def method(self: "MultiWriter", *args: Any, **kwargs: Any) -> None:
        self._check_open()
        for writer in self.writers:
            getattr(writer, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(MetricWriter, name).__doc__
    return method


class MultiWriter(MetricWriter):
    """Writes to several writers. Scalars leave the device once, for all of them.

    Args:
      writers: writers of this package or of clu, or runs of Weights & Biases: any
        object with `log(scalars, step=)`.

    Raises:
      TypeError: if one of them is none of these.

    Example:
      >>> class Printer(MetricWriter):
      ...     def write_scalars(self, step, scalars):
      ...         print(step, scalars)
      >>> with MultiWriter([Printer(), Printer()]) as writer:
      ...     writer.write_scalars(3, {"loss": jax.numpy.float32(0.5)})
      3 {'loss': 0.5}
      3 {'loss': 0.5}
    """

    def __init__(self, writers: Sequence[Any]) -> None:
        self.writers = tuple(map(_as_writer, writers))

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        self._check_open()
        step, numbers = to_step(step), to_numbers(scalars)
        for writer in self.writers:
            writer.write_scalars(step, numbers)

    write_hparams = _for_all("write_hparams")
    write_texts = _for_all("write_texts")
    write_images = _for_all("write_images")
    write_histograms = _for_all("write_histograms")
    write_audios = _for_all("write_audios")
    write_videos = _for_all("write_videos")
    write_summaries = _for_all("write_summaries")
    flush = _for_all("flush")

    def close(self) -> None:
        if self._is_closed:
            return
        super().close()
        with contextlib.ExitStack() as stack:  # one that fails does not stop the others
            for writer in self.writers:
                stack.callback(writer.close)


class _RunWriter(MetricWriter):
    """Writes to a run of Weights & Biases, or to an object like it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        if hasattr(self._run, "config"):
            self._run.config.update(dict(hparams))

    def close(self) -> None:
        if hasattr(self._run, "finish"):
            self._run.finish()


def _as_writer(given: Any) -> Any:
    if callable(getattr(given, "write_scalars", None)):
        return given
    if callable(getattr(given, "log", None)):
        return _RunWriter(given)
    raise TypeError(
        f"create_writer: got a {type(given).__name__} as a writer; expected an object "
        "with the methods of clu's MetricWriter, such as write_scalars(step, scalars), "
        "or with log(scalars, step=), as a run of Weights & Biases."
    )


def to_step(step: Any, what: str = "step") -> int:
    """Returns an integer, such as an array of one, as one of Python."""
    return _number(what, step, "an integer", np.integer)


def to_numbers(scalars: Scalars) -> dict[str, Any]:
    """Fetches all scalars at once, as numbers of Python."""
    for name in scalars:
        if not isinstance(name, str):
            raise TypeError(
                f"write_scalars: {name!r} is the name of a scalar; expected a string."
            )
        if name.splitlines() != [name]:
            raise ValueError(
                f"write_scalars: a scalar is named {name!r}; expected a non-empty "
                "string without line breaks. Rename it."
            )
        if name in ("step", "wall_time"):
            raise ValueError(
                f"write_scalars: a scalar is named {name!r}, which is what "
                "metrics.jsonl adds to each line; expected another name. Rename it."
            )
    # As a list, since a dict would come back with its keys sorted.
    fetched = jax.device_get(list(scalars.values()))
    return {
        name: _number(repr(name), value, "a real number", *REAL)
        for name, value in zip(scalars, fetched, strict=True)
    }


def is_dtype(dtype: Any, *kinds: Any) -> bool:
    """Whether a dtype, also one that NumPy does not know, is of some of the kinds."""
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)


def _number(what: str, value: Any, expected: str, *kinds: Any) -> Any:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(
            f"metrics: {what} has the shape {array.shape}; expected a scalar. "
            "Reduce it, or use write_histograms."
        )
    if not is_dtype(array.dtype, *kinds):
        raise TypeError(
            f"metrics: {what} is {value!r}; expected {expected}. Convert it, or leave "
            "it out."
        )
    number = array.reshape(())[()]
    # The shortest text of a float32: 0.9, not 0.8999999761581421.
    is_float = is_dtype(array.dtype, np.floating)
    return float(str(number)) if is_float else int(number)


def create_writer(
    logdir: str | os.PathLike[str],
    *,
    first_step: int | None = None,
    total_steps: int | None = None,
    tensorboard: bool = True,
    terminal: bool = True,
    writers: Sequence[Any] = (),
) -> MultiWriter:
    """Makes a writer for TensorBoard, for `metrics.jsonl` and for the terminal.

    In a run of several processes, only the first one writes.

    Args:
      logdir: the folder of the run; it may hold the logs of a run that is resumed.
      first_step: the first step that will be written, `int(state.step) + 1`. What an
        earlier run wrote for this step and later ones is dropped, since it is done
        again. By default nothing is dropped.
      total_steps: the last step of the run, for the time that is left.
      tensorboard: write event files, which takes tensorboardX.
      terminal: show a live line with steps per second and the time that is left; in a
        file, or a notebook, a line for each call.
      writers: more of them, as `MultiWriter` takes.

    Returns:
      A writer with the methods of clu's `MetricWriter`, and a context manager.

    Raises:
      ImportError: if tensorboardX is not installed.
      TypeError: if one of `writers` is no writer, or `first_step` no integer.

    Example:
      >>> import tempfile
      >>> logdir = tempfile.mkdtemp()
      >>> with create_writer(logdir, terminal=False) as writer:
      ...     writer.write_scalars(10, {"loss": 0.5})
      >>> from flax_amp import metrics
      >>> metrics.read(logdir)["loss"]
      [(10, 0.5)]
    """
    from flax_amp import metrics  # its files import this one

    first_step = None if first_step is None else to_step(first_step, "first_step")
    if jax.process_index() != 0:
        return MultiWriter([])
    given = MultiWriter(writers).writers
    kinds: list[Any] = [metrics.JsonlWriter]
    if tensorboard:
        kinds.append(metrics.TensorBoardWriter)  # may fail, before a file is open
    made = [kind(logdir, first_step=first_step) for kind in kinds]
    if terminal:
        steps: dict[str, Any] = dict(first_step=first_step, total_steps=total_steps)
        made.append(metrics.TerminalWriter(**steps))
    return MultiWriter([*made, *given])
