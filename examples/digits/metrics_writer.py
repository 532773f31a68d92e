"""TensorBoard event files without TensorFlow.

The methods are those of `clu.metric_writers.MetricWriter`, so a writer of clu, or your
own for another tracker, can replace this one without changes.
"""

import os
from collections.abc import Mapping
from typing import Any

import tensorboardX


class TensorBoardWriter:
    """Writes scalars and hyper-parameters for TensorBoard.

    Args:
      logdir: a folder; a resumed run adds a file of events to it.
      first_step: TensorBoard hides all events from this step on that an earlier run
        wrote after its last checkpoint.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, first_step: int = 0) -> None:
        purge = first_step if first_step else None
        self._writer = tensorboardX.SummaryWriter(str(logdir), purge_step=purge)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, float(value), step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        rows = [f"| {name} | {value} |" for name, value in hparams.items()]
        self._writer.add_text("hparams", "\n".join(["| | |", "| --- | --- |", *rows]))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
