"""The analysis: a jaxpr and a policy become a plan.

It only reads the program. It traces one thing, a user's precision function
(`_paint_call`), to learn which dtypes it gives.

Every float32 value of the program gets a `Paint`, every equation a `Step`. All other
dtypes (integers, float64, complex, keys, and halves that the user asked for) are left
exactly as they are. The rule:

- **Products** (matrix products, convolutions) read half precision, add up in float32,
  and give half precision. Some read 8-bit floats, if the policy asks for it
  (`fp8_rule.py`).
- **All other arithmetic** runs in float32, as written. Its result is rounded to half
  precision if it is *kept* (`keep.py`), and is float32 otherwise.
- **Moves** (reshapes, slices, selections, maxima) round nothing: they run in half
  precision where their result is kept in it, and on the float32 values otherwise. A
  maximum or minimum with a constant that half precision cannot represent is float32.
- **Equations that lead to no product**, as for a loss or a metric, read unrounded
  numbers.
- **Never in half precision**: the results of sums, the states of loops and arithmetic
  on them inside of the loop, and what is computed from arguments and constants alone,
  such as a parameter, which is cast at each use.

An example, centering between two products with the weight `w`:

    before                   after, in bfloat16           why
    y:f32 = dot x w          y:bf16 = dot x:bf16 w:bf16   a product
    m:f32 = mean y           m:f32 = mean y:f32           a sum
    d:f32 = sub y m          d:bf16 = sub y:f32 m         kept: a product reads it
    z:f32 = dot d w          z:bf16 = dot d:bf16 w:bf16   a product

`keep.py` goes through the program backward, then this module forward. Structured
primitives (scan, jit, custom derivatives, ...) have rules of their own in `rules.py`,
which are handed to the `Painter`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Aval, DType, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import (
    Kind,
    Trait,
    gathers_once,
    gives_operands,
    has,
    kind_of,
    may_read_twice,
)
from flax_amp._jaxpr.walk import only_looked_up, variables
from flax_amp._rewriter.captures import HasUserRule
from flax_amp._rewriter.casts import is_exact
from flax_amp._rewriter.choice import Choice, Chooser, Role
from flax_amp._rewriter.fp8_rule import product_in_fp8
from flax_amp._rewriter.keep import Flow, HasProduct, find_flow, operand_needs
from flax_amp._rewriter.plan import (
    FULL,
    HALVES,
    LEAF,
    LEAVES_ONLY,
    LOW,
    MOVES,
    NO_OPERAND,
    STATE,
    STATE_OF_LOOP,
    Context,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    Rule,
    Step,
    Value,
    Values,
    const_values,
    has_paint,
    is_painted,
    like,
    out_avals,
    rounded_needs,
    value_of,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.recurrence import find_states
from flax_amp.policy import Decision, Policy, use_fp8


class Painter:
    """Plans jaxprs, each once per combination of operand values.

    Args:
      policy: the checked policy.
      compute_dtype: the dtype of `LOW` values.
      rules: the rules of structured primitives, by primitive name.
      emits_all: whether these rules emit structured primitives even where the policy
        stops `amp`, because what is inside closes over values (`captures.py`).
    """

    def __init__(
        self,
        policy: Policy,
        compute_dtype: DType,
        rules: Mapping[str, Rule],
        emits_all: bool = False,
    ) -> None:
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.rules = rules
        self.has_fp8 = bool(policy.fp8_recipes)
        self._choose = Chooser(policy, self.compute_dtype, rules.keys(), emits_all)
        # By the jaxpr itself: jaxprs compare by identity, and the key keeps them alive.
        self._plans: dict[Any, Plan] = {}
        self._flows: dict[Any, Flow] = {}
        # The variables that hold states of unrolled recurrences, and the open jaxprs
        # that were searched for them.
        self._states: set[Var] = set()
        self._searched: set[Jaxpr] = set()
        self.has_product = HasProduct()
        self.has_user_rule = HasUserRule()

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Values,
        out_needs: Needs = (),
        context: Context = Context(),  # noqa: B008 - immutable
    ) -> Plan:
        """Plans an open or closed jaxpr.

        Args:
          jaxpr: the original jaxpr.
          ins: the values of its inputs.
          out_needs: what is needed of each result; by default nothing.
          context: where the jaxpr stands.
        """
        jaxpr_, consts = _compat.open_jaxpr(jaxpr)
        key = (jaxpr, ins, out_needs, context)
        if key not in self._plans:
            self._find_states(jaxpr_)
            flow = self._flow(jaxpr, out_needs, context)
            self._plans[key] = self._plan(jaxpr_, consts, ins, flow, context)
        return self._plans[key]

    def needs(self, jaxpr: Jaxpr, out_needs: Needs, context: Context) -> Needs:
        """Returns what is needed of each input; arguments as in `plan`."""
        flow = self._flow(jaxpr, out_needs, context)
        return tuple(map(flow.need, _compat.open_jaxpr(jaxpr)[0].invars))

    def _flow(self, jaxpr: Jaxpr, out_needs: Needs, context: Context) -> Flow:
        # `body_kind` and `numbers` of the context change no need.
        key = (jaxpr, out_needs, context.scopes, context.forced)
        if key not in self._flows:
            jaxpr_ = _compat.open_jaxpr(jaxpr)[0]
            self._flows[key] = find_flow(
                jaxpr_,
                out_needs or (Need.NONE,) * len(jaxpr_.outvars),
                self.has_product,
                functools.partial(self._choose_and_find_needs, context=context),
            )
        return self._flows[key]

    def _find_states(self, jaxpr: Jaxpr) -> None:
        """Finds the states of recurrences in a jaxpr and in what it calls."""
        if jaxpr not in self._searched and self.compute_dtype != jnp.float32:
            states, jaxprs = find_states(jaxpr)
            self._states |= states
            self._searched |= set(jaxprs)

    def _plan(
        self,
        jaxpr: Jaxpr,
        consts: Arrays,
        ins: Values,
        flow: Flow,
        context: Context,
    ) -> Plan:
        const_ins, ins = const_values(jaxpr, consts), _with_single_reads(jaxpr, ins)
        values = dict(zip(jaxpr.invars, ins, strict=True))
        values |= dict(zip(jaxpr.constvars, const_ins, strict=True))
        steps = []
        in_both_forms: set[Var] = set()  # rounded and unrounded
        for eqn in jaxpr.eqns:
            operands = tuple(value_of(v, values) for v in eqn.invars)
            step = self._step(eqn, operands, in_both_forms, flow, context)
            values.update(zip(eqn.outvars, step.outs, strict=True))
            if step.unrounded is not None:
                in_both_forms.update(eqn.outvars)
            steps.append(step)
        return Plan(
            jaxpr=jaxpr,
            consts=consts,
            const_ins=const_ins,
            ins=ins,
            outs=tuple(value_of(v, values) for v in jaxpr.outvars),
            steps=tuple(steps),
            body_kind=context.body_kind,
        )

    def _choose_and_find_needs(
        self, eqn: Eqn, results: Needs, flow: Flow, context: Context
    ) -> Sequence[Need]:
        """Stores how an equation runs in `flow`; returns the needs of its operands."""
        choice = flow.choices[eqn] = self._choose(eqn, context)
        if choice.role is not Role.STRUCTURED:
            return operand_needs(eqn, choice.role, results, flow)
        rule = self.rules[eqn.primitive.name]
        needs = rule.needs(self, eqn, results, choice.inside(context))
        return rounded_needs(needs) if _leads_on(results) else needs

    # --- forward: the paint of an equation's results ---------------------------------

    def _step(
        self,
        eqn: Eqn,
        ins: Values,
        in_both_forms: Set[Var],
        flow: Flow,
        context: Context,
    ) -> Step:
        needs = tuple(map(flow.need, eqn.outvars))
        step = self._paint(eqn, ins, needs, flow, context)
        # A loss reads numbers as they were before their rounding. What leads on to a
        # product reads those that the rest of the network sees.
        has_unrounded = not in_both_forms.isdisjoint(variables(eqn.invars))
        reads_unrounded = has_unrounded and not _leads_on(needs)
        # A comparison in half precision then takes the float32 numbers.
        if reads_unrounded and step.mode is Mode.LOW and not any(step.outs):
            step = dataclasses.replace(step, mode=Mode.FULL)
        return dataclasses.replace(
            step,
            needs=needs,
            reads_unrounded=reads_unrounded,
            unrounded=self._unrounded(eqn, step, needs, has_unrounded),
        )

    def _paint(
        self, eqn: Eqn, ins: Values, needs: Needs, flow: Flow, context: Context
    ) -> Step:
        choice = flow.choices[eqn]
        role, reason = choice.role, choice.reason
        if role is Role.STRUCTURED:
            if choice.decision.lowers_all_inside and _takes_no_data(ins):
                return _full(eqn, FULL, Reason("makes its numbers itself"))
            rule = self.rules[eqn.primitive.name]
            return rule.paint(self, eqn, ins, needs, choice.inside(context))
        if role is Role.USER_FUNCTION:
            return self._paint_call(eqn, ins, choice.decision, reason)
        if not any(ins):  # such as `iota`: a constant until something reads it
            return _full(eqn, LEAF, NO_OPERAND)
        if role in (Role.ORIGINAL, Role.PRECISE, Role.UNROUNDED):
            return _full(eqn, FULL, reason)
        if role is Role.PRODUCT:
            return self._paint_product(eqn, ins, needs, choice)
        if role is Role.MOVE:
            return self._paint_move(eqn, ins, needs)
        return self._paint_arithmetic(eqn, ins, needs, flow, reason)

    def _paint_product(
        self, eqn: Eqn, ins: Values, needs: Needs, choice: Choice
    ) -> Step:
        # Rounded even for a loss: its operands were rounded, which costs as much.
        outs = like(out_avals(eqn), LOW)
        recipe = choice.decision.function
        if not isinstance(recipe, use_fp8) or self.compute_dtype == jnp.float32:
            return Step(Mode.LOW, outs, choice.reason)
        found = product_in_fp8(eqn, ins, needs[0], choice.decision)
        if isinstance(found, Reason):
            return Step(Mode.LOW, outs, found)
        return Step(Mode.LOW, outs, choice.reason, detail=found)

    def _unrounded(
        self, eqn: Eqn, step: Step, needs: Needs, has_unrounded: bool
    ) -> Step | None:
        """Returns the step of an equation without a rounding of its result.

        There is one if a product reads the result, and so does arithmetic that leads to
        no product. In

            t = logistic z;  y = dot t v;  l = log (sub 1 t)

        the product reads a bfloat16 number, which may be 1.0, and the subtraction a
        float32 number below 1.0. Products, and additions in half precision, have no
        other result.

        Args:
          eqn: the equation.
          step: its step, which rounds.
          needs: what is needed of its results.
          has_unrounded: whether there are such results among its operands.
        """
        is_read = any(need.is_read_unrounded for need in needs)
        if not is_read or LOW not in step.outs or self.compute_dtype == jnp.float32:
            return None
        # If a move's operand exists only rounded, an unrounded step is a mere cast.
        moves_halves = step.mode is Mode.LOW and kind_of(eqn) is Kind.MOVE
        if step.mode.rounds or (moves_halves and has_unrounded):
            again = _full(eqn, FULL, step.reason)
            return dataclasses.replace(again, reads_unrounded=True)
        return step.unrounded  # the one that the rule of a call has found

    def _paint_arithmetic(
        self, eqn: Eqn, ins: Values, needs: Needs, flow: Flow, reason: Reason
    ) -> Step:
        if not any(has_paint(v, Paint.LOW, Paint.FULL) for v in ins):
            # Such as `w * mask`: still a weight, which is cast where it is used.
            return _full(eqn, LEAF, LEAVES_ONLY)
        # The small steps of a recurrence would be rounded away, in a loop or unrolled.
        reads_state = any(v is not None and v.is_state for v in ins)
        if reads_state or eqn.outvars[0] in self._states:
            return _full(eqn, STATE, STATE_OF_LOOP)
        if _adds_halves(eqn, ins, needs[0], flow):
            return Step(Mode.LOW, like(out_avals(eqn), LOW), HALVES)
        outs = tuple(
            value and (LOW if need.is_kept else FULL)
            for value, need in zip(like(out_avals(eqn), FULL), needs, strict=True)
        )
        # Computed in float32 in any case; what differs is whether a cast follows.
        mode = _mode_of_rounding(needs) if LOW in outs else Mode.FULL
        return Step(mode, outs, reason)

    def _paint_move(self, eqn: Eqn, ins: Values, needs: Needs) -> Step:
        operands = [v for v in ins if v is not None]
        avals = out_avals(eqn)
        if not any(map(is_painted, avals)):
            return self._paint_compare(eqn, operands)
        if _gives_as_is(eqn, needs):
            return Step(Mode.AS_IS, ins, MOVES)
        paints = {v.paint for v in operands}
        if paints == {Paint.LEAF}:
            return self._paint_leaf_move(eqn, operands, needs)
        if Paint.LOW in paints and self._moves_halves(eqn, operands, needs):
            return Step(_mode_of_half_move(eqn, needs), like(avals, LOW), MOVES)
        is_state = any(v.is_state for v in operands)
        return _full(eqn, FULL._replace(is_state=is_state), MOVES)

    def _moves_halves(self, eqn: Eqn, operands: Sequence[Value], needs: Needs) -> bool:
        """Whether a move of half-precision values gives half-precision values."""
        if gathers_once(eqn):  # whoever reads it; `keep.py` says why
            return True
        if self._bounds_by_float32(eqn, operands):
            return False
        # A selection between a half and a float32 number is not half for a maximum
        # alone: like arithmetic, it must be kept.
        has_full = any(v.paint is Paint.FULL for v in operands)
        return any(
            need.is_kept or (Need.COMPARED in need and not has_full) for need in needs
        )

    def _paint_leaf_move(
        self, eqn: Eqn, operands: Sequence[Value], needs: Needs
    ) -> Step:
        # A constant that is reshaped has the same bits, one that is concatenated with
        # another one may not.
        keeps_bits = len(operands) == 1 and has(eqn, Trait.LAYOUT)
        value = operands[0] if keeps_bits else LEAF
        # A scalar that is broadcast is neither a bias nor a weight, nor is an array
        # padded with a scalar.
        has_scalar = any(is_painted(v.aval) and not v.aval.shape for v in eqn.invars)
        is_argument = not has_scalar and all(v.is_argument for v in operands)
        outs = like(out_avals(eqn), value._replace(is_argument=is_argument))
        if eqn.primitive.name != "gather" or not operands[0].read_once:
            return Step(Mode.FULL, outs, LEAVES_ONLY)
        # Where all readers round the rows, the gradient may be rounded, too.
        read = needs[0] & (Need.READ_IN_HALF | Need.READ_IN_FLOAT32)
        dtype = self.compute_dtype if read == Need.READ_IN_HALF else None
        return Step(Mode.LOOKUP, outs, LEAVES_ONLY, detail=dtype)

    def _are_exact(self, operands: Sequence[Value]) -> bool:
        """Whether a cast to the compute dtype changes none of the operands."""
        return all(
            v.paint is Paint.LOW
            or (v.constant is not None and is_exact(v.constant, self.compute_dtype))
            for v in operands
        )

    def _bounds_by_float32(self, eqn: Eqn, operands: Sequence[Value]) -> bool:
        """Whether an equation bounds a value by what is not in half precision.

        Such as `clip(p, 1e-7, 1 - 1e-7)`, for a logarithm. And the derivative of a
        maximum asks which operand it is: a rounded one would be none of them.
        """
        return has(eqn, Trait.BOUND) and not self._are_exact(operands)

    def _paint_compare(self, eqn: Eqn, operands: list[Value]) -> Step:
        # A constant that the cast rounds could change the answer: `x > 0.1`.
        mode = Mode.LOW if self._are_exact(operands) else Mode.FULL
        return Step(mode, (None,) * len(eqn.outvars), Reason("a comparison"))

    def _paint_call(
        self, eqn: Eqn, ins: Values, decision: Decision, reason: Reason
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
        return Step(Mode.CALL, outs, reason, detail=decision)

    def dtype_of(self, value: Value | None, aval: Aval) -> DType:
        """Returns the dtype in which a value of the original `aval` is emitted."""
        is_low = value is not None and value.paint is Paint.LOW
        return self.compute_dtype if is_low else aval.dtype


def _with_single_reads(jaxpr: Jaxpr, ins: Values) -> Values:
    """Returns the values of inputs; `read_once` stays on those that are only looked up.

    Who calls the jaxpr knows only that it passes the value to nothing else.
    """
    if not any(value is not None and value.read_once for value in ins):
        return ins
    looked_up = only_looked_up(jaxpr)
    return tuple(
        value and value._replace(read_once=value.read_once and v in looked_up)
        for v, value in zip(jaxpr.invars, ins, strict=True)
    )


def _takes_no_data(ins: Values) -> bool:
    # Random numbers and positions: a scope that wants low precision means what is
    # computed with them, not how they are made.
    return all(v is None or v.constant is not None for v in ins)


def _full(eqn: Eqn, value: Value, reason: Reason) -> Step:
    return Step(Mode.FULL, like(out_avals(eqn), value), reason)


def _leads_on(needs: Needs) -> bool:
    return any(Need.LATER in need for need in needs)


def _mode_of_rounding(needs: Needs) -> Mode:
    """Returns the mode of an equation in float32 whose result is rounded.

    It is rounded for good where a sum, a sigmoid or a later layer reads it in float32.
    """
    is_read = any(need & (Need.SHARED | Need.BEHIND) for need in needs)
    return Mode.ROUNDED_FOR_GOOD if is_read else Mode.ROUNDED


def _gives_as_is(eqn: Eqn, needs: Needs) -> bool:
    """Whether a move leaves all paints as they are, such as a barrier around arrays.

    A sort that leads to no product ranks numbers as they were before a rounding.
    """
    return gives_operands(eqn) and (_leads_on(needs) or not has(eqn, Trait.RANKS))


def _mode_of_half_move(eqn: Eqn, needs: Needs) -> Mode:
    """Returns the mode of a move of half-precision values.

    A gather in float32, rounded again, gives the same result, but its transpose adds in
    float32 the cotangents of an element that is read twice.
    """
    return _mode_of_rounding(needs) if may_read_twice(eqn) else Mode.LOW


def _adds_halves(eqn: Eqn, ins: Values, need: Need, flow: Flow) -> bool:
    """Whether an equation adds a bias to a half, or two halves before a product.

    Added in float32 and rounded, two half-precision numbers give the same. But XLA then
    goes on with the float32 sum, and writes it to memory beside the rounded one.
    """
    if not has(eqn, Trait.ADDITION):
        return False
    operands = [(v, x) for v, x in zip(eqn.invars, ins, strict=True) if x is not None]
    others = [(v, x) for v, x in operands if x.paint is not Paint.LOW]
    if not others:
        # In front of a loss, the sum of two halves has more digits in float32.
        return Need.LATER in need
    has_half = len(others) < len(operands)
    # `sub` is left out: it may subtract a running mean.
    return (
        has_half
        and eqn.primitive.name == "add"
        and all(_is_bias(eqn, v, x, flow) for v, x in others)
    )


def _is_bias(eqn: Eqn, v: Var, value: Value, flow: Flow) -> bool:
    """Whether an operand of an addition is a bias.

    Each number of a bias is added to many numbers of the other operand. An argument of
    the shape of the result is an activation, unless it has one axis only.
    """
    if not value.is_argument or not v.aval.shape:
        return False
    shape = eqn.outvars[0].aval.shape
    return flow.is_broadcast(v, shape) or len(shape) == 1
