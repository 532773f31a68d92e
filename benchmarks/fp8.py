"""What runs in fp8: in the jaxpr of a step, and in the program that XLA makes of it.

A GPU that is not here has no estimate of a time. Its roofline stands for it: the sum
over kernels of the time for their bytes or for their matmuls, whichever is longer.
"""

import math
import re
from collections import Counter
from typing import Any

import jax

from benchmarks import hlo
from benchmarks.hlo_text import FUSIONS, Instruction, Shape, parse
from flax_amp.debug._place import places

Figures = dict[str, Any]

# Of an H200, per second: bytes, and operations of dense matmuls by the narrowest
# dtype of their factors, as its data sheet tells them
_BYTES = 4.8e12
_OPERATIONS = {8: 1979e12, 16: 989e12, 32: 494e12}


def products(step: Any, *shapes: Any) -> Figures:
    """Returns how many matmuls a step has: in fp8, and others that have no fp8 factor.

    Those in a loop count as often as it runs, those of a kernel of Pallas not at all.
    """
    found: Counter[str] = Counter()
    for place in places(jax.make_jaxpr(step)(*shapes)):
        eqn = place.eqn
        if eqn.primitive.name == "flax_amp_fp8_dot":
            found["fp8"] += place.times
        elif eqn.primitive.name == "dot_general":
            dtypes = [str(v.aval.dtype) for v in eqn.invars]
            in_fp8 = all("float8" in dtype for dtype in dtypes)
            found["fp8" if in_fp8 else "other"] += place.times
    return {"fp8_products": found["fp8"], "other_products": found["other"]}


def compiled(text: str, on_gpu: bool) -> Figures:
    """Returns the figures of a program, from its text.

    `fp8_dots` are matmuls of two factors in fp8; `launches` the kernels without those
    that are no fusion and make one number, of which a TPU has many; `roofline_ms` is
    `None` for a TPU.
    """
    module = parse(text)
    dots = [(dot, n) for dot, n in module.instructions(fused=True) if _is_dot(dot)]
    launched = hlo.launches(module)
    roofline = sum(n * _seconds(instruction) for instruction, n in launched)
    return {
        "fp8_dots": sum(n for dot, n in dots if _bits(dot) == 8),
        "launches": sum(n for i, n in launched if not _is_scalar(i)),
        "roofline_ms": 1e3 * roofline if on_gpu else None,
    }


def _is_scalar(instruction: Instruction) -> bool:
    is_small = all(math.prod(shape.dims) == 1 for shape in instruction.shapes)
    called = (*FUSIONS, "custom-call")
    return (
        is_small
        and instruction.opcode not in called
        and not hlo.collective_kind(instruction)
    )


# --- matmuls and their operations ----------------------------------------------------


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
    return max(hlo.bytes_accessed(kernel) / _BYTES, computing)


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
