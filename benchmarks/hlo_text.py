"""Reads the text of an optimised HLO module: computations, calls and loop trips.

What `jax.stages.Compiled.as_text` gives for a TPU, a GPU or a CPU. An instruction runs
as often as the loops around it turn; the text tells how often a loop turns either
outright (`known_trip_count`: GPU and CPU) or through its condition (TPU).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from benchmarks.trips import inferred_trips

_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8,
    "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{\s*$")
_LHS = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"n":"(\d+)"')
_TILES = re.compile(r"T((?:\([\d,*]+\))+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an instruction's result.

    Attributes:
      dtype: HLO's name, such as "bf16".
      dims: the dimensions.
      layout: the text between the braces, such as "1,0:T(8,128)S(1)".
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size without padding."""
        return -(-self.elements * _bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """Size in memory: a TPU pads the minor dimensions to whole tiles."""
        return -(-math.prod(self._padded_dims()) * _bits(self.dtype) // 8)

    @property
    def memory_space(self) -> int:
        """0 is the main memory; 1 is on-chip memory (VMEM) on a TPU."""
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0

    def _padded_dims(self) -> list[int]:
        minor_to_major = [int(i) for i in re.findall(r"\d+", self.layout.split(":")[0])]
        dims = [self.dims[i] for i in minor_to_major]
        tiles = _TILES.search(self.layout)
        if not tiles or len(dims) != len(self.dims):
            return list(self.dims)
        tile = tiles[1][1:].split(")")[0].split(",")
        for position, size in enumerate(reversed(tile)):
            if position >= len(dims):
                dims.append(1)
            if size != "*":
                dims[position] = -(-dims[position] // int(size)) * int(size)
        return dims

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      opcode: such as "fusion" or "all-gather-start".
      result: the result's shape as text; `shapes` holds it parsed.
      operands: names of the operands; for a parameter or constant, its literal.
      attributes: all that follows the operands.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result; a tuple's are flattened."""
        return parse_shapes(self.result)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that the instruction calls, by attribute."""
        return {
            key: tuple(re.findall(r"[\w.\-]+", value))
            for key, value in _CALLED.findall(self.attributes)
        }

    @property
    def op_name(self) -> str:
        """The JAX operation that the instruction comes from, where known."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def kind(self) -> str:
        """The opcode; for a fusion or custom call, also what sort of one it is."""
        opcode = self.opcode.removesuffix("-start")
        if opcode == "fusion":
            triton = re.search(r'"kind":"(__\w+)"', self.attributes)
            sort = triton or re.search(r"kind=(\w+)", self.attributes)
            return f"fusion {sort[1]}" if sort else opcode
        return self.target or opcode

    @property
    def index(self) -> int:
        """Which element of a tuple a get-tuple-element takes; otherwise -1."""
        found = re.search(r"index=(\d+)", self.attributes)
        return int(found[1]) if found else -1

    @property
    def target(self) -> str:
        """What a custom call calls, where it is one."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass
class Computation:
    """A named list of instructions, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction | None = None

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The users of each instruction, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.operands[0]))

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction reads."""
        if instruction.opcode in ("parameter", "constant"):
            return []
        found = (self.instructions.get(name) for name in instruction.operands)
        return [operand for operand in found if operand is not None]


@dataclasses.dataclass
class Module:
    """A parsed module.

    Attributes:
      computations: by name.
      entry: name of the computation that runs first.
      header: the first line.
    """

    computations: dict[str, Computation]
    entry: str
    header: str = ""

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """How often each scheduled computation runs (entry, loop bodies, calls)."""
        return self._counts[0]

    @functools.cached_property
    def fused_runs(self) -> dict[str, float]:
        """How often each fused computation runs, which launches nothing by itself."""
        return self._counts[1]

    def fused(self, fusion: Instruction) -> Computation:
        """Returns the computation that a fusion stands for."""
        return self.computations[fusion.called["calls"][0]]

    def makers(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Computation, Instruction]]:
        """Returns what makes each array of a result, looked for inside fusions.

        Args:
          computation: where the instruction is.
          instruction: the instruction.

        Returns:
          The computation and the instruction that make each array, in order.
        """
        while instruction.opcode in VIEWS and computation.operands_of(instruction):
            instruction = computation.operands_of(instruction)[0]
        if instruction.opcode in FUSIONS:
            inner = self.fused(instruction)
            if inner.root is not None:
                return self.makers(inner, inner.root)
        if instruction.opcode == "tuple":
            return [
                maker
                for operand in computation.operands_of(instruction)
                for maker in self.makers(computation, operand)
            ]
        return [(computation, instruction)] * len(instruction.shapes)

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, float]]:
        """Yields every instruction that is run by itself, and how often."""
        for name, count in self.runs.items():
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                yield computation, instruction, count

    def everything(self) -> Iterator[tuple[Computation, Instruction, float]]:
        """Yields every instruction, also inside fusions, and how often it is run."""
        yield from self.scheduled()
        for name, count in self.fused_runs.items():
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                yield computation, instruction, count

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns how often a while loop turns; `None` where the text does not tell."""
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known[1])
        return inferred_trips(self, computation, loop)

    @property
    def unknown_loops(self) -> list[str]:
        """Names of the while loops that are counted as one turn, for want of better."""
        return [
            instruction.name
            for computation, instruction, _ in self.scheduled()
            if instruction.opcode == "while"
            and self.trips(computation, instruction) is None
        ]

    @functools.cached_property
    def _counts(self) -> tuple[dict[str, float], dict[str, float]]:
        runs: dict[str, float] = {}
        fused: dict[str, float] = {}

        def visit(name: str, count: float, into: dict[str, float]) -> None:
            computation = self.computations.get(name)
            if computation is None:
                return
            into[name] = into.get(name, 0.0) + count
            for instruction in computation.instructions.values():
                for callee, times, inside in self._callees(computation, instruction):
                    visit(callee, count * times, fused if inside else into)

        visit(self.entry, 1.0, runs)
        return runs, fused

    def _callees(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[str, float, bool]]:
        """Yields the computations that an instruction runs: name, times, fused or not.

        Left out are a loop's condition and what a reduction, sort, scatter or
        collective applies to elements.
        """
        called = instruction.called
        if not called:
            return
        opcode = instruction.opcode
        if opcode == "while":
            turns = self.trips(computation, instruction)
            for name in called["body"]:
                yield name, 1 if turns is None else turns, False
        elif opcode == "conditional":
            branches = [name for names in called.values() for name in names]
            yield max(branches, key=self._weight), 1, False
        elif opcode == "call":
            for names in called.values():
                yield names[0], 1, False
        elif opcode == "async-start":
            for name in called.get("calls", ()):
                yield name, 1, False
        elif opcode in ("fusion", "fusion-start", "custom-call"):
            for key in ("calls", "called_computations"):
                for name in called.get(key, ()):
                    yield name, 1, True

    def _weight(self, name: str) -> int:
        """Returns a rough cost: only the costliest branch of a conditional counts."""
        computation = self.computations[name]
        own = sum(
            shape.bytes
            for instruction in computation.instructions.values()
            if instruction.opcode not in FREE
            for shape in instruction.shapes
        )
        return own + sum(
            int(self._weight(callee) * times)
            for instruction in computation.instructions.values()
            for callee, times, _ in self._callees(computation, instruction)
        )


FUSIONS = ("fusion", "fusion-start")
VIEWS = ("bitcast", "reshape")
# What neither computes nor moves anything.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "opt-barrier partition-id replica-id".split()
)


# What runs other computations and is nothing by itself.
CONTROL = frozenset("while conditional call async-start async-update".split())


@functools.lru_cache(maxsize=4)
def parse(text: str) -> Module:
    """Parses the text of an HLO module.

    Args:
      text: what `compiled.as_text()` gave.

    Returns:
      The module.

    Raises:
      ValueError: if there is no entry computation in the text.
    """
    computations: dict[str, Computation] = {}
    entry = header = ""
    current: Computation | None = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif current is None:
            opened = _HEADER.match(line)
            if opened:
                current = computations.setdefault(opened[2], Computation(opened[2]))
                entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            _add(current, line)
    if not entry:
        raise ValueError("no ENTRY computation in the text of the HLO module")
    return Module(computations, entry, header)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a shape such as "(f32[2,3]{1,0}, bf16[])"."""
    return tuple(
        Shape(
            dtype,
            tuple(int(d.lstrip("<=")) for d in dims.split(",") if d.strip()),
            layout,
        )
        for dtype, dims, layout in _LEAF.findall(_COMMENT.sub("", text))
    )


def split(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _add(computation: Computation, line: str) -> None:
    """Adds the instruction of a line, if it holds one."""
    matched = _LHS.match(line)
    if not matched:
        return
    root, name, rest = matched.groups()
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    result, call = rest[:end], rest[end:].strip()
    opening = call.find("(")
    if opening < 0:
        return
    closing = _closing(call, opening)
    inside = _COMMENT.sub("", call[opening + 1 : closing - 1])
    opcode = call[:opening]
    if opcode in ("parameter", "constant"):
        names = [inside.strip()]
    else:
        names = [operand.split()[-1].lstrip("%") for operand in split(inside)]
    instruction = Instruction(name, opcode, result, tuple(names), call[closing:])
    computation.instructions[name] = instruction
    if root:
        computation.root = instruction


def _closing(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    return 4 if dtype.startswith("f4") else 8  # the rest are kinds of float8
