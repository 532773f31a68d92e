"""Turns of a loop of an HLO module, where only the loop's condition tells them."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.hlo_text import Computation, Instruction, Module


def inferred_trips(
    module: Module, computation: Computation, loop: Instruction
) -> int | None:
    """Returns the turns of a loop that counts up from a constant to a constant."""
    try:
        condition = module.computations[loop.called["condition"][0]]
        body = module.computations[loop.called["body"][0]]
    except KeyError:
        return None
    init = computation.instructions.get(loop.operands[0])
    test = _comparison(module, condition)
    if init is None or init.opcode != "tuple" or test is None:
        return None
    left, right, direction = test
    if not isinstance(left, _Element) or direction not in ("LT", "LE"):
        return None
    start = _constant(computation, init.operands[left.index])
    if isinstance(right, _Element):
        stop = _constant(computation, init.operands[right.index])
    else:
        stop = right
    step = _step(module, body, left.index)
    if start is None or stop is None or step < 1:
        return None
    distance = stop - start + (direction == "LE")
    return max(0, -(-distance // step))


@dataclasses.dataclass(frozen=True)
class _Element:
    """An element of the tuple that a loop carries."""

    index: int


def _comparison(
    module: Module, condition: Computation
) -> tuple[_Element | int | None, _Element | int | None, str] | None:
    """Returns both sides and the direction of a condition's comparison."""
    root = condition.root
    if root is None:
        return None
    inner, arguments = condition, None
    if root.opcode == "fusion":
        inner = module.computations[root.called["calls"][0]]
        arguments = condition.operands_of(root)
        root = inner.root
    if root is None or root.opcode != "compare":
        return None
    direction = re.search(r"direction=(\w+)", root.attributes)
    sides = []
    for side in inner.operands_of(root):
        side, owner = _through(inner, side), inner
        if arguments is not None and side.opcode == "parameter":
            side, owner = arguments[int(side.operands[0])], condition
        sides.append(_element_or_constant(owner, side))
    if len(sides) != 2 or not direction:
        return None
    return sides[0], sides[1], direction[1]


def _element_or_constant(
    computation: Computation, instruction: Instruction
) -> _Element | int | None:
    instruction = _through(computation, instruction)
    if instruction.opcode == "get-tuple-element":
        return _Element(instruction.index)
    return _constant(computation, instruction.name)


def _step(module: Module, body: Computation, index: int) -> int:
    """Returns by how much a body raises its counter; 1 where it is not plain."""
    if body.root is None or body.root.opcode != "tuple":
        return 1
    raised = body.instructions.get(body.root.operands[index])
    if raised is None:
        return 1
    raised, owner = _through(body, raised), body
    if raised.opcode == "fusion":
        owner = module.computations[raised.called["calls"][0]]
        raised = owner.root or raised
    if raised.opcode != "add":
        return 1
    steps = [_constant(owner, name) for name in raised.operands]
    return next((step for step in steps if step is not None), 1)


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    instruction = _through(computation, instruction)
    if instruction.opcode != "constant":
        return None
    found = re.fullmatch(r"-?\d+", instruction.operands[0])
    return int(found[0]) if found else None


def _through(computation: Computation, instruction: Instruction) -> Instruction:
    """Follows copies and the like to where a value comes from."""
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-done"):
        sources = computation.operands_of(instruction)
        if not sources:
            break
        instruction = sources[0]
        if instruction.opcode == "copy-start":
            instruction = computation.operands_of(instruction)[0]
    return instruction
