"""The evaluator: runs a plan, equation by equation, on arrays or tracers.

Every cast down stands at the use that needs it, also inside loop bodies, and is never
kept for the next use, where a weight is concerned. XLA merges the converts of straight
code anyway, whereas one shared half-precision copy of a weight would make its
cotangents add up in half precision. A cast up is shared within a jaxpr, for the same
reason, and so is the cast down of what was computed, such as the output of a norm.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._rewriter.casts import cast_constant, rounded_exp, saturating_cast
from flax_amp._rewriter.outline.outline import outline
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    Mode,
    Paint,
    Plan,
    Rule,
    Step,
    Value,
    Values,
    has_paint,
    value_of,
    variables,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.recompute.keep import keep
from flax_amp._rewriter.recompute.regions import Recompute, Region, schedule
from flax_amp._rewriter.recompute.residuals import LowCopy, is_stored
from flax_amp._rewriter.wide_grad import product
from flax_amp.policy import LOW_OPS, with_result_dtype


@dataclasses.dataclass(frozen=True, repr=False)
class Emitter:
    """Evaluates plans.

    Args:
      painter: plans what is only known while emitting: custom derivative rules.
      rules: the rules of structured primitives, by primitive name.
      recompute: how much the backward pass computes again.
      wide_gradients: whether weights get their gradients in float32.
      merge_layers: whether equal layers become calls of one function.
    """

    painter: Painter
    rules: Mapping[str, Rule]
    recompute: Recompute = Recompute.AUTO
    wide_gradients: bool = False
    merge_layers: bool = True
    # Rewritten bodies of jit, one per (plan, operand types): a block that is called
    # 24 times is rewritten and lowered once.
    bodies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # The regions of each (plan, recompute).
    schedules: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # Each plan with its repeated equations as calls; the functions that are called.
    outlined: dict[Plan, Plan] = dataclasses.field(default_factory=dict)
    layers: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # What rules of custom derivatives close over, by variable (`flax_amp.captures`).
    captured: dict[Any, Any] = dataclasses.field(default_factory=dict)

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
        if plan not in self.outlined:
            # A call hides its body from what the rules inside close over.
            merges = self.merge_layers and not (plan.exports or self.captured)
            self.outlined[plan] = outline(plan) if merges else plan
        plan = self.outlined[plan]
        jaxpr = plan.jaxpr
        env = _Environment(
            {
                **dict(zip(jaxpr.invars, operands, strict=True)),
                **dict(zip(jaxpr.constvars, plan.consts, strict=True)),
            },
            plan.known(),
            [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars),
        )
        self._capture(plan, env, plan.exports)
        for item in self._schedule(plan):
            if isinstance(item, Region):
                self._emit_region(plan, item, env)
                made = item.outs
            else:
                self._emit_equation(plan, item, env)
                made = jaxpr.eqns[item].outvars
            self._capture(plan, env, made)
        return [env.array(v) for v in jaxpr.outvars]

    def _capture(
        self, plan: Plan, env: "_Environment", variables: Iterable[Any]
    ) -> None:
        """Keeps the float32 arrays of the variables that rules close over."""
        for v in plan.exports and plan.exports.intersection(variables):
            if env.has(v):
                self.captured[v] = env.full(v)

    def _schedule(self, plan: Plan) -> list[Region | int]:
        key = (plan, self.recompute)
        if key not in self.schedules:
            self.schedules[key] = schedule(plan, self.recompute, self.compute_dtype)
        return self.schedules[key]

    def _emit_region(self, plan: Plan, region: Region, env: "_Environment") -> None:
        values = {v: env.value(v) for v in region.ins}
        eqns = [plan.jaxpr.eqns[i] for i in region.indices]
        # What is inside of a region is recomputed with it.
        inner = dataclasses.replace(self, recompute=Recompute.NEVER)

        def evaluate(*operands: Any) -> list[Any]:
            reads = [v for eqn in eqns for v in eqn.invars] + list(region.outs)
            arrays = dict(zip(region.ins, operands, strict=True))
            first = region.barriers_at(region.indices[0])
            arrays |= {v: keep(arrays[v], first) for v in region.kept & arrays.keys()}
            inside = _Environment(arrays, dict(values), reads)
            for i in region.indices:
                inner._emit_equation(plan, i, inside, region)
            values.update((v, inside.value(v)) for v in region.outs)
            return [inside.array(v) for v in region.outs]

        recomputed = jax.checkpoint(evaluate, policy=is_stored, prevent_cse=False)
        arrays = [env.array(v) for v in region.ins]
        with _compat.source_line(eqns[-1]):
            outs = _compat.call_or_locate_nan(
                lambda: recomputed(*arrays), lambda: evaluate(*arrays)
            )
        env.write(region.outs, outs, [values[v] for v in region.outs])
        for eqn in eqns:
            env.release(eqn.invars)

    def _emit_equation(
        self,
        plan: Plan,
        index: int,
        env: "_Environment",
        region: Region | None = None,
    ) -> None:
        eqn, step = plan.jaxpr.eqns[index], plan.steps[index]
        values = tuple(env.value(v) for v in eqn.invars)
        with _compat.equation_context(eqn):
            if step.mode in (Mode.FULL, Mode.EXP):
                arrays = [env.full(v) for v in eqn.invars]
            elif step.mode is Mode.LOW:
                arrays = [
                    env.low(v, self.compute_dtype, _copy_barriers(region, v, index))
                    for v in eqn.invars
                ]
            else:
                arrays = [env.array(v) for v in eqn.invars]
            outs = self._emit_step(eqn, step, arrays, values)
            outs = self.land(outs, step.outs)
            if region is not None:
                outs = [
                    keep(x, region.barriers_at(index)) if v in region.kept else x
                    for v, x in zip(eqn.outvars, outs, strict=True)
                ]
        env.write(eqn.outvars, outs, step.outs)
        env.release(eqn.invars)

    def _emit_step(
        self, eqn: Any, step: Step, arrays: Sequence[Any], values: Values
    ) -> Sequence[Any]:
        if step.mode is Mode.RULE:
            rule = self.rules[eqn.primitive.name]
            return rule.emit(self, eqn, step, arrays, values)
        if step.mode is Mode.REPEAT:
            return self._layer(step.detail)(*arrays)
        if step.mode is Mode.EXP:
            return [rounded_exp(arrays[0], self.compute_dtype)]
        if step.mode is Mode.CALL:
            return call_precision_function(eqn, step.detail, self.compute_dtype, arrays)
        params = eqn.params
        if step.mode is Mode.LOW:
            name = eqn.primitive.name
            params = with_result_dtype(params, self.compute_dtype)
            pairs = zip(arrays, values, strict=True)
            lowered = [self.lower(x, v, name) for x, v in pairs]
            wide = self._wide_factors(eqn, values)
            if any(wide):
                triples = zip(arrays, lowered, wide, strict=True)
                factors = [x if w else low for x, low, w in triples]
                return [product(eqn, params, self.compute_dtype, factors, wide)]
            arrays = lowered
        return _compat.bind(eqn, arrays, params)

    def _layer(self, plan: Plan) -> Any:
        """Returns the jitted function of a repeated layer."""
        key = (plan, self.recompute)
        if key not in self.layers:

            def repeated(*operands: Any) -> list[Any]:
                return self.emit(plan, operands)

            self.layers[key] = jax.jit(repeated)
        return self.layers[key]

    def _wide_factors(self, eqn: Any, values: Values) -> list[bool]:
        """Returns which factors of a product get their gradients in float32."""
        is_product = eqn.primitive.name in LOW_OPS and len(values) == 2
        return [
            self.wide_gradients and is_product and has_paint(value, Paint.LEAF)
            for value in values
        ]

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
        if value.constant is not None:
            number = cast_constant(value.constant, self.compute_dtype, headroom)
            if np.ndim(x) == 0:
                return number
            # Made anew, not cast: XLA would hoist the float32 array out of a loop.
            if not getattr(jax.typeof(x), "vma", None):
                return jax.lax.full_like(x, number, dtype=self.compute_dtype)
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


def _copy_barriers(region: Region | None, atom: Any, index: int) -> Any:
    """Returns where there are barriers at a kept low copy, `None` if it is not kept."""
    if region is None or isinstance(atom, Literal) or LowCopy(atom) not in region.kept:
        return None
    return region.barriers_at(index)


def _restore(x: Any, value: Value | None) -> Any:
    """Casts an operand back to float32."""
    if value is None or x.dtype == jnp.float32:
        return x
    return jax.lax.convert_element_type(x, jnp.float32)


class _Environment:
    """The live arrays of a plan and their values; an array goes after its last use.

    Args:
      arrays: the arrays of the inputs, by variable.
      values: their values.
      reads: every read of a variable, results included.
    """

    def __init__(
        self,
        arrays: dict[Any, Any],
        values: dict[Any, Value | None],
        reads: Sequence[Any],
    ):
        self._arrays = arrays
        self._values = values
        self._full: dict[Any, Any] = {}
        self._low: dict[Any, Any] = {}
        self._uses = Counter(variables(reads))

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

    def low(self, atom: Any, dtype: Any, barriers: Sequence[str] | None) -> Any:
        """Returns the array, a full one in low precision; all readers share one cast.

        Leaves stay as they are: each use of a weight has a cast of its own.

        Args:
          atom: the variable or literal.
          dtype: the compute dtype.
          barriers: if given, the cast is kept for the backward pass with these.
        """
        is_full = has_paint(self.value(atom), Paint.FULL)
        if isinstance(atom, Literal) or not is_full:
            return self.array(atom)
        if atom not in self._low:
            x = jax.lax.convert_element_type(self._arrays[atom], dtype)
            self._low[atom] = x if barriers is None else keep(x, barriers)
        return self._low[atom]

    def has(self, variable: Any) -> bool:
        return variable in self._arrays

    def value(self, atom: Any) -> Value | None:
        return value_of(atom, self._values)

    def write(
        self, variables: Sequence[Any], arrays: Sequence[Any], values: Sequence[Any]
    ) -> None:
        for v, array, value in zip(variables, arrays, values, strict=True):
            if v in self._uses:
                self._arrays[v], self._values[v] = array, value

    def release(self, atoms: Sequence[Any]) -> None:
        """Notes that an equation has read its operands."""
        for v in variables(atoms):
            self._uses[v] -= 1
            if not self._uses[v]:
                for held in (self._arrays, self._values, self._full, self._low):
                    held.pop(v, None)
