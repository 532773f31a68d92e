"""What the backward pass reads from memory, and what it computes again.

Nothing here decides a dtype (`rule.py` does): results of matmuls and border values may
be stored, equations between loops stand together under one `jax.checkpoint`, and
barriers keep XLA from merging the two passes.

Measured and left out, because they buy less than 3 % or cost elsewhere: the gradient of
a table rounded (0.92 of a Llama's memory, as a key for `gather` does), cotangents
rounded at borders, scatter-adds in half, operands of activations stored, a minimum cut
between what is stored and what is computed again (5 % of a ViT's memory, with scipy),
and the cotangent of a norm behind a swish rounded (an EfficientNet on an H200 reads and
writes 1.10 of the bytes by hand, 1.25 so, but a U-Net takes 1.09 of the memory by hand,
1.02 so, and the backward pass of a region would round inside).
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flax_amp._compat import Eqn, Var
from flax_amp._jaxprs import variables
from flax_amp._rewriter.flow import HALF_ROLES, Node, Read, Reads, is_apart
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    has,
    inside,
    is_float32,
    is_relu,
    repeats,
)
from flax_amp._rewriter.rule import Plan
from flax_amp._rewriter.stored import NOWHERE, ON_GPU, ON_GPU_AND_TPU


class Stored(NamedTuple):
    """How a result is stored for the backward pass."""

    # Where a barrier stands behind it, in straight code: only if arithmetic reads it,
    # because XLA would store the results of that instead.
    platforms: tuple[str, ...]
    is_rounded: bool  # whether the forward pass has to read the digits that are stored
    # Whether it is stored in the body of a loop, too. A loop stacks what it stores, so
    # operands of matmuls are computed again there. In straight code that takes 0.70 of
    # a U-Net's memory on an H200, but 1.19 of a DiT's time.
    in_loops: bool


class Piece(NamedTuple):
    """Equations that are emitted together."""

    nodes: Sequence[Node]
    is_apart: bool  # whether it is one equation that no `jax.checkpoint` holds
    ins: Sequence[Read] = ()  # of variables of other pieces
    outs: Sequence[Read] = ()  # by other pieces, or results


class Memory(NamedTuple):
    """What is stored of a program, and what is emitted together."""

    stored: dict[Var, Stored]  # what the backward pass may store
    pieces: Sequence[Piece]  # in the order in which they are emitted
    relus: set[Var]  # whose derivative can read what is stored
    maxima: set[Var]  # along axes, which some platforms compute again


def memory_of(plan: Plan) -> Memory:
    """Returns what is stored of a program whose dtypes are planned."""
    relus = {
        v
        for node in plan.nodes
        if is_relu(node.eqn)
        for v in node.eqn.outvars
        if v in plan.border and v not in plan.flow.read_inside
    }
    maxima = {
        v
        for node in plan.nodes
        if node.eqn.primitive.name in ("reduce_max", "reduce_min")
        for v in node.eqn.outvars
        if is_float32(v)
    }
    return Memory(_stored(plan), _pieces(plan.nodes, plan.results), relus, maxima)


def _stored(plan: Plan) -> dict[Var, Stored]:
    """Returns what the backward pass may store: results of matmuls, border values."""
    border, read_by_later = plan.border, plan.read_by_later
    by_arithmetic, ill = _readings(plan.nodes)
    stored: dict[Var, Stored] = {}
    for node in plan.nodes:
        is_low = node.choice.role in HALF_ROLES
        is_matmul = node.eqn.primitive.name == "dot_general"
        for v in node.eqn.outvars:
            if (not is_low and v not in border) or _is_lookup(node, plan):
                continue
            has_barrier = v in plan.flow.for_matmuls and v in by_arithmetic
            on_tpu = is_matmul or v in plan.residual_sums
            platforms = ON_GPU_AND_TPU if on_tpu else ON_GPU
            is_read = v in border and v in read_by_later
            stored[v] = Stored(
                platforms if has_barrier else NOWHERE,
                is_rounded=v in ill or is_read,
                # What nothing but matmuls reads is computed again.
                in_loops=v not in border or is_read,
            )
    return stored


def _is_lookup(node: Node, plan: Plan) -> bool:
    """Whether an equation looks up more rows than a computed array has.

    The rows are computed again, because the smaller array is stored instead: a graph
    attention with 100,000 edges between 20,000 nodes took 722 MB on an H200, and takes
    577 MB so. Few rows of a large array, such as the masked tokens of a text, are
    stored. So are rows of a table among the arguments, which would be cast again.
    """
    if node.eqn.primitive.name != "gather" or not repeats(node.eqn):
        return False
    sizes = [v.aval.size for v in (node.eqn.invars[0], node.eqn.outvars[0])]
    if not all(isinstance(size, int) for size in sizes) or sizes[0] >= sizes[1]:
        return False
    return plan.origins.read(node.eqn.invars[0]).after_matmul


def _readings(nodes: Sequence[Node]) -> tuple[set[Var], set[Var]]:
    """Returns what arithmetic reads, and what ill-conditioned arithmetic comes from.

    The second are the variables from which arithmetic leads to an exponential, say.
    """
    by_arithmetic: set[Var] = set()
    ill: set[Var] = set()
    for node in reversed(nodes):
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

    Equations that stand apart, such as loops, separate the groups, and one
    `jax.checkpoint` holds each group. With a checkpoint for each region, a scanned GPT
    on a v5e took 8,920 MB, and takes 5,620 so. The depth of a group is the number of
    equations on the way to it that stand apart.
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
