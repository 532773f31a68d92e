"""The plan of a program: values, what is needed of them, a step for each equation.

This module decides nothing: `choice.py`, `keep.py` and `paint.py` make plans, and
`emit.py` follows them. The rules of structured primitives (`rules.py`) have a method
for each pass: `needs`, `paint` and `emit`.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp._compat import Array, Arrays, Atom, Aval, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import Trait, has
from flax_amp._jaxpr.walk import variables
from flax_amp.policy import Decision


class Paint(enum.Enum):
    """The precision of a float32 value of the original program in the rewritten one.

    The name is that of TensorFlow's auto_mixed_precision pass (Grappler), which paints
    the nodes of a graph with the precision that they are to run in.
    """

    LEAF = "leaf"  # float32, because it is an argument or a constant
    LOW = "low"  # in the compute dtype
    FULL = "full"  # float32, because it has to be computed so


class Value(NamedTuple):
    """What the analysis knows of one float32 value.

    Attributes:
      paint: its precision.
      is_state: of a `FULL` value: it is, or was computed from, the float32 carry of a
        loop. It stays `FULL` within the loop, whatever it is combined with.
      bits: of a `LEAF` value: the bytes of the number that all its elements have, if
        known. Numbers would not do, since `0.0 == -0.0` and `nan != nan`.
      read_once: it is an input of the whole program that a single equation reads: a
        gather, or a call in which again a single equation reads it.
      is_argument: of a `LEAF` value: it is an input of the whole program, moved at
        most, and was never a scalar. Neither constants nor computed values are.
    """

    paint: Paint
    is_state: bool = False
    bits: bytes | None = None
    read_once: bool = False
    is_argument: bool = False

    @property
    def constant(self) -> float | None:
        """The number that every element has, if known."""
        return None if self.bits is None else float(np.frombuffer(self.bits, "f4")[0])

    def after_loop(self) -> "Value":
        """Returns the value as it leaves a loop, where it is no state any more."""
        return self._replace(is_state=False)


LEAF = Value(Paint.LEAF)
ARGUMENT = Value(Paint.LEAF, is_argument=True)
LOW = Value(Paint.LOW)
FULL = Value(Paint.FULL)
STATE = Value(Paint.FULL, is_state=True)


class BodyKind(enum.Enum):
    """What a jaxpr is the body of. It decides what its backward pass stores."""

    STRAIGHT = "straight code"
    LAYER_SCAN = "a scan over layers"  # forward and backward pass are two loops
    RECURRENT_SCAN = "a scan over the steps of a recurrence"
    REPEATED_LAYER = "one of several equal layers of straight code"
    OPAQUE = "a checkpoint or a custom derivative"  # its own rule says what is stored


class Need(enum.Flag):
    """What the readers of a value need of it, and whether they lead to a product.

    Readers that lead to none, such as a loss or a metric, keep nothing (`keep.py`).
    """

    NONE = 0
    LATER = enum.auto()  # a product reads it later, through whatever arithmetic
    COSTLY = enum.auto()  # such a reader is a sum, a sigmoid, or of an unknown kind
    MAXIMUM = enum.auto()  # such a reader is a maximum
    RANKED = enum.auto()  # a sort, an argmax or a top_k reads it, before a product
    # What it is kept for, in half precision:
    PRODUCT = enum.auto()  # a product reads it, or a move to one
    BEHIND = enum.auto()  # it is read on the other side of a product
    SHARED = enum.auto()  # a sum or a sigmoid, and something else, read it
    BORDER = enum.auto()  # it crosses the border of a loop, a branch or a rule
    CAST = enum.auto()  # the program itself casts it to the compute dtype
    KEPT = PRODUCT | BEHIND | SHARED | BORDER | CAST
    # A maximum and something else read it, as they do the masked scores of a softmax.
    # A move of halves then runs in half precision, because it rounds nothing.
    COMPARED = enum.auto()
    READ_IN_HALF = enum.auto()  # a product, or a move in half precision, reads it
    READ_IN_FLOAT32 = enum.auto()  # a reader of any kind does
    ARITHMETIC = enum.auto()  # arithmetic that leads to a product reads it
    UNROUNDED = enum.auto()  # a reader that leads to no product reads it
    ROUNDED = enum.auto()  # what is no product, such as a loop, reads it as rounded

    @property
    def is_kept(self) -> bool:
        """Whether the value is kept, and in half precision."""
        return bool(self & Need.KEPT) and Need.RANKED not in self

    def settled(self) -> "Need":
        """Returns the need of a value, once all of its readers are known.

        What a product and arithmetic read, and nothing else keeps, is not kept: the
        product alone casts it. In `concat([x, sin(64 * x)]) @ w`, a rounded `x` would
        turn the phase of the sine.
        """
        is_kept_alone = self & Need.KEPT == Need.PRODUCT
        return (
            self & ~Need.PRODUCT if is_kept_alone and Need.ARITHMETIC in self else self
        )

    @property
    def is_read_unrounded(self) -> bool:
        """Whether a reader that leads to no product reads it, and no other arithmetic.

        All arithmetic reads one number: `y = x + f(x)` and the loss `y - x` must not
        read different forms of `x`.
        """
        return Need.UNROUNDED in self and not self & (Need.ARITHMETIC | Need.ROUNDED)

    def together_with(self, other: "Need") -> "Need":
        """Returns the need of two readers.

        What a sum reads has to be in memory if something else reads it as well: the
        exponentials of a softmax are read by their sum, and by the quotient. What a
        sigmoid reads, and its cotangent, need not be, but a compiler puts them there
        rather than compute the sigmoid again for each reader.
        """
        both = self | other
        if Need.LATER not in self or Need.LATER not in other:
            return both
        if Need.MAXIMUM in both:
            both |= Need.COMPARED
        return both.kept_for(Need.SHARED) if Need.COSTLY in both else both

    def kept_for(self, reason: "Need") -> "Need":
        """Returns the need of a value that a reason keeps, if it leads to a product.

        A value that is kept already stays as it is.
        """
        leads_on = Need.LATER in self and not self.is_kept
        return self | reason if leads_on else self


Values = tuple[Value | None, ...]  # None: not a float32 array, left as it is
Needs = tuple[Need, ...]


def rounded_needs(needs: Iterable[Need]) -> Needs:
    """Returns the needs of readers behind a border, which no unrounded number crosses.

    They read the rounded number, and so must all arithmetic.
    """
    return tuple(
        need & ~Need.UNROUNDED | Need.ROUNDED if Need.UNROUNDED in need else need
        for need in needs
    )


def at_border(needs: Iterable[Need]) -> Needs:
    """Returns the needs of values that cross the border of a loop or a rule."""
    return tuple(need.kept_for(Need.BORDER) for need in rounded_needs(needs))


class Mode(enum.Enum):
    """How an equation is emitted."""

    LOW = "low"  # float32 operands cast to the compute dtype
    FULL = "full"  # float32 operands restored to float32
    ROUNDED = "rounded"  # the same, and the result cast to the compute dtype
    # XLA drops a cast that is cast up again at once. It would write the float32 array
    # to memory, and in the backward pass that of cotangents. This one it cannot drop.
    ROUNDED_FOR_GOOD = "rounded for good"
    AS_IS = "as is"  # operands as they arrive
    # A gather as it is, with a gradient of its own (`embedding_lookup.py`).
    LOOKUP = "lookup"
    CALL = "call"  # a user's precision function decides
    RULE = "rule"  # a structured primitive, by its own rule
    REPEAT = "repeat"  # a call that stands for a repeated layer (`outline/`)

    @property
    def is_float32(self) -> bool:
        """Whether the equation computes in float32."""
        return self in (Mode.FULL, Mode.ROUNDED, Mode.ROUNDED_FOR_GOOD)

    @property
    def rounds(self) -> bool:
        """Whether it computes in float32, and its result is rounded."""
        return self in (Mode.ROUNDED, Mode.ROUNDED_FOR_GOOD)


class ReasonKind(enum.StrEnum):
    """A reason that code asks about. Its text is for people, with `{}` for a value."""

    PRECISION = "precision={}"
    NO_OPERAND = "no float32 operand"
    LEAVES_ONLY = "computed from arguments and constants alone"
    MOVES = "moves data"
    ARITHMETIC = "arithmetic"
    MULTIPLICATION = "an outer product is a multiplication"
    STATE_OF_LOOP = "the state of a loop"


class Reason(NamedTuple):
    """Why an equation runs in its precision. Its `str` is for people.

    Attributes:
      kind: the rule that decided, or the text of one that no code asks about.
      value: what the rule found: a decision of the policy, a constant, a dtype.
      inside: the structured primitive around it that is left as it is, if that is why.
    """

    kind: ReasonKind | str
    value: Any = None
    inside: str = ""

    @property
    def decision(self) -> Decision | None:
        """The decision of the policy, if it is what decided."""
        return self.value if isinstance(self.value, Decision) else None

    def __str__(self) -> str:
        text = self.kind.format(self.value)
        return f"inside {self.inside}: {text}" if self.inside else text


NO_OPERAND = Reason(ReasonKind.NO_OPERAND)
LEAVES_ONLY = Reason(ReasonKind.LEAVES_ONLY)
MOVES = Reason(ReasonKind.MOVES)
ARITHMETIC = Reason(ReasonKind.ARITHMETIC)
SUM = Reason("a sum")
MULTIPLICATION = Reason(ReasonKind.MULTIPLICATION)
HALVES = Reason("adds half-precision values")
STATE_OF_LOOP = Reason(ReasonKind.STATE_OF_LOOP)


@dataclasses.dataclass(frozen=True)
class Step:
    """The plan of one equation.

    Attributes:
      mode: how it is emitted.
      outs: the values of its results.
      reason: the rule that decided what it computes in.
      reads: of a structured primitive: the values as which it reads its operands, if
        it does not take them as they are.
      detail: what the mode needs: the user's decision, the plans of sub-jaxprs, the
        dtype to which the gradient of a lookup may be rounded, or how a product runs in
        fp8.
      needs: what is needed of its results, for `explain`.
      reads_unrounded: whether it reads operands as they were before they were rounded,
        where these are at hand. It does if it leads to no product.
      unrounded: how it is emitted a second time, without a rounding of its result, for
        such readers; `None` if it has none, or rounds nothing.
    """

    mode: Mode
    outs: Values
    reason: Reason
    reads: Values = ()
    detail: Any = None
    needs: Needs = ()
    reads_unrounded: bool = False
    unrounded: "Step | None" = None


# Neither this nor a plan has a repr of its parts: JAX writes the repr of callables into
# its debug information at each call, and those that hold a plan would spell it out.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EditedJaxpr:
    """A jaxpr with other equations, constants or results than JAX gave it."""

    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]
    constvars: Sequence[Var] = ()
    consts: Arrays = ()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The plan of one jaxpr for given operand values.

    Attributes:
      jaxpr: the original jaxpr.
      consts: the arrays of its `constvars`.
      const_ins: their values.
      ins: the values of its inputs.
      outs: the values of its results.
      steps: one `Step` for each equation.
      body_kind: what the jaxpr is the body of.
      exports: the variables that the rules of custom derivatives inside close over.
    """

    jaxpr: Jaxpr
    consts: Arrays
    const_ins: Values
    ins: Values
    outs: Values
    steps: tuple[Step, ...]
    body_kind: BodyKind
    exports: frozenset[Var] = frozenset()

    def pairs(self) -> Iterator[tuple[Eqn, Step]]:
        """Yields each equation with its step."""
        return zip(self.jaxpr.eqns, self.steps, strict=True)

    def known(self) -> dict[Var, Value | None]:
        """Returns the values of the inputs and the consts, by variable."""
        jaxpr = self.jaxpr
        pairs = zip(jaxpr.invars, self.ins, strict=True)
        return dict(pairs) | dict(zip(jaxpr.constvars, self.const_ins, strict=True))

    def values(self) -> dict[Var, Value | None]:
        """Returns the values of all variables."""
        values = self.known()
        for eqn, step in self.pairs():
            values |= zip(eqn.outvars, step.outs, strict=True)
        return values


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a sub-jaxpr stands.

    Attributes:
      scopes: the scopes around it; empty if no policy key can span several.
      forced: the decision of a scope around it, which holds for all inside.
      body_kind: what it is the body of.
      numbers: its integer inputs that are known numbers and are cast to float32, with
        these numbers.
    """

    scopes: tuple[str, ...] = ()
    forced: Decision | None = None
    body_kind: BodyKind = BodyKind.STRAIGHT
    numbers: tuple[tuple[Var, int], ...] = ()

    def inside(self, kind: BodyKind) -> "Context":
        """Returns the context of a body of another kind."""
        return dataclasses.replace(self, body_kind=kind)


class Rule(Protocol):
    """How a structured primitive is planned and emitted (see `rules.py`)."""

    def needs(
        self, painter: Any, eqn: Eqn, needs: Needs, context: Context
    ) -> Needs: ...

    def paint(
        self, painter: Any, eqn: Eqn, ins: Values, needs: Needs, context: Context
    ) -> Step: ...

    def emit(self, emitter: Any, eqn: Eqn, step: Step, operands: Arrays) -> Arrays: ...


def has_paint(value: Value | None, *paints: Paint) -> bool:
    """Whether a value is painted with one of the paints."""
    return value is not None and value.paint in paints


def is_painted(aval: Aval) -> bool:
    """Whether a value is painted at all: only float32 arrays are."""
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype == jnp.float32


def like(avals: Iterable[Aval], value: Value) -> Values:
    """Returns `value` for every painted aval, `None` for the others."""
    return tuple(value if is_painted(aval) else None for aval in avals)


def out_avals(eqn: Eqn) -> list[Aval]:
    """Returns the avals of an equation's results."""
    return [v.aval for v in eqn.outvars]


def join(values: Iterable[Value | None]) -> Value | None:
    """Returns one value for what several branches give.

    `FULL` wins over `LOW`, and `LOW` over `LEAF`. Equal leaves stay what they are.
    """
    present = [v for v in values if v is not None]
    for paint in (Paint.FULL, Paint.LOW):
        if any(v.paint is paint for v in present):
            return Value(paint, is_state=any(v.is_state for v in present))
    return present[0] if len(set(present)) == 1 else (LEAF if present else None)


def const_values(jaxpr: Jaxpr, consts: Arrays) -> Values:
    """Returns the values of the consts that a jaxpr closes over."""
    values = like([v.aval for v in jaxpr.constvars], LEAF)
    return tuple(
        value and LEAF._replace(bits=_uniform(x))
        for x, value in zip(consts, values, strict=True)
    )


def _uniform(x: Array) -> bytes | None:
    """Returns the bytes that all elements of a small concrete array share, if any."""
    if isinstance(x, jax.core.Tracer) or not 0 < np.size(x) <= 4096:
        return None
    words = np.asarray(x, np.float32).view(np.uint32)
    first = words.flat[0]
    return first.tobytes() if (words == first).all() else None


def value_of(atom: Atom, values: Mapping[Var, Value | None]) -> Value | None:
    """Returns the value of a variable or literal of a jaxpr."""
    if not isinstance(atom, Literal):
        return values[atom]
    if not is_painted(atom.aval):
        return None
    return Value(Paint.LEAF, bits=np.float32(atom.val).tobytes())


def moves_of_inputs(plan: Plan, values: Mapping[Var, Value | None]) -> dict[int, None]:
    """Returns the equations that only move the data of parameters and other inputs.

    They can run before all others, and that is better: JAX hoists what is the same at
    each step out of a loop, and the layers that read the results become equal. In

        w0 = slice w; y0 = dot x w0; w1 = slice w; y1 = dot y0 w1

    the two products are next to each other once the slices have gone ahead. Their
    indices are returned in order, as keys.
    """
    inputs = {*plan.jaxpr.invars, *plan.jaxpr.constvars}
    moves: dict[int, None] = {}  # an ordered set
    for i, eqn in enumerate(plan.jaxpr.eqns):
        if has(eqn, Trait.LAYOUT) and all(
            v in inputs and has_paint(values[v], Paint.LEAF)
            for v in variables(eqn.invars)
        ):
            moves[i] = None
            inputs.update(eqn.outvars)
    return moves
