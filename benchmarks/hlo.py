"""Figures of a compiled step, read from the text of its optimised HLO module.

Every figure counts an instruction as often as the loops around it run, which XLA's
own `cost_analysis` does not. It also counts an asynchronous copy twice; here it counts
once.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from benchmarks.hlo_text import FUSIONS, VIEWS, Instruction, Module, Shape, parse

# XLA writes it where it does not know the cycles (on a TPU7x's sparse core).
_UNKNOWN = 2**63 - 1
_COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all "
    "collective-permute collective-broadcast".split()
)
# These neither compute nor move anything, or cost nothing beside what they call.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "opt-barrier partition-id replica-id "
    "while conditional call async-start async-update".split()
)
_NOT_LAUNCHED = ("AllocateBuffer", "ConcatBitcast", "Sharding")
_SLICES = ("slice", "dynamic-slice", "gather")


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Returns the figures of a compiled step: those of its text, and its memory.

    `argument_mb` are 1e6 bytes of arguments, `temp_mb` of temporaries, `peak_mb` the
    most that lives at one time, with arguments.
    """
    memory: Any = compiled.memory_analysis()
    return figures(compiled.as_text() or "") | {
        "argument_mb": memory.argument_size_in_bytes / 1e6,
        "temp_mb": memory.temp_size_in_bytes / 1e6,
        "peak_mb": memory.peak_memory_in_bytes / 1e6,
    }


def figures(text: str) -> dict[str, Any]:
    """Returns the figures of one run of a program, from its text.

    `estimated_mcycles` is XLA's estimate in 1e6 cycles (`None` where it made none),
    without the operations of `unknown_cycles`, whose cycles it does not know;
    `gb_accessed` 1e9 bytes read and written, `converts` the casts, `kernels` the
    launches: of a fusion, a custom call, a copy.
    """
    module = parse(text)
    launched = launches(module)
    estimates = [
        (int(instruction.find(r'"estimated_cycles":"(\d+)"') or 0), count)
        for instruction, count in module.instructions()
    ]
    cycles = sum(count * each for each, count in estimates if each != _UNKNOWN)
    every = module.instructions(fused=True)
    return {
        "estimated_mcycles": cycles / 1e6 or None,
        "unknown_cycles": sum(n for each, n in estimates if each == _UNKNOWN),
        "gb_accessed": sum(count * bytes_accessed(i) for i, count in launched) / 1e9,
        "converts": sum(count for i, count in every if i.opcode == "convert"),
        "kernels": sum(count for _, count in launched),
        "collectives": _exchanged(module),
    }


def launches(module: Module) -> list[tuple[Instruction, int]]:
    """Returns what is launched, and how often."""
    return [(i, count) for i, count in module.instructions() if not _is_free(i)]


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    free = opcode in _FREE or opcode.endswith("-done")
    return free or instruction.target in _NOT_LAUNCHED


def _exchanged(module: Module) -> str:
    """Returns the MB that one device sends or receives, by collective and dtype.

    A TPU splits an asynchronous collective over several fusions of one channel, which
    count once.
    """
    moved: Counter[tuple[str, str]] = Counter()
    seen = set()
    for instruction, count in module.instructions(fused=True):
        kind = instruction.opcode.removesuffix("-start")
        channel = kind, instruction.find(r"channel_id=(\d+)") or instruction
        if kind not in _COLLECTIVES or channel in seen:
            continue
        seen.add(channel)
        read = [shape for o in instruction.operands for shape in o.shapes]
        for shape in max(read, _results(instruction), key=_unpadded):
            moved[kind, shape.dtype] += count * shape.bytes
    texts = [f"{kind} {dtype} {n / 1e6:.1f}" for (kind, dtype), n in moved.items()]
    return ", ".join(sorted(texts))


# Bytes: operands and results of what is run by itself, padded to tiles as layouts say,
# in memory of any kind. Of an operand that is only sliced, the slices count; of one
# that is updated in place, the update.


def bytes_accessed(instruction: Instruction) -> int:
    """Returns the bytes that one run of a scheduled instruction reads and writes."""
    operands, results = instruction.operands, _results(instruction)
    written = _written(instruction, results)
    if instruction.opcode in ("slice-start", "dynamic-slice-start"):
        return written + sum(_part(shape, operands[0].shapes[0]) for shape in results)
    return written + sum(
        _read_by(instruction, position, shape)
        for position, operand in enumerate(operands)
        for shape in operand.shapes
    )


def _results(instruction: Instruction) -> list[Shape]:
    """Returns what an instruction makes; of a -start, what its -done gives."""
    if instruction.opcode.endswith("-start"):
        for user in instruction.users():
            if user.opcode.endswith("-done"):
                return [*user.shapes]
    return [*instruction.shapes]


def _read_by(user: Instruction, position: int, whole: Shape) -> int:
    """Returns the bytes of an operand that an instruction reads."""
    opcode = user.opcode
    if opcode in FUSIONS:
        return _read(user.fused.parameters[position], whole)
    if opcode in _SLICES and position == 0:
        return _part(user.shapes[0], whole)
    if opcode == "dynamic-update-slice" and position == 0:
        return 0
    if opcode == "scatter" and position < len(user.operands) // 2:
        return _part(user.operands[-1].shapes[0], whole)
    return whole.padded_bytes


def _read(value: Instruction, whole: Shape) -> int:
    """Returns the bytes of a fusion's parameter that the fusion reads."""
    if value is value.computation.root:
        return whole.padded_bytes
    total = 0
    for user in value.users():
        if user.opcode in VIEWS:
            total += _read(user, whole)
        else:
            total += _read_by(user, user.operands.index(value), whole)
    return min(total, whole.padded_bytes)


def _written(instruction: Instruction, results: list[Shape]) -> int:
    makers = [instruction] * len(results)
    if instruction.opcode in FUSIONS:
        makers = instruction.makers()
    if len(makers) != len(results):
        return sum(shape.padded_bytes for shape in results)
    total = 0
    for maker, result in zip(makers, results, strict=True):
        if maker.opcode in ("dynamic-update-slice", "scatter"):
            update = maker.operands[-1 if maker.opcode == "scatter" else 1]
            total += _part(update.shapes[0], result)
        else:
            total += result.padded_bytes
    return total


def _part(part: Shape, whole: Shape) -> int:
    return min(part.padded_bytes, whole.padded_bytes)


def _unpadded(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


# --- matmuls in fp8 ------------------------------------------------------------------

# Of an H200, per second: bytes, and operations of dense matmuls by the bits of the
# wider one of their factors, as its data sheet tells them
_BYTES = 4.8e12
_OPERATIONS = {8: 1979e12, 16: 989e12, 32: 494e12}


def fp8_figures(text: str) -> dict[str, Any]:
    """Returns the matmuls of two factors in fp8 of a program, and its roofline.

    A GPU that is not here has no estimate of a time. Its roofline stands for it: the
    sum over kernels of the time for their bytes or for their matmuls, whichever is
    longer.
    """
    module = parse(text)
    dots = [(dot, n) for dot, n in module.instructions(fused=True) if _is_dot(dot)]
    seconds = sum(n * _seconds(kernel) for kernel, n in launches(module))
    return {
        "fp8_matmuls": sum(n for dot, n in dots if _bits(dot) == 8),
        "roofline_ms": 1e3 * seconds,
    }


def _is_dot(instruction: Instruction) -> bool:
    is_gemm = instruction.opcode == "custom-call" and re.match(
        r"__(cublas|cudnn)", instruction.target
    )
    return bool(is_gemm) or instruction.opcode in ("dot", "convolution")


def _bits(dot: Instruction) -> int:
    """Returns the bits of the wider one of the two factors."""
    factors = [operand.shapes[0] for operand in dot.operands[:2]]
    return max(8 * Shape(factor.dtype, ()).bytes for factor in factors)


def _seconds(kernel: Instruction) -> float:
    """Returns the time of a kernel; convolutions, of patches only, count as bytes."""
    inside = [kernel]
    if kernel.opcode in FUSIONS:
        inside = [*kernel.fused.instructions.values()]
    dots = [i for i in inside if _is_dot(i) and i.opcode != "convolution"]
    computing = sum(_operations(dot) / _OPERATIONS[_bits(dot)] for dot in dots)
    return max(bytes_accessed(kernel) / _BYTES, computing)


def _operations(dot: Instruction) -> int:
    """Returns the operations of a matmul: two for each term."""
    found = re.search(
        r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', dot.attributes
    )
    if found is None:
        return 0
    dims = dot.operands[0].shapes[0].dims
    terms = math.prod(dims[int(axis)] for axis in re.findall(r"\d+", found[1]))
    return 2 * terms * math.prod(dot.shapes[0].dims)
