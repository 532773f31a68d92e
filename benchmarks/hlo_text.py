"""Reads the text of an optimised HLO module: computations, calls and loop trips.

The text is what `jax.stages.Compiled.as_text` gives for a TPU, a GPU or a CPU. An
instruction runs as often as the loops around it turn. The text tells how often a loop
turns either outright (`known_trip_count` on GPU and CPU) or by its condition (TPU).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{\s*$")
_LHS = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"n":"(\d+)"')
_TILE = re.compile(r"T\(([\d,*]+)\)")

FUSIONS = ("fusion", "fusion-start")
VIEWS = ("bitcast", "reshape")
# These neither compute nor move anything.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "opt-barrier partition-id replica-id".split()
)
# These run other computations and cost nothing by themselves.
CONTROL = frozenset("while conditional call async-start async-update".split())


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a result; `layout` is such as "1,0:T(8,128)"."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size without padding; the name of every numeric dtype tells its bits."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-self.elements * (int(bits[1]) if bits else _BITS[self.dtype]) // 8)

    @functools.cached_property
    def padded_bytes(self) -> int:
        """Size in memory: a TPU pads the minor dimensions to whole tiles."""
        tile = _TILE.search(self.layout)
        order = [int(i) for i in re.findall(r"\d+", self.layout.split(":")[0])]
        if not tile or len(order) != len(self.dims):
            return self.bytes
        dims = [self.dims[i] for i in order]  # the minor one first
        sizes = [1 if n == "*" else int(n) for n in reversed(tile[1].split(","))]
        dims += [1] * (len(sizes) - len(dims))
        padded = [-(-n // size) * size for n, size in zip(dims, sizes, strict=False)]
        padded += dims[len(sizes) :]
        return Shape(self.dtype, tuple(padded)).bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    The operands of a parameter or constant are its literal; `result` is the shape of
    the result as text, and `attributes` is all that follows the operands.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result; tuples are flattened."""
        return parse_shapes(self.result)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that the instruction calls, by attribute."""
        found = _CALLED.findall(self.attributes)
        return {key: tuple(re.findall(r"[\w.\-]+", names)) for key, names in found}

    @property
    def target(self) -> str:
        """What a custom call calls, where it is one."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""


_NOTHING = Instruction("", "", "", (), "")


@dataclasses.dataclass
class Computation:
    """A named list of instructions, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction = _NOTHING

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

    def source(self, instruction: Instruction) -> Instruction:
        """Follows copies and the like back to where a value comes from."""
        copies = ("copy", "bitcast", "convert", "copy-done", "copy-start")
        while instruction.opcode in copies and self.operands_of(instruction):
            instruction = self.operands_of(instruction)[0]
        return instruction

    def integer(self, name: str) -> int | None:
        """Returns the value of an instruction that is a constant integer."""
        found = self.source(self.instructions[name])
        is_integer = found.opcode == "constant" and found.operands[0].isdigit()
        return int(found.operands[0]) if is_integer else None


Run = tuple[Computation, Instruction, float]


@dataclasses.dataclass
class Module:
    """A parsed module; `entry` names the computation that runs first."""

    computations: dict[str, Computation]
    entry: str

    def fused(self, fusion: Instruction) -> Computation:
        """Returns the computation that a fusion stands for."""
        return self.computations[fusion.called["calls"][0]]

    def makers(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Computation, Instruction]]:
        """Returns what makes each array of a result, looked for inside fusions."""
        while instruction.opcode in VIEWS and computation.operands_of(instruction):
            instruction = computation.operands_of(instruction)[0]
        if instruction.opcode in FUSIONS:
            inner = self.fused(instruction)
            return self.makers(inner, inner.root)
        if instruction.opcode == "tuple":
            operands = computation.operands_of(instruction)
            return [m for o in operands for m in self.makers(computation, o)]
        return [(computation, instruction)] * len(instruction.shapes)

    def instructions(self, fused: bool = False) -> Iterator[Run]:
        """Yields every instruction that is run by itself, and how often it is run."""
        for runs in self.runs[: 1 + fused]:
            for name, count in runs.items():
                computation = self.computations[name]
                for instruction in computation.instructions.values():
                    yield computation, instruction, count

    @property
    def unknown_loops(self) -> list[str]:
        """Names of the loops that count as one turn, because the text tells nothing."""
        return [
            instruction.name
            for computation, instruction, _ in self.instructions()
            if instruction.opcode == "while"
            and self.trips(computation, instruction) is None
        ]

    @functools.cached_property
    def runs(self) -> tuple[dict[str, float], dict[str, float]]:
        """How often each computation runs: the scheduled ones, then the fused ones."""
        scheduled: dict[str, float] = {}
        fused: dict[str, float] = {}

        def visit(name: str, count: float, into: dict[str, float]) -> None:
            if name not in self.computations:
                return
            into[name] = into.get(name, 0.0) + count
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                for callee, times, inside in self._callees(computation, instruction):
                    visit(callee, count * times, fused if inside else into)

        visit(self.entry, 1.0, scheduled)
        return scheduled, fused

    def _callees(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[str, float, bool]]:
        """Yields the computations that an instruction runs: name, times, fused or not.

        A loop's condition is left out, and so is what a reduction, sort, scatter or
        collective applies to elements.
        """
        called, opcode = instruction.called, instruction.opcode
        if opcode == "while":
            turns = self.trips(computation, instruction)
            yield called["body"][0], 1 if turns is None else turns, False
        elif opcode == "conditional":  # only the longest branch counts
            branches = [name for names in called.values() for name in names]
            sizes = {n: len(self.computations[n].instructions) for n in branches}
            yield max(sizes, key=sizes.__getitem__), 1, False
        elif opcode in ("call", "async-start", *FUSIONS, "custom-call"):
            for names in called.values():
                yield names[0], 1, opcode not in ("call", "async-start")

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns how often a while loop turns; `None` where the text does not tell.

        Without a known count, a loop is read that counts up from a constant to a
        constant: its condition compares an element of the carried tuple with a limit.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        init = computation.instructions.get(loop.operands[0], _NOTHING)
        condition = self.computations[loop.called["condition"][0]]
        body = self.computations[loop.called["body"][0]]
        where, test, arguments = self._opened(condition, condition.root)
        direction = re.search(r"direction=L([TE])\b", test.attributes)
        if init.opcode != "tuple" or test.opcode != "compare" or not direction:
            return None
        sides = []
        for operand in where.operands_of(test):
            side, owner = where.source(operand), where
            if arguments and side.opcode == "parameter":
                argument = arguments[int(side.operands[0])]
                side, owner = condition.source(argument), condition
            element = re.search(r"index=(\d+)", side.attributes)
            if element:
                index = int(element[1])
                sides.append((computation.integer(init.operands[index]), index))
            else:
                sides.append((owner.integer(side.name), -1))
        (start, counter), (stop, _) = sides
        if counter < 0 or start is None or stop is None:
            return None
        raised = body.source(body.instructions[body.root.operands[counter]])
        where, added, _ = self._opened(body, raised)
        steps = [where.integer(n) for n in added.operands if added.opcode == "add"]
        step = next((n for n in steps if n), 1)
        return max(0, -(-(stop - start + (direction[1] == "E")) // step))

    def _opened(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[Computation, Instruction, list[Instruction]]:
        """Returns the root of a fusion, where it is, and the fusion's arguments."""
        if instruction.opcode != "fusion":
            return computation, instruction, []
        inner = self.fused(instruction)
        return inner, inner.root, computation.operands_of(instruction)


@functools.lru_cache(maxsize=4)
def parse(text: str) -> Module:
    """Parses the text of an HLO module."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            if opened := _HEADER.match(line):
                current = computations.setdefault(opened[2], Computation(opened[2]))
                entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            _add(current, line)
    if not entry:
        raise ValueError("no ENTRY computation in the text of the HLO module")
    return Module(computations, entry)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a shape such as "(f32[2,3]{1,0}, bf16[])"."""
    found = _LEAF.findall(_COMMENT.sub("", text))
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in found
    )


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
        names = [operand.split()[-1].lstrip("%") for operand in _split(inside)]
    instruction = Instruction(name, opcode, result, tuple(names), call[closing:])
    computation.instructions[name] = instruction
    if root:
        computation.root = instruction


def _split(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(f"{text},"):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [part for part in parts if part]


def _closing(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)
