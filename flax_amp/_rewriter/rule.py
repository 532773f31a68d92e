"""The rule of `amp`: in which dtype each variable of a program is, and why.

Between two matmuls everything is float32. Values that go to the next matmul are half.

1. Matmuls read half precision and give half precision              `_way_of_matmul`
2. A region computes in float32, and nothing is rounded inside       `Way.FLOAT32`
3. A value that leaves a region for a later matmul is rounded once   `_form`
4. Sums, scalars, arguments and states are never rounded             `_why_float32`
5. Sums of halves and biases, and moves, stay half                   `_stays_half`
   Residual sums are rounded for their own region, too            `_residual_sums`
6. Keys of the policy decide first                                   `roles.py`

The plan of a program is made before anything is emitted. The plan has the *form* of
each variable, with the reason, and the *way* in which each equation runs. `emit.py`
reads the plan and asserts the planned dtypes. `debug/` shows the plan. The plan does
not say which results are stored for the backward pass: `memory.py` does.

A value that is rounded at the border has up to two kinds of readers:

    read_outside_region     the variables that are read rounded, behind the border
    read_by_later           of these, the variables that arithmetic reads there
    Read.before_border      a reader wants the float32 value from before the border
    Form.has_float32_too    the variable has this float32 value, not the half alone

A rule for each value by its readers was tried before (8,000 lines). Nobody could
predict a dtype. Behind a call, `log(1 - gate)` was infinite beside a matmul that reads
the gate. Relative to casting matmuls only, the errors of the hard losses are 1.00, and
were 1.00 to 1.14 with the rule for each value.
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

# The results of equations with these roles are never rounded where they leave a region.
_NEVER_ROUNDED = (Kind.ORIGINAL, Kind.CALLED, Kind.OTHER)


class Form(NamedTuple):
    """The dtypes in which a float32 variable of the user's program exists."""

    is_half: bool
    # Whether the region of the variable reads the float32 value before the rounding.
    has_float32_too: bool = False
    # Why the variable is float32, or rounded. Empty if its equation gives half.
    reason: str = ""


class Way(enum.Enum):
    """How an equation runs."""

    HALF = "reads half precision, and gives half precision"
    FLOAT32_RESULT = "a matmul of halves that gives its float32 sum"
    SPREAD = "a broadcast to half precision, whose derivative adds up in float32"
    ROUNDED = "in float32, then rounded, so that its derivative adds up in float32"
    FLOAT32 = "in float32"
    CALLED = "as a user's precision function says"
    BODIES = "its bodies are planned"


class Signature(NamedTuple):
    """The signature of a jaxpr: the facts that the program outside knows of it."""

    context: Context
    uses: ResultUses
    origins: tuple[Origin, ...]  # of the inputs
    halves: Flags  # which inputs are half
    # Which results are gradients that keep the float32 sums of their matmuls.
    gradients: Flags = ()

    @classmethod
    def in_float32(
        cls, context: Context, results: int, origins: Sequence[Origin], halves: Flags
    ) -> "Signature":
        """Returns the signature of a body whose results all stay float32."""
        uses = ResultUses.in_float32(results)
        return cls(context, uses, tuple(origins), halves)

    def without(self, count: int) -> "Signature":
        """Returns the signature without the first inputs."""
        origins = self.origins[count:]
        halves = self.halves[count:]
        return self._replace(origins=origins, halves=halves)


class Plan(NamedTuple):
    """The dtypes of a program."""

    flow: Flow
    nodes: Sequence[Node]  # with the way and the reads of each equation
    results: Reads
    origins: Origins
    numbers: dict[Var, float]  # the variables whose elements are all the same number
    forms: dict[Var, Form]  # of the float32 variables
    border: set[Var]  # the variables that are rounded where they leave their region
    read_by_later: set[Var]  # the variables that arithmetic of later regions reads
    # The variables of the border that their own region reads rounded, too.
    residual_sums: set[Var]

    def reads_half(self, read: Read | None) -> bool:
        """Whether an operand is read in half precision."""
        return _is_half(self.forms, read)

    def readings(self, nodes: Sequence[Node]) -> list[Read]:
        """Returns the reads of some equations.

        A region casts a half up only once, so all reads of a half in a region count as
        a single read.
        """
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
    """Plans jaxprs, once for each jaxpr and signature."""

    @cached
    def plan(self, closed: Jaxpr, signature: Signature) -> Plan:
        """Returns the plan of a jaxpr."""
        return _Rule(self, closed, signature).plan()

    def signature_of_bodies(
        self, node: Node, origins: Origins, halves: Flags
    ) -> Signature:
        """Returns the signature of the bodies of an equation, for all its operands."""
        assert node.uses is not None
        are_states = [bool(origins.of[v].state) for v in node.eqn.outvars]
        uses = node.uses._replace(
            read_only_rounded=_and_not(node.uses.read_only_rounded, are_states),
            for_results=tuple(map(max, node.uses.for_results, are_states)),
        )
        inputs = origins.of_bodies[id(node.eqn)]
        return Signature(node.choice.body_context, uses, inputs, halves)


class _Rule:
    """The rule on a program.

    A matmul that runs as written, or as a user's function says, is treated as an
    equation of arithmetic: such a matmul begins no region.
    """

    def __init__(self, planner: Planner, closed: Jaxpr, signature: Signature):
        self.planner = planner
        self.half = planner.choose.half
        self.signature = signature
        self.flow = planner.flow(closed, signature.context, signature.uses)
        self.origins = planner.origins(closed, signature.context, signature.origins)
        self.numbers = _numbers(self.flow.program)
        reads = _reads_across_regions(self.flow, signature.uses)
        self.read_outside_region, self.read_by_later = reads
        self.residual_sums = self._residual_sums()
        program = self.flow.program
        self.forms = dict.fromkeys(filter(is_float32, program.consts), Form(False))
        for v, is_half in zip(program.invars, signature.halves, strict=True):
            if is_float32(v):
                self.forms[v] = Form(is_half)
        self.to_gradients = self._leads_to_gradients()
        self.border: set[Var] = set()
        are_states = zip(program.outvars, signature.uses.states, strict=True)
        self.states_of_loop = {v for v, is_state in are_states if is_state}

    def plan(self) -> Plan:
        nodes = list(map(self._node, self.flow.nodes))
        # Arithmetic outside may belong to the region of a result. Such arithmetic reads
        # the result unrounded.
        are_rounded = self.signature.uses.read_only_rounded
        results: Reads = []
        for v, is_rounded in zip(self.flow.program.outvars, are_rounded, strict=True):
            if isinstance(v, Literal):
                results.append(None)
            else:
                results.append(self._settled(Read(v, not is_rounded)))
        return Plan(
            *(self.flow, nodes, results, self.origins, self.numbers, self.forms),
            *(self.border, self.read_by_later, self.residual_sums & self.border),
        )

    def _settled(self, read: Read | None) -> Read | None:
        """Returns a read that is unrounded only if the variable has both dtypes."""
        if read is None or not read.before_border:
            return read
        form = self.forms.get(read.v)
        return Read(read.v, form is not None and form.has_float32_too)

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
        eqn = node.eqn
        role = node.choice.role
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
        # A gather of halves whose own derivative adds up in float32 was tried. It saved
        # no memory: two layers of graph attention take 3.63 GB on an H200 either way.
        is_broadcast = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1
        return Way.SPREAD if is_broadcast else Way.ROUNDED

    def _way_of_matmul(self, node: Node) -> Way:
        """1. Matmuls read half precision, and give half precision.

        Matmuls round their results for all readers. Unrounded results for a loss were
        tried: the rounding of the operands does as much harm (the error of a
        log-spectrogram is 0.56 with unrounded results, and 0.71 with rounded results).
        A key with the value `use_float32_result` gives float32 results.
        """
        function = node.choice.decision.function
        is_wide = function is use_float32_result
        if node.choice.role is Kind.MATMUL and not isinstance(function, use_fp8):
            is_wide |= not self.to_gradients.isdisjoint(node.eqn.outvars)
        return Way.FLOAT32_RESULT if is_wide else Way.HALF

    def _halves(self, node: Node) -> Sequence[bool]:
        """Returns which results of an equation are half before any border."""
        way = node.way
        count = len(node.eqn.outvars)
        halves = tuple(_is_half(self.forms, read) for read in node.reads)
        if way is Way.BODIES:
            signature = self.planner.signature_of_bodies(node, self.origins, halves)
            rewriting = traits_of(node.eqn).rewriting
            found: Sequence[bool] = rewriting.halves(self.planner, node.eqn, signature)
            return found
        if way is Way.CALLED:
            return self._asked(node, halves)
        if way is Way.FLOAT32 and is_same_dtype(node.eqn):
            return halves
        return [way in (Way.HALF, Way.SPREAD, Way.ROUNDED)] * count

    def _asked(self, node: Node, halves: Flags) -> Sequence[bool]:
        """Asks a user's precision function which results are half."""
        eqn = node.eqn
        half = self.half
        decision = node.choice.decision
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
                # An axis of a mesh has no name outside of its `shard_map`. If a name in
                # the user's own function does not exist, the emission raises the error.
                return [False] * len(eqn.outvars)
        return [x.dtype == half for x in outs]

    # --- lines 3 and 4: borders ---

    def _form(self, v: Var, is_half: bool, node: Node) -> Form:
        """3. A value that leaves a region for a later matmul is rounded once."""
        if node.way is Way.HALF and node.choice.role in HALF_ROLES:
            return Form(True)
        why = self._why_float32(v, node)
        if not why:
            self.border.add(v)
        if is_half:
            return Form(True)
        if why:
            return Form(False, reason=why)
        has_float32_too = v not in self.residual_sums
        return Form(True, has_float32_too, "a matmul reads it later")

    def _why_float32(self, v: Var, node: Node) -> str:
        """4. Says why a result is not rounded at a border; "" for a rounded result."""
        role = node.choice.role
        origin = self.origins.of[v]
        if not v.aval.shape:
            # Scalars are step sizes, say. With rounded scalars, a solver's gradient had
            # 3.0 times the error of casting matmuls only.
            return "a scalar"
        if v not in self.flow.for_matmuls:
            if v in self.states_of_loop:
                return "the state of a loop"
            of_step = "of this step " if self.states_of_loop else ""
            return f"no matmul {of_step}in half precision reads it later"
        if not origin.after_matmul:
            return "no matmul comes before it here"
        if origin.is_sum:
            return "a sum or a maximum"
        if origin.state:
            return origin.state
        if v not in self.read_outside_region:
            return "only its own region reads it"
        if node.way is Way.FLOAT32_RESULT:
            return node.choice.reason
        return role.value if role in _NEVER_ROUNDED else ""

    def _residual_sums(self) -> set[Var]:
        """Returns the sums of two computed arrays that a later region reads.

        The own region of such a sum reads the sum rounded, too. The sum is a residual
        stream, `x + f(x)`. If the own region read the float32 sum, the backward pass
        would compute the norm behind the sum again from both terms. A DiT on a v5e
        takes 40.7 ms and 34.3 GB with rounded sums, and 42.7 ms and 38.4 GB if the own
        region reads float32.

        A sum that only its own region reads stays float32, such as the last sum before
        a norm. Rounding such sums as well was tried with a ConvNeXt on a v5e. Relative
        to a ConvNeXt in half precision by hand, the time is 1.01 with rounded sums and
        1.15 without, but the memory is 1.29 with rounded sums and 1.15 without. Also,
        softmaxes would read rounded sums of scores and positions.

        A result, such as the next carry of a loop, is handed on unrounded.
        """
        found: set[Var] = set()
        for eqn in self.flow.program.eqns:
            terms = variables(eqn.invars)
            computed = [v for v in terms if self.origins.of[v].after_matmul]
            if eqn.primitive.name in ("add", "add_any") and len(computed) == 2:
                found.update(self.read_by_later.intersection(eqn.outvars))
        are_rounded = self.signature.uses.read_only_rounded
        unrounded = [not is_rounded for is_rounded in are_rounded]
        found -= set(flagged(self.flow.program.outvars, unrounded))
        return found - self.flow.for_results

    def _leads_to_gradients(self) -> set[Var]:
        """Returns gradients that keep the sums of their matmuls, and their operands.

        A sum gives the gradient of a bias. The operand of the sum is an activation,
        which stays half, so the search ends at sums. Matmuls in a body are not found.
        """
        if not self.signature.gradients:
            return set()
        found = set(flagged(self.flow.program.outvars, self.signature.gradients))
        for node in reversed(self.flow.nodes):
            is_sum = node.choice.role is Kind.SUM
            if node.in_region and not is_sum and not found.isdisjoint(node.eqn.outvars):
                found.update(variables(node.eqn.invars))
        return found

    # --- line 5 ---

    def _stays_half(self, node: Node) -> bool:
        """5. Whether a sum of halves, of a half and a bias, or a move is half.

        If such a sum were float32, XLA would write the float32 sum beside the rounded
        sum. A small ViT on a v5e took 3.80 ms with float32 sums, and takes 3.46 ms with
        half sums.
        """
        eqn = node.eqn
        role = node.choice.role
        pairs = zip(eqn.invars, node.reads, strict=True)
        floats = [(v, read) for v, read in pairs if is_float32(v)]
        others = [v for v, read in floats if not _is_half(self.forms, read)]
        # A lookup that repeats no row is half for any reader of its result. The array
        # that the lookup reads is larger than the result, and would be cast up for the
        # lookup. Six of sixteen models have such a lookup.
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

        Only arguments are biases. With constants as biases, the gradient of
        `mean((x @ w + 37.3 * arange(8) - t)**2)` had an error of 0.3 in bfloat16, and
        an error of 3e-3 in a program in half precision by hand.
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
        """Whether a move of a half may read a float32 operand `v` rounded."""
        number = _number_of(v, self.numbers)
        if number is None:
            is_joined = eqn.primitive.name == "concatenate"
            return is_joined and self.origins.read(v).is_argument
        is_exact = float(cast_number(number, self.half)) == number
        return is_exact or not has(eqn, Trait.EXACT_LITERAL)


def _and_not(flags: Flags, excluded: Sequence[bool]) -> Flags:
    """Returns `flags`, turned off where `excluded` is on."""
    pairs = zip(flags, excluded, strict=True)
    return tuple(flag and not is_excluded for flag, is_excluded in pairs)


def _is_half(forms: dict[Var, Form], read: Read | None) -> bool:
    """Whether an operand is read in half precision; `None` stands for a literal."""
    if read is None or read.v not in forms:
        return False
    return forms[read.v].is_half and not read.before_border


def _number_of(v: Atom, numbers: dict[Var, float]) -> float | None:
    """Returns the number that all elements of a variable or a literal are."""
    if isinstance(v, Literal):
        return literal(v)
    return numbers.get(v)


def _numbers(program: Program) -> dict[Var, float]:
    """Returns the variables whose elements are all equal, with their number."""
    numbers: dict[Var, float] = {}
    for eqn in program.eqns:
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            number = _number_of(eqn.invars[0], numbers)
            if number is not None and is_float32(eqn.outvars[0]):
                numbers[eqn.outvars[0]] = number
    return numbers


def _reads_across_regions(flow: Flow, uses: ResultUses) -> tuple[set[Var], set[Var]]:
    """Returns the variables that are read outside of their region.

    The first set has all these variables. The second set has the variables that
    arithmetic reads.
    """
    read_outside_region = set(flagged(flow.program.outvars, uses.read_only_rounded))
    read_by_later: set[Var] = set()
    for node in flow.nodes:
        read = [read.v for read in node.reads if read and not read.before_border]
        read_outside_region.update(read)
        if node.in_region:
            read_by_later.update(read)
    return read_outside_region, read_by_later
