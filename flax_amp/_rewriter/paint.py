"""The analysis: a jaxpr and a policy become a plan. Pure; nothing is traced here.

Every float32 value of the program gets a `Paint`, every equation a `Step` that says in
which precision it runs. All other dtypes (integers, float64, complex, keys, and halves
that the user asked for) are left exactly as they are.

The rules, in the order in which they apply to an equation:

- **low** (matrix products, convolutions): operands cast down, result `LOW`. Unless a
  scope of the policy decides, an outer product is a multiplication, and follows its
  operands; an inner product is a sum, and is full.
- **full** (sums, `exp`, linear algebra): operands in float32, result `FULL`.
- **follow** (elementwise arithmetic):
    1. a `FULL` operand that is a *statistic*, or the float32 state of a loop, makes
       the result `FULL`;
    2. a `FULL` operand to which its statistic *has been applied* (the output of a
       normalization) stays `FULL` while float32 leaves (scale, bias) join it, and goes
       back to `LOW` with anything else. Without this exit the residual stream behind
       the first norm, and its memory, would be float32;
    3. a `LOW` operand makes the result `LOW`, and leaf operands are cast down. Without
       this the first bias would promote the whole network back to float32;
    4. leaves alone stay float32 leaves.
- **keep** (data movement, comparison): the operand's own paint.

An example, centering between two products with the weight `w`:

    before                   after, in bfloat16           why
    y:f32 = dot x w          y:bf16 = dot x:bf16 w:bf16   low
    m:f32 = mean y           m:f32 = mean y:f32           full: a statistic of y
    d:f32 = sub y m          d:f32 = sub y:f32 m          follow, rule 1
    z:f32 = dot d w          z:bf16 = dot d:bf16 w:bf16   low

The forward pass paints the equations in order. A backward sweep then finds how each
value is read (`uses.py`). A follow equation whose result is read in full precision only
runs in float32, too: the `x - max` of a softmax, the loss behind the logits. So does
arithmetic of normalized values that the program only returns, because its results are
float32 anyway. A value that a norm reads is no such case: the norm takes its statistics
in float32 anyway, and otherwise the whole residual stream of an unrolled network would
turn float32, layer by layer from the end. If a value has readers other than low ones, a
second forward pass paints again what this changes.

Structured primitives (scan, jit, custom derivatives, ...) have rules of their own in
`rules.py`, which are handed to the `Painter`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Aval, DType, Eqn, Jaxpr, Var
from flax_amp._rewriter.captures import HasUserRule
from flax_amp._rewriter.heuristics import (
    ProductKind,
    constant_survives_cast,
    is_exact,
    is_softmax_numerator,
    may_read_twice,
    only_looked_up,
    only_selects,
    product_kind,
    with_maximum_flags,
)
from flax_amp._rewriter.plan import (
    CONSTANT,
    FULL,
    KEEPS_DTYPE,
    LEAF,
    LEAVES_ONLY,
    LOOP_STATE,
    LOW,
    NO_OPERAND,
    PRECISION,
    STATISTIC_APPLIED,
    SUM_OF_PRODUCTS,
    Context,
    Mode,
    Paint,
    Plan,
    Reason,
    Rule,
    Step,
    Use,
    Uses,
    Value,
    Values,
    const_values,
    has_paint,
    is_painted,
    like,
    out_avals,
    value_of,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.recurrence import find_states
from flax_amp._rewriter.uses import SQUARES, Forward, find_uses, union
from flax_amp.policy import (
    ACCUMULATION_OPS,
    BUILT_IN,
    CASTABLE_OPS,
    LOW_OPS,
    RANGE_OPS,
    Decision,
    Origin,
    Policy,
    PrecisionFunction,
    follow_precision,
    keep_precision,
    use_compute_precision,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

# These take a statistic of their operand: their result can be applied to it.
_STATISTICS = frozenset((*ACCUMULATION_OPS, *SQUARES))
# Bounded functions: near their limits, half precision has few digits.
_BOUNDED = ("logistic", "tanh", "erf", "erfc")

# Data movement whose result has no element that its operand does not have. A gather
# fills in where it is out of bounds; a ppermute leaves zeros where nobody sends.
_MOVES_ALL = frozenset(
    "reshape squeeze broadcast_in_dim transpose rev slice copy stop_gradient".split()
)


class Painter:
    """Plans jaxprs, each once per combination of operand values.

    Args:
      policy: the checked policy.
      compute_dtype: the dtype of `LOW` values.
      rules: the rules of structured primitives, by primitive name.
      emits_all: whether their rules emit even those that a policy leaves in their
        original precision, because what is inside closes over values (`captures.py`).
    """

    def __init__(
        self,
        policy: Policy,
        compute_dtype: DType,
        rules: Mapping[str, Rule],
        emits_all: bool = False,
    ) -> None:
        self.compute_dtype = jnp.dtype(compute_dtype)
        self._policy = policy
        self.rules = rules
        self._emits_all = emits_all
        self._plans: dict[Any, tuple[Jaxpr, Plan]] = {}
        # The variables that hold states of unrolled recurrences, and the jaxprs that
        # were searched for them, by id.
        self._states: set[Var] = set()
        self._searched: dict[int, Jaxpr] = {}
        self.has_user_rule = HasUserRule()

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Values,
        uses: Uses | None = None,
        context: Context = Context(),  # noqa: B008 - immutable
    ) -> Plan:
        """Plans an open or closed jaxpr.

        Args:
          jaxpr: the original jaxpr.
          ins: the values of its inputs.
          uses: how each result is read; by default in low precision.
          context: where the jaxpr stands.
        """
        jaxpr_, consts = _compat.open_jaxpr(jaxpr)
        uses = uses or (Use.LOW,) * len(jaxpr_.outvars)
        key = (id(jaxpr), ins, uses, context)
        if key not in self._plans:
            self._find_states(jaxpr_)
            plan = self._plan(jaxpr_, consts, ins, uses, context)
            # The jaxpr is stored with its plan: its id is unique while it lives.
            self._plans[key] = (jaxpr, plan)
        return self._plans[key][1]

    def _find_states(self, jaxpr: Jaxpr) -> None:
        """Finds the states of recurrences in a jaxpr and in what it calls."""
        if id(jaxpr) not in self._searched and self.compute_dtype != jnp.float32:
            states, jaxprs = find_states(jaxpr)
            self._states |= states
            self._searched |= {id(searched): searched for searched in jaxprs}

    def _plan(
        self,
        jaxpr: Jaxpr,
        consts: Arrays,
        ins: Values,
        out_uses: Uses,
        context: Context,
    ) -> Plan:
        const_ins = const_values(jaxpr, consts)
        if any(value is not None and value.read_once for value in ins):
            looked_up = only_looked_up(jaxpr)
            ins = tuple(
                value and value._replace(read_once=value.read_once and v in looked_up)
                for v, value in zip(jaxpr.invars, ins, strict=True)
            )
        known = dict(zip(jaxpr.invars, ins, strict=True))
        known |= dict(zip(jaxpr.constvars, const_ins, strict=True))
        # How a value is read depends on the paints of its readers, and those depend on
        # its own. The first pass takes all readers for low ones, to begin somewhere.
        forward = self._forward(jaxpr, known, {}, context)
        uses = find_uses(
            jaxpr,
            forward,
            out_uses,
            functools.partial(self._paint, context=context),
        )
        if any(use is not Use.LOW for use in uses.values()):
            forward = self._forward(jaxpr, known, uses, context, forward)
        return Plan(
            jaxpr=jaxpr,
            consts=consts,
            const_ins=const_ins,
            ins=ins,
            outs=tuple(value_of(v, forward.values) for v in jaxpr.outvars),
            uses=tuple(uses.get(v, Use.NONE) for v in jaxpr.invars),
            steps=tuple(forward.steps),
            body_kind=context.body_kind,
        )

    def _forward(
        self,
        jaxpr: Jaxpr,
        known: dict[Var, Value | None],
        uses: Mapping[Var, Use],
        context: Context,
        first: Forward | None = None,
    ) -> Forward:
        """Paints the equations in order; `first` is the pass for low readers."""
        forward = Forward([], [], dict(known))
        for i, eqn in enumerate(jaxpr.eqns):
            ins = tuple(value_of(v, forward.values) for v in eqn.invars)
            out_uses = tuple(uses.get(v, Use.LOW) for v in eqn.outvars)
            if first is not None and first.holds_for(i, ins, out_uses):
                step = first.steps[i]
            else:
                step = self._paint(eqn, ins, out_uses, context)
            forward.values.update(zip(eqn.outvars, step.outs, strict=True))
            forward.steps.append(step)
            forward.operands.append(ins)
        return forward

    # --- one equation ----------------------------------------------------------------

    def _paint(self, eqn: Eqn, ins: Values, uses: Uses, context: Context) -> Step:
        scopes = context.scopes + _compat.scope_names(eqn)
        decision = context.forced or self._policy.decide(eqn.primitive, scopes)
        is_chosen = decision.origin is not Origin.DEFAULT
        stops = is_chosen and decision.function is use_original_precision
        rule = self.rules.get(eqn.primitive.name)
        # A scope or a key that stops `amp` leaves a structured primitive untouched.
        # With any other decision, what is inside of it is painted.
        if rule is None or (stops and not self._emits_all):
            return self._paint_plain(eqn, ins, uses, decision)
        if not stops:
            _check_structured(eqn, decision)
        if decision.origin is Origin.SCOPE and _takes_no_data(ins):
            return _full(eqn, FULL, Reason("makes its numbers itself"))
        body = Context(
            scopes if self._policy.spans_scopes else (),
            decision if is_chosen else None,
            context.body_kind,
            context.numbers,
        )
        return rule.paint(self, eqn, ins, uses, body)

    def _paint_plain(
        self, eqn: Eqn, ins: Values, uses: Uses, decision: Decision
    ) -> Step:
        is_half = self.compute_dtype != jnp.float32
        if is_half and is_softmax_numerator(eqn, ins, uses, decision):
            outs = like(out_avals(eqn), LOW)
            return Step(Mode.EXP, outs, Reason("numerator of a softmax"))
        return with_maximum_flags(
            eqn, ins, self._paint_by_function(eqn, ins, uses, decision)
        )

    def _paint_by_function(
        self, eqn: Eqn, ins: Values, uses: Uses, decision: Decision
    ) -> Step:
        because = Reason("{0.origin.value} {0.key}", decision)
        function = self._built_in(eqn, decision.function)
        is_user_defined = not (function or isinstance(decision.function, use_precision))
        if not is_user_defined and not any(ins):
            return _full(eqn, FULL, NO_OPERAND)
        if eqn.params.get("update_jaxpr") is not None:  # of a scatter
            because = Reason("its update function is a float32 one")
            if function is keep_precision and eqn.primitive.name != "scatter":
                chosen = self._paint_keep(eqn, ins, uses)  # a maximum or minimum
                return dataclasses.replace(chosen, mode=Mode.FULL, reason=because)
            return _full(eqn, FULL, because)
        if function in (use_original_precision, use_widest_precision):
            is_elementwise = eqn.primitive.name in RANGE_OPS
            of_data = is_elementwise and ins[0] is not None and _is_data(ins[0])
            return _full(eqn, FULL._replace(of_data=of_data), because)
        if function is use_compute_precision:
            return self._paint_low(eqn, ins, decision, because)
        if function is follow_precision:
            return self._paint_follow(eqn, ins, uses)
        if function is keep_precision:
            return self._paint_keep(eqn, ins, uses)
        return self._paint_call(eqn, ins, decision, because)

    def _built_in(self, eqn: Eqn, function: PrecisionFunction) -> Any:
        """Returns the function of `policy.py` that a function amounts to, if any.

        `use_precision` with a third dtype, such as float16 under bfloat16, amounts to
        none of them: it is called on the equation, as a user's own function is.
        """
        if not isinstance(function, use_precision):
            return function if function in BUILT_IN else None
        if function.dtype == self.compute_dtype:
            return use_compute_precision
        is_castable = eqn.primitive.name in CASTABLE_OPS
        is_float32 = function.dtype == jnp.float32
        return use_original_precision if is_float32 or not is_castable else None

    def _paint_low(
        self, eqn: Eqn, ins: Values, decision: Decision, because: Reason
    ) -> Step:
        obstacle = self._obstacle_to_low(eqn)
        if obstacle:
            return _full(eqn, FULL, obstacle)
        kind = None if decision.origin is Origin.SCOPE else product_kind(eqn)
        if kind is ProductKind.MULTIPLICATION:
            # The product of low-precision data is low, whoever reads it.
            step = self._paint_follow(eqn, ins, (Use.LOW,))
            is_low = step.mode is Mode.LOW
            return dataclasses.replace(step, use=Use.LOW) if is_low else step
        if kind is ProductKind.SUM:
            return _full(eqn, FULL, SUM_OF_PRODUCTS, Use.MEASURE)
        return Step(Mode.LOW, like(out_avals(eqn), LOW), because, use=Use.LOW)

    def _obstacle_to_low(self, eqn: Eqn) -> Reason | None:
        """Says why an equation cannot run in the compute dtype, if it cannot."""
        if eqn.primitive.name not in CASTABLE_OPS:
            return Reason("{} runs in its original dtypes only", eqn.primitive.name)
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            # float64, complex and the other half are what the user asked for.
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self.compute_dtype):
                return Reason("{} operand", dtype)
        if eqn.primitive.name in LOW_OPS:
            # A quantized weight has a range of its own, which a half may not have.
            for dtype in dtypes[:2]:
                if not jnp.issubdtype(dtype, jnp.floating):
                    return Reason("{} operand", dtype)
        if not _is_default_precision(eqn.params.get("precision")):
            return Reason(PRECISION, eqn.params["precision"])
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self.compute_dtype):
            return Reason("preferred_element_type={}", preferred)
        return None

    def _paint_follow(self, eqn: Eqn, ins: Values, uses: Uses) -> Step:
        operands = [v for v in ins if v is not None]
        has_data = any(v.statistic_applied or v.paint is Paint.LOW for v in operands)
        if any(v.loop_state for v in operands):
            return _full(eqn, LOOP_STATE, Reason("float32 state of a loop"))
        if has_data and eqn.outvars[0] in self._states:
            return _full(eqn, LOOP_STATE, Reason("state of a recurrence"))
        statistics = [v for v in operands if v.is_statistic]
        if statistics:
            of_data = all(v.of_data for v in statistics)
            return _paint_statistic(eqn, has_data, of_data)
        if not has_data:
            # Such as `w * mask`: still a weight, which is cast where it is used.
            return _full(eqn, LEAF, LEAVES_ONLY)
        return self._paint_data(eqn, operands, uses)

    def _paint_data(self, eqn: Eqn, operands: Sequence[Value], uses: Uses) -> Step:
        """Paints arithmetic with low-precision data that meets no statistic.

        In the last lines of a norm, `d` has its mean subtracted, and `g` is a leaf:

            o:f32 = mul d r      r: the statistic is applied; o may go back ...
            s:f32 = mul o g      ... but the scale joins in float32,
            t:bf16 = add s x     and with other data it goes back
        """
        is_normalized = any(v.statistic_applied for v in operands)
        if is_normalized and any(v.is_leaf for v in operands):
            # Cast down, the scale and bias of a BatchNorm break its fusion on a TPU.
            reason = Reason("float32 leaf joins a normalized value")
            return _full(eqn, STATISTIC_APPLIED, reason, Use.APPLY)
        constants = [v.constant for v in operands if v.constant is not None]
        for constant in constants:
            if not constant_survives_cast(eqn, constant, self.compute_dtype):
                return _full(eqn, FULL, Reason(CONSTANT, constant))
        outs = like(out_avals(eqn), LOW)
        if only_selects(eqn, operands, self.compute_dtype):
            # Also where all readers want float32: `where(mask, logits, -inf)` would
            # otherwise make the largest array of a transformer a float32 one.
            reason = Reason("chooses among low-precision values")
            return Step(Mode.LOW, outs, reason, use=None)
        asked = union(uses)
        if eqn.primitive.name in _BOUNDED and asked.wants_digits:
            # `sigmoid(7)` is 1 in bfloat16, and `log(1 - p)` infinite. As after `exp`,
            # low readers round the result.
            reason = Reason("a consumer runs in full precision")
            return _full(eqn, FULL._replace(of_data=True), reason)
        if asked.wants_full(operands):
            reason = Reason("every consumer runs in full precision")
            return _full(eqn, STATISTIC_APPLIED, reason, None)
        reason = Reason("follows a low-precision operand")
        return Step(Mode.LOW, outs, reason, use=None)

    def _paint_keep(self, eqn: Eqn, ins: Values, uses: Uses) -> Step:
        operands = [v for v in ins if v is not None]
        avals = out_avals(eqn)
        if not any(is_painted(aval) for aval in avals):
            return self._paint_compare(eqn, operands)
        if has_paint(ins[0], Paint.LOW) and may_read_twice(eqn):
            # Gathered in float32 and rounded again, the result is the same, but the
            # cotangents of an element that is read twice are added in float32.
            reason = Reason("its gradient is a long sum")
            return Step(Mode.FULL, like(avals, LOW), reason, use=None)
        outs = _moved(eqn, ins, operands)
        if outs is None:
            return self._paint_follow(eqn, ins, uses)
        if eqn.primitive.name != "gather" or not operands[0].read_once:
            return Step(Mode.KEEP, outs, KEEPS_DTYPE, use=None)
        # Where all readers round the rows, the gradient may be rounded, too.
        dtype = self.compute_dtype if uses == (Use.LOW,) else None
        return Step(Mode.LOOKUP, outs, KEEPS_DTYPE, use=None, detail=dtype)

    def _paint_compare(self, eqn: Eqn, operands: list[Value]) -> Step:
        # A constant that the cast rounds could change the answer: `x > 0.1`.
        exact = all(
            v.paint is Paint.LOW
            or (v.constant is not None and is_exact(v.constant, self.compute_dtype))
            for v in operands
        )
        outs = like(out_avals(eqn), FULL)
        mode = Mode.LOW if exact else Mode.FULL
        # `Use.NONE`: the other readers alone decide on the precision of the operands.
        return Step(mode, outs, Reason("compares at the widest dtype"), use=Use.NONE)

    def _paint_call(
        self, eqn: Eqn, ins: Values, decision: Decision, because: Reason
    ) -> Step:
        def call(*operands: Array) -> list[Array]:
            return call_precision_function(eqn, decision, self.compute_dtype, operands)

        # The only way to learn which dtypes a user's function gives is to ask it.
        structs = [
            _compat.struct_of(v.aval, self.dtype_of(value, v.aval))
            for v, value in zip(eqn.invars, ins, strict=True)
        ]
        shapes = jax.eval_shape(call, *structs)
        outs = tuple(
            (LOW if shape.dtype == self.compute_dtype else FULL)
            if is_painted(aval)
            else None
            for aval, shape in zip(out_avals(eqn), shapes, strict=True)
        )
        return Step(Mode.CALL, outs, because, use=Use.LOW, detail=decision)

    def dtype_of(self, value: Value | None, aval: Aval) -> DType:
        """Returns the dtype in which a value of the original `aval` is emitted."""
        is_low = value is not None and value.paint is Paint.LOW
        return self.compute_dtype if is_low else aval.dtype


def _moved(eqn: Eqn, ins: Values, operands: Sequence[Value]) -> Values | None:
    """Returns the values of the results of an equation that only moves data.

    Args:
      eqn: the equation.
      ins: the values of all its operands.
      operands: the values of its float32 operands.

    Returns:
      The values; `None` if the equation combines several operands.
    """
    avals = out_avals(eqn)
    if len(operands) == 1:
        (value,) = operands
        if eqn.primitive.name not in _MOVES_ALL:
            value = value.without_constant()
        return like(avals, value)
    is_one_to_one = eqn.primitive.multiple_results and len(ins) == len(avals)
    return ins if is_one_to_one else None


def _takes_no_data(ins: Values) -> bool:
    # Random numbers and positions: a scope that wants low precision means what is
    # computed with them, not how they are made.
    return all(v is None or v.constant is not None for v in ins)


def _full(eqn: Eqn, value: Value, reason: Reason, use: Use | None = Use.FULL) -> Step:
    if use is Use.FULL and eqn.primitive.name in _STATISTICS:
        use = Use.MEASURE
    return Step(Mode.FULL, like(out_avals(eqn), value), reason, use=use)


def _paint_statistic(eqn: Eqn, has_data: bool, of_data: bool) -> Step:
    """Paints arithmetic with a statistic, or with a function of data (`of_data`)."""
    if not has_data:
        reason = Reason("follows a full-precision operand")
        return _full(eqn, FULL._replace(of_data=of_data), reason, None)
    # In `x * exp(x)`, `x` meets no statistic. It is read as the result is: in float32
    # by a loss, and low by a product.
    use = None if of_data else Use.APPLY
    reason = Reason("applies a full-precision value")
    return _full(eqn, STATISTIC_APPLIED, reason, use)


def _is_data(value: Value) -> bool:
    """Whether a value is low-precision data, or computed from it element by element."""
    return value.paint is Paint.LOW or value.statistic_applied or value.of_data


def _is_default_precision(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    defaults = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
    return all(part in defaults for part in parts)


def _check_structured(eqn: Eqn, decision: Decision) -> None:
    """Raises a TypeError if a policy sets the precision of a structured primitive."""
    if decision.origin is Origin.PRIMITIVE:
        raise TypeError(
            f"amp_policy: key {decision.key!r} is a structured primitive, and its "
            f"value is {decision.function!r}; expected "
            "flax_amp.use_original_precision, which leaves it untouched. To set the "
            "precision of what is inside, use the primitives inside or a scope as keys."
        )
