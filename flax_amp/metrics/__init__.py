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
    from flax_amp.metrics._tensorboard import TensorBoardWriter as TensorBoardWriter
    from flax_amp.metrics._terminal import TerminalWriter as TerminalWriter
    from flax_amp.metrics._update import finite_by_leaf as finite_by_leaf
    from flax_amp.metrics._update import trained_norms as trained_norms
    from flax_amp.metrics._writers import MetricWriter as MetricWriter
    from flax_amp.metrics._writers import MultiWriter as MultiWriter
    from flax_amp.metrics._writers import create_writer as create_writer

_FILES = {
    "JsonlWriter": "_jsonl",
    "MetricWriter": "_writers",
    "MultiWriter": "_writers",
    "StepMetrics": "_collection",
    "TensorBoardWriter": "_tensorboard",
    "TerminalWriter": "_terminal",
    "create_writer": "_writers",
    "finite_by_leaf": "_update",
    "plot": "_plot",
    "read": "_jsonl",
    "trained_norms": "_update",
}
__all__ = list(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
