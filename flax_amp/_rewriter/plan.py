"""What the analysis says of a program: values, uses, steps, plans. Data only.

`flax_amp.paint` makes it, `flax_amp.emit` follows it; the rules of structured
primitives do both.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp.policy import Decision


class Paint(enum.Enum):
    """Where a float32 value of the original program lives in the rewritten one."""

    LEAF = "leaf"  # float32, straight from an argument or constant
    LOW = "low"  # in the compute dtype
    FULL = "full"  # float32, computed so on purpose


class Value(NamedTuple):
    """What the analysis knows of one float32 value.

    Attributes:
      paint: the precision in which it lives.
      applied: of a `FULL` value: a statistic has been applied to low-precision data
        (`x - mean`), so the value may return to the compute dtype.
      carried: of a `FULL` value: it is, or was computed from, the float32 carry of a
        loop. Such a state never goes back low within the loop, whatever meets it.
      bits: of a `LEAF` value: the bytes of the float32 number that every element has,
        if known. Bytes, because `0.0 == -0.0` and `nan != nan`.
      maximum: whether it is the maximum of something.
      below_zero: whether a maximum was subtracted from it: `x - max(x)`.
    """

    paint: Paint
    applied: bool = False
    carried: bool = False
    bits: bytes | None = None
    maximum: bool = False
    below_zero: bool = False

    @property
    def constant(self) -> float | None:
        """The number that every element has, if known."""
        return None if self.bits is None else float(np.frombuffer(self.bits, "f4")[0])

    @property
    def is_statistic(self) -> bool:
        """Whether the value keeps what it is combined with in full precision."""
        return self.paint is Paint.FULL and not self.applied

    def varied(self) -> "Value":
        """The value without the number that all its elements have."""
        return self._replace(bits=None)

    def settled(self) -> "Value":
        """The value as it leaves a loop: an applied one goes back low."""
        return LOW if self.applied else self._replace(carried=False)


LEAF = Value(Paint.LEAF)
LOW = Value(Paint.LOW)
FULL = Value(Paint.FULL)
APPLIED = Value(Paint.FULL, applied=True)
CARRIED = Value(Paint.FULL, carried=True)


class Site(enum.Enum):
    """What a jaxpr is the body of; it decides what its backward pass stores."""

    STRAIGHT = "straight code"
    LAYERS = "a scan over layers"  # forward and backward pass are two loops
    STEPS = "a scan over the steps of a recurrence"
    BLOCK = "one of several equal pieces of straight code"
    CLOSED = "a checkpoint or a custom derivative"  # whose own rules say what is stored


class Use(enum.Flag):
    """How the consumers of a value read it; the union over all of them."""

    NONE = 0
    LOW = enum.auto()  # in the compute dtype
    FULL = enum.auto()  # in float32
    MEASURE = enum.auto()  # in float32, for a statistic of it
    APPLY = enum.auto()  # in float32, to apply a statistic to it

    @property
    def is_numerator(self) -> bool:
        """Whether a statistic of the value is taken and the value itself read, too."""
        return Use.MEASURE in self and self is not Use.MEASURE

    def wants_full(self, has_leaf: bool) -> bool:
        """Whether the equation that computes the value should run in full precision.

        Args:
          has_leaf: whether a float32 leaf would have to be cast down for it.
        """
        if self is Use.NONE or Use.LOW in self:
            return False
        if Use.MEASURE in self and Use.APPLY in self:
            return False
        # A statistic that is only applied comes from elsewhere, such as the running
        # averages of a BatchNorm: what counts is not to round those.
        return has_leaf or self is not Use.APPLY


Values = tuple[Value | None, ...]  # None: not a float32 array, left as it is
Uses = tuple[Use, ...]


class Mode(enum.Enum):
    """How an equation is emitted."""

    LOW = "low"  # float32 operands cast to the compute dtype
    FULL = "full"  # float32 operands restored to float32
    EXP = "exp"  # the same, its result rounded for good
    KEEP = "keep"  # operands as they arrive
    CALL = "call"  # a user's precision function decides
    RULE = "rule"  # a structured primitive, by its own rule
    REPEAT = "repeat"  # a call that stands for equal equations (`flax_amp.outline`)


@dataclasses.dataclass(frozen=True)
class Step:
    """The plan of one equation.

    Attributes:
      mode: how it is emitted.
      outs: the values of its results.
      reason: the deciding rule, for people.
      use: how it reads its operands; `None` if as its consumers read the results.
      uses: of a rule: how it reads each operand.
      detail: what the mode needs: the decision of a user, or the plans of sub-jaxprs.
    """

    mode: Mode
    outs: Values
    reason: str
    use: Use | None = Use.FULL
    uses: Uses = ()
    detail: Any = None


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
      steps: one `Step` per equation.
      site: what the jaxpr is the body of.
      exports: the variables that the rules of custom derivatives inside close over.
    """

    jaxpr: Any
    consts: Sequence[Any]
    const_ins: Values
    ins: Values
    outs: Values
    uses: Uses
    steps: tuple[Step, ...]
    site: Site
    exports: frozenset[Any] = frozenset()

    def known(self) -> dict[Any, Value | None]:
        """Returns the values of the inputs and the consts, by variable."""
        jaxpr = self.jaxpr
        pairs = zip(jaxpr.invars, self.ins, strict=True)
        return dict(pairs) | dict(zip(jaxpr.constvars, self.const_ins, strict=True))

    def values(self) -> dict[Any, Value | None]:
        """Returns the values of all variables."""
        values = self.known()
        for eqn, step in zip(self.jaxpr.eqns, self.steps, strict=True):
            values |= zip(eqn.outvars, step.outs, strict=True)
        return values


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a sub-jaxpr stands.

    Attributes:
      scopes: the scopes around it, kept only if a policy key can span several.
      forced: the decision of an enclosing scope, which holds for all inside.
      site: what it is the body of.
    """

    scopes: tuple[str, ...] = ()
    forced: Decision | None = None
    site: Site = Site.STRAIGHT

    def of(self, site: Site) -> "Context":
        """Returns the context of a body of another kind."""
        return dataclasses.replace(self, site=site)


class Rule(Protocol):
    """How a structured primitive is painted and emitted (see `flax_amp.rules`)."""

    def paint(
        self, painter: Any, eqn: Any, ins: Values, uses: Uses, context: Context
    ) -> Step: ...

    def emit(
        self,
        emitter: Any,
        eqn: Any,
        step: Step,
        operands: Sequence[Any],
        values: Values,
    ) -> Sequence[Any]: ...


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms of a jaxpr that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def has_paint(value: Value | None, *paints: Paint) -> bool:
    """Whether a value is painted with one of the paints."""
    return value is not None and value.paint in paints


def is_painted(aval: Any) -> bool:
    """Whether a value is painted at all: only float32 arrays are."""
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype == jnp.float32


def like(avals: Iterable[Any], value: Value) -> Values:
    """Returns `value` for every painted aval, `None` for the others."""
    return tuple(value if is_painted(aval) else None for aval in avals)


def out_avals(eqn: Any) -> list[Any]:
    """Returns the avals of an equation's results."""
    return [v.aval for v in eqn.outvars]


def join(values: Iterable[Value | None]) -> Value | None:
    """Returns the value of what several branches or iterations agree on."""
    present = [LOW if v.applied else v for v in values if v is not None]
    if not present:
        return None
    carried = any(v.carried for v in present)
    for paint in (Paint.FULL, Paint.LOW):
        if any(v.paint is paint for v in present):
            return Value(paint, carried=carried)
    return present[0] if len(set(present)) == 1 else LEAF


def const_values(jaxpr: Any, consts: Sequence[Any]) -> Values:
    """Returns the values of the consts that a jaxpr closes over."""
    values = like([v.aval for v in jaxpr.constvars], LEAF)
    return tuple(
        value and LEAF._replace(bits=_uniform(x))
        for x, value in zip(consts, values, strict=True)
    )


def _uniform(x: Any) -> bytes | None:
    """The bits of every element of a small concrete float32 array, if all have them."""
    if isinstance(x, jax.core.Tracer) or not 0 < np.size(x) <= 4096:
        return None
    words = np.asarray(x, np.float32).view(np.uint32)
    first = words.flat[0]
    return first.tobytes() if (words == first).all() else None


def value_of(atom: Any, values: Mapping[Any, Value | None]) -> Value | None:
    """Returns the value of a variable or literal of a jaxpr."""
    if not isinstance(atom, Literal):
        return values[atom]
    if not is_painted(atom.aval):
        return None
    return Value(Paint.LEAF, bits=np.float32(atom.val).tobytes())
