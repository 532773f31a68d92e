"""The analysis: a jaxpr and a policy become a plan. Pure; nothing is traced here.

Every float32 value of the program gets a `Paint`, every equation a `Step`. All other
dtypes (integers, float64, complex, keys, and halves that the user asked for) are left
exactly as they are. The rule:

- **Products** (matrix products, convolutions) read half precision, add up in float32,
  and give half precision.
- **All other arithmetic** runs in float32, as written. Its result is rounded to half
  precision if it is *kept* (`keep.py`), and is float32 otherwise.
- **Moves** (reshapes, slices, selections, maxima) round nothing: they run in half
  precision where their result is kept in it, and on the float32 values otherwise. A
  maximum or minimum with a number that half precision does not have is float32.
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
import enum
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Aval, DType, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import (
    CASTABLE,
    Kind,
    ProductKind,
    Trait,
    gathers_once,
    gives_operands,
    has,
    has_update,
    kind_of,
    may_read_twice,
    product_kind,
)
from flax_amp._jaxpr.walk import only_looked_up
from flax_amp._rewriter.captures import HasUserRule
from flax_amp._rewriter.casts import is_exact
from flax_amp._rewriter.keep import Flow, HasProduct, find_flow
from flax_amp._rewriter.plan import (
    ARITHMETIC,
    FULL,
    HALVES,
    LEAF,
    LEAVES_ONLY,
    LOW,
    MOVES,
    MULTIPLICATION,
    NO_OPERAND,
    STATE,
    STATE_OF_LOOP,
    SUM,
    Context,
    Mode,
    Need,
    Needs,
    Paint,
    Plan,
    Reason,
    ReasonKind,
    Rule,
    Step,
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
from flax_amp.policy import (
    BUILT_IN,
    Decision,
    Origin,
    Policy,
    PrecisionFunction,
    follow_precision,
    use_compute_precision,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

FLOAT32_UPDATE = Reason("its update function is a float32 one")


class _Kind(enum.Enum):
    """What an equation is for the rule."""

    PRODUCT = "a product"
    MOVE = "a move"
    ARITHMETIC = "arithmetic"
    UNROUNDED = "a sum, or what else is never rounded"
    ORIGINAL = "in float32 by the policy"
    CALL = "by a user's precision function"
    STRUCTURED = "by the rule of a structured primitive"


class _Choice(NamedTuple):
    """How an equation runs, as far as it does not depend on its operands."""

    kind: _Kind
    reason: Reason
    decision: Decision
    context: Context  # of the bodies of a structured primitive


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
        self._flows: dict[Any, tuple[Jaxpr, Flow]] = {}
        # The variables that hold states of unrolled recurrences, and the jaxprs that
        # were searched for them, by id.
        self._states: set[Var] = set()
        self._searched: dict[int, Jaxpr] = {}
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
        key = (id(jaxpr), ins, out_needs, context)
        if key not in self._plans:
            self._find_states(jaxpr_)
            flow = self._flow(jaxpr, out_needs, context)
            plan = self._plan(jaxpr_, consts, ins, flow, context)
            # The jaxpr is stored with its plan: its id is unique while it lives.
            self._plans[key] = (jaxpr, plan)
        return self._plans[key][1]

    def needs(self, jaxpr: Jaxpr, out_needs: Needs, context: Context) -> Needs:
        """Returns what is needed of each input; arguments as in `plan`."""
        flow = self._flow(jaxpr, out_needs, context)
        return tuple(map(flow.need, _compat.open_jaxpr(jaxpr)[0].invars))

    def _flow(self, jaxpr: Jaxpr, out_needs: Needs, context: Context) -> Flow:
        key = (id(jaxpr), out_needs, context.scopes, context.forced)
        if key not in self._flows:
            jaxpr_ = _compat.open_jaxpr(jaxpr)[0]
            found = find_flow(
                jaxpr_,
                out_needs or (Need.NONE,) * len(jaxpr_.outvars),
                self.has_product,
                functools.partial(self._reads, context=context),
            )
            self._flows[key] = (jaxpr, found)
        return self._flows[key][1]

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
        flow: Flow,
        context: Context,
    ) -> Plan:
        const_ins = const_values(jaxpr, consts)
        if any(value is not None and value.read_once for value in ins):
            looked_up = only_looked_up(jaxpr)
            ins = tuple(
                value and value._replace(read_once=value.read_once and v in looked_up)
                for v, value in zip(jaxpr.invars, ins, strict=True)
            )
        values = dict(zip(jaxpr.invars, ins, strict=True))
        values |= dict(zip(jaxpr.constvars, const_ins, strict=True))
        steps = []
        for eqn in jaxpr.eqns:
            operands = tuple(value_of(v, values) for v in eqn.invars)
            needs = tuple(map(flow.need, eqn.outvars))
            step = self._paint(eqn, operands, needs, flow, context)
            step = dataclasses.replace(step, needs=needs)
            values.update(zip(eqn.outvars, step.outs, strict=True))
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

    # --- what an equation is ---------------------------------------------------------

    def _choose(self, eqn: Eqn, context: Context) -> _Choice:
        scopes = context.scopes + _compat.scope_names(eqn)
        decision = context.forced or self._policy.decide(eqn.primitive, scopes)
        is_chosen = decision.origin is not Origin.DEFAULT
        stops = is_chosen and decision.function is use_original_precision
        # A scope or a key that stops `amp` leaves a structured primitive untouched.
        # With any other decision, what is inside of it is painted.
        if eqn.primitive.name in self.rules and (not stops or self._emits_all):
            if not stops:
                _check_structured(eqn, decision)
            body = Context(
                scopes if self._policy.spans_scopes else (),
                decision if is_chosen else None,
                context.body_kind,
                context.numbers,
            )
            return _Choice(_Kind.STRUCTURED, MOVES, decision, body)
        kind, reason = self._kind(eqn, decision)
        return _Choice(kind, reason, decision, context)

    def _kind(self, eqn: Eqn, decision: Decision) -> tuple[_Kind, Reason]:
        because = Reason("{0.origin.value} {0.key}", decision)
        function = self._built_in(eqn, decision.function)
        if function is None and not isinstance(decision.function, use_precision):
            return _Kind.CALL, because
        is_original = function in (use_original_precision, use_widest_precision)
        if is_original and decision.origin is not Origin.DEFAULT:
            return _Kind.ORIGINAL, because
        if is_original or function is follow_precision:
            return _kind_by_default(eqn, decision)
        if has_update(eqn):
            return _Kind.ORIGINAL, FLOAT32_UPDATE
        if function is None:
            return _Kind.CALL, because
        if obstacle := self._obstacle_to_low(eqn):
            return _Kind.ORIGINAL, obstacle
        kind = None if decision.origin is Origin.SCOPE else product_kind(eqn)
        if kind is ProductKind.MULTIPLICATION:
            return _Kind.ARITHMETIC, MULTIPLICATION
        if kind is ProductKind.SUM:
            return _Kind.UNROUNDED, Reason("an inner product is a sum")
        return _Kind.PRODUCT, because

    def _built_in(self, eqn: Eqn, function: PrecisionFunction) -> Any:
        """Returns the function of `policy.py` that a function amounts to, if any.

        `use_precision` with a third dtype, such as float16 under bfloat16, amounts to
        none of them: it is called on the equation, as a user's own function is.
        """
        if not isinstance(function, use_precision):
            return function if function in BUILT_IN else None
        if function.dtype == self.compute_dtype:
            return use_compute_precision
        is_castable = kind_of(eqn) in CASTABLE
        is_float32 = function.dtype == jnp.float32
        return use_original_precision if is_float32 or not is_castable else None

    def _obstacle_to_low(self, eqn: Eqn) -> Reason | None:
        """Says why an equation cannot run in the compute dtype, if it cannot."""
        if kind_of(eqn) not in CASTABLE:
            return Reason("{} runs in its original dtypes only", eqn.primitive.name)
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            # float64, complex and the other half are what the user asked for.
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self.compute_dtype):
                return Reason("{} operand", dtype)
        if kind_of(eqn) is Kind.PRODUCT:
            # A quantized weight has a range of its own, which a half may not have.
            for dtype in dtypes[:2]:
                if not jnp.issubdtype(dtype, jnp.floating):
                    return Reason("{} operand", dtype)
        if not _is_default_precision(eqn.params.get("precision")):
            return Reason(ReasonKind.PRECISION, eqn.params["precision"])
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self.compute_dtype):
            return Reason("preferred_element_type={}", preferred)
        return None

    # --- backward: what an equation needs of its operands ----------------------------

    def _reads(
        self, eqn: Eqn, results: Needs, flow: Flow, context: Context
    ) -> Sequence[Need]:
        choice = self._choose(eqn, context)
        if choice.kind is _Kind.STRUCTURED:
            rule = self.rules[eqn.primitive.name]
            return rule.needs(self, eqn, results, choice.context)
        if choice.kind is _Kind.PRODUCT:
            need = Need.LATER | Need.PRODUCT | Need.READ_IN_HALF
            return (need,) * len(eqn.invars)
        if choice.kind is _Kind.MOVE:
            if gives_operands(eqn):
                return results
            if gathers_once(eqn):
                return (Need.READ_IN_HALF | results[0],) * len(eqn.invars)
            return (_read_by_move(eqn, results),) * len(eqn.invars)
        if _is_kept_in_float32(eqn, choice.kind):
            return (Need.READ_IN_FLOAT32,) * len(eqn.invars)
        if flow.is_residual(eqn) and results[0].is_kept:
            return (Need.LATER | Need.BEHIND | Need.READ_IN_HALF,) * len(eqn.invars)
        leads_on = any(Need.LATER in need for need in results)
        need = Need.READ_IN_FLOAT32 | (Need.LATER if leads_on else Need.NONE)
        if any(Need.CHOICE in need for need in results):
            need |= Need.CHOICE
        if leads_on and (choice.kind is _Kind.UNROUNDED or has(eqn, Trait.SIGMOID)):
            need |= Need.COSTLY
        return (need,) * len(eqn.invars)

    # --- forward: the paint of its results -------------------------------------------

    def _paint(
        self, eqn: Eqn, ins: Values, needs: Needs, flow: Flow, context: Context
    ) -> Step:
        choice = self._choose(eqn, context)
        kind, reason = choice.kind, choice.reason
        if kind is _Kind.STRUCTURED:
            if choice.decision.origin is Origin.SCOPE and _takes_no_data(ins):
                return _full(eqn, FULL, Reason("makes its numbers itself"))
            rule = self.rules[eqn.primitive.name]
            return rule.paint(self, eqn, ins, needs, choice.context)
        if kind is _Kind.CALL:
            return self._paint_call(eqn, ins, choice.decision, reason)
        if not any(ins):
            return _full(eqn, LEAF, NO_OPERAND)
        if kind in (_Kind.ORIGINAL, _Kind.UNROUNDED):
            return _full(eqn, FULL, reason)
        if kind is _Kind.PRODUCT:
            return Step(Mode.LOW, like(out_avals(eqn), LOW), reason)
        if kind is _Kind.MOVE:
            return self._paint_move(eqn, ins, needs)
        return self._paint_arithmetic(eqn, ins, needs, flow, reason)

    def _paint_arithmetic(
        self, eqn: Eqn, ins: Values, needs: Needs, flow: Flow, reason: Reason
    ) -> Step:
        if not any(has_paint(v, Paint.LOW, Paint.FULL) for v in ins):
            # Such as `w * mask`: still a weight, which is cast where it is used.
            return _full(eqn, LEAF, LEAVES_ONLY)
        reads_state = any(v is not None and v.is_state for v in ins)
        if reads_state or eqn.outvars[0] in self._states:
            return _full(eqn, STATE, STATE_OF_LOOP)
        if _adds_halves(eqn, ins, needs[0], flow):
            return Step(Mode.LOW, like(out_avals(eqn), LOW), HALVES)
        outs = tuple(
            (LOW if need.is_kept else FULL) if is_painted(v.aval) else None
            for v, need in zip(eqn.outvars, needs, strict=True)
        )
        return Step(Mode.FULL, outs, reason)

    def _paint_move(self, eqn: Eqn, ins: Values, needs: Needs) -> Step:
        operands = [v for v in ins if v is not None]
        avals = out_avals(eqn)
        if not any(map(is_painted, avals)):
            return self._paint_compare(eqn, operands)
        if gives_operands(eqn):
            return Step(Mode.KEEP, ins, MOVES)
        if all(v.paint is Paint.LEAF for v in operands):
            return self._paint_leaf_move(eqn, operands, needs)
        has_low = any(v.paint is Paint.LOW for v in operands)
        if has_low and self._moves_halves(eqn, operands, needs):
            # Gathered in float32 and rounded again, the result is the same, but the
            # cotangents of an element that is read twice are added in float32.
            mode = Mode.FULL if may_read_twice(eqn) else Mode.LOW
            return Step(mode, like(avals, LOW), MOVES)
        is_state = any(v.is_state for v in operands)
        return _full(eqn, STATE if is_state else FULL, MOVES)

    def _moves_halves(self, eqn: Eqn, operands: Sequence[Value], needs: Needs) -> bool:
        """Whether a move of half-precision values gives half-precision values."""
        if gathers_once(eqn):
            return True
        if self._is_unrounded_bound(eqn, operands):
            return False
        is_exact = all(v.paint is not Paint.FULL for v in operands)
        return any(
            need.is_kept or (is_exact and Need.COMPARED in need) for need in needs
        )

    def _paint_leaf_move(
        self, eqn: Eqn, operands: Sequence[Value], needs: Needs
    ) -> Step:
        value, name = LEAF, eqn.primitive.name
        if len(operands) == 1 and has(eqn, Trait.LAYOUT):
            (value,) = operands
        has_scalar = any(is_painted(v.aval) and not v.aval.shape for v in eqn.invars)
        may_be_bias = not has_scalar and all(v.may_be_bias for v in operands)
        value = value._replace(may_be_bias=may_be_bias)
        outs = like(out_avals(eqn), value)
        if name != "gather" or not operands[0].read_once:
            return Step(Mode.FULL, outs, LEAVES_ONLY)
        # Where all readers round the rows, the gradient may be rounded, too.
        is_rounded = Need.READ_IN_HALF in needs[0] and not (
            needs[0] & (Need.READ_IN_FLOAT32 | Need.RETURNED)
        )
        dtype = self.compute_dtype if is_rounded else None
        return Step(Mode.LOOKUP, outs, LEAVES_ONLY, detail=dtype)

    def _are_exact(self, operands: Sequence[Value]) -> bool:
        """Whether a cast to the compute dtype changes none of the operands."""
        return all(
            v.paint is Paint.LOW
            or (v.constant is not None and is_exact(v.constant, self.compute_dtype))
            for v in operands
        )

    def _is_unrounded_bound(self, eqn: Eqn, operands: Sequence[Value]) -> bool:
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
        return Step(Mode.CALL, outs, because, detail=decision)

    def dtype_of(self, value: Value | None, aval: Aval) -> DType:
        """Returns the dtype in which a value of the original `aval` is emitted."""
        is_low = value is not None and value.paint is Paint.LOW
        return self.compute_dtype if is_low else aval.dtype


def _kind_by_default(eqn: Eqn, decision: Decision) -> tuple[_Kind, Reason]:
    """Returns what an equation is that no key of the policy names."""
    because = Reason("{0.origin.value} {0.key}", decision)
    match kind_of(eqn):
        case Kind.MOVE if has_update(eqn):
            return _Kind.ORIGINAL, FLOAT32_UPDATE
        case Kind.MOVE:
            return _Kind.MOVE, MOVES
        case Kind.ARITHMETIC:
            return _Kind.ARITHMETIC, ARITHMETIC
        case Kind.LINEAR_ALGEBRA:
            return _Kind.UNROUNDED, Reason("linear algebra")
        case Kind.PRODUCT:  # without a key
            return _Kind.ORIGINAL, because
        case Kind.SUM:
            return _Kind.UNROUNDED, SUM
    # Random numbers, and primitives that are not known here.
    return _Kind.UNROUNDED, because


def _is_kept_in_float32(eqn: Eqn, kind: _Kind) -> bool:
    """Whether an equation is linear algebra, or a matrix product in float32.

    Nothing is rounded for what leads to these alone.
    """
    if kind_of(eqn) is Kind.PRODUCT:
        return kind is _Kind.ORIGINAL
    return kind_of(eqn) is Kind.LINEAR_ALGEBRA


def _read_by_move(eqn: Eqn, results: Needs) -> Need:
    """Returns what a move needs of its operands: what is needed of its results."""
    # A comparison moves no floats: it reads them in whatever precision.
    pairs = list(zip(results, eqn.outvars, strict=True))
    moved = [need for need, v in pairs if is_painted(v.aval)]
    union = functools.reduce(operator.or_, moved, Need.NONE)
    leads_on = any(Need.LATER in need for need in results)
    if leads_on and has(eqn, Trait.CHOICE):
        return union | Need.LATER | Need.CHOICE | Need.READ_IN_FLOAT32
    if not moved:
        return Need.LATER if leads_on else Need.NONE
    if leads_on and eqn.primitive.name == "reduce_max":
        union = (union & ~Need.COMPARED) | Need.MAXIMUM
    if union.is_kept or Need.COMPARED in union:  # the move runs in half precision
        union |= Need.READ_IN_HALF
    return union


def _takes_no_data(ins: Values) -> bool:
    # Random numbers and positions: a scope that wants low precision means what is
    # computed with them, not how they are made.
    return all(v is None or v.constant is not None for v in ins)


def _full(eqn: Eqn, value: Value, reason: Reason) -> Step:
    return Step(Mode.FULL, like(out_avals(eqn), value), reason)


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
        return Need.LATER in need
    shape = eqn.outvars[0].aval.shape
    return len(others) < len(operands) and all(
        x.may_be_bias
        and v.aval.shape  # not a scalar
        and (flow.is_broadcast(v, shape) or len(shape) == 1)
        and eqn.primitive.name == "add"  # not a running mean that is subtracted
        for v, x in others
    )


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
