"""The plan of a program: its values, their uses, one step for each equation. Data only.

`paint.py` makes plans and `emit.py` follows them. The rules of structured primitives
(`rules.py`) do both.
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
      statistic_applied: of a `FULL` value: it is low-precision data to which a
        statistic was applied (`x - mean`), and may return to the compute dtype.
      loop_state: of a `FULL` value: it is, or was computed from, the float32 carry of a
        loop. It stays `FULL` within the loop, whatever it is combined with.
      of_data: of a `FULL` value: it is a function of low-precision data, element by
        element, as the square in a Huber loss is, and no statistic of these data.
      bits: of a `LEAF` value: the bytes of the number that all its elements have, if
        known. Numbers would not do, since `0.0 == -0.0` and `nan != nan`.
      is_maximum: it is the maximum of something.
      maximum_subtracted: a maximum was subtracted from it: `x - max(x)`.
      read_once: it is an input of the whole program that a single equation reads: a
        gather, or a call in which again a single equation reads it.
    """

    paint: Paint
    statistic_applied: bool = False
    loop_state: bool = False
    of_data: bool = False
    bits: bytes | None = None
    is_maximum: bool = False
    maximum_subtracted: bool = False
    read_once: bool = False

    @property
    def constant(self) -> float | None:
        """The number that every element has, if known."""
        return None if self.bits is None else float(np.frombuffer(self.bits, "f4")[0])

    @property
    def is_leaf(self) -> bool:
        """Whether the value is a float32 array from outside, such as a weight."""
        return self.paint is Paint.LEAF and self.bits is None

    @property
    def is_statistic(self) -> bool:
        """Whether what the value is combined with has to be in full precision, too."""
        return self.paint is Paint.FULL and not self.statistic_applied

    def without_constant(self) -> "Value":
        """Returns the value without what is known of that very array."""
        return self._replace(bits=None, read_once=False, of_data=False)

    def after_loop(self) -> "Value":
        """Returns the value as it leaves a loop, where it is no loop state any more."""
        return LOW if self.statistic_applied else self._replace(loop_state=False)


LEAF = Value(Paint.LEAF)
LOW = Value(Paint.LOW)
FULL = Value(Paint.FULL)
STATISTIC_APPLIED = Value(Paint.FULL, statistic_applied=True)
LOOP_STATE = Value(Paint.FULL, loop_state=True)


class BodyKind(enum.Enum):
    """What a jaxpr is the body of. It decides what its backward pass stores."""

    STRAIGHT = "straight code"
    LAYER_SCAN = "a scan over layers"  # forward and backward pass are two loops
    RECURRENT_SCAN = "a scan over the steps of a recurrence"
    REPEATED_LAYER = "one of several equal layers of straight code"
    OPAQUE = "a checkpoint or a custom derivative"  # its own rule says what is stored


class Use(enum.Flag):
    """How the readers of a value read it: the union over all of them."""

    NONE = 0
    LOW = enum.auto()  # in the compute dtype
    FULL = enum.auto()  # in float32
    MEASURE = enum.auto()  # in float32, for a statistic of it
    APPLY = enum.auto()  # in float32, to apply a statistic to it
    UNKNOWN = enum.auto()  # by whoever gets the results of the program

    @property
    def of_known_readers(self) -> "Use":
        """The use without `UNKNOWN`."""
        return self & ~Use.UNKNOWN

    @property
    def is_measured_and_rounded(self) -> bool:
        """Whether a reader takes a statistic of it and all known others round it.

        So are the exponentials of a softmax between two products: by their sum, and by
        the quotient, which hands on how the product reads it. A logarithm would read it
        in float32: in float16, a probability below 3e-8 is zero.
        """
        return self.of_known_readers is Use.MEASURE | Use.LOW

    @property
    def wants_digits(self) -> bool:
        """Whether a bounded function should run in full precision for these readers.

        It should for a float32 reader, and for one that applies a statistic of other
        values, or a cotangent, to it: `ct * p * (1 - p)` in a backward pass. A norm,
        which applies a statistic of the value itself, needs no more digits.
        """
        return Use.FULL in self or (Use.APPLY in self and Use.MEASURE not in self)

    def wants_full(self, operands: Sequence[Value]) -> bool:
        """Whether the equation that computes the value should run in full precision.

        Args:
          operands: what is known of its operands.
        """
        if self is Use.UNKNOWN:
            # A result is float32 anyway: a rounded one would only be cast up again.
            return all(v.paint is not Paint.LOW for v in operands)
        if self.of_known_readers is Use.NONE or Use.LOW in self:
            return False
        # The readers are a norm, which takes its statistics in float32 anyway. If this
        # asked for float32, the sum before the norm would run in it, then the sum
        # before that one, and so on back to the first layer.
        if Use.MEASURE in self and Use.APPLY in self:
            return False
        # A statistic that is only applied comes from elsewhere, such as the running
        # averages of a BatchNorm. Only a float32 operand would lose digits by a cast.
        has_float32 = any(v.is_leaf or v.statistic_applied for v in operands)
        return has_float32 or self.of_known_readers is not Use.APPLY


Values = tuple[Value | None, ...]  # None: not a float32 array, left as it is
Uses = tuple[Use, ...]


class Mode(enum.Enum):
    """How an equation is emitted."""

    LOW = "low"  # float32 operands cast to the compute dtype
    FULL = "full"  # float32 operands restored to float32
    EXP = "exp"  # in float32, and its result rounded to the compute dtype
    KEEP = "keep"  # operands as they arrive
    LOOKUP = "lookup"  # a gather as it is, with a gradient of its own (`lookup.py`)
    CALL = "call"  # a user's precision function decides
    RULE = "rule"  # a structured primitive, by its own rule
    REPEAT = "repeat"  # a call that stands for a repeated layer (`outline/`)


class Reason(NamedTuple):
    """Why an equation runs in its precision. Its `str` is for people.

    Attributes:
      text: the rule that decided, with `{}` for the value.
      value: what the rule found: a decision of the policy, a constant, a dtype.
      inside: the structured primitive around it that is left as it is, if that is why.
    """

    text: str
    value: Any = None
    inside: str = ""

    @property
    def decision(self) -> Decision | None:
        """The decision of the policy, if it is what decided."""
        return self.value if isinstance(self.value, Decision) else None

    def __str__(self) -> str:
        text = self.text.format(self.value)
        return f"inside {self.inside}: {text}" if self.inside else text


PRECISION = "precision={}"
CONSTANT = "constant {:g} would not survive"
NO_OPERAND = Reason("no float32 operand")
SUM_OF_PRODUCTS = Reason("an inner product is a sum")
LEAVES_ONLY = Reason("float32 leaves only")
KEEPS_DTYPE = Reason("keeps its operand's dtype")


@dataclasses.dataclass(frozen=True)
class Step:
    """The plan of one equation.

    Attributes:
      mode: how it is emitted.
      outs: the values of its results.
      reason: the deciding rule.
      use: how it reads its operands; `None` means as the results are read.
      uses: of a structured primitive: how it reads each operand.
      detail: what the mode needs: the user's decision, the plans of sub-jaxprs, or the
        dtype to which the gradient of a lookup may be rounded.
    """

    mode: Mode
    outs: Values
    reason: Reason
    use: Use | None = Use.FULL
    uses: Uses = ()
    detail: Any = None


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
      uses: how each input is read.
      steps: one `Step` for each equation.
      body_kind: what the jaxpr is the body of.
      exports: the variables that the rules of custom derivatives inside close over.
    """

    jaxpr: Jaxpr
    consts: Arrays
    const_ins: Values
    ins: Values
    outs: Values
    uses: Uses
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
    """How a structured primitive is painted and emitted (see `rules.py`)."""

    def paint(
        self, painter: Any, eqn: Eqn, ins: Values, uses: Uses, context: Context
    ) -> Step: ...

    def emit(self, emitter: Any, eqn: Eqn, step: Step, operands: Arrays) -> Arrays: ...


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns those operands or results of an equation that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


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
    """Returns one value for what several branches or iterations give.

    `FULL` wins over `LOW`, and `LOW` over `LEAF`.
    """
    present = [LOW if v.statistic_applied else v for v in values if v is not None]
    if not present:
        return None
    loop_state = any(v.loop_state for v in present)
    for paint in (Paint.FULL, Paint.LOW):
        if any(v.paint is paint for v in present):
            return Value(paint, loop_state=loop_state)
    return present[0] if len(set(present)) == 1 else LEAF


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
