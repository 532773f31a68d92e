"""The evaluator: runs a plan, equation by equation, on arrays or tracers.

Every cast down stands at the use that needs it, also inside loop bodies, and is never
kept for the next use. XLA merges the converts of straight code anyway, whereas one
shared half-precision copy of a weight would make its cotangents add up in half
precision. A cast up is shared within a jaxpr, for the same reason.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._cast import cast_constant, saturating_cast
from flax_amp.paint import Painter, call_precision_function
from flax_amp.plan import (
    Mode,
    Paint,
    Plan,
    Rule,
    Step,
    Value,
    Values,
    value_of,
)
from flax_amp.policy import LOW_OPS, with_result_dtype


@dataclasses.dataclass(frozen=True)
class Emitter:
    """Evaluates plans.

    Args:
      painter: plans what is only known while emitting: custom derivative rules.
      rules: the rules of structured primitives, by primitive name.
    """

    painter: Painter
    rules: Mapping[str, Rule]
    # Rewritten bodies of jit, one per (plan, operand types): a block that is called
    # 24 times is rewritten and lowered once.
    bodies: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def compute_dtype(self) -> Any:
        """The dtype of `LOW` values."""
        return self.painter.compute_dtype

    def emit(self, plan: Plan, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a plan.

        Args:
          plan: the plan.
          operands: one per input, in the dtype that `plan.ins` says.

        Returns:
          The results, in the dtypes that `plan.outs` says.
        """
        env = _Environment(plan, operands)
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True):
            values = tuple(env.value(v) for v in eqn.invars)
            with _compat.equation_context(eqn):
                read = env.full if step.mode is Mode.FULL else env.array
                arrays = [read(v) for v in eqn.invars]
                outs = self._emit_step(eqn, step, arrays, values)
                outs = self.land(outs, step.outs)
            env.write(eqn, outs, step.outs)
        return [env.array(v) for v in plan.jaxpr.outvars]

    def _emit_step(
        self, eqn: Any, step: Step, arrays: Sequence[Any], values: Values
    ) -> Sequence[Any]:
        if step.mode is Mode.RULE:
            rule = self.rules[eqn.primitive.name]
            return rule.emit(self, eqn, step, arrays, values)
        if step.mode is Mode.CALL:
            return call_precision_function(eqn, step.detail, self.compute_dtype, arrays)
        params = eqn.params
        if step.mode is Mode.LOW:
            name = eqn.primitive.name
            pairs = zip(arrays, values, strict=True)
            arrays = [self.lower(x, v, name) for x, v in pairs]
            params = with_result_dtype(params, self.compute_dtype)
        return _compat.bind(eqn, arrays, params)

    def lower(self, x: Any, value: Value | None, primitive: str = "") -> Any:
        """Casts an operand to the compute dtype; a leaf saturates.

        Args:
          x: the operand.
          value: what is known of it; `None` leaves it as it is.
          primitive: the name of the primitive that takes it, if one does.
        """
        if value is None or x.dtype == self.compute_dtype:
            return x
        headroom = primitive in ("add", "sub")
        if value.constant is not None and np.ndim(x) == 0:
            return cast_constant(value.constant, self.compute_dtype, headroom)
        # The range of bfloat16 is that of float32, but for the last half step that
        # rounds up to infinity. Masks stand there, weights do not: theirs is a plain
        # convert, which collectives can be moved across.
        is_weight = primitive in LOW_OPS and self.compute_dtype == jnp.bfloat16
        if value.paint is Paint.LEAF and not is_weight:
            return saturating_cast(x, self.compute_dtype, headroom)
        return jax.lax.convert_element_type(x, self.compute_dtype)

    def land(
        self, arrays: Sequence[Any], values: Values, origins: Values | None = None
    ) -> list[Any]:
        """Casts arrays to the dtypes that `values` says.

        Args:
          arrays: the arrays.
          values: the values that they become.
          origins: the values that they are, if they may be leaves.
        """
        return [
            self.lower(x, origin or v)
            if v is not None and v.paint is Paint.LOW
            else _restore(x, v)
            for x, v, origin in zip(
                arrays, values, origins or (None,) * len(arrays), strict=True
            )
        ]


def _restore(x: Any, value: Value | None) -> Any:
    """Casts an operand back to float32."""
    if value is None or x.dtype == jnp.float32:
        return x
    return jax.lax.convert_element_type(x, jnp.float32)


class _Environment:
    """The live arrays of a plan and their values; an array goes after its last use."""

    def __init__(self, plan: Plan, operands: Sequence[Any]):
        jaxpr = plan.jaxpr
        self._arrays = dict(zip(jaxpr.invars, operands, strict=True))
        self._values = dict(zip(jaxpr.invars, plan.ins, strict=True))
        self._full: dict[Any, Any] = {}
        self._arrays |= dict(zip(jaxpr.constvars, plan.consts, strict=True))
        self._values |= dict(zip(jaxpr.constvars, plan.const_ins, strict=True))
        reads = [v for eqn in jaxpr.eqns for v in eqn.invars]
        atoms = (*reads, *jaxpr.outvars)
        self._uses = Counter(v for v in atoms if not isinstance(v, Literal))

    def array(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self._arrays[atom]

    def full(self, atom: Any) -> Any:
        """Returns the array in float32; all readers share one cast.

        What a norm sends back to its input then adds up in float32 and is rounded
        once, not at each of the three places where the norm reads it.
        """
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._full:
            self._full[atom] = _restore(self._arrays[atom], self._values[atom])
        return self._full[atom]

    def value(self, atom: Any) -> Value | None:
        return value_of(atom, self._values)

    def write(self, eqn: Any, arrays: Sequence[Any], values: Values) -> None:
        for v, array, value in zip(eqn.outvars, arrays, values, strict=True):
            if v in self._uses:
                self._arrays[v], self._values[v] = array, value
        for v in eqn.invars:
            if not isinstance(v, Literal):
                self._uses[v] -= 1
                if not self._uses[v]:
                    del self._arrays[v], self._values[v]
                    self._full.pop(v, None)
