"""Calls in place of repeated layers, so that each kind of layer is rewritten once.

A network of 24 equal layers that a Python loop unrolls is 24 times the same equations.
Here they become 24 calls of one function. JAX differentiates, transposes and lowers a
jitted function once, whatever the number of its calls. XLA inlines the calls before it
optimizes, so the compiled program is the same.

    before             after
    a = dot x w0       b = repeat[layer] x w0
    b = tanh a         d = repeat[layer] b w1
    c = dot b w1       layer: lambda x w0. a = dot x w0; b = tanh a; return b
    d = tanh c
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence

from jax.extend.core import Literal, Primitive, Var

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.outline.equality import bits, map_plans, plans_in
from flax_amp._rewriter.outline.repeats import EqualLayers, Key, Program, find
from flax_amp._rewriter.outline.scopes import LayerScopes, Scopes
from flax_amp._rewriter.plan import (
    BodyKind,
    EditedJaxpr,
    Mode,
    Plan,
    Reason,
    Step,
)

# The primitive of the calls in an outlined plan. It is never bound.
repeat_p = Primitive("flax_amp_repeat")
repeat_p.multiple_results = True


def outline(plan: Plan, has_user_rule: Callable[[Eqn], bool]) -> Plan:
    """Returns the plan with calls in place of repeated layers.

    It computes the same. The calls have the primitive `repeat_p`, and the `detail` of
    their steps is the plan of the layer, one object for all of them. A plan that is not
    of straight code is returned as it is.

    Args:
      plan: the plan.
      has_user_rule: tells equations with a rule of a user, which no call replaces.
    """
    if plan.body_kind not in (BodyKind.STRAIGHT, BodyKind.REPEATED_LAYER):
        return plan
    program = Program(plan, has_user_rule)
    # Between the runs, the equations stay as they are.
    eqns: list[Eqn] = []
    steps: list[Step] = []
    done = 0
    for layers in find(program):
        run = layers.run
        eqns += program.eqns[done : run.start]
        steps += program.steps[done : run.start]
        calls, step = _Calls(program, layers).calls()
        eqns += calls
        steps += [step] * run.copies
        done = run.stop
    if not done:  # no run was found
        return plan
    eqns += program.eqns[done:]
    steps += program.steps[done:]
    return _with_equations(plan, eqns, steps)


def _with_equations(plan: Plan, eqns: Sequence[Eqn], steps: Sequence[Step]) -> Plan:
    jaxpr = plan.jaxpr
    edited = EditedJaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr.constvars)
    return dataclasses.replace(plan, jaxpr=edited, steps=tuple(steps))


class _Calls:
    """The calls that take the places of equal layers.

    The layers differ in variables, in integer literals, and in scopes (`scopes.py`).
    What they call is the first one, with what differs as inputs.
    """

    def __init__(self, program: Program, layers: EqualLayers):
        self._program = program
        self._run, self._substitutions, self._scopes = layers

    def calls(self) -> tuple[list[Eqn], Step]:
        """Returns the calls, and the step of all of them."""
        program, run = self._program, self._run
        layer, keys = self._layer()
        calls = []
        layers = zip(run.starts, self._substitutions, self._scopes.calls, strict=True)
        for start, found, scopes in layers:
            # A call takes its source line from the first equation of its layer.
            call = program.eqns[start].replace(
                primitive=repeat_p,
                invars=[found[key] for key in keys],
                outvars=[found[v] for v in layer.jaxpr.outvars],
                params={},
            )
            calls.append(_compat.with_scopes(call, scopes))
        # One step with one plan for all calls: `Emitter.cached` finds it by identity.
        reason = Reason("one of equal layers")
        return calls, Step(Mode.REPEAT, layer.outs, reason, detail=layer)

    def _layer(self) -> tuple[Plan, list[Key]]:
        """Returns the plan of the first layer, and the keys of its inputs."""
        program, run = self._program, self._run
        indices = range(run.start, run.start + run.period)
        made = {v for i in indices for v in program.eqns[i].outvars}
        ins: dict[Key, Var] = {}
        eqns: list[Eqn] = []
        steps: list[Step] = []
        outs: list[Var] = []
        for i in indices:
            eqn, step = _renamed(program.eqns[i], program.steps[i], self._scopes)
            # In the order in which they are read: it is the same in every process.
            ins |= {v: v for v in variables(eqn.invars) if v not in made}
            keys = [(i - run.start, k) for k in range(len(eqn.invars))]
            literals = self._changing_literals(eqn, keys)
            ins |= literals
            pairs = zip(keys, eqn.invars, strict=True)
            eqns.append(eqn.replace(invars=[literals.get(k, v) for k, v in pairs]))
            steps.append(step)
            # What no layer passes on stays inside, where it can be recomputed.
            outs += filter(self._is_read_outside, eqn.outvars)
        values = program.values
        invars = list(ins.values())
        plan = Plan(
            jaxpr=EditedJaxpr(invars, outs, eqns),
            consts=(),
            const_ins=(),
            ins=tuple(values.get(v) for v in invars),
            outs=tuple(values[v] for v in outs),
            steps=tuple(steps),
            body_kind=BodyKind.REPEATED_LAYER,
        )
        return plan, list(ins)

    def _changing_literals(self, eqn: Eqn, keys: Sequence[Key]) -> dict[Key, Var]:
        """Returns an input for each literal that is not equal in all layers.

        An example is the number that the key of a layer's dropout is folded with:

            k0 = random_fold_in key 0  ->  k0 = random_fold_in key i, with i an input
        """
        return {
            key: Var(atom.aval)
            for key, atom in zip(keys, eqn.invars, strict=True)
            if isinstance(atom, Literal)
            if len({bits(found[key]) for found in self._substitutions}) > 1
        }

    def _is_read_outside(self, variable: Var) -> bool:
        """Whether a variable of the first layer is read outside of it, in any layer."""
        # The last layer may have readers that the others do not have, such as the head.
        # All calls return what one of them has to return.
        return any(
            not start <= index < start + self._run.period
            for start, found in zip(self._run.starts, self._substitutions, strict=True)
            for index in self._program.readers.get(found[variable], ())
        )


def _renamed(
    eqn: Eqn, step: Step, scopes: LayerScopes, outer: Scopes = ()
) -> tuple[Eqn, Step]:
    """Returns an equation of the first layer, and its step, with other scopes.

    Args:
      eqn: the equation.
      step: its step.
      scopes: those of the layers.
      outer: the scopes around the jaxpr with the equation, which begin at its border.
    """
    path = outer + _compat.scopes(eqn)
    new = scopes.inside(path)[len(scopes.inside(outer)) :]
    if new != _compat.scopes(eqn):
        eqn = _compat.with_scopes(eqn, new)

    detail = map_plans(step.detail, lambda plan: _renamed_plan(plan, scopes, path))
    if all(map(operator.is_, plans_in(detail), plans_in(step.detail))):
        return eqn, step
    return eqn, dataclasses.replace(step, detail=detail)


def _renamed_plan(plan: Plan, scopes: LayerScopes, outer: Scopes) -> Plan:
    """Returns the plan of a body with other scopes, or itself if none is another one.

    Whoever calls the same body calls the same plan, so it is rewritten once.
    """
    pairs = [_renamed(*pair, scopes, outer) for pair in plan.pairs()]
    eqns, steps = [eqn for eqn, _ in pairs], [step for _, step in pairs]
    is_same = all(map(operator.is_, eqns, plan.jaxpr.eqns))
    if is_same and all(map(operator.is_, steps, plan.steps)):
        return plan
    return _with_equations(plan, eqns, steps)
