"""Figures of a compiled step, read from the text of its optimised HLO module.

Every figure counts an instruction as often as the loops around it turn, which XLA's
own `cost_analysis` does not. It also counts an asynchronous copy twice; here it counts
once.
"""

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.hlo_text import (
    CONTROL,
    FREE,
    FUSIONS,
    VIEWS,
    Computation,
    Instruction,
    Module,
    Shape,
    parse,
)
from benchmarks.stages import Build

V5E_HZ = 1.5e9
Window = tuple[int, int, int, int]

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all "
    "collective-permute collective-broadcast".split()
)
_NOT_LAUNCHED = ("AllocateBuffer", "ConcatBitcast", "Sharding")
_SLICES = ("slice", "dynamic-slice", "gather")
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
_CONVOLUTION = "__cudnn$conv"
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")


def measure(build: Build) -> dict[str, Any]:
    """Returns the figures of a compiled step.

    `estimated_ms` is XLA's estimate for a v5e, `gb_accessed` 1e9 bytes read and
    written, `temp_mb` 1e6 bytes of temporaries; casts, kernels and flops are those of
    one run.
    """
    text = build.compiled.as_text() or ""
    memory = build.compiled.memory_analysis()
    return {
        "estimated_ms": estimated_seconds(text) * 1e3 or None,
        "gb_accessed": bytes_accessed(text) / 1e9,
        "temp_mb": getattr(memory, "temp_size_in_bytes", 0) / 1e6,
        "converts": {"executed": converts(text)},
        "kernels": {"executed": kernels(text)},
        "dots": {dtype: {"flops": n} for dtype, n in flops_by_dtype(text).items()},
        "collectives": collectives(text),
        "unknown_loops": parse(text).unknown_loops,
        "trace_s": build.trace_s,
        "lower_s": build.lower_s,
        "compile_s": build.compile_s,
    }


def estimated_seconds(text: str, hz: float = V5E_HZ) -> float:
    """Returns XLA's own estimate of the time of a run; 0 where it made none."""
    cycles = 0.0
    for _, instruction, count in parse(text).instructions():
        if found := _CYCLES.search(instruction.attributes):
            cycles += count * int(found[1])
    return cycles / hz


def converts(text: str) -> float:
    """Returns how many casts a run executes, fused ones included."""
    found = parse(text).instructions(fused=True)
    return sum(count for _, i, count in found if i.opcode == "convert")


def kernels(text: str) -> float:
    """Returns how often a run launches something: a fusion, a custom call, a copy."""
    found = parse(text).instructions()
    return sum(count for _, i, count in found if not _is_free(i))


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in FREE | CONTROL or opcode.endswith("-done"):
        return True
    return instruction.target in _NOT_LAUNCHED


# Collectives


def collectives(text: str) -> list[dict[str, Any]]:
    """Returns the bytes that one device sends or receives, by collective and dtype.

    `bytes` are those of a run, `text_bytes` count each instruction once. A TPU splits
    an asynchronous collective over several fusions of one channel, which count once.
    """
    moved: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    seen = set()
    for computation, instruction, count in parse(text).instructions(fused=True):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _COLLECTIVES:
            continue
        if channel := re.search(r"channel_id=(\d+)", instruction.attributes):
            if (kind, channel[1]) in seen:
                continue
            seen.add((kind, channel[1]))
        read = [s for o in computation.operands_of(instruction) for s in o.shapes]
        made = _results(computation, instruction)
        for shape in max(read, made, key=lambda shapes: sum(s.bytes for s in shapes)):
            total = moved[kind, shape.dtype]
            total[0] += count * shape.bytes
            total[1] += shape.bytes
    return [
        {"kind": kind, "dtype": dtype, "bytes": in_run, "text_bytes": in_text}
        for (kind, dtype), (in_run, in_text) in sorted(moved.items())
    ]


# Bytes: operands and results of what is run by itself, padded to tiles as layouts say.


def bytes_accessed(text: str) -> float:
    """Returns the bytes that a run reads and writes, in memory of any kind.

    Of an operand that a fusion only slices, the slices count; of one that it updates in
    place, the update.
    """
    module = parse(text)
    return sum(
        count * _bytes(module, computation, instruction)
        for computation, instruction, count in module.instructions()
        if not _is_free(instruction)
    )


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that one run of a scheduled instruction reads and writes."""
    opcode, operands = instruction.opcode, computation.operands_of(instruction)
    results = _results(computation, instruction)
    if opcode in FUSIONS:
        return _fusion_bytes(module, computation, instruction, results)
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


def _results(
    computation: Computation, instruction: Instruction
) -> tuple[Shape, ...] | list[Shape]:
    """Returns what an instruction makes; of a -start, what its -done gives."""
    if instruction.opcode.endswith("-start"):
        for user in computation.users[instruction.name]:
            if user.opcode.endswith("-done"):
                return user.shapes
    return instruction.shapes


def _fusion_bytes(
    module: Module,
    computation: Computation,
    fusion: Instruction,
    results: Iterable[Shape],
) -> int:
    inner, results = module.fused(fusion), list(results)
    operands = computation.operands_of(fusion)
    total = 0
    for parameter, operand in zip(inner.parameters, operands, strict=False):
        for whole in operand.shapes[:1]:
            total += min(whole.padded_bytes, _read(module, inner, parameter, whole))
    makers = module.makers(computation, fusion)
    if len(makers) != len(results):
        return total + _size(results)
    for (where, maker), result in zip(makers, results, strict=True):
        position = {"dynamic-update-slice": 1, "scatter": -1}.get(maker.opcode)
        if position is None:
            total += result.padded_bytes
        else:
            total += _part(where.operands_of(maker)[position].shapes[0], result)
    return total


def _read(module: Module, inner: Computation, value: Instruction, whole: Shape) -> int:
    """Returns the bytes of a fusion's parameter that the fusion reads."""
    if value is inner.root:
        return whole.padded_bytes
    total = 0
    for user in inner.users[value.name]:
        position = user.operands.index(value.name)
        if user.opcode in VIEWS:
            total += _read(module, inner, user, whole)
        elif user.opcode in _SLICES and position == 0:
            total += _part(user.shapes[0], whole)
        elif user.opcode == "dynamic-update-slice" and position == 0:
            pass
        elif user.opcode == "scatter" and position < len(user.operands) // 2:
            total += _part(inner.instructions[user.operands[-1]].shapes[0], whole)
        elif user.opcode in FUSIONS:
            nested = module.fused(user)
            total += _read(module, nested, nested.parameters[position], whole)
        else:
            return whole.padded_bytes
    return total


def _part(part: Shape, whole: Shape) -> int:
    return min(part.padded_bytes, whole.padded_bytes)


def _size(shapes: Iterable[Shape]) -> int:
    return sum(shape.padded_bytes for shape in shapes)


def _sizes(instructions: Iterable[Instruction]) -> int:
    return sum(_size(instruction.shapes) for instruction in instructions)


# Flops of matrix products, a multiplication and an addition counted as two


def flops_by_dtype(text: str) -> dict[str, float]:
    """Returns the flops of matrix products in a run, by the dtype of the factors.

    Factors of two dtypes are named "bf16 x f32". On a TPU, dots are convolutions in the
    text; it multiplies float32 factors in bfloat16 unless the program asks for more.
    """
    work: defaultdict[str, float] = defaultdict(float)
    for computation, instruction, count in parse(text).instructions(fused=True):
        if not _is_matmul(instruction):
            continue
        factors = [o.shapes[0] for o in computation.operands_of(instruction)[:2]]
        dtype = " x ".join(sorted({factor.dtype for factor in factors}))
        work[dtype] += count * _flops(instruction, *factors)
    return dict(sorted(work.items()))


def _is_matmul(instruction: Instruction) -> bool:
    products = ("dot", "convolution", "ragged-dot", "scaled-dot")
    called = instruction.target.startswith((*_GEMM, _CONVOLUTION))
    return instruction.opcode in products or called


def _flops(instruction: Instruction, lhs: Shape, rhs: Shape) -> float:
    attributes, result = instruction.attributes, instruction.shapes[0]
    labels = _LABELS.search(attributes)
    if labels and instruction.opcode == "convolution":
        return _convolution_flops(attributes, labels.groups(), lhs, rhs, result)
    if labels and instruction.target.startswith(_CONVOLUTION):  # padding counts as work
        backward = "Backward" in instruction.target
        output = lhs if "Input" in instruction.target else rhs if backward else result
        filters = result if "Filter" in instruction.target else rhs
        features = filters.dims[labels[2].index("o")]
        return 2.0 * output.elements * filters.elements / features
    found = _CONTRACTED.search(attributes)
    contracted = json.loads(f"[{found[1]}]") if found else []
    return 2.0 * result.elements * math.prod(lhs.dims[int(i)] for i in contracted)


def _convolution_flops(
    attributes: str, labels: tuple[str, ...], lhs: Shape, rhs: Shape, out: Shape
) -> float:
    """Counts the flops of a convolution.

    Positions where it reads padding or the holes of a dilated operand are no work,
    because a TPU writes every dot as such a convolution.
    """
    left, right, result = labels
    positions = 1
    for axis, window in enumerate(_windows(attributes)):
        sizes = lhs.dims[left.index(str(axis))], rhs.dims[right.index(str(axis))]
        out_size = out.dims[result.index(str(axis))]
        positions *= _valid_positions(*sizes, out_size, window)
    outputs = out.dims[result.index("b")] * out.dims[result.index("f")]
    return 2.0 * outputs * rhs.dims[right.index("i")] * positions


def _windows(attributes: str) -> list[Window]:
    """Returns pad, stride and both dilations of each spatial axis of a convolution."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}
    axes = len(fields["size"].split("x")) if fields else 0
    columns = []
    for key, default in dict(pad=0, stride=1, lhs_dilate=1, rhs_dilate=1).items():
        texts = fields.get(key, "x".join([str(default)] * axes)).split("x")
        columns.append([int(text.split("_")[0]) for text in texts[:axes]])
    return list(zip(*columns, strict=True))


@functools.lru_cache(maxsize=4096)
def _valid_positions(lhs: int, rhs: int, out: int, window: Window) -> int:
    """Counts the pairs of an output and a filter position that meet an operand."""
    pad, stride, lhs_dilate, rhs_dilate = window
    valid = 0
    for tap in range(rhs):
        at = np.arange(out) * stride + tap * rhs_dilate - pad
        meets = (at >= 0) & (at % lhs_dilate == 0) & (at // lhs_dilate < lhs)
        valid += int(meets.sum())
    return valid
