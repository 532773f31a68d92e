"""The flow of a program: its regions, and the variables that lead to a matmul.

    h = dot x w        level 0, a matmul; its result is half
    a = tanh h         level 1 --+
    s = sum a          level 1   |  a region
    l = div s 8        level 1 --+  the loss reads float32: nothing behind is a matmul
    y = dot a v        level 1, a matmul; it reads `a` rounded, which is a border value
    z = mul y a        level 2: another region, which reads `a` rounded

The level of an equation is the number of matmuls on the longest path to the equation.
Loops, branches and calls without a matmul are arithmetic of their region, so their
operands are not rounded. Rounded where they entered a scan over 2,048 steps, decays
`exp(-dt)` became 1, and the loss was 32 % off. A call with matmuls is one step from
level to level. The region before the call goes on inside the call, and the region of
the call's last level goes on behind the call.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._jaxprs import has_options, variables
from flax_amp._rewriter.flatten import Program, flatten
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    bodies,
    has,
    inside,
    is_float32,
    kind_of,
    traits_of,
)
from flax_amp._rewriter.roles import Choice, Chooser, Context
from flax_amp.policy import use_compute_precision_behind_matmuls

Flags = tuple[bool, ...]

# Equations of these roles read rounded numbers, and give half precision.
HALF_ROLES = (Kind.MATMUL, Kind.HALF)
_CALLS = ("jit", "closed_call", "eval_jaxpr")
# Equations with bodies that do not stand apart if no matmul is inside. Loops and
# checkpoints stand apart: a `jax.checkpoint` around them would run a loop again in the
# backward pass, or lose the policy of a checkpoint.
_MAY_BE_CHECKPOINTED = ("custom_jvp_call", "cond", *_CALLS)


class ResultUses(NamedTuple):
    """How the results of a jaxpr are used outside of the jaxpr."""

    for_matmuls: Flags  # which results lead to a matmul
    # Which of these results no arithmetic of their own region reads.
    read_only_rounded: Flags
    # Which results are results of the program or states of loops, unchanged or moved.
    # A sum without this flag may be half (line 5 of the rule), also if arithmetic reads
    # the sum first: the stream from the `checkpoint` of a layer to the next layer.
    for_results: Flags
    states: Flags  # which results are the states of a loop

    @classmethod
    def in_float32(cls, count: int, are_states: bool = False) -> "ResultUses":
        """Returns the uses of a body whose results all stay float32."""
        none = (False,) * count
        return cls(none, none, (True,) * count, (are_states,) * count)


class Read(NamedTuple):
    """A variable, and whether its value before the border's rounding is read."""

    v: Var
    before_border: bool


Reads = list[Read | None]  # of an equation or of results; `None` stands for a literal


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation of a program, with the findings of the sweeps over the program."""

    eqn: Eqn
    choice: Choice
    level: int  # the number of matmuls on the longest path to the equation
    # Whether a body has a matmul, or another equation that leaves its own dtypes.
    has_matmul: bool
    reads: Reads = dataclasses.field(default_factory=list)
    uses: ResultUses | None = None  # `None` for an equation without `has_matmul`
    way: Any = None  # a `Way` of `rule.py`: how the equation runs

    @property
    def in_region(self) -> bool:
        """Whether the equation is arithmetic of a region, and so adds no level."""
        return not (self.choice.role in HALF_ROLES or self.has_matmul)


class Levels(NamedTuple):
    """The equations of a program with their levels, and the region of each variable."""

    nodes: Sequence[Node]
    region: dict[Var, int]


class Flow(NamedTuple):
    """The findings of two sweeps over a program, first forward and then backward."""

    program: Program
    nodes: Sequence[Node]
    for_matmuls: set[Var]  # the variables that lead to a matmul
    # The variables that arithmetic of their own region reads.
    read_in_own_region: set[Var]
    # Results, states of loops, and the variables from which moves lead to them.
    for_results: set[Var]


def cached(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method of `FlowAnalysis` compute each result once."""

    @functools.wraps(method)
    def lookup(self: "FlowAnalysis", *args: Any) -> Any:
        key = (method.__name__, *args)
        if key not in self.cache:
            self.cache[key] = method(self, *args)
        return self.cache[key]

    return lookup


class FlowAnalysis:
    """Sweeps over jaxprs; over each jaxpr once for the same uses of its results."""

    def __init__(self, choose: Chooser):
        self.choose = choose
        self.cache: dict[Any, Any] = {}

    def has_matmul(self, eqn: Eqn, choice: Choice) -> bool:
        """Whether an equation in a body does not run in its own dtypes.

        Two kinds of rules count as such bodies without a look inside, because this
        package traces them: a rule that closes over a variable, and the backward rule
        in the tangents of a `custom_vjp`.
        """
        if "captured" in eqn.params or eqn.primitive.name == "custom_lin":
            return True
        if choice.role is not Kind.STRUCTURED:
            return False
        return any(
            self._holds_matmul(_compat.open_jaxpr(body)[0], choice.body_context)
            for body in jaxprs_in_params(eqn.params)  # the condition of a loop, too
        )

    @cached
    def _holds_matmul(self, body: Jaxpr, context: Context) -> bool:
        changed = (*HALF_ROLES, Kind.CALLED)
        pairs = ((eqn, self.choose(eqn, context)) for eqn in body.eqns)
        return any(
            choice.role in changed or self.has_matmul(eqn, choice)
            for eqn, choice in pairs
        )

    @cached
    def program(self, closed: Jaxpr, context: Context) -> Program:
        """Returns a jaxpr in which small calls are open."""

        def opened(eqn: Eqn) -> Program | None:
            if not self._may_open(eqn, context):
                return None
            return self.program(bodies(eqn)[0], context)

        return flatten(closed, opened)

    def _may_open(self, eqn: Eqn, context: Context) -> bool:
        if eqn.primitive.name not in _CALLS:
            return False
        choice = self.choose(eqn, context)
        if choice.role is not Kind.STRUCTURED:
            return False
        if eqn.primitive.name != "jit":  # the remaining calls have no options
            return True
        return not (self.has_matmul(eqn, choice) or is_apart(eqn))

    @cached
    def flow(self, closed: Jaxpr, context: Context, uses: ResultUses) -> Flow:
        """Sweeps over a jaxpr, forward and then backward.

        The second sweep finds the variables that lead to a matmul, and the variables
        that their own region reads.
        """
        program = self.program(closed, context)
        found, region = self.levels(closed, context)
        for_matmuls = set(flagged(program.outvars, uses.for_matmuls))
        unrounded = [not is_rounded for is_rounded in uses.read_only_rounded]
        read_in_own_region = set(flagged(program.outvars, unrounded))
        for_results = set(flagged(program.outvars, uses.for_results))
        nodes = []
        for node in reversed(found):
            invars = node.eqn.invars
            level = node.level
            to_matmuls, before_border, read, of_results = self._reading(
                node, for_matmuls, read_in_own_region, for_results
            )
            # An equation reads values of its own region unrounded.
            reads: Reads = []
            for v, is_before in zip(invars, before_border, strict=True):
                if isinstance(v, Literal):
                    reads.append(None)
                else:
                    reads.append(Read(v, is_before and region[v] == level))
            nodes.append(dataclasses.replace(node, reads=reads, uses=of_results))
            for_matmuls.update(flagged(invars, to_matmuls))
            own = (v for v in flagged(invars, read) if region[v] == level)
            read_in_own_region.update(own)
            # A body without a matmul may only move its operand, or be a `relu`, so its
            # operands count as moved to the result.
            role = node.choice.role
            in_region = node.in_region
            passes = in_region and role in (Kind.MOVE, Kind.STRUCTURED)
            if passes and not for_results.isdisjoint(node.eqn.outvars):
                for_results.update(v for v in variables(invars) if region[v] == level)
        return Flow(program, nodes[::-1], for_matmuls, read_in_own_region, for_results)

    def _reading(
        self,
        node: Node,
        for_matmuls: set[Var],
        read_in_own_region: set[Var],
        for_results: set[Var],
    ) -> tuple[Flags, Flags, Flags, ResultUses | None]:
        """Returns how an equation reads its operands, by the readers of its results.

        The first three parts are flags of the operands: which operands lead to a
        matmul, which operands are read as they were before a border, and which operands
        arithmetic of their region reads. The last part has the uses of the results, for
        an equation with a matmul inside.
        """
        eqn = node.eqn
        outvars = node.eqn.outvars
        count = len(node.eqn.invars)
        if node.has_matmul:
            read_only_rounded = tuple(
                v in for_matmuls and v not in read_in_own_region for v in outvars
            )
            of_results = ResultUses(
                among(outvars, for_matmuls),
                read_only_rounded,
                among(outvars, for_results),
                states=(False,) * len(outvars),
            )
            rewriting = traits_of(eqn).rewriting
            context = node.choice.body_context
            to_matmuls, read = rewriting.operand_uses(self, eqn, context, of_results)
            return to_matmuls, read, read, of_results
        leads = not node.in_region or not for_matmuls.isdisjoint(outvars)
        # The operand of a move is read as its result is.
        passes = _is_move(node) and read_in_own_region.isdisjoint(outvars)
        is_read = node.in_region and not passes
        before_border = (node.in_region,) * count
        return (leads,) * count, before_border, (is_read,) * count, None

    @cached
    def levels(self, closed: Jaxpr, context: Context) -> Levels:
        """Sweeps forward: the level of each equation, the region of each variable."""
        program = self.program(closed, context)
        region: dict[Var, int] = dict.fromkeys((*program.consts, *program.invars), 0)
        nodes = []
        for eqn in program.eqns:
            choice = self.choose(eqn, context)
            level = max((region[v] for v in variables(eqn.invars)), default=0)
            if level == 0 and choice.role is Kind.HALF and _is_behind_matmuls(choice):
                reason = "no matmul comes before it here"
                choice = choice._replace(role=kind_of(eqn), reason=reason)
            node = Node(eqn, choice, level, self.has_matmul(eqn, choice))
            nodes.append(node)
            region |= dict.fromkeys(eqn.outvars, level + (not node.in_region))
        return Levels(nodes, region)


def _is_behind_matmuls(choice: Choice) -> bool:
    """Whether a key asks for half precision only behind matmuls."""
    return choice.decision.function is use_compute_precision_behind_matmuls


def is_apart(eqn: Eqn) -> bool:
    """Whether an equation without matmuls is emitted outside of `jax.checkpoint`."""
    return any(map(_is_apart_itself, (eqn, *inside(eqn))))


def _is_apart_itself(eqn: Eqn) -> bool:
    """Whether an equation stands apart by itself, without regard to its bodies."""
    is_structured = kind_of(eqn) is Kind.STRUCTURED
    if is_structured and eqn.primitive.name not in _MAY_BE_CHECKPOINTED:
        return True
    if eqn.primitive.name == "jit" and has_options(eqn):
        return True
    if eqn.effects or kind_of(eqn) is Kind.OTHER:
        return True
    # A policy of `jax.checkpoint` cannot store complex numbers or 8-bit floats.
    dtypes = (str(getattr(v.aval, "dtype", "")) for v in eqn.outvars)
    return any(d.startswith(("complex", "float8", "float6", "float4")) for d in dtypes)


def _is_move(node: Node) -> bool:
    """Whether an equation only moves numbers, and so is read as its result is read."""
    is_move = node.choice.role is Kind.MOVE and not has(node.eqn, Trait.RANKS)
    return is_move and any(map(is_float32, node.eqn.outvars))


def among(atoms: Sequence[Atom], variables: Container[Var]) -> Flags:
    """Returns which atoms are among the variables; a literal never is."""
    return tuple(not isinstance(v, Literal) and v in variables for v in atoms)


def flagged(atoms: Sequence[Atom], flags: Sequence[bool]) -> list[Var]:
    """Returns the variables that have a flag."""
    pairs = zip(atoms, flags, strict=True)
    return [v for v, flag in pairs if flag and not isinstance(v, Literal)]
