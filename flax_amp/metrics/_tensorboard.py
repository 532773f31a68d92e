"""Event files for TensorBoard, without TensorFlow and without a thread."""

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from flax_amp.metrics._writers import MetricWriter, Scalars, to_numbers, to_step

try:
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
except ImportError as error:
    raise ImportError(
        "TensorBoardWriter: tensorboardX is not installed; expected it, for the event "
        "files. Run `pip install tensorboardX`, or call create_writer with "
        "tensorboard=False."
    ) from error


class TensorBoardWriter(MetricWriter):
    """Writes scalars, texts, images and histograms for TensorBoard.

    Each call is on disk when it returns. tensorboardX's own `SummaryWriter` keeps
    events in a queue, which a kill loses: up to two minutes of them.

    Args:
      logdir: a folder; a resumed run adds a file of events to it.
      first_step: TensorBoard hides events of this step and later ones that earlier
        files hold.

    Example:
      >>> import tempfile
      >>> with TensorBoardWriter(tempfile.mkdtemp()) as writer:
      ...     writer.write_scalars(1, {"loss": 0.5})
    """

    def __init__(
        self, logdir: str | os.PathLike[str], *, first_step: int | None = None
    ) -> None:
        os.makedirs(logdir, exist_ok=True)
        # Files made in the same second must differ in the rest of their names, which
        # those of `SummaryWriter` do not.
        prefix = os.path.join(logdir, "events")
        self._events = EventsWriter(prefix, f".{time.time_ns()}.{os.getpid()}")
        if first_step is not None:
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in to_numbers(scalars).items()
        ]
        self._write(step, summary=Summary(value=values))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        rows = [f"| {name} | {value} |" for name, value in hparams.items()]
        table = "\n".join(["| | |", "| --- | --- |", *rows])
        self.write_texts(0, {"hparams": table})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._write(step, summary=summary.text(name, text))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        for name, image in images.items():
            layout = "NHWC" if np.ndim(image) == 4 else "HWC"
            made = summary.image(name, np.asarray(image), dataformats=layout)
            self._write(step, summary=made)

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        for name, array in arrays.items():
            values = np.asarray(array, np.float64)
            values = values[np.isfinite(values)]
            if values.size:  # what cannot be shown is ignored
                bins = (num_buckets or {}).get(name, 30)
                self._write(step, summary=summary.histogram(name, values, bins))

    def _write(self, step: int, **what: Any) -> None:
        self._check_open()
        event = Event(wall_time=time.time(), step=to_step(step), **what)
        self._events.write_event(event)
        self._events.flush()

    def close(self) -> None:
        if not self._is_closed:
            super().close()
            self._events.close()
