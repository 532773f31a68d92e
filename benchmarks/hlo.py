"""Figures of a compiled step, read from the text of its optimised HLO module.

Every figure counts an instruction as often as the loops around it turn.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from benchmarks import flops, traffic
from benchmarks.buffers import Buffer, largest_buffers
from benchmarks.hlo_text import CONTROL, FREE, Computation, Instruction, parse

if TYPE_CHECKING:
    from benchmarks.stages import Build

__all__ = [
    "Buffer",
    "Collective",
    "Converts",
    "Dots",
    "Figures",
    "Kernels",
    "bytes_accessed",
    "collectives",
    "converts",
    "dots_by_dtype",
    "estimated_seconds",
    "kernels",
    "largest_buffers",
    "main_memory_bytes",
    "measure",
]

V5E_HZ = 1.5e9

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NOT_LAUNCHED_TARGETS = ("AllocateBuffer", "ConcatBitcast", "Sharding")


@dataclasses.dataclass(frozen=True)
class Dots:
    """Multiplications of matrices with factors of one dtype.

    Attributes:
      count: in the text.
      executed: in a run.
      flops: in a run.
    """

    count: int
    executed: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Converts:
    """Casts.

    Attributes:
      count: in the text, fused ones included.
      executed: in a run.
      bytes: read and written by them in a run, were none fused.
      standalone: in the text, those outside fusions, which really go through memory.
    """

    count: int
    executed: float
    bytes: float
    standalone: int


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What a device launches.

    Attributes:
      count: in the text.
      executed: in a run.
      by_kind: executed, by opcode, kind of fusion or target of a custom call.
    """

    count: int
    executed: float
    by_kind: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind and dtype.

    Attributes:
      kind: such as "all-gather".
      dtype: of what is moved.
      count: in the text; parts of one asynchronous collective count once.
      executed: in a run.
      bytes: in a run and for one device, the larger of operands and results.
      text_bytes: the same with each instruction of the text counted once.
    """

    kind: str
    dtype: str
    count: int
    executed: float
    bytes: float
    text_bytes: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one compiled step.

    Attributes:
      estimated_ms: XLA's estimate of the time of a run; a TPU only.
      gb_accessed: 1e9 bytes read and written in a run, wherever they lie.
      gb_main_memory: the part of it in main memory; on-chip memory left out.
      temp_mb: 1e6 bytes of temporaries, by XLA's buffer assignment.
      peak_mb: 1e6 bytes at the peak, arguments and on-chip memory included.
      converts: casts.
      kernels: launches.
      dots: multiplications of matrices by the dtype of their factors.
      collectives: by kind and dtype.
      unknown_loops: loops that were counted as one turn for want of a trip count.
      trace_s: seconds of tracing.
      lower_s: seconds of lowering.
      compile_s: seconds of XLA.
    """

    estimated_ms: float | None
    gb_accessed: float
    gb_main_memory: float
    temp_mb: float
    peak_mb: float | None
    converts: Converts
    kernels: Kernels
    dots: dict[str, Dots]
    collectives: list[Collective]
    unknown_loops: list[str]
    trace_s: float
    lower_s: float
    compile_s: float


def measure(build: "Build") -> Figures:
    """Returns the figures of a compiled step.

    Args:
      build: what `benchmarks.stages.build` or `benchmarks.targets.compile_for` gave.

    Returns:
      The figures.
    """
    text = build.compiled.as_text() or ""
    memory = build.compiled.memory_analysis()
    seconds = estimated_seconds(text)
    peak = getattr(memory, "peak_memory_in_bytes", None)
    return Figures(
        estimated_ms=seconds * 1e3 if seconds else None,
        gb_accessed=bytes_accessed(text) / 1e9,
        gb_main_memory=main_memory_bytes(text) / 1e9,
        temp_mb=getattr(memory, "temp_size_in_bytes", 0) / 1e6,
        peak_mb=None if peak is None else peak / 1e6,
        converts=converts(text),
        kernels=kernels(text),
        dots=dots_by_dtype(text),
        collectives=collectives(text),
        unknown_loops=parse(text).unknown_loops,
        trace_s=build.trace_s,
        lower_s=build.lower_s,
        compile_s=build.compile_s,
    )


def estimated_seconds(text: str, hz: float = V5E_HZ) -> float:
    """Returns XLA's own estimate of the time of a run on a TPU.

    Args:
      text: the module.
      hz: the clock of the TPU.

    Returns:
      The seconds; 0 for a module without estimates.
    """
    cycles = 0.0
    for _, instruction, count in parse(text).scheduled():
        found = _CYCLES.search(instruction.attributes)
        if found:
            cycles += count * int(found[1])
    return cycles / hz


def bytes_accessed(text: str) -> float:
    """Returns the bytes that a run reads and writes; see `benchmarks.traffic`."""
    return traffic.module_bytes(parse(text))


def main_memory_bytes(text: str) -> float:
    """Returns the bytes of main memory that a run reads and writes."""
    return traffic.module_bytes(parse(text), traffic.main_memory)


def dots_by_dtype(text: str) -> dict[str, Dots]:
    """Returns the multiplications of matrices, by the dtype of their factors.

    On a TPU, dots are convolutions in the text; float32 factors are multiplied in
    bfloat16 there unless the program asks for more.
    """
    counts: Counter[str] = Counter()
    executed: defaultdict[str, float] = defaultdict(float)
    work: defaultdict[str, float] = defaultdict(float)
    for computation, instruction, count in parse(text).everything():
        if flops.is_matmul(instruction):
            dtype = flops.operand_dtypes(computation, instruction)
            counts[dtype] += 1
            executed[dtype] += count
            work[dtype] += count * flops.matmul_flops(computation, instruction)
    return {d: Dots(counts[d], executed[d], work[d]) for d in sorted(counts)}


def converts(text: str) -> Converts:
    """Returns the casts of a module."""
    module = parse(text)
    total = standalone = 0
    executed = moved = 0.0
    for computation, instruction, count in module.everything():
        if instruction.opcode != "convert":
            continue
        total += 1
        standalone += computation.name in module.runs
        executed += count
        arrays = [instruction, *computation.operands_of(instruction)]
        moved += count * sum(shape.bytes for i in arrays for shape in i.shapes)
    return Converts(total, executed, moved, standalone)


def kernels(text: str) -> Kernels:
    """Returns what a device launches: fusions, custom calls, copies and the rest."""
    total = 0
    by_kind: defaultdict[str, float] = defaultdict(float)
    for _, instruction, count in parse(text).scheduled():
        if _is_launched(instruction):
            total += 1
            by_kind[instruction.kind] += count
    return Kernels(total, sum(by_kind.values()), dict(sorted(by_kind.items())))


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a module, by kind and dtype.

    A TPU splits an asynchronous collective over several fusions that carry one channel
    each; a channel counts once.
    """
    counts: Counter[tuple[str, str]] = Counter()
    executed: defaultdict[tuple[str, str], float] = defaultdict(float)
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    written: Counter[tuple[str, str]] = Counter()
    seen: set[tuple[str, str]] = set()
    for computation, instruction, count in parse(text).everything():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _COLLECTIVES:
            continue
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        if channel:
            if (kind, channel[1]) in seen:
                continue
            seen.add((kind, channel[1]))
        for dtype, size in _payload(computation, instruction).items():
            counts[kind, dtype] += 1
            executed[kind, dtype] += count
            moved[kind, dtype] += count * size
            written[kind, dtype] += size
    return [
        Collective(*key, counts[key], executed[key], moved[key], written[key])
        for key in sorted(counts)
    ]


def _is_launched(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in FREE or opcode in CONTROL or opcode.endswith("-done"):
        return False
    return instruction.target not in _NOT_LAUNCHED_TARGETS


def _payload(computation: Computation, collective: Instruction) -> dict[str, int]:
    """Returns the bytes that a collective moves by dtype: operands or results."""
    read = [s for o in computation.operands_of(collective) for s in o.shapes]
    made = list(traffic.result_shapes(computation, collective))
    moved = max(read, made, key=lambda shapes: sum(shape.bytes for shape in shapes))
    by_dtype: Counter[str] = Counter()
    for shape in moved:
        by_dtype[shape.dtype] += shape.bytes
    return dict(by_dtype)
