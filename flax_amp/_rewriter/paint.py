"""The analysis: a jaxpr and a policy become a plan. Pure; nothing is traced here.

Every float32 value of the program gets a `Paint`, every equation a `Step` that says in
which precision it runs. All other dtypes (integers, float64, complex, keys, and halves
that the user asked for) are left exactly as they are.

The rules, in the order in which they apply to an equation:

- **low** (matrix products, convolutions): operands cast down, result `LOW`.
- **full** (sums, `exp`, linear algebra): operands in float32, result `FULL`.
- **follow** (elementwise arithmetic):
    1. a `FULL` operand that is a *statistic*, or the float32 state of a loop, makes
       the result `FULL`;
    2. a `FULL` operand to which its statistic *has been applied* (`Value.applied`: the
       output of a normalization) stays `FULL` while float32 leaves (scale, bias) join
       it, and goes back to `LOW` with anything else. Without this exit the residual
       stream behind the first norm, and its memory, would be float32;
    3. a `LOW` operand makes the result `LOW`, and leaf operands are cast down. Without
       this the first bias would promote the whole network back to float32;
    4. leaves alone stay float32 leaves.
- **keep** (data movement, comparison): the operand's own paint.

A backward sweep then finds the values that only full-precision equations consume
(`Use`). A follow equation that computes such a value runs in float32 too: the `x - max`
of a softmax, the loss behind the logits. The input of a normalization does not count:
its consumers measure it and apply what they measured, and with it the whole residual
stream of an unrolled network would turn float32, layer by layer from the end.

Structured primitives (scan, jit, custom derivatives, ...) have rules of their own in
`flax_amp.rules`, which are handed to the `Painter`.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._rewriter.heuristics import (
    bears,
    is_exact,
    is_softmax_numerator,
    noted,
    only_chooses,
    reads_again,
)
from flax_amp._rewriter.plan import (
    APPLIED,
    CARRIED,
    FULL,
    LEAF,
    LOW,
    Context,
    Mode,
    Paint,
    Plan,
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
from flax_amp.policy import (
    ACCUMULATION_OPS,
    BUILT_IN,
    LOW_OPS,
    LOWERABLE_OPS,
    Decision,
    Origin,
    Policy,
    follow_precision,
    keep_precision,
    use_compute_precision,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

# What measures a value, so that the result can be applied to it.
_MEASURES = frozenset((*ACCUMULATION_OPS, "square", "integer_pow"))

# Movement whose result has no element that its operand does not have. A gather out of
# bounds fills in, and a ppermute leaves zeros where nobody sends.
_KEEP_CONSTANT = frozenset(
    "reshape squeeze broadcast_in_dim transpose rev slice copy stop_gradient".split()
)


class _Forward(NamedTuple):
    """What the forward pass over one jaxpr found, equation by equation."""

    steps: list[Step]
    operands: list[Values]
    values: dict[Any, Value | None]


class Painter:
    """Plans jaxprs, each once per combination of operand values.

    Args:
      policy: the checked policy.
      compute_dtype: the dtype of `LOW` values.
      rules: the rules of structured primitives, by primitive name.
    """

    def __init__(
        self, policy: Policy, compute_dtype: Any, rules: Mapping[str, Rule]
    ) -> None:
        self.compute_dtype = jnp.dtype(compute_dtype)
        self._policy = policy
        self._rules = rules
        self._plans: dict[Any, tuple[Any, Plan]] = {}
        # The variables that hold states of recurrences, and the searched jaxprs.
        self._states: set[Any] = set()
        self._searched: dict[int, Any] = {}

    def plan(
        self,
        jaxpr: Any,
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
            self._search(jaxpr_)
            plan = self._plan(jaxpr_, consts, ins, uses, context)
            # Kept beside its plan, the jaxpr stays alive and its id unique.
            self._plans[key] = (jaxpr, plan)
        return self._plans[key][1]

    def _search(self, jaxpr: Any) -> None:
        """Finds the states of recurrences in a jaxpr and in what it calls."""
        if id(jaxpr) not in self._searched and self.compute_dtype != jnp.float32:
            states, jaxprs = find_states(jaxpr)
            self._states |= states
            self._searched |= {id(searched): searched for searched in jaxprs}

    def _plan(
        self, jaxpr: Any, consts: Any, ins: Values, out_uses: Uses, context: Context
    ) -> Plan:
        const_ins = const_values(jaxpr, consts)
        known = dict(zip(jaxpr.invars, ins, strict=True))
        known |= dict(zip(jaxpr.constvars, const_ins, strict=True))
        forward = self._forward(jaxpr, known, {}, context)
        uses = self._backward(jaxpr, forward, out_uses, context)
        if any(
            use.wants_full(has_leaf=True) or use.is_numerator for use in uses.values()
        ):
            forward = self._forward(jaxpr, known, uses, context)
        return Plan(
            jaxpr=jaxpr,
            consts=consts,
            const_ins=const_ins,
            ins=ins,
            outs=tuple(value_of(v, forward.values) for v in jaxpr.outvars),
            uses=tuple(uses.get(v, Use.NONE) for v in jaxpr.invars),
            steps=tuple(forward.steps),
            site=context.site,
        )

    def _forward(
        self,
        jaxpr: Any,
        known: dict[Any, Value | None],
        uses: Mapping[Any, Use],
        context: Context,
    ) -> _Forward:
        forward = _Forward([], [], dict(known))
        for eqn in jaxpr.eqns:
            ins = tuple(value_of(v, forward.values) for v in eqn.invars)
            out_uses = tuple(uses.get(v, Use.LOW) for v in eqn.outvars)
            step = self._paint(eqn, ins, out_uses, context)
            forward.values.update(zip(eqn.outvars, step.outs, strict=True))
            forward.steps.append(step)
            forward.operands.append(ins)
        return forward

    def _backward(
        self, jaxpr: Any, forward: _Forward, out_uses: Uses, context: Context
    ) -> dict[Any, Use]:
        """Returns how each variable is read."""
        uses: dict[Any, Use] = {}

        def note(atoms: Sequence[Any], atom_uses: Sequence[Use]) -> None:
            for atom, use in zip(atoms, atom_uses, strict=True):
                if not isinstance(atom, Literal):
                    uses[atom] = uses.get(atom, Use.NONE) | use

        note(jaxpr.outvars, out_uses)
        for eqn, step, ins in zip(
            reversed(jaxpr.eqns),
            reversed(forward.steps),
            reversed(forward.operands),
            strict=True,
        ):
            results = tuple(uses.get(v, Use.NONE) for v in eqn.outvars)
            if step.mode is Mode.RULE:
                if any(use.wants_full(has_leaf=True) for use in results):
                    step = self._paint(eqn, ins, results, context)
                note(eqn.invars, step.uses)
            else:
                use = _union(results) if step.use is None else step.use
                note(eqn.invars, (use,) * len(eqn.invars))
        return uses

    # --- one equation ----------------------------------------------------------------

    def _paint(self, eqn: Any, ins: Values, uses: Uses, context: Context) -> Step:
        scopes = context.scopes + _compat.scope_names(eqn)
        decision = context.forced or self._policy.decide(eqn.primitive, scopes)
        stops = decision.function is use_original_precision
        rule = self._rules.get(eqn.primitive.name)
        if rule is not None and not (stops and decision.origin is not Origin.DEFAULT):
            _check_structured(eqn, decision)
            if decision.origin is Origin.SCOPE and _takes_no_data(ins):
                return _full(eqn, FULL, "makes its numbers itself")
            inner = Context(
                scopes if self._policy.spans_scopes else (),
                decision if decision.origin is Origin.SCOPE else None,
                context.site,
            )
            return rule.paint(self, eqn, ins, uses, inner)
        is_half = self.compute_dtype != jnp.float32
        if is_half and is_softmax_numerator(eqn, ins, uses, decision):
            outs = like(out_avals(eqn), LOW)
            return Step(Mode.EXP, outs, "numerator of a softmax")
        return noted(eqn, ins, self._paint_plain(eqn, ins, uses, decision))

    def _paint_plain(
        self, eqn: Any, ins: Values, uses: Uses, decision: Decision
    ) -> Step:
        function = decision.function
        because = f"{decision.origin.value} {decision.key}"
        is_fixed = isinstance(function, use_precision)
        if (function in BUILT_IN or is_fixed) and not any(ins):
            return _full(eqn, FULL, "no float32 operand")
        if eqn.params.get("update_jaxpr") is not None:  # of a scatter
            return _full(eqn, FULL, "its update function is a float32 one")
        if isinstance(function, use_precision):
            is_lowerable = eqn.primitive.name in LOWERABLE_OPS
            if function.dtype == self.compute_dtype:
                function = use_compute_precision
            elif function.dtype == jnp.float32 or not is_lowerable:
                function = use_original_precision
        if function in (use_original_precision, use_widest_precision):
            return _full(eqn, FULL, because)
        if function is use_compute_precision:
            return self._paint_low(eqn, because)
        if function is follow_precision:
            return self._paint_follow(eqn, ins, uses)
        if function is keep_precision:
            return self._paint_keep(eqn, ins, uses)
        return self._paint_call(eqn, ins, decision, because)

    def _paint_low(self, eqn: Any, because: str) -> Step:
        obstacle = self._obstacle_to_low(eqn)
        if obstacle:
            return _full(eqn, FULL, obstacle)
        return Step(Mode.LOW, like(out_avals(eqn), LOW), because, use=Use.LOW)

    def _obstacle_to_low(self, eqn: Any) -> str | None:
        if eqn.primitive.name not in LOWERABLE_OPS:
            return f"{eqn.primitive.name} runs in its original dtypes only"
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self.compute_dtype):
                return f"{dtype} operand"
        if eqn.primitive.name in LOW_OPS:
            for dtype in dtypes[:2]:  # the two factors; a quantized weight has a range
                if not jnp.issubdtype(dtype, jnp.floating):
                    return f"{dtype} operand"
        if not _is_default_precision(eqn.params.get("precision")):
            return f"precision={eqn.params['precision']}"
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self.compute_dtype):
            return f"preferred_element_type={preferred}"
        return None

    def _paint_follow(self, eqn: Any, ins: Values, uses: Uses) -> Step:
        operands = [v for v in ins if v is not None]
        any_low = any(v.paint is Paint.LOW for v in operands)
        applied = any(v.applied for v in operands)
        has_leaf = any(v.paint is Paint.LEAF and v.constant is None for v in operands)
        if any(v.carried for v in operands):
            return _full(eqn, CARRIED, "float32 state of a loop")
        if eqn.outvars[0] in self._states and (any_low or applied):
            return _full(eqn, CARRIED, "state of a recurrence")
        if any(v.is_statistic for v in operands):
            if any_low or applied:
                return _full(eqn, APPLIED, "applies a full-precision value", Use.APPLY)
            return _full(eqn, FULL, "follows a full-precision operand")
        if applied and has_leaf:
            return _full(eqn, APPLIED, "float32 leaf joins a normalized value")
        if not (any_low or applied):
            return _full(eqn, LEAF, "float32 leaves only")
        for v in operands:
            if v.constant is not None and not bears(
                eqn, v.constant, self.compute_dtype
            ):
                return _full(eqn, FULL, f"constant {v.constant:g} would not survive")
        if only_chooses(eqn, operands, self.compute_dtype):
            outs = like(out_avals(eqn), LOW)
            return Step(Mode.LOW, outs, "chooses among low-precision values", use=None)
        if _union(uses).wants_full(has_leaf):
            return _full(eqn, APPLIED, "every consumer runs in full precision", None)
        outs = like(out_avals(eqn), LOW)
        # Were all consumers to read it in full, it would be computed in full above.
        return Step(Mode.LOW, outs, "follows a low-precision operand", use=None)

    def _paint_keep(self, eqn: Any, ins: Values, uses: Uses) -> Step:
        operands = [v for v in ins if v is not None]
        avals = out_avals(eqn)
        if not any(is_painted(aval) for aval in avals):
            return self._paint_compare(eqn, operands)
        if has_paint(ins[0], Paint.LOW) and reads_again(eqn):
            # A gather in float32, rounded again, gives the same result, but its
            # cotangents are added in float32.
            outs = like(avals, LOW)
            return Step(Mode.FULL, outs, "its gradient is a long sum", use=None)
        if len(operands) == 1:
            keeps = eqn.primitive.name in _KEEP_CONSTANT
            outs = like(avals, operands[0] if keeps else operands[0].varied())
        elif eqn.primitive.multiple_results and len(ins) == len(avals):
            outs = ins
        else:
            return self._paint_follow(eqn, ins, uses)
        return Step(Mode.KEEP, outs, "keeps its operand's dtype", use=None)

    def _paint_compare(self, eqn: Any, operands: list[Value]) -> Step:
        exact = all(
            v.paint is Paint.LOW
            or (v.constant is not None and is_exact(v.constant, self.compute_dtype))
            for v in operands
        )
        # A comparison goes along with whatever the other consumers want.
        outs = like(out_avals(eqn), FULL)
        mode = Mode.LOW if exact else Mode.FULL
        return Step(mode, outs, "compares at the widest dtype", use=Use.NONE)

    def _paint_call(
        self, eqn: Any, ins: Values, decision: Decision, because: str
    ) -> Step:
        def call(*operands: Any) -> list[Any]:
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

    def dtype_of(self, value: Value | None, aval: Any) -> Any:
        """Returns the dtype in which a value of the original `aval` is emitted."""
        is_low = value is not None and value.paint is Paint.LOW
        return self.compute_dtype if is_low else aval.dtype


def _takes_no_data(ins: Values) -> bool:
    # Random numbers and positions: a scope that wants all in low precision means what
    # is computed with them, not how they are made.
    return all(v is None or v.constant is not None for v in ins)


def _full(eqn: Any, value: Value, reason: str, use: Use | None = Use.FULL) -> Step:
    if use is Use.FULL and eqn.primitive.name in _MEASURES:
        use = Use.MEASURE
    return Step(Mode.FULL, like(out_avals(eqn), value), reason, use=use)


def _union(uses: Iterable[Use]) -> Use:
    return functools.reduce(operator.or_, uses, Use.NONE)


def _is_default_precision(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    defaults = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
    return all(part in defaults for part in parts)


def _check_structured(eqn: Any, decision: Decision) -> None:
    if decision.origin is Origin.PRIMITIVE:
        raise TypeError(
            f"amp_policy: key {decision.key!r} is a structured primitive, its value is "
            f"{decision.function!r}; expected flax_amp.use_original_precision, which "
            "leaves it untouched. To set the precision of what is inside, use the "
            "primitives inside or a scope as keys."
        )
