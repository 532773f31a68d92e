"""Logs and pictures of a run: what its steps report, where it is written, how it looks.

`StepMetrics` gathers the metrics of steps on the device, `create_writer` writes them
for TensorBoard, as JSON lines and on the terminal, and `plot` draws them. Nothing here
is needed for training, and nothing else in the package imports it. clu, tensorboardX
and matplotlib are imported when a name is first used. README.md in this folder says
more.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax_amp.metrics._collection import StepMetrics as StepMetrics
    from flax_amp.metrics._jsonl import JsonlWriter as JsonlWriter
    from flax_amp.metrics._jsonl import read as read
    from flax_amp.metrics._plot import plot as plot
    from flax_amp.metrics._update import finite_by_leaf as finite_by_leaf
    from flax_amp.metrics._update import trained_norms as trained_norms
    from flax_amp.metrics._writers import MetricWriter as MetricWriter
    from flax_amp.metrics._writers import TensorBoardWriter as TensorBoardWriter
    from flax_amp.metrics._writers import TerminalWriter as TerminalWriter
    from flax_amp.metrics._writers import create_writer as create_writer

_FILES = {
    "_collection": ["StepMetrics"],
    "_jsonl": ["JsonlWriter", "read"],
    "_plot": ["plot"],
    "_update": ["finite_by_leaf", "trained_norms"],
    "_writers": [
        "MetricWriter",
        "TensorBoardWriter",
        "TerminalWriter",
        "create_writer",
    ],
}
__all__ = [name for names in _FILES.values() for name in names]


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
