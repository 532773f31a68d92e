"""Which values are stored for the backward pass, and which are computed again.

The dtypes are decided before, by `rule.py`. Results of matmuls and border values may be
stored. Equations between loops stand together under a single `jax.checkpoint`. Barriers
keep XLA from merging the forward pass and the backward pass.

These changes were measured and left out, each for the reason given:

- Round the gradient of a table: saves 8 % of a Llama's memory, which a policy key for
  `gather` saves as well.
- Round cotangents at borders, run scatter-adds in half precision, or store the operands
  of activations: each of these three changes saves less than 3 %, or is worse
  elsewhere.
- Choose the stored values by a minimum cut: saves 5 % of a ViT's memory, and needs
  scipy.
- Round the cotangent of a norm behind a swish. An EfficientNet on an H200 would read
  and write 1.10 of the bytes of the model that is cast by hand, and reads and writes
  1.25. But a U-Net would take 1.09 of the memory by hand, and takes 1.02, and the
  backward pass would round inside a region.
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

    # The platforms on which a barrier stands behind the result, outside of loops. There
    # is a barrier only if arithmetic reads the result, because XLA would store the
    # results of the arithmetic instead.
    barrier_platforms: tuple[str, ...]
    is_rounded: bool  # whether the forward pass must read the stored digits, too
    # Whether the result is stored in the body of a loop, too. A loop stacks the stored
    # values of its steps, so operands of matmuls are computed again in loops. Outside
    # of loops they are stored: to compute them again would take 0.70 of a U-Net's
    # memory on an H200, but 1.19 of a DiT's time.
    in_loops: bool


class Piece(NamedTuple):
    """Equations that are emitted together."""

    nodes: Sequence[Node]
    is_apart: bool  # a single equation, outside of `jax.checkpoint`
    ins: Sequence[Read] = ()  # reads of variables that the piece does not make
    outs: Sequence[Read] = ()  # reads by later pieces, and reads as results


class Memory(NamedTuple):
    """Which results of a program are stored, and which equations stand together."""

    stored: dict[Var, Stored]  # results that may be stored for the backward pass
    pieces: Sequence[Piece]  # in the order in which they are emitted
    relu_results: set[Var]  # results of relus from which the derivative can be computed
    maxima: set[Var]  # along axes; some platforms compute the maximum again


def memory_of(plan: Plan) -> Memory:
    """Returns the `Memory` of a program whose dtypes are planned."""
    relu_results = {
        v
        for node in plan.nodes
        if is_relu(node.eqn)
        for v in node.eqn.outvars
        if v in plan.border and v not in plan.flow.read_in_own_region
    }
    maxima = {
        v
        for node in plan.nodes
        if node.eqn.primitive.name in ("reduce_max", "reduce_min")
        for v in node.eqn.outvars
        if is_float32(v)
    }
    return Memory(
        _stored(plan), _pieces(plan.nodes, plan.results), relu_results, maxima
    )


def _stored(plan: Plan) -> dict[Var, Stored]:
    """Returns the results of matmuls and the border values that may be stored."""
    border = plan.border
    read_by_later = plan.read_by_later
    by_arithmetic, ill = _arithmetic_operands(plan.nodes)
    stored: dict[Var, Stored] = {}
    for node in plan.nodes:
        is_low = node.choice.role in HALF_ROLES
        is_matmul = node.eqn.primitive.name == "dot_general"
        for v in node.eqn.outvars:
            if (not is_low and v not in border) or _is_lookup(node, plan):
                continue
            has_barrier = v in plan.flow.for_matmuls and v in by_arithmetic
            platforms = NOWHERE
            if has_barrier:
                on_tpu = is_matmul or v in plan.residual_sums
                platforms = ON_GPU_AND_TPU if on_tpu else ON_GPU
            is_read = v in border and v in read_by_later
            stored[v] = Stored(
                platforms,
                is_rounded=v in ill or is_read,
                # A border value that only matmuls read is computed again there.
                in_loops=v not in border or is_read,
            )
    return stored


def _is_lookup(node: Node, plan: Plan) -> bool:
    """Whether an equation looks up more rows than a computed array has.

    The rows are computed again, because the smaller array is stored instead: a graph
    attention with 100,000 edges between 20,000 nodes takes 577 MB on an H200, and took
    722 MB with stored rows. Few rows of a large array, such as the masked tokens of a
    text, are stored. Rows of a table among the arguments are stored, too, because the
    table would be cast again.
    """
    if node.eqn.primitive.name != "gather" or not repeats(node.eqn):
        return False
    sizes = [v.aval.size for v in (node.eqn.invars[0], node.eqn.outvars[0])]
    if not all(isinstance(size, int) for size in sizes) or sizes[0] >= sizes[1]:
        return False
    return plan.origins.read(node.eqn.invars[0]).after_matmul


def _arithmetic_operands(nodes: Sequence[Node]) -> tuple[set[Var], set[Var]]:
    """Returns the operands of arithmetic, and the sources of ill-conditioned results.

    The second set has the variables from which arithmetic leads to an ill-conditioned
    equation, such as an exponential.
    """
    by_arithmetic: set[Var] = set()
    ill: set[Var] = set()
    for node in reversed(nodes):
        eqn = node.eqn
        role = node.choice.role
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
    """Returns the equations in pieces, with the variables that each reads and gives."""
    pieces = _split_in_pieces(nodes)
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


def _split_in_pieces(nodes: Sequence[Node]) -> list[Piece]:
    """Returns the equations in pieces, in the order in which the pieces are emitted.

    Equations that stand apart, such as loops, separate the pieces, and a single
    `jax.checkpoint` holds each piece. A scanned GPT on a v5e takes 5,620 MB, and took
    8,920 MB with a checkpoint for each region. The depth of an equation is the largest
    number of equations that stand apart on a path to the equation. All equations of a
    depth that do not stand apart are a piece.
    """
    depth: dict[Var, int] = defaultdict(int)
    together: dict[int, list[Node]] = defaultdict(list)
    apart: dict[int, list[Node]] = defaultdict(list)
    floor = 0  # the least depth of the next effect: effects stay in order
    for node in nodes:
        eqn = node.eqn
        own = max((depth[v] for v in variables(eqn.invars)), default=0)
        stands_apart = (
            node.has_matmul or node.choice.role is Kind.CALLED or is_apart(eqn)
        )
        if stands_apart and eqn.effects:
            own = floor = max(own, floor)
        group = apart if stands_apart else together
        group[own].append(node)
        depth.update(dict.fromkeys(eqn.outvars, own + stands_apart))
    pieces: list[Piece] = []
    for own in sorted({*together, *apart}):
        if together[own]:
            pieces.append(Piece(together[own], False))
        pieces += [Piece([node], True) for node in apart[own]]
    return pieces
