"""The rule of `amp`: in which dtype each variable of a program is, and why.

Between two matmuls everything is float32; what is carried to the next one is half.

1. Matmuls read half precision and give half precision              `_way_of_matmul`
2. A region computes in float32, and nothing is rounded inside       `Way.FLOAT32`
3. What leaves a region towards another matmul is rounded once       `_form`
4. Sums, scalars, arguments and states are never rounded             `_why_float32`
5. Sums of halves and biases, and moves, stay half                   `_stays_half`
6. Keys of the policy decide first                                   `roles.py`

The plan of a program is made before anything is emitted: the *form* of each variable,
with the reason, and the *way* in which each equation runs. `emit.py` reads the plan and
asserts it, `debug/` shows it. Where a result is stored is no part of it: `memory.py`.

A rule for each value by its readers was tried before (8,000 lines): nobody could
predict a dtype, and behind a call `log(1 - gate)` was infinite beside a matmul that
reads the gate. The errors of the hard losses are 1.00 of those of casting matmuls only,
and were 1.00 to 1.14.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _jaxprs, _source
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._jaxprs import variables
from flax_amp._rewriter.casts import cast_number
from flax_amp._rewriter.flatten import Program
from flax_amp._rewriter.flow import (
    HALF_ROLES,
    Flags,
    Flow,
    Node,
    Read,
    Reads,
    ResultUses,
    cached,
    flagged,
)
from flax_amp._rewriter.origins import Origin, OriginAnalysis, Origins
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    has,
    is_float32,
    is_same_dtype,
    literal,
    repeats,
    traits_of,
)
from flax_amp._rewriter.roles import Context, call_precision_function
from flax_amp.policy import use_float32_result, use_fp8

# Whose results are never rounded where they leave a region.
_NEVER_ROUNDED = (Kind.ORIGINAL, Kind.CALLED, Kind.OTHER)


class Form(NamedTuple):
    """In which dtypes a float32 variable of the user's program is there."""

    is_half: bool
    # Whether its own region reads it in float32, as it was before it was rounded.
    is_both: bool = False
    reason: str = ""  # why it is float32, or rounded; empty if it was made half


class Way(enum.Enum):
    """How an equation runs."""

    HALF = "reads half precision, and gives half precision"
    FLOAT32_RESULT = "a matmul of halves that gives its float32 sum"
    SPREAD = "a broadcast to half precision, whose derivative adds up in float32"
    ROUNDED = "in float32, then rounded, so that its derivative adds up in float32"
    FLOAT32 = "in float32"
    CALLED = "as a user's precision function says"
    BODIES = "its bodies are planned"


class Outside(NamedTuple):
    """What is known of a jaxpr from outside: its signature."""

    context: Context
    uses: ResultUses
    origins: tuple[Origin, ...]  # of its inputs
    halves: Flags  # which inputs are half
    # Which results are gradients that keep the float32 sums of their matmuls.
    gradients: Flags = ()

    @classmethod
    def in_float32(
        cls, context: Context, results: int, origins: Sequence[Origin], halves: Flags
    ) -> "Outside":
        """Returns the signature of a body whose results all stay float32."""
        uses = ResultUses.in_float32(results)
        return cls(context, uses, tuple(origins), halves)

    def without(self, count: int) -> "Outside":
        """Returns the signature without the first inputs."""
        origins, halves = self.origins[count:], self.halves[count:]
        return self._replace(origins=origins, halves=halves)


class Plan(NamedTuple):
    """The dtypes of a program."""

    flow: Flow
    nodes: Sequence[Node]  # with the way of each equation, and how it reads
    results: Reads
    origins: Origins
    numbers: dict[Var, float]  # the variables all of whose elements are one number
    forms: dict[Var, Form]  # of the float32 variables
    border: set[Var]  # the variables that are rounded where they leave their region
    read_by_later: set[Var]  # the variables that arithmetic of later regions reads
    residual_sums: set[Var]  # of the border, those that are read rounded everywhere

    def reads_half(self, read: Read | None) -> bool:
        """Whether an operand is read in half precision."""
        return _is_half(self.forms, read)

    def readings(self, nodes: Sequence[Node]) -> list[Read]:
        """Returns each read of these equations; a region casts a half up once."""
        found: list[Read] = []
        cast_up: dict[tuple[Read, int], Read] = {}
        for node in nodes:
            reads = [read for read in node.reads if read is not None]
            if node.way in (Way.FLOAT32, Way.SPREAD, Way.ROUNDED):
                cast_up.update(((read, node.level), read) for read in reads)
            else:
                found += reads
        return [*found, *cast_up.values()]

    @property
    def result_halves(self) -> Flags:
        """Which results are half."""
        return tuple(map(self.reads_half, self.results))


class Planner(OriginAnalysis):
    """Plans jaxprs; each is planned once for each signature."""

    @cached
    def plan(self, closed: Jaxpr, outside: Outside) -> Plan:
        """Returns the plan of a jaxpr."""
        return _Rule(self, closed, outside).plan()

    def outside(self, node: Node, origins: Origins, halves: Flags) -> Outside:
        """Returns the signature of the bodies of an equation, for all its operands."""
        assert node.uses is not None
        are_states = [bool(origins.of[v].state) for v in node.eqn.outvars]
        uses = node.uses._replace(
            rounded=_unless(node.uses.rounded, are_states),
            for_results=tuple(map(max, node.uses.for_results, are_states)),
        )
        inputs = origins.of_bodies[id(node.eqn)]
        return Outside(node.choice.body_context, uses, inputs, halves)


class _Rule:
    """The rule on one program.

    A matmul that runs as it was written, or as a user's function says, is an equation
    like any other: it begins no region.
    """

    def __init__(self, planner: Planner, closed: Jaxpr, outside: Outside):
        self.planner, self.half = planner, planner.choose.half
        self.outside = outside
        self.flow = planner.flow(closed, outside.context, outside.uses)
        self.origins = planner.origins(closed, outside.context, outside.origins)
        self.numbers = _numbers(self.flow.program)
        self.leaving, self.read_by_later = _read_outside(self.flow, outside.uses)
        self.residual_sums = self._residual_sums()
        program = self.flow.program
        self.forms = dict.fromkeys(filter(is_float32, program.consts), Form(False))
        for v, is_half in zip(program.invars, outside.halves, strict=True):
            if is_float32(v):
                self.forms[v] = Form(is_half)
        self.to_gradients = self._leads_to_gradients()
        self.border: set[Var] = set()
        are_states = zip(program.outvars, outside.uses.states, strict=True)
        self.states_of_loop = {v for v, is_state in are_states if is_state}

    def plan(self) -> Plan:
        nodes = list(map(self._node, self.flow.nodes))
        # A result that arithmetic of its region reads outside is read unrounded there.
        pairs = zip(self.flow.program.outvars, self.outside.uses.rounded, strict=True)
        results: Reads = [
            None if isinstance(v, Literal) else self._settled(Read(v, not is_rounded))
            for v, is_rounded in pairs
        ]
        return Plan(
            *(self.flow, nodes, results, self.origins, self.numbers, self.forms),
            *(self.border, self.read_by_later, self.residual_sums & self.border),
        )

    def _settled(self, read: Read | None) -> Read | None:
        """Returns a read that is unrounded only where the variable is there so."""
        if read is None or not read.is_unrounded:
            return read
        form = self.forms.get(read.v)
        return Read(read.v, form is not None and form.is_both)

    def _node(self, node: Node) -> Node:
        """Plans an equation, and the forms of its results."""
        node = dataclasses.replace(node, reads=list(map(self._settled, node.reads)))
        node = dataclasses.replace(node, way=self._way(node))
        halves = self._halves(node)
        for v, is_half in zip(node.eqn.outvars, halves, strict=True):
            if is_float32(v):
                self.forms[v] = self._form(v, is_half, node)
        return node

    def _way(self, node: Node) -> Way:
        eqn, role = node.eqn, node.choice.role
        if node.has_matmul:
            return Way.BODIES
        if role in HALF_ROLES:
            return self._way_of_matmul(node)
        if role is Kind.CALLED:
            return Way.CALLED
        if self.half == jnp.float32 or not self._stays_half(node):
            return Way.FLOAT32
        if not repeats(eqn):
            return Way.HALF
        # A gather of halves, with a derivative of its own that adds up in float32, was
        # as large: two layers of graph attention take 3.63 GB on an H200 either way.
        is_broadcast = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1
        return Way.SPREAD if is_broadcast else Way.ROUNDED

    def _way_of_matmul(self, node: Node) -> Way:
        """1. Matmuls read half precision, and give half precision.

        They round their results whoever reads them: unrounded results for a loss were
        tried, and rounding the operands does as much harm (the error of a
        log-spectrogram is 0.56, 0.71 so). A key for `use_float32_result` decides.
        """
        function = node.choice.decision.function
        is_wide = function is use_float32_result
        if node.choice.role is Kind.MATMUL and not isinstance(function, use_fp8):
            is_wide |= not self.to_gradients.isdisjoint(node.eqn.outvars)
        return Way.FLOAT32_RESULT if is_wide else Way.HALF

    def _halves(self, node: Node) -> Sequence[bool]:
        """Returns which results of an equation are half before any border."""
        way, count = node.way, len(node.eqn.outvars)
        halves = tuple(_is_half(self.forms, read) for read in node.reads)
        if way is Way.BODIES:
            outside = self.planner.outside(node, self.origins, halves)
            rewriting = traits_of(node.eqn).rewriting
            found: Sequence[bool] = rewriting.halves(self.planner, node.eqn, outside)
            return found
        if way is Way.CALLED:
            return self._asked(node, halves)
        if way is Way.FLOAT32 and is_same_dtype(node.eqn):
            return halves
        return [way in (Way.HALF, Way.SPREAD, Way.ROUNDED)] * count

    def _asked(self, node: Node, halves: Flags) -> Sequence[bool]:
        """Asks a user's precision function which results are half."""
        eqn, half, decision = node.eqn, self.half, node.choice.decision
        structs = [
            _jaxprs.struct_of(v.aval, half if is_half else v.aval.dtype)
            for v, is_half in zip(eqn.invars, halves, strict=True)
        ]

        def call(*operands: jax.Array) -> list[jax.Array]:
            return call_precision_function(eqn, decision, half, operands)[1]

        with _source.equation_context(eqn):
            try:
                outs = jax.eval_shape(call, *structs)
            except NameError:
                # An axis of a mesh has no name outside of its `shard_map`. A name that
                # the user's function lacks is an error where the equation is emitted.
                return [False] * len(eqn.outvars)
        return [x.dtype == half for x in outs]

    # --- lines 3 and 4: borders ---

    def _form(self, v: Var, is_half: bool, node: Node) -> Form:
        """3. What leaves a region towards another matmul is rounded once."""
        if node.way is Way.HALF and node.choice.role in HALF_ROLES:
            return Form(True)
        why = self._why_float32(v, node)
        if not why:
            self.border.add(v)
        if is_half:
            return Form(True)
        if why:
            return Form(False, reason=why)
        is_both = v not in self.residual_sums
        return Form(True, is_both, "a matmul reads it later")

    def _why_float32(self, v: Var, node: Node) -> str:
        """4. Says why a result is never rounded at a border, "" if it is."""
        role, origin = node.choice.role, self.origins.of[v]
        if not v.aval.shape:
            # Step sizes: a solver's gradient had 3.0 times the error of products only.
            return "a scalar"
        if v not in self.flow.for_matmuls:
            if v in self.states_of_loop:
                return "the state of a loop"
            of_step = "of this step " if self.states_of_loop else ""
            return f"no matmul {of_step}reads it later"
        if not origin.after_matmul:
            return "no matmul comes before it here"
        if origin.is_sum:
            return "a sum or a maximum"
        if origin.state:
            return origin.state
        if v not in self.leaving:
            return "only its own region reads it"
        if node.way is Way.FLOAT32_RESULT:
            return node.choice.reason
        return role.value if role in _NEVER_ROUNDED else ""

    def _residual_sums(self) -> set[Var]:
        """Returns the sums of two computed arrays that a later region reads.

        Their own region reads them rounded, too. It is a residual stream, `x + f(x)`:
        the norm behind it would be computed again from both terms. So a DiT on a v5e
        takes 40.7 ms and 34.3 GB, 42.7 and 38.4 if its own region reads float32.

        A sum that only its own region reads stays float32, such as the last one before
        a norm. To round it as well takes 1.01 of the time of a ConvNeXt by hand on a
        v5e, 1.15 so, but 1.29 of its memory, 1.15 so, and softmaxes would read rounded
        sums of scores and positions.

        A result, such as the next carry of a loop, is handed on unrounded.
        """
        found: set[Var] = set()
        for eqn in self.flow.program.eqns:
            terms = variables(eqn.invars)
            computed = [v for v in terms if self.origins.of[v].after_matmul]
            if eqn.primitive.name in ("add", "add_any") and len(computed) == 2:
                found.update(self.read_by_later.intersection(eqn.outvars))
        unrounded = [not is_rounded for is_rounded in self.outside.uses.rounded]
        found -= set(flagged(self.flow.program.outvars, unrounded))
        return found - self.flow.for_results

    def _leads_to_gradients(self) -> set[Var]:
        """Returns gradients that keep the sums of their matmuls, and their operands.

        Behind a sum that gives the gradient of a bias stands an activation, which stays
        half. Matmuls in a body are not found.
        """
        if not self.outside.gradients:
            return set()
        found = set(flagged(self.flow.program.outvars, self.outside.gradients))
        for node in reversed(self.flow.nodes):
            is_sum = node.choice.role is Kind.SUM
            if node.in_region and not is_sum and not found.isdisjoint(node.eqn.outvars):
                found.update(variables(node.eqn.invars))
        return found

    # --- line 5 ---

    def _stays_half(self, node: Node) -> bool:
        """5. Whether a sum of halves, of a half and a bias, or a move is half.

        In float32, XLA would write the float32 sum beside the rounded one: a small ViT
        on a v5e took 3.80 ms, and takes 3.46 so.
        """
        eqn, role = node.eqn, node.choice.role
        pairs = zip(eqn.invars, node.reads, strict=True)
        floats = [(v, read) for v, read in pairs if is_float32(v)]
        others = [v for v, read in floats if not _is_half(self.forms, read)]
        # A lookup of one row is half wherever it leads: what it reads is the larger
        # array, which would be cast up for it. Six of sixteen models have one.
        is_lookup = eqn.primitive.name == "gather" and not repeats(eqn)
        is_read = not self.flow.for_matmuls.isdisjoint(eqn.outvars)
        if len(others) == len(floats) or not (is_read or is_lookup):
            return False
        if role is Kind.MOVE:
            spoils = has(eqn, Trait.RANKS) or has(eqn, Trait.ILL_CONDITIONED)
            return not spoils and all(self._fits(v, eqn) for v in others)
        return role is Kind.ARITHMETIC and self._is_half_sum(eqn, others)

    def _is_half_sum(self, eqn: Eqn, others: Sequence[Atom]) -> bool:
        """Whether an equation adds biases to a half, and gives no result and no state.

        Only arguments are biases: `mean((x @ w + 37.3 * arange(8) - t)**2)` had a
        gradient error of 0.3 in bfloat16, and 3e-3 by hand.
        """
        name = eqn.primitive.name
        if not (name == "add" or (name == "add_any" and not others)):
            return False
        is_inner = self.flow.for_results.isdisjoint(eqn.outvars)
        if not is_inner or any(self.origins.of[v].state for v in eqn.outvars):
            return False
        are_biases = [
            bool(v.aval.shape) and self.origins.read(v).is_argument for v in others
        ]
        return all(are_biases)

    def _fits(self, v: Atom, eqn: Eqn) -> bool:
        """Whether a move may read a float32 operand rounded beside one that is half."""
        number = literal(v) if isinstance(v, Literal) else self.numbers.get(v)
        if number is None:
            is_joined = eqn.primitive.name == "concatenate"
            return is_joined and self.origins.read(v).is_argument
        is_exact = float(cast_number(number, self.half)) == number
        return is_exact or not has(eqn, Trait.EXACT_LITERAL)


def _unless(flags: Flags, others: Sequence[bool]) -> Flags:
    """Returns flags that are off where others are on."""
    pairs = zip(flags, others, strict=True)
    return tuple(flag and not other for flag, other in pairs)


def _is_half(forms: dict[Var, Form], read: Read | None) -> bool:
    """Whether an operand is read in half precision; `None` stands for a number."""
    if read is None or read.v not in forms:
        return False
    return forms[read.v].is_half and not read.is_unrounded


def _numbers(program: Program) -> dict[Var, float]:
    """Returns the variables all of whose elements are one number."""
    numbers: dict[Var, float] = {}
    for eqn in program.eqns:
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            x = eqn.invars[0]
            number = literal(x) if isinstance(x, Literal) else numbers.get(x)
            if number is not None and is_float32(eqn.outvars[0]):
                numbers[eqn.outvars[0]] = number
    return numbers


def _read_outside(flow: Flow, uses: ResultUses) -> tuple[set[Var], set[Var]]:
    """Returns what is read as it leaves its region: by anything, and by arithmetic."""
    leaving = set(flagged(flow.program.outvars, uses.rounded))
    by_later: set[Var] = set()
    for node in flow.nodes:
        read = [read.v for read in node.reads if read and not read.is_unrounded]
        leaving.update(read)
        by_later.update(read if node.in_region else [])
    return leaving, by_later
