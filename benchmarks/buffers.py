"""The largest arrays that a compiled step keeps, and the operations they come from.

XLA's assignment of buffers is not to be had for a described device. This lists what it
had to place, from the text of the module: arrays share memory where they do not live at
one time, so that the sum is more than the temporaries.
"""

import dataclasses

from benchmarks import traffic
from benchmarks.hlo_text import (
    CONTROL,
    FREE,
    FUSIONS,
    VIEWS,
    Computation,
    Instruction,
    Module,
    parse,
)

# The result is an array that is there already, or nothing.
_MAKES_NOTHING = (FREE - {"constant"}) | CONTROL | {"domain"}
_PASSES_ON = (*VIEWS, "copy", "broadcast", "transpose", "copy-done", "copy-start")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in main memory that an instruction makes.

    Attributes:
      bytes: with padding.
      shape: such as "f32[8,1024]".
      kind: of the instruction: its opcode, kind of fusion or target of a custom call.
      name: of the instruction.
      op_name: the JAX operation that it comes from, where XLA still knows it.
      filled_by: for an array that a loop fills slice by slice, such as the residuals
        of a scan: the JAX operation whose results the slices are.
      in_loop: whether it is made in a loop, anew at each turn.
      is_output: whether it is a result of the step, no temporary.
    """

    bytes: int
    shape: str
    kind: str
    name: str
    op_name: str
    filled_by: str
    in_loop: bool
    is_output: bool


def largest_buffers(text: str, n: int = 20) -> list[Buffer]:
    """Returns the largest arrays in main memory that the instructions make.

    Args:
      text: the module.
      n: how many.

    Returns:
      The buffers, the largest first.
    """
    module = parse(text)
    outputs = _outputs(module)
    buffers = []
    for computation, instruction, count in module.scheduled():
        opcode = instruction.opcode
        if opcode in _MAKES_NOTHING or opcode.endswith("-done"):
            continue
        if instruction.target == "ConcatBitcast":
            continue
        results = traffic.result_shapes(computation, instruction)
        in_place = _in_place(module, computation, instruction, len(results))
        for position, shape in enumerate(results):
            if shape.memory_space or in_place[position]:
                continue
            element = position if len(results) > 1 else None
            buffers.append(
                Buffer(
                    bytes=shape.padded_bytes,
                    shape=str(shape),
                    kind=instruction.kind,
                    name=instruction.name,
                    op_name=instruction.op_name,
                    filled_by=_filled_by(module, computation, instruction, element),
                    in_loop=count > 1,
                    is_output=instruction.name in outputs,
                )
            )
    return sorted(buffers, key=lambda buffer: -buffer.bytes)[:n]


def _outputs(module: Module) -> set[str]:
    """Returns the names of what makes the results of the module, views seen through."""
    entry = module.computations[module.entry]
    if entry.root is None:
        return set()
    names = set()
    found = entry.operands_of(entry.root) if entry.root.opcode == "tuple" else []
    for instruction in found or [entry.root]:
        while instruction.opcode in (*VIEWS, "get-tuple-element", "copy-done"):
            names.add(instruction.name)
            instruction = entry.operands_of(instruction)[0]
        if instruction.opcode != "while":
            names.add(instruction.name)
    return names


def _in_place(
    module: Module, computation: Computation, instruction: Instruction, results: int
) -> list[bool]:
    """Returns for each result whether it is an operand updated in place."""
    makers = module.makers(computation, instruction)
    if len(makers) != results:
        return [False] * results
    return [
        maker.opcode == "parameter" or traffic.updated_with(inner, maker) is not None
        for inner, maker in makers
    ]


def _filled_by(
    module: Module, computation: Computation, array: Instruction, element: int | None
) -> str:
    """Returns the operation that fills an array which a loop carries, or ""."""
    values = [array]
    if element is not None:
        users = computation.users[array.name]
        values = [u for u in users if u.index == element]
    for value in values:
        for carried in computation.users[value.name]:
            if carried.opcode != "tuple":
                continue
            for loop in computation.users[carried.name]:
                if loop.opcode == "while":
                    index = carried.operands.index(value.name)
                    return _slice_maker(module, loop, index)
    return ""


def _slice_maker(module: Module, loop: Instruction, index: int) -> str:
    """Returns the operation of the slices that a loop writes into a carried array."""
    body = module.computations[loop.called["body"][0]]
    if body.root is None or body.root.opcode != "tuple":
        return ""
    value = body.instructions[body.root.operands[index]]
    if value.opcode.endswith("-done"):
        value = body.operands_of(value)[0]
    makers = [(body, value)]
    if value.opcode == "get-tuple-element":
        made = body.operands_of(value)[0]
        makers = module.makers(body, made)[value.index : value.index + 1]
    for computation, maker in makers:
        for inner, updating in module.makers(computation, maker):
            update = traffic.updated_with(inner, updating)
            if update is not None:
                return _origin(module, body, inner, update) or updating.op_name
    return ""


def _origin(
    module: Module, body: Computation, inner: Computation, value: Instruction
) -> str:
    """Returns the operation that a value comes from, seen through fusions."""
    while value.opcode in _PASSES_ON and inner.operands_of(value):
        value = inner.operands_of(value)[0]
    if value.opcode in FUSIONS:
        computation, maker = module.makers(inner, value)[0]
        return _origin(module, body, computation, maker) or value.op_name
    if value.opcode == "parameter" and inner is not body:
        callers = (
            (owner, instruction)
            for owner in module.computations.values()
            for instruction in owner.instructions.values()
            if instruction.opcode in FUSIONS and module.fused(instruction) is inner
        )
        owner, fusion = next(callers, (None, None))
        if owner is not None and fusion is not None:
            operand = owner.operands_of(fusion)[int(value.operands[0])]
            return _origin(module, body, owner, operand) or operand.op_name
    return value.op_name
