"""Reads the text of an optimised HLO module: computations, calls and loop trips.

The text is what `jax.stages.Compiled.as_text` gives for a TPU, a GPU or a CPU. An
instruction runs as often as the loops around it. The text tells how often a loop
runs either outright (`known_trip_count` on GPU and CPU) or by its condition (TPU).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{\s*$")
# Root or not, name, shape of the result, opcode, operands, attributes
_INSTRUCTION = re.compile(
    r"^\s+(ROOT\s+)?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$"
)
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TILE = re.compile(r"T\(([\d,]+)\)")
_COPIES = ("copy", "bitcast", "convert", "copy-done", "copy-start")

FUSIONS = ("fusion", "fusion-start")
VIEWS = ("bitcast", "reshape")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a result; `layout` is such as "1,0:T(8,128)"."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Size without padding; the name of every numeric dtype tells its bits."""
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(found[1]) if found else _BITS[self.dtype]
        return -(-math.prod(self.dims) * bits // 8)

    @functools.cached_property
    def padded_bytes(self) -> int:
        """Size in memory: a TPU pads the minor dimensions to whole tiles."""
        tile = _TILE.search(self.layout)
        order = [int(i) for i in re.findall(r"\d+", self.layout.split(":")[0])]
        if not tile or len(order) != len(self.dims):
            return self.bytes
        minor_first = [self.dims[i] for i in order]
        sizes = [int(n) for n in reversed(tile[1].split(","))]
        pairs = itertools.zip_longest(minor_first, sizes, fillvalue=1)
        return Shape(self.dtype, tuple(-(-n // size) * size for n, size in pairs)).bytes


@dataclasses.dataclass(eq=False, repr=False)
class Instruction:
    """One line of a computation.

    `result` is the shape of the result as text, `arguments` is the text in the
    parentheses (the literal of a constant, the number of a parameter), and
    `attributes` is all that follows them.
    """

    computation: "Computation"
    name: str
    result: str
    opcode: str
    arguments: str
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result; tuples are flattened."""
        return tuple(
            Shape(
                dtype, tuple(int(n.lstrip("<=")) for n in re.findall("[^,]+", dims)), to
            )
            for dtype, dims, to in _LEAF.findall(self.result)
        )

    @functools.cached_property
    def operands(self) -> list["Instruction"]:
        """The instructions whose results this one reads."""
        names = re.findall(r"%([\w.\-]+)", self.arguments)
        return [self.computation.instructions[name] for name in names]

    @functools.cached_property
    def called(self) -> dict[str, list["Computation"]]:
        """The computations that the instruction calls, by attribute."""
        module = self.computation.module
        return {
            key: [module[name] for name in re.findall(r"[\w.\-]+", names)]
            for key, names in _CALLED.findall(self.attributes)
        }

    @property
    def fused(self) -> "Computation":
        """The computation that a fusion stands for."""
        return self.called["calls"][0]

    @property
    def target(self) -> str:
        """What a custom call calls, where it is one."""
        return self.find(r'custom_call_target="([^"]*)"')

    def find(self, pattern: str) -> str:
        """Returns the group of a pattern in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def users(self) -> list["Instruction"]:
        """Returns the instructions of the computation that read the result."""
        return self.computation.users[self]

    def makers(self) -> list["Instruction"]:
        """Returns what makes each array of the result, looked for inside fusions."""
        if self.opcode in VIEWS and self.operands:
            return self.operands[0].makers()
        if self.opcode in FUSIONS:
            return self.fused.root.makers()
        if self.opcode == "tuple":
            return [maker for operand in self.operands for maker in operand.makers()]
        return [self] * len(self.shapes)


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """The instructions of a computation by name, in the order of the text."""

    module: dict[str, "Computation"]
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction = dataclasses.field(init=False)

    @functools.cached_property
    def users(self) -> Mapping[Instruction, list[Instruction]]:
        """The users of each instruction."""
        users: defaultdict[Instruction, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.arguments))


class Module:
    """How often one run of a module runs each computation: by itself, or fused."""

    def __init__(self, entry: Computation):
        self._scheduled: Counter[Computation] = Counter()
        self._fused: Counter[Computation] = Counter()
        self._count(entry, 1, self._scheduled)

    def instructions(self, fused: bool = False) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction that is run by itself, and how often it is run."""
        for counts in (self._scheduled, self._fused)[: 1 + fused]:
            for computation, count in counts.items():
                for instruction in computation.instructions.values():
                    yield instruction, count

    def _count(
        self, computation: Computation, times: int, counts: Counter[Computation]
    ) -> None:
        """Counts a computation and all that it calls.

        A loop's condition is left out, and so is what a reduction, sort, scatter or
        collective applies to elements.
        """
        counts[computation] += times
        for instruction in computation.instructions.values():
            called, opcode = instruction.called, instruction.opcode
            if opcode == "while":
                self._count(called["body"][0], times * trips(instruction), counts)
            elif opcode == "conditional":  # only the longest branch counts
                branches = itertools.chain(*called.values())
                longest = max(branches, key=lambda branch: len(branch.instructions))
                self._count(longest, times, counts)
            elif opcode in ("call", "async-start"):
                for callee, *_ in called.values():
                    self._count(callee, times, counts)
            elif opcode in (*FUSIONS, "custom-call"):
                for callee, *_ in called.values():
                    self._count(callee, times, self._fused)


def parse(text: str) -> Module:
    """Parses the text of an HLO module.

    Raises:
      ValueError: if there is no entry computation, or the text does not tell how often
        a loop runs.
    """
    module: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if opened := _HEADER.match(line):
            current = module[opened[2]] = Computation(module)
            entry = current if opened[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, name, *parts = found.groups()
            instruction = Instruction(current, name, *parts)
            current.instructions[name] = instruction
            if root:
                current.root = instruction
    if entry is None:
        raise ValueError("no ENTRY computation in the text of the HLO module")
    return Module(entry)


def trips(loop: Instruction) -> int:
    """Returns how often the body of a while loop runs.

    Raises:
      ValueError: if the text does not tell.
    """
    if known := loop.find(r'known_trip_count"?[:=]\{"n":"(\d+)"'):
        return int(known)
    try:
        return _counted(loop)
    except (LookupError, ValueError) as error:
        unknown = f"the text does not tell how often the loop {loop.name} runs"
        raise ValueError(unknown) from error


def _counted(loop: Instruction) -> int:
    """Returns how often a loop runs that counts up from a constant to a constant.

    Its condition compares an element of the carried tuple with a limit.
    """
    carried, condition = loop.operands[0], loop.called["condition"][0].root

    def first(value: Instruction) -> int:
        """Returns what a value is before the first iteration."""
        if value.opcode == "get-tuple-element":
            return _integer(_origin(carried.operands[_place(value)]))
        return _integer(value)

    (test,) = condition.makers()
    counter, limit = (_origin(operand, condition) for operand in test.operands)
    span = first(limit) - first(counter)
    span += {"T": 0, "E": 1}[test.find(r"direction=L([TE])\b")]
    raised = _origin(loop.called["body"][0].root.operands[_place(counter)])
    added = raised.makers()[0]
    operands = map(_origin, added.operands if added.opcode == "add" else ())
    steps = [_integer(each) for each in operands if each.opcode == "constant"]
    return max(0, -(-span // (steps or [1])[0]))


def _origin(value: Instruction, fusion: Instruction | None = None) -> Instruction:
    """Follows copies, and a parameter of a fusion, back to what makes a value."""
    while value.opcode in _COPIES and value.operands:
        value = value.operands[0]
    if value.opcode == "parameter" and fusion is not None and fusion.operands:
        return _origin(fusion.operands[int(value.arguments)])
    return value


def _place(element: Instruction) -> int:
    return int(element.find(r"index=(\d+)"))


def _integer(value: Instruction) -> int:
    if value.opcode != "constant":
        raise ValueError(f"{value.name} is no constant")
    return int(value.arguments)
