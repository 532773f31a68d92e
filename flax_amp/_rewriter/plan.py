"""Which values are rounded, and which are stored: the rule of `amp` on one jaxpr.

Between two matmuls everything is float32; what is carried to the next one is half. A
*region* is the arithmetic between products. It computes in float32, as written. What
leaves a region towards another product is rounded, once, at the *border*:

    h = dot x w        level 0, a product; its result is half
    a = tanh h         level 1 --+
    s = sum a          level 1   |  one region
    l = div s 8        level 1 --+  the loss reads float32: nothing behind is a product
    y = dot a v        level 1, a product; it reads `a` rounded, which is a border value
    z = mul y a        level 2: another region, which reads `a` rounded

The level of an equation is the number of products on the longest path to it. Loops,
branches and calls without a product are arithmetic like any other. A call with products
is one step from level to level; the region before it goes on inside, and that of its
last level goes on behind it.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var, variables
from flax_amp._rewriter.flatten import Flattener, Program
from flax_amp._rewriter.primitives import Kind, Trait, bodies, has, kind_of, literal
from flax_amp._rewriter.roles import Choice, Chooser, Context, Role
from flax_amp._rewriter.walk import walk

Flags = tuple[bool, ...]

# These read rounded numbers, and give half precision.
HALF_ROLES = (Role.PRODUCT, Role.HALF)
# Whose results are never rounded where they leave a region.
_NEVER_ROUNDED = (
    *HALF_ROLES,
    *(Role.SUM, Role.ORIGINAL, Role.CALLED, Role.PRECISE, Role.OTHER),
)
# Calls without options, and all that may be opened.
_CALLS, _PLAIN_CALLS = (
    ("jit", "closed_call", "eval_jaxpr"),
    ("closed_call", "eval_jaxpr"),
)


def is_float32(v: Atom) -> bool:
    """Whether a variable is a float32 one in the user's program."""
    return getattr(v.aval, "dtype", None) == jnp.float32


def is_same_dtype(eqn: Eqn) -> bool:
    """Whether an equation casts from float32 to float32, such as to a strong type."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return is_float32(eqn.invars[0]) and is_float32(eqn.outvars[0])


def is_layout(eqn: Eqn) -> bool:
    """Whether an equation gives its operands in another shape or order."""
    return has(eqn, Trait.LAYOUT) or is_same_dtype(eqn)


class Outs(NamedTuple):
    """What happens outside of a jaxpr to its results.

    Attributes:
      leads: which ones a product reads later.
      halves: which ones nothing else reads before, so that they leave it rounded.
    """

    leads: Flags
    halves: Flags


class Ask(NamedTuple):
    """What is known of a jaxpr from outside.

    Attributes:
      context: where it stands.
      outs: what happens to its results.
      weights: which inputs are arguments of the whole program, moved at most.
      computed: which inputs come after a product. In a loop these are the streams
        alone: nothing is rounded that was computed from the state of a recurrence.
    """

    context: Context
    outs: Outs
    weights: Flags
    computed: Flags

    @classmethod
    def of_states(cls, context: Context, outs: Outs, weights: Flags) -> "Ask":
        """Returns what is asked of a body whose inputs are states, never rounded."""
        return cls(context, outs, weights, (False,) * len(weights))

    def without_first(self) -> "Ask":
        """Returns this without the first input, the index of a branch."""
        return Ask(self.context, self.outs, self.weights[1:], self.computed[1:])


class Read(NamedTuple):
    """A variable, and whether it is read as it was before the border."""

    v: Var
    is_exact: bool


class Stored(NamedTuple):
    """How a result is stored for the backward pass.

    Attributes:
      has_barrier: whether arithmetic reads it, whose results XLA would store instead.
      also_on_tpu: whether it is the result of a matmul, or a residual sum.
      is_rounded: whether the forward pass has to read the digits that are stored.
    """

    has_barrier: bool
    also_on_tpu: bool
    is_rounded: bool


class Piece(NamedTuple):
    """Equations that are emitted together.

    Attributes:
      indices: of the equations.
      ins: what they read from outside.
      outs: what is read of them outside.
      is_apart: whether it is one equation that no `jax.checkpoint` holds.
    """

    indices: Sequence[int]
    ins: Sequence[Read]
    outs: Sequence[Read]
    is_apart: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """What two sweeps over a program find, one forward and one backward.

    Attributes:
      program: the program.
      choices: of each equation.
      levels: of each equation.
      region: the region that each variable belongs to, by its level.
      has_product: of each equation, whether a body of it has a product.
      reads_exact: of each equation, which operands it reads as they were before a
        border, if they are of its own region.
      outs: of each equation with a product in its body, what happens to its results.
      leads: the variables that a product reads later.
      exact: the variables that arithmetic of their own region reads.
    """

    program: Program
    choices: Sequence[Choice]
    levels: Sequence[int]
    region: dict[Var, int]
    has_product: Sequence[bool]
    reads_exact: Sequence[Flags]
    outs: Sequence[Outs | None]
    leads: set[Var]
    exact: set[Var]

    def reads(self, i: int) -> list[Read | None]:
        """Returns how an equation reads its operands; `None` stands for a literal."""
        level, eqn = self.levels[i], self.program.eqns[i]
        return [
            None
            if isinstance(v, Literal)
            else Read(v, is_exact and self.region[v] == level)
            for v, is_exact in zip(eqn.invars, self.reads_exact[i], strict=True)
        ]

    def is_light(self, i: int) -> bool:
        """Whether an equation belongs to a region."""
        return not (self.choices[i].role in HALF_ROLES or self.has_product[i])


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What `emit.py` does with a jaxpr.

    Attributes:
      flow: what the sweeps found.
      border: the variables that are rounded where they leave their region.
      twofold: those that arithmetic of their own region reads as they were before.
      later: the variables that arithmetic of another region reads.
      weights: the variables that are arguments of the whole program, moved at most.
      computed: the variables that come after a product.
      numbers: the variables all of whose elements are one number.
      stored: the variables that the backward pass may store.
      results: how the results are read.
      pieces: the equations, in the order in which they are emitted.
      dead: of each equation, what nothing reads after it.
    """

    flow: Flow
    border: set[Var]
    twofold: set[Var]
    later: set[Var]
    weights: set[Var]
    computed: set[Var]
    numbers: dict[Var, float]
    stored: dict[Var, Stored]
    results: Sequence[Read | None]
    pieces: Sequence[Piece] = ()
    dead: dict[int, list[Read]] = dataclasses.field(default_factory=dict)

    def reads(self, i: int) -> list[Read | None]:
        """Returns how an equation reads its operands; `None` stands for a literal."""
        return [
            read and Read(read.v, read.is_exact and read.v in self.twofold)
            for read in self.flow.reads(i)
        ]


class Planner:
    """Plans jaxprs; each is planned once for what is asked of it.

    Args:
      choose: says what an equation is.
    """

    def __init__(self, choose: Chooser):
        self.choose = choose
        self._cache: dict[Any, Any] = {}

    def plan(self, closed: Jaxpr, ask: Ask) -> Plan:
        """Returns the plan of a jaxpr for what is asked of it."""
        key = ("plan", closed, ask)
        if key not in self._cache:
            self._cache[key] = _plan(self.flow(closed, ask.context, ask.outs), ask)
        return self._cache[key]

    def flow(self, closed: Jaxpr, context: Context, outs: Outs) -> Flow:
        """Sweeps over a jaxpr, for what happens to its results."""
        key = ("flow", closed, context, outs)
        if key not in self._cache:
            self._cache[key] = self._flow(self.program(closed, context), context, outs)
        return self._cache[key]

    def has_product(self, eqn: Eqn, choice: Choice) -> bool:
        """Whether something in a body does not run in its own dtypes."""
        if choice.role is not Role.STRUCTURED:
            return False
        condition = eqn.params.get("cond_jaxpr")
        inside = [*bodies(eqn), *([] if condition is None else [condition])]
        return any(self._holds_product(body, choice.inside) for body in inside)

    def _holds_product(self, body: Jaxpr, context: Context) -> bool:
        body = _compat.open_jaxpr(body)[0]
        key = ("has_product", body, context)
        if key not in self._cache:
            changed = (*HALF_ROLES, Role.CALLED)
            pairs = ((eqn, self.choose(eqn, context)) for eqn in body.eqns)
            self._cache[key] = any(
                choice.role in changed or self.has_product(eqn, choice)
                for eqn, choice in pairs
            )
        return self._cache[key]

    def program(self, closed: Jaxpr, context: Context) -> Program:
        """Returns a jaxpr in which small calls are open."""
        key = ("flattener", context)
        if key not in self._cache:
            self._cache[key] = Flattener(lambda eqn: self._may_open(eqn, context))
        return self._cache[key](closed)

    def _may_open(self, eqn: Eqn, context: Context) -> bool:
        name = eqn.primitive.name
        if name not in _CALLS:
            return False
        choice = self.choose(eqn, context)
        if choice.role is not Role.STRUCTURED:
            return False
        if name in _PLAIN_CALLS:
            return True
        if _compat.has_options(eqn) or self.has_product(eqn, choice):
            return False
        body = _compat.open_jaxpr(bodies(eqn)[0])[0]
        key = ("may_open", body, choice.inside)
        if key not in self._cache:
            self._cache[key] = all(
                self._may_open(inner, choice.inside)
                if inner.primitive.name in _CALLS
                else not is_apart(inner)
                for inner in body.eqns
            )
        return self._cache[key]

    def _flow(self, program: Program, context: Context, outs: Outs) -> Flow:
        choices = [self.choose(eqn, context) for eqn in program.eqns]
        eqns = list(zip(program.eqns, choices, strict=True))
        inside = [self.has_product(eqn, choice) for eqn, choice in eqns]
        ends = [
            choice.role in HALF_ROLES or has_product
            for choice, has_product in zip(choices, inside, strict=True)
        ]
        levels, region = _levels(program, ends)
        leads = set(_flagged(program.outvars, outs.leads))
        exact = set(_flagged(program.outvars, [not half for half in outs.halves]))
        reads_exact: list[Flags] = [()] * len(eqns)
        asked: list[Outs | None] = [None] * len(eqns)
        for i in reversed(range(len(eqns))):
            eqn, choice = eqns[i]
            count = len(eqn.invars)
            if inside[i]:
                led = tuple(v in leads for v in eqn.outvars)
                halves = tuple(v in leads and v not in exact for v in eqn.outvars)
                asked[i] = of_results = Outs(led, halves)
                in_leads, needs = self._of_operands(eqn, choice, of_results)
                reads_exact[i] = needs
            elif choice.role in HALF_ROLES:
                in_leads, needs = (True,) * count, (False,) * count
                reads_exact[i] = needs
            else:
                in_leads = (any(v in leads for v in eqn.outvars),) * count
                # A move reads what it is asked for.
                is_read = not _is_move(eqn, choice) or any(
                    v in exact for v in eqn.outvars
                )
                needs, reads_exact[i] = (is_read,) * count, (True,) * count
            leads.update(_flagged(eqn.invars, in_leads))
            read = _flagged(eqn.invars, needs)
            exact.update(v for v in read if region[v] == levels[i])
        return Flow(
            program, choices, levels, region, inside, reads_exact, asked, leads, exact
        )

    def _of_operands(self, eqn: Eqn, choice: Choice, outs: Outs) -> tuple[Flags, Flags]:
        """Returns which operands lead to a product, and which arithmetic reads first.

        Args:
          eqn: an equation with products in its bodies.
          choice: what it is.
          outs: what happens to its results.
        """
        count = len(eqn.invars)
        if eqn.primitive.name in ("while", "custom_linear_solve"):
            return (True,) * count, (True,) * count
        leads, needs = [False] * count, [False] * count
        if eqn.primitive.name == "scan":  # the next step reads what this one gives
            _, carried = _compat.scan_counts(eqn)
            all_lead = (True,) * carried + outs.leads[carried:]
            outs = outs._replace(leads=all_lead)
        for body in bodies(eqn):
            flow = self.flow(body, choice.inside, outs)
            # The index of a branch comes before the operands of the body.
            first = count - len(flow.program.invars)
            for i, v in enumerate(flow.program.invars, start=first):
                leads[i] |= v in flow.leads
                needs[i] |= v in flow.exact
        return tuple(leads), tuple(needs)


def is_apart(eqn: Eqn) -> bool:
    """Whether no `jax.checkpoint` holds an equation that has no product inside."""
    if eqn.effects or has(eqn, Trait.APART) or kind_of(eqn) is Kind.OTHER:
        return True
    # A policy of `jax.checkpoint` cannot store complex numbers or 8-bit floats.
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if any(jnp.issubdtype(d, jnp.complexfloating) or _is_tiny(d) for d in dtypes if d):
        return True
    is_structured = kind_of(eqn) is Kind.STRUCTURED
    return is_structured and eqn.primitive.name not in ("custom_jvp_call", "cond")


def _is_tiny(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2


def _is_move(eqn: Eqn, choice: Choice) -> bool:
    """Whether an equation only moves numbers, so that its readers count."""
    is_move = choice.role is Role.MOVE and not has(eqn, Trait.RANKS)
    return is_move and any(map(is_float32, eqn.outvars))


def _flagged(atoms: Sequence[Atom], flags: Sequence[bool]) -> list[Var]:
    pairs = zip(atoms, flags, strict=True)
    return [v for v, flag in pairs if flag and not isinstance(v, Literal)]


def _levels(program: Program, ends: Sequence[bool]) -> tuple[list[int], dict[Var, int]]:
    """Returns the level of each equation, and the region of each variable."""
    region: dict[Var, int] = dict.fromkeys((*program.consts, *program.invars), 0)
    levels = []
    for eqn, ends_region in zip(program.eqns, ends, strict=True):
        level = max((region[v] for v in variables(eqn.invars)), default=0)
        levels.append(level)
        region |= dict.fromkeys(eqn.outvars, level + ends_region)
    return levels, region


# --- the plan ------------------------------------------------------------------------


def _plan(flow: Flow, ask: Ask) -> Plan:
    """Returns the plan of a program."""
    program = flow.program
    weights, numbers = _arguments(program, ask)
    computed = _computed(flow, ask)
    leaving = set(_flagged(program.outvars, ask.outs.halves))
    later: set[Var] = set()
    for i in range(len(program.eqns)):
        for read in filter(None, flow.reads(i)):
            if not read.is_exact:
                leaving.add(read.v)
                if flow.is_light(i):
                    later.add(read.v)
    border = _border(flow, leaving & flow.leads & computed)
    residuals = border & _residuals(flow, later, computed)
    # Who gets a result, such as the next step of a loop, gets it as it was.
    halves = ask.outs.halves
    residuals -= set(_flagged(program.outvars, [not half for half in halves]))
    twofold = border - residuals
    results = [
        None if isinstance(v, Literal) else Read(v, v in twofold and not half)
        for v, half in zip(program.outvars, halves, strict=True)
    ]
    stored = _stored(flow, border, later, residuals)
    plan = Plan(
        flow, border, twofold, later, weights, computed, numbers, stored, results
    )
    pieces = _pieces(plan)
    return dataclasses.replace(plan, pieces=pieces, dead=_dead(plan, pieces))


def _border(flow: Flow, leaving: set[Var]) -> set[Var]:
    """Returns which of the variables that leave for a product are rounded there.

    Sums, maxima and scalars are not.
    """
    border: set[Var] = set()
    never: set[Var] = set()
    for eqn, choice in zip(flow.program.eqns, flow.choices, strict=True):
        is_maximum = has(eqn, Trait.STORED) and has(eqn, Trait.ILL_CONDITIONED)
        if choice.role is Role.SUM or is_maximum or _is_reshaped(eqn, never):
            never.update(eqn.outvars)
        elif choice.role not in _NEVER_ROUNDED:
            shaped = (v for v in eqn.outvars if is_float32(v) and v.aval.shape)
            border.update(v for v in shaped if v in leaving)
    return border - _small_steps(flow.program)


def _is_reshaped(eqn: Eqn, which: set[Var]) -> bool:
    """Whether an equation gives some variables in another shape.

    Such as `sum(..., keepdims=True)`, which is a sum.
    """
    if not has(eqn, Trait.LAYOUT) or not which.issuperset(variables(eqn.invars)):
        return False
    sizes = {math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)}
    return len(sizes) == 1


def _residuals(flow: Flow, later: set[Var], computed: set[Var]) -> set[Var]:
    """Returns the sums of two computed arrays that a later region reads.

    Their own region reads them rounded, too. It is a residual stream, `x + f(x)`: the
    norm behind it would be computed again from both terms.
    """
    found: set[Var] = set()
    for eqn in flow.program.eqns:
        terms = [v for v in variables(eqn.invars) if v in computed]
        if eqn.primitive.name in ("add", "add_any") and len(terms) == 2:
            found.update(later.intersection(eqn.outvars))
    return found


def _arguments(program: Program, ask: Ask) -> tuple[set[Var], dict[Var, float]]:
    """Returns the variables that are moved arguments, and those that are one number."""
    weights = set(_flagged(program.invars, ask.weights)) | program.consts.keys()
    numbers: dict[Var, float] = {}
    for eqn in program.eqns:
        operands = variables(eqn.invars)
        if is_layout(eqn) and operands and weights.issuperset(operands):
            weights.update(eqn.outvars)
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            x = eqn.invars[0]
            number = literal(x) if isinstance(x, Literal) else numbers.get(x)
            if number is not None and is_float32(eqn.outvars[0]):
                numbers[eqn.outvars[0]] = number
    return weights, numbers


def _computed(flow: Flow, ask: Ask) -> set[Var]:
    """Returns the variables that come after a product."""
    computed = set(_flagged(flow.program.invars, ask.computed))
    for i, eqn in enumerate(flow.program.eqns):
        if not flow.is_light(i) or not computed.isdisjoint(variables(eqn.invars)):
            computed.update(eqn.outvars)
    return computed


def _small_steps(program: Program) -> set[Var]:
    """Returns the sums of unrolled small steps, and what they add to.

    Of `y = y + 1e-3 * f(y)`, a rounding of `y` to half precision would lose the step.
    """
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}

    def is_step(v: Var) -> bool:
        if v not in made or made[v].primitive.name not in ("mul", "div"):
            return False
        is_factor = made[v].primitive.name == "mul"
        numbers = filter(None, map(literal, made[v].invars))
        return any((abs(n) if is_factor else 1 / abs(n)) < 1 / 32 for n in numbers)

    found: set[Var] = set()
    for eqn in reversed(program.eqns):
        operands = variables(eqn.invars)
        if eqn.primitive.name in ("add", "sub") and (
            eqn.outvars[0] in found or any(map(is_step, operands))
        ):
            found.update(eqn.outvars, operands)
    return found


def _stored(
    flow: Flow, border: set[Var], later: set[Var], residuals: set[Var]
) -> dict[Var, Stored]:
    """Returns what the backward pass may store: results of products, border values."""
    eqns = flow.program.eqns
    by_arithmetic: set[Var] = set()
    ill: set[Var] = set()  # what ill-conditioned arithmetic reads in its region
    for i in reversed(range(len(eqns))):
        eqn, role = eqns[i], flow.choices[i].role
        operands = variables(eqn.invars)
        if role not in HALF_ROLES and not (flow.is_light(i) and role is Role.MOVE):
            by_arithmetic.update(operands)
        if flow.is_light(i) and (_is_ill(eqn) or not ill.isdisjoint(eqn.outvars)):
            ill.update(operands)
    stored = {}
    for i, eqn in enumerate(eqns):
        is_product = flow.choices[i].role in HALF_ROLES
        for v in eqn.outvars:
            if is_product or v in border:
                has_barrier = v in flow.leads and v in by_arithmetic
                stored[v] = Stored(
                    has_barrier,
                    eqn.primitive.name == "dot_general" or v in residuals,
                    v in ill or (v in border and v in later),
                )
    return stored


def _is_ill(eqn: Eqn) -> bool:
    inside = (visit.eqn for body in bodies(eqn) for visit in walk(body))
    return any(has(inner, Trait.ILL_CONDITIONED) for inner in (eqn, *inside))


def _pieces(plan: Plan) -> list[Piece]:
    """Returns the equations in groups, as they are emitted.

    Between two equations that stand apart, such as loops, all others are one group, and
    what one `jax.checkpoint` holds.
    """
    flow, eqns = plan.flow, plan.flow.program.eqns
    level: dict[Var, int] = defaultdict(int)
    together: dict[int, list[int]] = defaultdict(list)
    apart: dict[int, list[int]] = defaultdict(list)
    floor = 0  # effects stay in order
    for i, eqn in enumerate(eqns):
        own = max((level[v] for v in variables(eqn.invars)), default=0)
        role = flow.choices[i].role
        if flow.has_product[i] or role is Role.CALLED or is_apart(eqn):
            if eqn.effects:
                own = floor = max(own, floor)
            apart[own].append(i)
            level.update(dict.fromkeys(eqn.outvars, own + 1))
        else:
            together[own].append(i)
            level.update(dict.fromkeys(eqn.outvars, own))
    groups: list[tuple[list[int], bool]] = []
    for own in sorted({*together, *apart}):
        groups += [(together[own], False)] if together[own] else []
        groups += [([i], True) for i in apart[own]]
    # Who reads what: the number of the group, and one for the results.
    made = {
        v: n
        for n, (group, _) in enumerate(groups)
        for i in group
        for v in eqns[i].outvars
    }
    ins: list[dict[Read, None]] = [{} for _ in groups]
    outs: list[dict[Read, None]] = [{} for _ in groups]
    for read in filter(None, plan.results):
        if read.v in made:
            outs[made[read.v]][read] = None
    for n, (group, _) in enumerate(groups):
        for i in group:
            for read in filter(None, plan.reads(i)):
                maker = made.get(read.v)
                if maker != n:
                    ins[n][read] = None
                    if maker is not None:
                        outs[maker][read] = None
    return [
        Piece(group, list(ins[n]), list(outs[n]), is_alone)
        for n, (group, is_alone) in enumerate(groups)
    ]


def _dead(plan: Plan, pieces: Sequence[Piece]) -> dict[int, list[Read]]:
    """Returns after which equation a variable is read no more.

    Outside of `jit` an array takes memory for as long as it is held.
    """
    last: dict[Read, int] = {}
    for i in (i for piece in pieces for i in piece.indices):
        last |= dict.fromkeys(filter(None, plan.reads(i)), i)
    dead: dict[int, list[Read]] = defaultdict(list)
    kept = set(plan.results)
    for read, i in last.items():
        if read not in kept:
            dead[i].append(read)
    return dead
