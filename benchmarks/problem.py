"""The registry of what the benchmarks train: a model by name, in two sizes."""

from types import ModuleType

from jax.typing import DTypeLike

from benchmarks.models import (
    gpt,
    llama,
    lstm,
    mlp,
    moe,
    nnx_vit,
    resnet,
    vit,
)
from benchmarks.models.base import Problem

_MODULES: dict[str, ModuleType] = {
    "vit_small": vit,
    "vit_s16": vit,
    "gpt_scan": gpt,
    "gpt_unroll": gpt,
    "gpt_scan_noremat": gpt,
    "gpt_24": gpt,
    "gpt_fsdp": gpt,
    "resnet50": resnet,
    "mlp": mlp,
    "lstm": lstm,
    "nnx_vit": nnx_vit,
    "llama": llama,
    "moe": moe,
}
NAMES = tuple(_MODULES)
SIZES = ("full", "tiny")


def problem(
    name: str,
    size: str = "full",
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> Problem:
    """Makes the problem of a model.

    Args:
      name: one of `NAMES`.
      size: "full" is the size of the published tables, "tiny" has as many leaves and
        runs on a CPU.
      dtype: the dtype of every layer of a hand-set model; `None` is the untouched
        float32 model. Parameters are float32 in both.
      softmax_dtype: `jnp.float32` for a float32 softmax in attention.

    Returns:
      The problem.

    Raises:
      ValueError: if there is no such model or size.
    """
    if name not in _MODULES or size not in SIZES:
        raise ValueError(
            f"problem: got {name!r}, {size!r}; expected one of {NAMES} and of {SIZES}."
        )
    return _MODULES[name].problem(name, size, dtype, softmax_dtype)
