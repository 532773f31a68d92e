"""Figures of a compiled step, read from the text of its optimised HLO module.

Every figure counts an instruction as often as the loops around it turn, which XLA's
own `cost_analysis` does not. It also counts an asynchronous copy twice; here it counts
once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
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


def collective_kind(instruction: Instruction) -> str:
    """Returns what collective an instruction is, or an empty string."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _COLLECTIVES else ""


def collectives(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yields the collectives, and how often they run.

    A TPU splits an asynchronous collective over several fusions of one channel, which
    count once.
    """
    seen = set()
    for instruction, count in module.instructions(fused=True):
        kind = collective_kind(instruction)
        channel = kind, instruction.find(r"channel_id=(\d+)") or instruction
        if kind and channel not in seen:
            seen.add(channel)
            yield instruction, count


def _exchanged(module: Module) -> list[dict[str, Any]]:
    """Returns the bytes that one device sends or receives, by collective and dtype.

    `bytes` are those of a run, `text_bytes` count each instruction once.
    """
    moved: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for instruction, count in collectives(module):
        read = [shape for o in instruction.operands for shape in o.shapes]
        for shape in max(read, _results(instruction), key=_unpadded):
            total = moved[collective_kind(instruction), shape.dtype]
            total[0] += count * shape.bytes
            total[1] += shape.bytes
    return [
        {"kind": kind, "dtype": dtype, "bytes": in_run, "text_bytes": in_text}
        for (kind, dtype), (in_run, in_text) in sorted(moved.items())
    ]


# Bytes: operands and results of what is run by itself, padded to tiles as layouts say,
# in memory of any kind. Of an operand that a fusion only slices, the slices count; of
# one that it updates in place, the update.


def bytes_accessed(instruction: Instruction) -> int:
    """Returns the bytes that one run of a scheduled instruction reads and writes."""
    opcode, operands = instruction.opcode, instruction.operands
    results = _results(instruction)
    if opcode in FUSIONS:
        return _read_by_fusion(instruction) + _written_by_fusion(instruction, results)
    if opcode in ("slice-start", "dynamic-slice-start"):
        return sum(_part(s, operands[0].shapes[0]) for s in results) + _size(results)
    if opcode in _SLICES:
        read = _part(instruction.shapes[0], operands[0].shapes[0])
        return read + _size(instruction.shapes) + _sizes(operands[1:])
    if opcode == "dynamic-update-slice":
        return 2 * _size(operands[1].shapes) + _sizes(operands[2:])
    if opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sizes(operands[arrays + 1 :]) + _size(operands[arrays].shapes)
    return _size(results) + _sizes(operands)


def _results(instruction: Instruction) -> list[Shape]:
    """Returns what an instruction makes; of a -start, what its -done gives."""
    if instruction.opcode.endswith("-start"):
        for user in instruction.users():
            if user.opcode.endswith("-done"):
                return [*user.shapes]
    return [*instruction.shapes]


def _read_by_fusion(fusion: Instruction) -> int:
    total = 0
    for value, operand in zip(fusion.fused.parameters, fusion.operands, strict=False):
        for whole in operand.shapes[:1]:
            total += min(whole.padded_bytes, _read(value, whole))
    return total


def _written_by_fusion(fusion: Instruction, results: list[Shape]) -> int:
    makers = fusion.makers()
    if len(makers) != len(results):
        return _size(results)
    total = 0
    for maker, result in zip(makers, results, strict=True):
        if maker.opcode in ("dynamic-update-slice", "scatter"):
            update = maker.operands[-1 if maker.opcode == "scatter" else 1]
            total += _part(update.shapes[0], result)
        else:
            total += result.padded_bytes
    return total


def _read(value: Instruction, whole: Shape) -> int:
    """Returns the bytes of a fusion's parameter that the fusion reads."""
    if value is value.computation.root:
        return whole.padded_bytes
    total = 0
    for user in value.users():
        position = user.operands.index(value)
        if user.opcode in VIEWS:
            total += _read(user, whole)
        elif user.opcode in _SLICES and position == 0:
            total += _part(user.shapes[0], whole)
        elif user.opcode == "dynamic-update-slice" and position == 0:
            pass
        elif user.opcode == "scatter" and position < len(user.operands) // 2:
            total += _part(user.operands[-1].shapes[0], whole)
        elif user.opcode in FUSIONS:
            total += _read(user.fused.parameters[position], whole)
        else:
            return whole.padded_bytes
    return total


def _part(part: Shape, whole: Shape) -> int:
    return min(part.padded_bytes, whole.padded_bytes)


def _size(shapes: Iterable[Shape]) -> int:
    return sum(shape.padded_bytes for shape in shapes)


def _sizes(instructions: Iterable[Instruction]) -> int:
    return sum(_size(instruction.shapes) for instruction in instructions)


def _unpadded(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)
