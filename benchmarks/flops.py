"""Multiplications of matrices in the text of an HLO module: their operands and work."""

import functools
import json
import math
import re

import numpy as np

from benchmarks.hlo_text import Computation, Instruction, Shape

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
_CONVOLUTION = "__cudnn$conv"


def is_matmul(instruction: Instruction) -> bool:
    """Returns whether an instruction multiplies matrices (dot or convolution)."""
    if instruction.opcode in ("dot", "convolution", "ragged-dot", "scaled-dot"):
        return True
    return instruction.opcode == "custom-call" and instruction.target.startswith(
        (*_GEMM, _CONVOLUTION)
    )


def operand_dtypes(computation: Computation, instruction: Instruction) -> str:
    """Returns the dtype of both factors: "bf16", or "bf16 x f32" where they differ."""
    factors = computation.operands_of(instruction)[:2]
    dtypes = sorted({factor.shapes[0].dtype for factor in factors if factor.shapes})
    return " x ".join(dtypes)


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns the flops of one run, a multiplication and an addition counted as two.

    Positions where a convolution reads padding or the holes of a dilated operand are no
    work: a TPU writes every dot as such a convolution.
    """
    factors = [o.shapes[0] for o in computation.operands_of(instruction)[:2]]
    if len(factors) < 2 or not instruction.shapes:
        return 0.0
    lhs, rhs = factors
    result = instruction.shapes[0]
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction.attributes, lhs, rhs, result)
    if instruction.target.startswith(_CONVOLUTION):
        return _cudnn_flops(instruction, lhs, rhs, result)
    contracted = _contracted(instruction)
    return 2.0 * result.elements * math.prod(lhs.dims[i] for i in contracted)


def _contracted(dot: Instruction) -> list[int]:
    """Returns the contracted dimensions of the left factor."""
    if dot.opcode == "custom-call":
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', dot.attributes)
        return [int(i) for i in json.loads(found[1])] if found else []
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    return [int(i) for i in found[1].split(",") if i] if found else []


def _convolution_flops(attributes: str, lhs: Shape, rhs: Shape, out: Shape) -> float:
    labels = _LABELS.search(attributes)
    if not labels:
        return 0.0
    left, right, result = labels.groups()
    window = _window(attributes)
    positions = 1
    for axis in sorted(label for label in left if label.isdigit()):
        positions *= _valid_positions(
            lhs.dims[left.index(axis)],
            rhs.dims[right.index(axis)],
            out.dims[result.index(axis)],
            **{key: values[int(axis)] for key, values in window.items()},
        )
    batch = out.dims[result.index("b")]
    features = out.dims[result.index("f")]
    return 2.0 * batch * features * rhs.dims[right.index("i")] * positions


def _cudnn_flops(call: Instruction, lhs: Shape, rhs: Shape, result: Shape) -> float:
    """Returns the flops of a convolution of cuDNN; padding is counted as work."""
    labels = _LABELS.search(call.attributes)
    if not labels:
        return 0.0
    if "BackwardInput" in call.target:
        filters, output = rhs, lhs
    elif "BackwardFilter" in call.target:
        filters, output = result, rhs
    else:
        filters, output = rhs, result
    features = filters.dims[labels[2].index("o")]
    return 2.0 * output.elements * filters.elements / features


def _window(attributes: str) -> dict[str, list[tuple[int, ...]]]:
    """Returns the fields of a window, each with one entry per spatial axis."""
    found = _WINDOW.search(attributes)
    fields = (field.split("=") for field in found[1].split()) if found else ()
    return {
        key: [tuple(int(n) for n in axis.split("_")) for axis in value.split("x")]
        for key, value in fields
        if key in ("pad", "stride", "lhs_dilate", "rhs_dilate")
    }


@functools.lru_cache(maxsize=4096)
def _valid_positions(
    lhs: int,
    rhs: int,
    out: int,
    pad: tuple[int, ...] = (0,),
    stride: tuple[int, ...] = (1,),
    lhs_dilate: tuple[int, ...] = (1,),
    rhs_dilate: tuple[int, ...] = (1,),
) -> int:
    """Counts the pairs of an output and a filter position that meet an operand."""
    if rhs == 1 and lhs == out and stride == lhs_dilate == (1,):
        return out
    starts = np.arange(out, dtype=np.int64) * stride[0] - pad[0]
    valid = 0
    for tap in range(rhs):
        at = starts + tap * rhs_dilate[0]
        meets = (at >= 0) & (at % lhs_dilate[0] == 0) & (at // lhs_dilate[0] < lhs)
        valid += int(meets.sum())
    return valid
