"""Calls in the place of repeated layers, so that each kind is rewritten only once.

A network of 24 equal layers that a Python loop unrolls is 24 times the same equations.
Here they become 24 calls of one function: JAX differentiates, transposes and lowers a
jitted function once, whatever the number of its calls, and XLA inlines the calls before
it optimizes, so the compiled program stays the same.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal, Primitive, Var

from flax_amp import _compat
from flax_amp._rewriter.outline.equality import bits, replaced
from flax_amp._rewriter.outline.repeats import Code, Run, common, find, wiring
from flax_amp._rewriter.plan import Mode, Plan, Site, Step, variables

# Stands for a call in an outlined plan; never bound.
repeat_p = Primitive("flax_amp_repeat")
repeat_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Piece:
    """Some equations of a jaxpr, with what a `Plan` needs of one."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    constvars: Sequence[Any] = ()


def outline(plan: Plan) -> Plan:
    """Returns the plan with calls in the place of repeated equations.

    Args:
      plan: the plan of straight code; others come back as they are.

    Returns:
      A plan that computes the same. Its calls have the primitive `repeat_p`; the
      `detail` of their steps is the plan of the layer, the same object for all of them.
    """
    if plan.site not in (Site.STRAIGHT, Site.BLOCK):
        return plan
    code = Code(plan)
    eqns: list[Any] = []
    steps: list[Step] = []
    done = 0
    for run in find(code):
        eqns += code.eqns[done : run.start]
        steps += code.steps[done : run.start]
        calls, step = _calls(code, run)
        eqns += calls
        steps += [step] * run.copies
        done = run.stop
    if not done:
        return plan
    eqns += code.eqns[done:]
    steps += code.steps[done:]
    return _with_equations(plan, eqns, steps)


def _with_equations(plan: Plan, eqns: Sequence[Any], steps: Sequence[Step]) -> Plan:
    jaxpr = plan.jaxpr
    piece = Piece(jaxpr.invars, jaxpr.outvars, eqns, jaxpr.constvars)
    return dataclasses.replace(plan, jaxpr=piece, steps=tuple(steps))


def _calls(code: Code, run: Run) -> tuple[list[Any], Step]:
    """Returns the calls of a run, and the step of all of them."""
    wirings = [wiring(code, run, start) or {} for start in run.starts]
    layer, keys = _layer(code, run, wirings)
    calls = []
    for start, found in zip(run.starts, wirings, strict=True):
        call = code.eqns[start].replace(
            primitive=repeat_p,
            invars=[found[key] for key in keys],
            outvars=[found[v] for v in layer.jaxpr.outvars],
            params={},
        )
        calls.append(_compat.with_scopes(call, common(code.scopes(start, run))))
    return calls, Step(Mode.REPEAT, layer.outs, "one of equal layers", detail=layer)


def _layer(
    code: Code, run: Run, wirings: Sequence[dict[Any, Any]]
) -> tuple[Plan, list[Any]]:
    """Returns the plan of the layers of a run, and the keys of its inputs in wirings.

    Its variables are those of the first layer.
    """
    depth = len(common(code.scopes(run.start, run)))
    places = range(run.start, run.start + run.period)
    made = {v for i in places for v in code.eqns[i].outvars}
    ins: dict[Any, Any] = {}  # the inputs by their keys in wirings
    eqns, steps, outs = [], [], []
    for i in places:
        eqn, step = _without(code.eqns[i], code.steps[i], depth)
        ins |= {v: v for v in variables(eqn.invars) if v not in made}
        invars = list(eqn.invars)
        for k, atom in enumerate(invars):
            key = (i - run.start, k)
            if isinstance(atom, Literal) and _differ(found[key] for found in wirings):
                ins[key] = invars[k] = Var(atom.aval)
        eqns.append(eqn.replace(invars=invars))
        steps.append(step)
        outs += [v for v in eqn.outvars if _leaves(code, run, wirings, v)]
    values = code.values
    invars = list(ins.values())
    plan = Plan(
        jaxpr=Piece(invars, outs, eqns),
        consts=(),
        const_ins=(),
        ins=tuple(values.get(v) for v in invars),
        outs=tuple(values[v] for v in outs),
        uses=(),
        steps=tuple(steps),
        site=Site.BLOCK,
    )
    return plan, list(ins)


def _differ(literals: Iterable[Literal]) -> bool:
    return len(set(map(bits, literals))) > 1


def _leaves(
    code: Code, run: Run, wirings: Sequence[dict[Any, Any]], variable: Any
) -> bool:
    """Whether any layer hands on what is this variable in the first one."""
    return any(
        not start <= place < start + run.period
        for start, found in zip(run.starts, wirings, strict=True)
        for place in code.readers.get(found[variable], ())
    )


def _without(eqn: Any, step: Step, depth: int) -> tuple[Any, Step]:
    """Returns an equation and its step without the first scopes, also those inside."""
    own = _compat.scopes(eqn)
    eqn = _compat.with_scopes(eqn, own[depth:])
    if depth <= len(own):
        return eqn, step
    detail = replaced(step.detail, lambda plan: _plan_without(plan, depth - len(own)))
    return eqn, dataclasses.replace(step, detail=detail)


def _plan_without(plan: Plan, depth: int) -> Plan:
    pairs = [
        _without(eqn, step, depth)
        for eqn, step in zip(plan.jaxpr.eqns, plan.steps, strict=True)
    ]
    return _with_equations(plan, [e for e, _ in pairs], [step for _, step in pairs])
