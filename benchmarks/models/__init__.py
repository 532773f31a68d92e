"""The models of the benchmarks: plain Flax, as a user writes them, in two sizes."""

import importlib

from benchmarks.models.base import DType, Problem

NAMES = tuple(
    """
    vit_s16 gpt_scan gpt_scan_noremat resnet50 lstm llama moe bert t5 mamba
    convnext efficientnet unet gat dit swin mlp llama_4k gpt_fsdp
    """.split()
)
# To try a command out, wide enough for fp8, and for 256 chips.
OTHERS = NAMES[-3:]
SIZES = ("full", "tiny")
# The modules of several models; every other one is named after its model.
_HOMES = {
    "vit_s16": "vit",
    "resnet50": "resnet",
    "mlp": "small",
    "lstm": "small",
    "llama_4k": "llama",
} | dict.fromkeys(("gpt_scan", "gpt_scan_noremat", "gpt_fsdp"), "gpt")


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
