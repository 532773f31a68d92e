"""The models of the benchmarks: plain Flax, as a user writes them, in two sizes."""

from benchmarks.models import (
    bert,
    clip,
    convnext,
    dit,
    dlrm,
    efficientnet,
    gat,
    gpt,
    griffin,
    linear_attention,
    llama,
    mamba,
    mixer,
    moe,
    resnet,
    small,
    swin,
    t5,
    unet,
    vit,
    wavenet,
)
from benchmarks.models.base import DType, Problem

_MODULES = {
    "vit_small": vit,
    "vit_s16": vit,
    "gpt_scan": gpt,
    "gpt_unroll": gpt,
    "gpt_scan_noremat": gpt,
    "gpt_24": gpt,
    "gpt_fsdp": gpt,
    "resnet50": resnet,
    "mlp": small,
    "lstm": small,
    "nnx_vit": vit,
    "llama": llama,
    "llama_noremat": llama,
    "moe": moe,
    "bert": bert,
    "t5": t5,
    "griffin": griffin,
    "griffin_loop": griffin,
    "dlrm": dlrm,
    "convnext": convnext,
    "efficientnet": efficientnet,
    "unet": unet,
    "gat": gat,
    "dit": dit,
    "swin": swin,
    "clip": clip,
    "mamba": mamba,
    "mamba_loop": mamba,
    "mixer": mixer,
    "wavenet": wavenet,
    "linear_attention": linear_attention,
    "nnx_gpt": gpt,
    "nnx_resnet50": resnet,
}
NAMES = tuple(_MODULES)
SIZES = ("full", "tiny")


def problem(name: str, size: str = "full", dtype: DType = None) -> Problem:
    """Makes the problem of a model; parameters are float32 in all of them.

    Args:
      name: one of `NAMES`.
      size: "full" for the tables; "tiny" has as many leaves and runs on a CPU.
      dtype: that of every layer of a hand-set model; `None` leaves the model as it is.
    """
    if name not in _MODULES or size not in SIZES:
        raise ValueError(
            f"problem: got {name!r}, {size!r}; expected one of {NAMES} and of {SIZES}."
        )
    return _MODULES[name].problem(name, size, dtype)
