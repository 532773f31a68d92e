"""Figures of a compiled step, read from the text of its optimised HLO module.

Every figure counts an instruction as often as the loops around it run, which XLA's
own `cost_analysis` does not. It also counts an asynchronous copy twice; here it counts
once.
"""

import math
import re
from typing import Any

import jax

from benchmarks.hlo_text import FUSIONS, VIEWS, Instruction, Module, Shape, parse

# XLA writes it for an operation whose cycles it does not know.
_UNKNOWN = 2**63 - 1
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

    `estimated_mcycles` is XLA's estimate in 1e6 cycles, `None` where it made none;
    `gb_accessed` 1e9 bytes read and written, `converts` the casts, `kernels` the
    launches: of a fusion, a custom call, a copy; `fp8_matmuls` those of two factors in
    fp8.
    """
    module = parse(text)
    launched = launches(module)
    cycles = sum(
        count * int(instruction.find(r'"estimated_cycles":"(\d+)"') or 0)
        for instruction, count in module.instructions()
    )
    every = [*module.instructions(fused=True)]
    return {
        "estimated_mcycles": cycles / 1e6 if 0 < cycles < _UNKNOWN else None,
        "gb_accessed": sum(count * bytes_accessed(i) for i, count in launched) / 1e9,
        "converts": sum(count for i, count in every if i.opcode == "convert"),
        "kernels": sum(count for _, count in launched),
        "fp8_matmuls": sum(n for i, n in every if _is_dot(i) and _bits(i) == 8),
    }


def launches(module: Module) -> list[tuple[Instruction, int]]:
    """Returns what is launched, and how often."""
    return [(i, count) for i, count in module.instructions() if not _is_free(i)]


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    free = opcode in _FREE or opcode.endswith("-done")
    return free or instruction.target in _NOT_LAUNCHED


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


# --- matmuls in fp8 ------------------------------------------------------------------

# Of an H200, per second: bytes, and operations of dense matmuls by the bits of the
# wider one of their factors, as its data sheet tells them
_BYTES = 4.8e12
_OPERATIONS = {8: 1979e12, 16: 989e12, 32: 494e12}


def roofline_ms(text: str) -> float:
    """Returns what stands for the time on an H200 that is not here.

    It is the sum over kernels of the time for their bytes or for their matmuls,
    whichever is longer.
    """
    return 1e3 * sum(n * _seconds(kernel) for kernel, n in launches(parse(text)))


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
