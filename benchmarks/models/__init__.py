"""The models of the benchmarks: plain Flax, as a user writes them, in some sizes."""

import importlib

from benchmarks.models.base import DType, Problem

# By name: the module, and what makes the problem in it
_HOMES = {
    "vit_s16": "vit.problem",
    "gpt_scan": "gpt.problem",
    "gpt_scan_noremat": "gpt.noremat",
    "resnet50": "resnet.problem",
    "lstm": "small.lstm",
    **{
        name: f"{name}.problem"
        for name in """
            llama moe bert t5 mamba convnext efficientnet unet gat dit swin
            nerf retnet perceiver postnorm mpnn towers conformer
            """.split()
    },
    "gat_v1": "gat.v1",
    # To try a command out, wide enough for fp8, and for 256 chips
    "mlp": "small.mlp",
    "llama_4k": "llama.wide",
    "gpt_fsdp": "gpt.fsdp",
}
NAMES = tuple(_HOMES)
COMPARED = NAMES[:-3]
SIZES = ("full", "tiny", "cpu")
ON_CPU = "vit_s16 gpt_scan bert resnet50 mlp".split()  # they have the size "cpu"


def problem(name: str, size: str = "full", dtype: DType = None) -> Problem:
    """Makes the problem of a model; parameters are float32 in all of them.

    Args:
      name: one of `NAMES`.
      size: "full" for the tables; "tiny" has as many leaves and runs on a CPU. "cpu"
        is for times on a CPU: a step in float32 takes up to a second.
      dtype: that of every layer of a hand-set model; `None` leaves the model as it is.
    """
    module, function = _HOMES[name].split(".")
    home = importlib.import_module(f"{__name__}.{module}")
    made: Problem = getattr(home, function)(size, dtype)
    return made
