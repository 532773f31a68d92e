"""Which values are rounded, and which are stored: the rule of `amp` on one jaxpr.

The sweeps of `flow.py` find which values leave their region for a matmul. The plan
says which of them are rounded there, what the backward pass reads from memory, and
which equations one `jax.checkpoint` holds.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import Literal

from flax_amp._compat import Atom, Eqn, Jaxpr, Var, variables
from flax_amp._rewriter.flatten import Program
from flax_amp._rewriter.flow import (
    HALF_ROLES,
    Flow,
    FlowAnalysis,
    Node,
    Outside,
    Read,
    Reads,
    cached,
    flagged,
    is_apart,
)
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    has,
    inside,
    is_float32,
    is_layout,
    kind_of,
    literal,
)
from flax_amp._rewriter.stored import NOWHERE, ON_GPU, ON_GPU_AND_TPU

# Whose results are never rounded where they leave a region.
_NEVER_ROUNDED = (Kind.ORIGINAL, Kind.CALLED, Kind.OTHER)


class Stored(NamedTuple):
    """How a result is stored for the backward pass."""

    # Where a barrier stands behind it, in straight code: only if arithmetic reads it,
    # because XLA would store the results of that instead.
    platforms: tuple[str, ...]
    is_rounded: bool  # whether the forward pass has to read the digits that are stored
    in_loops: bool  # whether it is stored in the body of a loop, too


class Piece(NamedTuple):
    """Equations that are emitted together."""

    nodes: Sequence[Node]
    is_apart: bool  # whether it is one equation that no `jax.checkpoint` holds
    ins: Sequence[Read] = ()  # what they read from outside
    outs: Sequence[Read] = ()  # what is read of them outside


class Plan(NamedTuple):
    """What `emit.py` does with a jaxpr."""

    flow: Flow
    why_float32: dict[Var, str]  # and not rounded at a border; "" for what is rounded
    unrounded_inside: set[Var]  # rounded, but read unrounded by their own region
    arguments: set[Var]  # or constants of the whole program, reshaped or transposed
    after_matmul: set[Var]  # what comes after a matmul
    numbers: dict[Var, float]  # the variables all of whose elements are one number
    stored: dict[Var, Stored]  # what the backward pass may store
    results: Reads
    pieces: Sequence[Piece]  # in the order in which they are emitted

    def is_border(self, v: Var) -> bool:
        """Whether a variable is rounded where it leaves its region."""
        return self.why_float32.get(v) == ""


class Planner(FlowAnalysis):
    """Plans jaxprs; each is planned once for what is known from outside."""

    @cached
    def plan(self, closed: Jaxpr, outside: Outside) -> Plan:
        """Returns the plan of a jaxpr."""
        flow = self.flow(closed, outside.context, outside.uses)
        arguments, numbers = _arguments(flow.program, outside)
        after_matmul = _after_matmul(flow, outside)
        leaving, read_by_later = _read_outside(flow, outside)
        why_float32 = _why_float32(flow, leaving, after_matmul)
        border = {v for v, why in why_float32.items() if not why}
        residual_sums = border & _residual_sums(flow, read_by_later, after_matmul)
        # Who gets a result, such as the next step of a loop, gets it as it was.
        unrounded_results = [not is_half for is_half in outside.uses.rounded]
        residual_sums -= set(flagged(flow.program.outvars, unrounded_results))
        residual_sums -= flow.for_results
        unrounded_inside = border - residual_sums
        nodes, results = _reads(flow, unrounded_results, unrounded_inside)
        stored = _stored(flow, border, read_by_later, residual_sums)
        pieces = _pieces(nodes, results)
        return Plan(
            *(flow, why_float32, unrounded_inside, arguments, after_matmul, numbers),
            *(stored, results, pieces),
        )


def _read_outside(flow: Flow, outside: Outside) -> tuple[set[Var], set[Var]]:
    """Returns what is read as it leaves its region: by anything, and by arithmetic."""
    leaving = set(flagged(flow.program.outvars, outside.uses.rounded))
    by_later: set[Var] = set()
    for node in flow.nodes:
        read = [read.v for read in node.reads if read and not read.is_unrounded]
        leaving.update(read)
        by_later.update(read if node.in_region else [])
    return leaving, by_later


def _reads(
    flow: Flow, unrounded_results: Sequence[bool], unrounded_inside: set[Var]
) -> tuple[list[Node], Reads]:
    """Returns equations and results that read unrounded only what is so inside."""

    def settled(read: Read | None) -> Read | None:
        return read and Read(read.v, read.is_unrounded and read.v in unrounded_inside)

    nodes = [
        dataclasses.replace(node, reads=list(map(settled, node.reads)))
        for node in flow.nodes
    ]
    results = [
        None if isinstance(v, Literal) else settled(Read(v, is_unrounded))
        for v, is_unrounded in zip(flow.program.outvars, unrounded_results, strict=True)
    ]
    return nodes, results


def _why_float32(
    flow: Flow, leaving: set[Var], after_matmul: set[Var]
) -> dict[Var, str]:
    """Says of each float32 variable why it is not rounded at a border, "" if it is.

    `leaving` is what others than its own region read.
    """
    why: dict[Var, str] = {}
    sums, steps = _sums(flow), small_steps(flow.program)
    for node in flow.nodes:
        role = node.choice.role
        for v in filter(is_float32, node.eqn.outvars):
            if not v.aval.shape:
                why[v] = "a scalar"
            elif v not in flow.for_matmuls:
                why[v] = "no matmul reads it later"
            elif v not in after_matmul:
                why[v] = "no matmul comes before it here"
            elif v in sums:
                why[v] = "a sum or a maximum"
            elif v in steps:
                why[v] = "it adds up small steps"
            elif v not in leaving:
                why[v] = "only its own region reads it"
            elif role in _NEVER_ROUNDED:
                why[v] = role.value
            elif role not in HALF_ROLES:
                why[v] = ""
    return why


def _sums(flow: Flow) -> set[Var]:
    """Returns the sums and maxima, moved at most."""
    sums: set[Var] = set()
    maximum = Trait.STORED | Trait.ILL_CONDITIONED
    for node in flow.nodes:
        eqn, role = node.eqn, node.choice.role
        is_sum = role is Kind.SUM or (role is Kind.MOVE and has(eqn, maximum))
        if is_sum or (is_layout(eqn) and sums.issuperset(variables(eqn.invars))):
            sums.update(eqn.outvars)
    return sums


def _residual_sums(
    flow: Flow, read_by_later: set[Var], after_matmul: set[Var]
) -> set[Var]:
    """Returns the sums of two computed arrays that a later region reads.

    Their own region reads them rounded, too. It is a residual stream, `x + f(x)`: the
    norm behind it would be computed again from both terms.
    """
    found: set[Var] = set()
    for eqn in flow.program.eqns:
        terms = [v for v in variables(eqn.invars) if v in after_matmul]
        if eqn.primitive.name in ("add", "add_any") and len(terms) == 2:
            found.update(read_by_later.intersection(eqn.outvars))
    return found


def _arguments(program: Program, outside: Outside) -> tuple[set[Var], dict[Var, float]]:
    """Returns the variables that are moved arguments, and those that are one number."""
    arguments = set(flagged(program.invars, outside.arguments)) | program.consts.keys()
    numbers: dict[Var, float] = {}
    for eqn in program.eqns:
        operands = variables(eqn.invars)
        if is_layout(eqn) and operands and arguments.issuperset(operands):
            arguments.update(eqn.outvars)
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            x = eqn.invars[0]
            number = literal(x) if isinstance(x, Literal) else numbers.get(x)
            if number is not None and is_float32(eqn.outvars[0]):
                numbers[eqn.outvars[0]] = number
    return arguments, numbers


def _after_matmul(flow: Flow, outside: Outside) -> set[Var]:
    """Returns the variables that come after a matmul."""
    after_matmul = set(flagged(flow.program.invars, outside.after_matmul))
    for node in flow.nodes:
        operands = variables(node.eqn.invars)
        if not node.in_region or not after_matmul.isdisjoint(operands):
            after_matmul.update(node.eqn.outvars)
    return after_matmul


def small_steps(program: Program) -> set[Var]:
    """Returns the sums of small steps, the steps, and what they are added to.

    Of `y = y + 1e-3 * f(y)`, a rounding of `y` to half precision would lose the step.
    """
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    found: set[Var] = set()
    for eqn in program.eqns:
        if eqn.primitive.name not in ("add", "sub"):
            continue
        operands = variables(eqn.invars)
        # A mean that is subtracted is no step: `x - sum(x, keepdims=True) / 64`.
        shape = eqn.outvars[0].aval.shape
        if any(_is_step(v, made) and v.aval.shape == shape for v in operands):
            found.update(eqn.outvars, operands)
    return found


def _is_step(v: Var, made: Mapping[Var, Eqn]) -> bool:
    """Whether a value is another one times a small literal, and no mean."""
    eqn = made.get(v)
    if eqn is None or eqn.primitive.name not in ("mul", "div"):
        return False
    if eqn.primitive.name == "div":
        divisor = literal(eqn.invars[1])
        is_large = divisor is not None and abs(divisor) > 32
        return is_large and not _is_sum(eqn.invars[0], made)
    factors = filter(None, map(literal, eqn.invars))
    return any(abs(factor) < 1 / 32 for factor in factors)


def _is_sum(atom: Atom, made: Mapping[Var, Eqn]) -> bool:
    """Whether a value is a sum, possibly reshaped or broadcast."""
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    while eqn and is_layout(eqn) and not isinstance(eqn.invars[0], Literal):
        eqn = made.get(eqn.invars[0])
    return eqn is not None and kind_of(eqn) is Kind.SUM


def _stored(
    flow: Flow, border: set[Var], read_by_later: set[Var], residual_sums: set[Var]
) -> dict[Var, Stored]:
    """Returns what the backward pass may store: results of matmuls, border values."""
    by_arithmetic, ill = _readings(flow)
    stored: dict[Var, Stored] = {}
    for node in flow.nodes:
        is_low = node.choice.role in HALF_ROLES
        is_matmul = node.eqn.primitive.name == "dot_general"
        for v in node.eqn.outvars:
            if not is_low and v not in border:
                continue
            has_barrier = v in flow.for_matmuls and v in by_arithmetic
            on_tpu = is_matmul or v in residual_sums
            platforms = ON_GPU_AND_TPU if on_tpu else ON_GPU
            is_read = v in border and v in read_by_later
            stored[v] = Stored(
                platforms if has_barrier else NOWHERE,
                is_rounded=v in ill or is_read,
                # What nothing but matmuls reads is computed again.
                in_loops=v not in border or is_read,
            )
    return stored


def _readings(flow: Flow) -> tuple[set[Var], set[Var]]:
    """Returns what arithmetic reads, and what ill-conditioned arithmetic comes from.

    The second are the variables from which arithmetic leads to an exponential, say.
    """
    by_arithmetic: set[Var] = set()
    ill: set[Var] = set()
    for node in reversed(flow.nodes):
        eqn, role = node.eqn, node.choice.role
        operands = variables(eqn.invars)
        is_move = node.in_region and role is Kind.MOVE
        if role not in HALF_ROLES and not is_move:
            by_arithmetic.update(operands)
        if node.in_region and (_is_ill(eqn) or not ill.isdisjoint(eqn.outvars)):
            ill.update(operands)
    return by_arithmetic, ill


def _is_ill(eqn: Eqn) -> bool:
    return any(has(x, Trait.ILL_CONDITIONED) for x in (eqn, *inside(eqn)))


def _pieces(nodes: Sequence[Node], results: Reads) -> list[Piece]:
    """Returns the equations in groups, with what each group reads and gives."""
    pieces = _groups(nodes)
    maker = {
        v: n
        for n, piece in enumerate(pieces)
        for node in piece.nodes
        for v in node.eqn.outvars
    }
    ins: list[list[Read]] = []
    for n, piece in enumerate(pieces):
        found = dict.fromkeys(x for node in piece.nodes for x in node.reads if x)
        ins.append([read for read in found if maker.get(read.v) != n])
    outs: dict[int | None, list[Read]] = defaultdict(list)
    for read in dict.fromkeys(itertools.chain(filter(None, results), *ins)):
        outs[maker.get(read.v)].append(read)
    return [p._replace(ins=ins[n], outs=outs[n]) for n, p in enumerate(pieces)]


def _groups(nodes: Sequence[Node]) -> list[Piece]:
    """Returns the equations in groups, as they are emitted.

    Between two equations that stand apart, such as loops, all others are one group, and
    what one `jax.checkpoint` holds. The depth of a group is the number of equations on
    the way to it that stand apart.
    """
    depth: dict[Var, int] = defaultdict(int)
    together: dict[int, list[Node]] = defaultdict(list)
    apart: dict[int, list[Node]] = defaultdict(list)
    floor = 0  # effects stay in order
    for node in nodes:
        eqn = node.eqn
        own = max((depth[v] for v in variables(eqn.invars)), default=0)
        stands_apart = (
            node.has_matmul or node.choice.role is Kind.CALLED or is_apart(eqn)
        )
        if stands_apart and eqn.effects:
            own = floor = max(own, floor)
        (apart if stands_apart else together)[own].append(node)
        depth.update(dict.fromkeys(eqn.outvars, own + stands_apart))
    groups: list[Piece] = []
    for own in sorted({*together, *apart}):
        groups += [Piece(together[own], False)] if together[own] else []
        groups += [Piece([node], True) for node in apart[own]]
    return groups
