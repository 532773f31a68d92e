"""The models of the benchmarks: plain Flax, as a user writes them, in two sizes."""

import importlib

from benchmarks.models.base import DType, Problem

NAMES = tuple(
    """
    vit_small vit_s16 gpt_scan gpt_unroll gpt_scan_noremat gpt_24 gpt_fsdp
    resnet50 mlp lstm nnx_vit llama llama_noremat moe bert t5 griffin
    llama_1b griffin_loop dlrm convnext efficientnet unet gat dit swin clip mamba
    mamba_loop mixer wavenet linear_attention nnx_gpt nnx_resnet50 llama_4k mlp_4k
    """.split()
)
SIZES = ("full", "tiny")
# The modules of several models; every other one is named after its model.
_SEVERAL = {
    "vit": "vit_small vit_s16 nnx_vit",
    "gpt": "gpt_scan gpt_unroll gpt_scan_noremat gpt_24 gpt_fsdp nnx_gpt",
    "resnet": "resnet50 nnx_resnet50",
    "small": "mlp lstm",
    "llama": "llama_noremat llama_1b llama_4k mlp_4k",
    "griffin": "griffin_loop",
    "mamba": "mamba_loop",
}
_HOMES = {name: home for home, names in _SEVERAL.items() for name in names.split()}


def problem(name: str, size: str = "full", dtype: DType = None) -> Problem:
    """Makes the problem of a model; parameters are float32 in all of them.

    Args:
      name: one of `NAMES`.
      size: "full" for the tables; "tiny" has as many leaves and runs on a CPU.
      dtype: that of every layer of a hand-set model; `None` leaves the model as it is.
    """
    if name not in NAMES or size not in SIZES:
        raise ValueError(
            f"problem: got {name!r}, {size!r}; expected one of {NAMES} and of {SIZES}."
        )
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    made: Problem = module.problem(name, size, dtype)
    return made
