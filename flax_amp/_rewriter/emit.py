"""The evaluator: runs a plan, equation by equation, on arrays or tracers.

It decides no dtype, and it looks at the one that an operand really has: a wrong plan
can cost precision, but it cannot give a value a wrong dtype. What it chooses is how to
round: by a plain cast, one that saturates, or one that XLA cannot drop (`casts.py`).

A weight is cast down at each use, inside loop bodies too. XLA merges the converts of
straight code anyway, whereas the cotangents of one shared half-precision copy would add
up in half precision. For the same reason all readers in a jaxpr share one cast up. What
was computed is cast down once for all products that read it: three projections of one
norm would otherwise make a float32 sum of three cotangents.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn, Var
from flax_amp._jaxpr.traits import Kind, Trait, has, kind_of
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.casts import (
    DERIVATIVES,
    cast_constant,
    clamped,
    rounded,
    rounded_function,
    saturating_cast,
)
from flax_amp._rewriter.embedding_lookup import lookup_p
from flax_amp._rewriter.environment import Environment, to_float32
from flax_amp._rewriter.fp8_dot import fp8_dot
from flax_amp._rewriter.fp8_rule import Fp8Product
from flax_amp._rewriter.outline.equality import EquationIds
from flax_amp._rewriter.outline.outline import outline
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    Mode,
    Paint,
    Plan,
    Step,
    Value,
    Values,
    has_paint,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.recompute.regions import Recompute, Region, group_into_regions
from flax_amp._rewriter.recompute.residuals import is_stored
from flax_amp._rewriter.wide_grad import product
from flax_amp.policy import with_result_dtype

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Emitter:
    """Evaluates plans.

    Args:
      painter: plans the rules of custom derivatives, which are known only while
        emitting, and holds the rules of structured primitives.
      recompute: how much the backward pass computes again.
      wide_gradients: whether weights get their gradients in float32 (`wide_grad.py`),
        and tables of embeddings theirs without a rounding (`embedding_lookup.py`).
      merge_layers: whether equal layers become calls of one function.
    """

    painter: Painter
    recompute: Recompute
    wide_gradients: bool
    merge_layers: bool
    # What `cached` made: orders of equations, rewritten bodies, functions of layers.
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # The arrays that rules of custom derivatives close over (`captures.py`).
    captured: dict[Var, Array] = dataclasses.field(default_factory=dict)
    # Of the place of the call. JAX traces nested rules where this cannot be seen.
    takes_symbolic_zeros: bool = dataclasses.field(
        default_factory=_compat.takes_symbolic_zeros
    )

    @property
    def compute_dtype(self) -> DType:
        """The dtype of `LOW` values."""
        return self.painter.compute_dtype

    def cached(self, kind: str, plan: Plan, make: Callable[[], T], *types: Any) -> T:
        """Returns what `make` gave at the first call for a plan and operand types.

        A block that is called 24 times is rewritten once, and JAX lowers it once.
        """
        key = (kind, plan, self.recompute, *types)
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def shared_rules(self, eqn: Eqn, step: Step) -> dict[Any, Any]:
        """Returns where the planned rules of a custom derivative are kept.

        It is one dictionary for all equal equations: each rule is traced and planned
        once.
        """
        ids = self.cache.setdefault("ids", EquationIds(self.painter.has_user_rule))
        key = "rules", ids.id_of_rules(eqn, step), self.recompute
        return self.cache.setdefault(key, {})

    def emit(
        self, plan: Plan, operands: Arrays, *, unrounded: bool = False
    ) -> list[Array]:
        """Evaluates a plan.

        Args:
          plan: the plan.
          operands: one for each input, in the dtype that `plan.ins` says.
          unrounded: whether to return results as they were before they were rounded,
            in float32, where these are at hand.

        Returns:
          The results, otherwise in the dtypes that `plan.outs` says.
        """
        plan, order = self.cached("order", plan, lambda: self._order(plan))
        jaxpr = plan.jaxpr
        env = Environment(
            {
                **dict(zip(jaxpr.invars, operands, strict=True)),
                **dict(zip(jaxpr.constvars, plan.consts, strict=True)),
            },
            plan.known(),
            [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars),
        )
        self._capture(plan, env, plan.exports)
        for item in order:
            if isinstance(item, Region):
                self._emit_region(plan, item, env)
                outs = item.outs
            else:
                self._emit_equation(plan, item, env)
                outs = jaxpr.eqns[item].outvars
            self._capture(plan, env, outs)
        return [env.array(v, unrounded=unrounded) for v in jaxpr.outvars]

    def _capture(self, plan: Plan, env: Environment, written: Iterable[Var]) -> None:
        """Records the float32 arrays of those variables that rules close over."""
        if not plan.exports:
            return  # Most plans export nothing, and this runs for every equation.
        for v in plan.exports.intersection(written):
            if env.has(v):
                self.captured[v] = env.full(v)

    def _order(self, plan: Plan) -> tuple[Plan, list[Region | int]]:
        """Returns the plan with calls for its repeated layers, and its regions."""
        # What rules close over must not be inside of a call, out of their sight.
        if self.merge_layers and not (plan.exports or self.captured):
            plan = outline(plan, self.painter.has_user_rule)
        regions = group_into_regions(
            plan, self.recompute, self.compute_dtype, self.painter.has_user_rule
        )
        return plan, regions

    def _emit_region(self, plan: Plan, region: Region, env: Environment) -> None:
        pairs = [(plan.jaxpr.eqns[i], plan.steps[i]) for i in region.indices]
        unrounded = env.unrounded(_read_unrounded(pairs))
        unrounded_outs = [v for v in _emitted_twice(pairs) if v in region.outs]
        # What is inside of a region is recomputed with it, not by regions of its own.
        inner = dataclasses.replace(self, recompute="never")

        def evaluate(operands: Arrays, unrounded_operands: Arrays) -> Any:
            inside = env.of_region(region, [eqn for eqn, _ in pairs], operands)
            inside.write_unrounded(zip(unrounded, unrounded_operands, strict=True))
            for i in region.indices:
                inner._emit_equation(plan, i, inside)
            return (
                [inside.array(v) for v in region.outs],
                [inside.array(v, unrounded=True) for v in unrounded_outs],
            )

        # No barriers here: the stored values carry them (`stored.py`).
        recomputed = jax.checkpoint(evaluate, policy=is_stored, prevent_cse=False)
        arrays = [env.array(v) for v in region.ins], list(unrounded.values())
        with _compat.source_line(pairs[-1][0]):
            outs, more = _compat.call_or_locate_nan(
                lambda: recomputed(*arrays), lambda: evaluate(*arrays)
            )
        values: dict[Var, Value | None] = {}
        for eqn, step in pairs:
            values |= zip(eqn.outvars, step.outs, strict=True)
            env.release(eqn.invars)
        env.write(region.outs, outs, [values[v] for v in region.outs])
        env.write_unrounded(zip(unrounded_outs, more, strict=True))

    def _emit_equation(self, plan: Plan, index: int, env: Environment) -> None:
        eqn, step = plan.jaxpr.eqns[index], plan.steps[index]
        with _compat.equation_context(eqn):
            outs = self._results(eqn, step, index, env)
            if step.unrounded is not None:
                again = self._results(eqn, step.unrounded, index, env)
                found = dict(zip(eqn.outvars, again, strict=True))
                twice = _emitted_twice([(eqn, step)])
                env.write_unrounded((v, found[v]) for v in twice)
            # The functions of `DERIVATIVES` round their result themselves.
            rounds_itself = eqn.primitive.name in DERIVATIVES
            if step.mode is Mode.ROUNDED_FOR_GOOD and not rounds_itself:
                outs = list(map(rounded, outs))
            pairs = zip(eqn.outvars, outs, strict=True)
            outs = [env.mark(v, x, index) for v, x in pairs]
        env.write(eqn.outvars, outs, step.outs)
        env.release(eqn.invars)

    def _results(
        self, eqn: Eqn, step: Step, index: int, env: Environment
    ) -> list[Array]:
        """Returns the results of an equation, in the dtypes that its step says."""
        values = tuple(env.value(v) for v in eqn.invars)
        # First the casts that readers share; what is left is cast for this reader alone
        # in `_emit_low`.
        full = functools.partial(env.full, unrounded=step.reads_unrounded)
        if step.mode.is_float32:
            arrays = [full(v) for v in eqn.invars]
            arrays = self._within_range(eqn, step, arrays, values)
        elif step.reads:
            arrays = [
                full(v) if has_paint(read, Paint.FULL) else env.array(v)
                for v, read in zip(eqn.invars, step.reads, strict=True)
            ]
        elif step.mode is Mode.LOW:
            arrays = [env.low(v, self.compute_dtype, index) for v in eqn.invars]
        else:
            arrays = [env.array(v) for v in eqn.invars]
        outs = self._emit_step(eqn, step, arrays, values)
        # What a rule or a user's function gives need not be what was planned.
        return self.cast_to_plan(outs, step.outs)

    def _within_range(
        self, eqn: Eqn, step: Step, arrays: list[Array], values: Values
    ) -> list[Array]:
        """Returns the operands of an equation, such that its result can be rounded.

        A mask of -1e9, or of the smallest float32 number, that is added to something
        would be rounded to an infinity.
        """
        if eqn.primitive.name not in ("add", "sub") or not step.mode.rounds:
            return arrays
        return [
            clamped(x, value.constant, self.compute_dtype)
            if value is not None and value.paint is Paint.LEAF
            else x
            for x, value in zip(arrays, values, strict=True)
        ]

    def _emit_step(
        self, eqn: Eqn, step: Step, arrays: Arrays, values: Values
    ) -> Arrays:
        if step.mode is Mode.RULE:
            rule = self.painter.rules[eqn.primitive.name]
            return rule.emit(self, eqn, step, arrays)
        if step.mode is Mode.REPEAT:
            layer = self.cached("layer", step.detail, lambda: self._layer(step.detail))
            return layer(*arrays)
        is_half = self.compute_dtype != jnp.float32
        if is_half and eqn.primitive.name in DERIVATIVES and step.mode.rounds:
            (x,) = arrays
            # The function has to see whether its operand is a half (`casts.py`).
            if has_paint(values[0], Paint.LOW):
                x = x.astype(self.compute_dtype)
            return [rounded_function(eqn.primitive.name, x, self.compute_dtype)]
        if step.mode is Mode.CALL:
            return call_precision_function(eqn, step.detail, self.compute_dtype, arrays)
        if step.mode is Mode.LOW:
            if isinstance(step.detail, Fp8Product):
                dtype, wide = self.compute_dtype, self.wide_gradients
                return [fp8_dot(eqn, *step.detail, dtype, arrays, wide)]
            return self._emit_low(eqn, arrays, values)
        if step.mode is Mode.LOOKUP:
            dtype = None if self.wide_gradients else step.detail
            return [lookup_p.bind(*arrays, dtype=dtype, **eqn.params)]
        return _compat.bind(eqn, arrays, eqn.params)

    def _emit_low(self, eqn: Eqn, arrays: Arrays, values: Values) -> Arrays:
        """Binds an equation in the compute dtype, its operands cast for it alone."""
        params = with_result_dtype(eqn.params, self.compute_dtype)
        # A ragged product has a third operand, the sizes of its groups.
        is_product = kind_of(eqn) is Kind.PRODUCT and len(values) == 2
        widens = self.wide_gradients and is_product
        # Computed factors are no weights: their gradients go on in the compute dtype.
        wide = [widens and has_paint(value, Paint.LEAF) for value in values]
        if has(eqn, Trait.ADDITION) and self.compute_dtype == jnp.float16:
            arrays = self._broadcast_biases(eqn, arrays, values)
        # A weight enters in float32, so that its gradient leaves in float32.
        operands = [
            x if is_wide else self.to_compute_dtype(x, value, eqn.primitive.name)
            for x, value, is_wide in zip(arrays, values, wide, strict=True)
        ]
        if not any(wide):
            return _compat.bind(eqn, operands, params)
        return [product(eqn, params, self.compute_dtype, operands, wide)]

    def _broadcast_biases(
        self, eqn: Eqn, arrays: Arrays, values: Values
    ) -> list[Array]:
        """Returns the operands of a sum, with leaves in the shape of its result.

        The gradient of a bias is a sum of cotangents. It is one in float32 if the bias
        is cast after it was broadcast. In bfloat16, XLA adds up in float32 itself, and
        this would cost a float32 array of cotangents.
        """
        shape, dtype = eqn.outvars[0].aval.shape, self.compute_dtype
        return [
            jnp.broadcast_to(clamped(x, None, dtype), shape)
            if x.shape != shape and value is not None and value.is_argument
            else x
            for x, value in zip(arrays, values, strict=True)
        ]

    def _layer(self, plan: Plan) -> Callable[..., Arrays]:
        """Returns the jitted function of a repeated layer."""

        # Its name is what a profile shows around the scopes of a layer.
        def repeated(*operands: Array) -> list[Array]:
            return self.emit(plan, operands)

        return jax.jit(repeated)

    def to_compute_dtype(
        self, x: Array, value: Value | None, primitive: str = ""
    ) -> Array:
        """Returns an operand in the compute dtype; a leaf saturates.

        Args:
          x: the operand.
          value: what is known of it. With `None` it is returned as it is.
          primitive: the name of the primitive that reads it, if one does.
        """
        if value is None or x.dtype == self.compute_dtype:
            return x
        headroom = primitive in ("add", "sub")
        if value.constant is not None:
            number = cast_constant(value.constant, self.compute_dtype, headroom)
            if np.ndim(x) == 0:
                return number
            # A new array, not a cast: XLA would hoist the float32 one out of a loop.
            return jax.lax.full_like(x, number, dtype=self.compute_dtype)
        # bfloat16 has the range of float32, except for the numbers next to the largest
        # one, which round up to infinity. Masks may be that large, weights are not:
        # they get a plain convert, which XLA can move across an all-gather.
        is_product = kind_of(primitive) is Kind.PRODUCT
        is_plain = is_product and self.compute_dtype == jnp.bfloat16
        if value.paint is Paint.LEAF and not is_plain:
            return saturating_cast(x, self.compute_dtype, headroom)
        return jax.lax.convert_element_type(x, self.compute_dtype)

    def cast_to_plan(
        self, arrays: Arrays, values: Values, origins: Values | None = None
    ) -> list[Array]:
        """Casts arrays to the dtypes that a plan has for them.

        Args:
          arrays: the arrays.
          values: the values that they become.
          origins: the values that they are, if they may be leaves: these saturate,
            what was computed does not.
        """
        origins = origins or (None,) * len(arrays)
        return [
            self.to_compute_dtype(x, origin or value)
            if has_paint(value, Paint.LOW)
            else to_float32(x, value)
            for x, value, origin in zip(arrays, values, origins, strict=True)
        ]


def _read_unrounded(pairs: Iterable[tuple[Eqn, Step]]) -> list[Var]:
    """Returns what some equations read as it was before it was rounded."""
    read = [eqn.invars for eqn, step in pairs if step.reads_unrounded]
    return list(dict.fromkeys(v for atoms in read for v in variables(atoms)))


def _emitted_twice(pairs: Iterable[tuple[Eqn, Step]]) -> list[Var]:
    """Returns the results of some equations that are also there without a rounding."""
    return [
        v
        for eqn, step in pairs
        if step.unrounded is not None
        for v, value in zip(eqn.outvars, step.unrounded.outs, strict=True)
        if has_paint(value, Paint.FULL)
    ]
