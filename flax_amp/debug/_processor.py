"""What the CPU of this machine can compute in half precision."""

import pathlib

# What Linux calls the instructions that compute in a dtype; those of ARM come last.
# Instructions that only convert, as f16c, are none of them.
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
_CPUINFO = pathlib.Path("/proc/cpuinfo")


def half_instructions() -> dict[str, list[str]] | None:
    """Returns the instructions of this CPU by dtype.

    It is `None` where there is no `/proc/cpuinfo` to read. A CPU without such
    instructions has `{"bfloat16": [], "float16": []}`.
    """
    if not _CPUINFO.exists():
        return None
    words = {*_CPUINFO.read_text().split()}
    return {
        dtype: [name for name in names if name in words]
        for dtype, names in _INSTRUCTIONS.items()
    }


def about_cpu(found: dict[str, list[str]] | None) -> list[str]:
    """Returns sentences, without a period, about a CPU with such instructions."""
    if found is None:
        return ["whether this CPU has instructions for half precision is not known"]
    there = [f"{', '.join(x)} for {dtype}" for dtype, x in found.items() if x]
    missing = [dtype for dtype, x in found.items() if not x]
    sentences = []
    if there:
        sentences.append(f"this CPU has {' and '.join(there)}")
    if missing:
        sentences.append(
            f"this CPU has no instructions for {' or '.join(missing)}: "
            "XLA computes in float32 and casts"
        )
    return sentences
