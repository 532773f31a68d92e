"""The instructions of this machine's CPU that compute in half precision."""

import pathlib

# The names that Linux gives to the instructions that compute in a dtype; the name of
# the ARM instructions is last in each row. Instructions that only convert, such as
# f16c, are left out, because arithmetic with them still runs in float32.
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
_CPUINFO = pathlib.Path("/proc/cpuinfo")


def half_instructions() -> dict[str, list[str]] | None:
    """Returns the instructions of this CPU by dtype.

    The result is `None` where there is no `/proc/cpuinfo` to read. For a CPU without
    such instructions, the result is `{"bfloat16": [], "float16": []}`.
    """
    if not _CPUINFO.exists():
        return None
    words = {*_CPUINFO.read_text().split()}
    return {
        dtype: [name for name in names if name in words]
        for dtype, names in _INSTRUCTIONS.items()
    }


def about_cpu(found: dict[str, list[str]] | None) -> list[str]:
    """Returns sentences, without a period, about the instructions of a CPU.

    `found` is the result of `half_instructions`.
    """
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
