"""The casts that `amp` leaves in a program, and the rule that puts each of them there.

Read from the rewriter's plan, for the forward pass: the backward pass has the transpose
of each, and what it computes again.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.typing import DTypeLike

from flax_amp import _compat, default_amp_policy
from flax_amp._rewriter.outline.equality import plans_in
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    LEAF,
    Mode,
    Paint,
    Plan,
    Step,
    Use,
    Value,
    has_paint,
    like,
)
from flax_amp._rewriter.rules import RULES
from flax_amp.policy import LOW_OPS, MOVE_OPS, Policy

PyTree = Any


class Cast(NamedTuple):
    """A kind of cast between float32 and the compute dtype.

    Attributes:
      scope: of the equation that wants it, without the numbers of layers.
      down: from float32 to the compute dtype, or back.
      operand: the primitive that makes what is cast, or "parameter" or "input".
      reader: the primitive that wants it.
      rule: why.
    """

    scope: str
    down: bool
    operand: str
    reader: str
    rule: str

    @property
    def because(self) -> str:
        """The rule in words (see ARCHITECTURE.md)."""
        if self.rule == "numerator of a softmax":
            return "largest array, between 0 and 1: computed in float32, stored low"
        if self.down and self.operand in _OUTSIDE:
            if self.reader in LOW_OPS:
                return "products read the compute dtype; a weight is cast at each use"
            return "what comes from outside follows low-precision data (leaf rule)"
        if self.down:
            return "a float32 result returns to the compute dtype (exit rule)"
        if self.rule.startswith("primitive "):
            return "the policy runs it in float32: a sum, a power, an exponential"
        if self.rule == "every consumer runs in full precision":
            return "only read in float32, so computed in float32 (backward demand)"
        if self.rule == "applies a full-precision value":
            return "joins a float32 statistic"
        return ""


# What is not computed by the program itself.
_OUTSIDE = ("parameter", "input", "constant", "carry")


@dataclasses.dataclass
class Total:
    """How often a cast is run in a step, and the bytes of its float32 side."""

    count: int = 0
    bytes: int = 0


def casts(
    loss: Any, params: PyTree, *args: PyTree, compute_dtype: DTypeLike
) -> dict[Cast, Total]:
    """Returns the casts of the forward pass of a loss, the largest first.

    Args:
      loss: a function of float32 parameters and further arguments.
      params: its parameters, or their shapes.
      *args: the further arguments, or their shapes.
      compute_dtype: the half dtype.

    Returns:
      Their totals.
    """
    closed = jax.make_jaxpr(loss)(params, *args)
    jaxpr, _ = _compat.open_jaxpr(closed)
    painter = Painter(Policy(default_amp_policy), compute_dtype, RULES)
    ins = like([v.aval for v in jaxpr.invars], LEAF)
    plan = painter.plan(closed, ins, (Use.NONE,) * len(jaxpr.outvars))
    count = len(jax.tree.leaves(params))
    origins = ["parameter"] * count + ["input"] * (len(ins) - count)
    walk = _Walk()
    walk.plan(plan, origins, (), 1)
    return dict(sorted(walk.totals.items(), key=lambda item: -item[1].bytes))


class _Walk:
    """Follows a plan as the emitter does, and notes each cast.

    Attributes:
      totals: of the casts so far.
    """

    def __init__(self) -> None:
        self.totals: dict[Cast, Total] = {}

    def plan(
        self, plan: Plan, origins: Sequence[str], scopes: tuple[str, ...], times: int
    ) -> list[str]:
        """Notes the casts of a plan that is run several times.

        Args:
          plan: the plan.
          origins: what made each of its inputs.
          scopes: around it.
          times: how often it is run.

        Returns:
          What makes each of its results.
        """
        jaxpr, values = plan.jaxpr, plan.values()
        made = dict(zip(jaxpr.invars, origins, strict=True))
        made |= dict.fromkeys(jaxpr.constvars, "constant")
        shared: set[Any] = set()  # casts that all readers share
        for eqn, step in zip(jaxpr.eqns, plan.steps, strict=True):
            here = (*scopes, *_compat.scope_names(eqn))
            operands = [v for v in eqn.invars if not isinstance(v, Literal)]
            for v in operands:
                value = values[v]
                down = _is_cast(step, value)
                if down is None or (v, down) in shared:
                    continue
                if not (down and has_paint(value, Paint.LEAF)):
                    shared.add((v, down))
                self._note(here, down, made[v], eqn, step, v.aval, times)
            if step.mode is Mode.EXP:
                self._note(here, True, "exp", eqn, step, eqn.outvars[0].aval, times)
            for v in _entering(eqn, step, values):
                self._note(here, True, made[v], eqn, step, v.aval, times)
            names = [_name(v, made) for v in eqn.invars]
            results = self._outs(eqn, step, names, here, times)
            made |= zip(eqn.outvars, results, strict=True)
        return [_name(v, made) for v in jaxpr.outvars]

    def _outs(
        self, eqn: Any, step: Step, names: list[str], scopes: Any, times: int
    ) -> list[str]:
        """Returns what makes the results of an equation; notes the casts in it."""
        inner = plans_in(step.detail)
        if eqn.primitive.name == "scan":
            consts, carries = _compat.scan_counts(eqn)
            names[consts : consts + carries] = ["carry"] * carries
            times *= eqn.params["length"]
        for plan in inner[:1]:
            if len(plan.jaxpr.invars) == len(names):
                return self.plan(plan, names, scopes, times)
        is_move = eqn.primitive.name in MOVE_OPS and len(names) == 1
        name = names[0] if is_move else eqn.primitive.name
        return [name] * len(eqn.outvars)

    def _note(
        self,
        scopes: Sequence[str],
        down: bool,
        operand: str,
        eqn: Any,
        step: Step,
        aval: Any,
        times: int,
    ) -> None:
        scope = re.sub(r"\d+", "*", "/".join(scopes))
        cast = Cast(scope, down, operand, eqn.primitive.name, step.reason)
        total = self.totals.setdefault(cast, Total())
        total.count += times
        total.bytes += times * aval.size * aval.dtype.itemsize


def _entering(eqn: Any, step: Step, values: dict[Any, Value | None]) -> list[Any]:
    """Returns what is cast down as the first carry of a scan."""
    if eqn.primitive.name != "scan":
        return []
    consts, carries = _compat.scan_counts(eqn)
    pairs = zip(eqn.invars[consts:][:carries], step.detail.carry, strict=True)
    return [
        v
        for v, carry in pairs
        if not isinstance(v, Literal)
        and has_paint(carry, Paint.LOW)
        and has_paint(values[v], Paint.LEAF, Paint.FULL)
    ]


def _name(atom: Any, made: dict[Any, str]) -> str:
    return "constant" if isinstance(atom, Literal) else made[atom]


def _is_cast(step: Step, value: Value | None) -> bool | None:
    """Whether a step casts an operand down (True), up (False) or not at all (None)."""
    if value is None:
        return None
    if step.mode in (Mode.FULL, Mode.EXP) and value.paint is Paint.LOW:
        return False
    is_low = value.paint is Paint.LOW or value.constant is not None
    return True if step.mode is Mode.LOW and not is_low else None
