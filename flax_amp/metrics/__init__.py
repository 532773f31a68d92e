"""Logs and pictures of a run: what its steps report, where it is written, how it looks.

`StepMetrics` gathers the metrics of steps on the device, `create_writer` writes them
for TensorBoard, as JSON lines and on the terminal, `read` reads them and `plot` draws
them. Nothing here is needed for training. clu, tensorboardX and matplotlib are imported
when they are first used. README.md in this folder says more.
"""

from typing import TYPE_CHECKING, Any

from flax_amp.metrics._log import MetricWriter as MetricWriter
from flax_amp.metrics._log import create_writer as create_writer
from flax_amp.metrics._log import read as read
from flax_amp.metrics._plot import plot as plot
from flax_amp.metrics._update import finite_by_leaf as finite_by_leaf

if TYPE_CHECKING:
    from flax_amp.metrics._collection import StepMetrics as StepMetrics

__all__ = ["MetricWriter", "StepMetrics", "create_writer", "finite_by_leaf", "plot"]
__all__ += ["read"]


def __getattr__(name: str) -> Any:
    if name == "StepMetrics":  # a subclass of a class of clu
        from flax_amp.metrics._collection import StepMetrics

        return StepMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
