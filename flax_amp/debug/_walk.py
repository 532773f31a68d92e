"""Walks a plan, and notes its equations instead of emitting them.

Nothing is traced here. The walk knows in which dtype each operand arrives, and which
rule decided; tests/debug/test_walk.py compares the dtypes of products with those of the
program that `amp` emits. The casts are counted in that program (`_emitted.py`).
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from flax_amp._compat import Atom, Eqn, Var
from flax_amp._jaxpr.traits import CASTABLE, Kind, is_matrix_product, kind_of
from flax_amp._rewriter.fp8_rule import Fp8Product
from flax_amp._rewriter.outline.equality import plans_in
from flax_amp._rewriter.outline.outline import outline
from flax_amp._rewriter.outline.scopes import resolved
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import (
    FULL,
    LOW,
    Mode,
    Paint,
    Plan,
    ReasonKind,
    Step,
    Value,
    Values,
    has_paint,
    join,
    like,
    value_of,
)
from flax_amp._rewriter.rules import RULES
from flax_amp.debug._kept import CROSSES, Kept, kept
from flax_amp.debug._model import IN_FP8, Dtypes, Equation, float_factors, is_half
from flax_amp.debug._place import Place, known_size, places

_CONVERT = "convert_element_type"


class Visit(NamedTuple):
    """An equation of the walk, with what the plan knows of it."""

    row: Equation
    eqn: Eqn
    step: Step
    scopes: tuple[str, ...]


@dataclasses.dataclass
class Walk:
    """Notes the equations of a plan.

    Args:
      painter: the painter that made the plan.
      merge_layers: whether equal layers become calls of one function.

    Attributes:
      visits: what was noted.
    """

    painter: Painter
    merge_layers: bool
    visits: list[Visit] = dataclasses.field(default_factory=list)
    _outlined: dict[Plan, Plan] = dataclasses.field(default_factory=dict)
    # What the bodies of loops return, with the values that it has outside of them.
    _returned: dict[Var, Value | None] = dataclasses.field(default_factory=dict)

    def plan(self, plan: Plan, place: Place) -> None:
        """Walks a plan and all that it calls."""
        if self.merge_layers:  # as `emit.py` does
            if plan not in self._outlined:
                self._outlined[plan] = outline(plan, self.painter.has_user_rule)
            plan = self._outlined[plan]
        values = plan.values()
        for eqn, step in plan.pairs():
            operands = tuple(value_of(v, values) for v in eqn.invars)
            self._equation(eqn, step, operands, place)

    def _equation(self, eqn: Eqn, step: Step, values: Values, place: Place) -> None:
        name = eqn.primitive.name
        if step.mode in (Mode.RULE, Mode.REPEAT):
            self._find_returned(eqn, step)
            for plan in plans_in(step.detail):
                self.plan(plan, place.within(eqn))
            if name == _CONVERT:  # from float32 to float32: it moves data only
                return
        elif step.mode is not Mode.CALL and _has_untouched_bodies(eqn):
            self._untouched(eqn, step, place)
        if not _is_call(eqn):
            operands = [_operand_value(value, step) for value in values]
            sides = (eqn.invars, operands), (eqn.outvars, step.outs)
            after = Dtypes(*(self._dtypes(*side) for side in sides))
            if isinstance(step.detail, Fp8Product):
                after = after._replace(operands=IN_FP8)
            self._note(step, place.of(eqn), after)

    def _find_returned(self, eqn: Eqn, step: Step) -> None:
        if eqn.primitive.name in ("scan", "while"):
            pairs = zip(step.detail.body.jaxpr.outvars, step.outs, strict=True)
            for v, value in pairs:
                if not isinstance(v, Literal):
                    self._returned[v] = join([value, self._returned.get(v)])

    def _untouched(self, around: Eqn, step: Step, place: Place) -> None:
        """Walks the bodies of an equation that runs in its original dtypes."""
        for body in jaxprs_in_params(around.params):
            for at in places(body, place.within(around), _has_untouched_bodies):
                eqn = at.eqn
                if _is_call(eqn):
                    continue
                reason = step.reason._replace(inside="".join(at.inside[-1:]))
                outs = like([v.aval for v in eqn.outvars], FULL)
                own = Step(Mode.FULL, outs, reason)
                self._note(own, at, dtypes_of(eqn))

    # --- rows --------------------------------------------------------------------

    def _dtypes(
        self, atoms: Sequence[Atom], values: Sequence[Value | None]
    ) -> tuple[str, ...]:
        dtype_of = self.painter.dtype_of
        pairs = zip(atoms, values, strict=True)
        return tuple(str(dtype_of(v, atom.aval) or "") for atom, v in pairs)

    def _note(self, step: Step, place: Place, after: Dtypes) -> None:
        """Notes the equation of a place."""
        eqn = place.eqn
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars] or [()]
        before, found = dtypes_of(eqn), kept(eqn, step) or Kept(False, "")
        dtype = after.results[before.results.index("float32")] if found.is_kept else ""
        returned = [self._returned[v] for v in eqn.outvars if v in self._returned]
        if not is_half(dtype) and any(has_paint(x, Paint.LOW) for x in returned):
            dtype, found = self.painter.compute_dtype.name, Kept(True, CROSSES)
        elif any(returned) and not found.is_kept:
            dtype, found = "float32", Kept(True, str(ReasonKind.STATE_OF_LOOP))
        row = Equation(
            path=place.path,
            primitive=eqn.primitive.name,
            before=before,
            after=after,
            reason=str(step.reason),
            kept=dtype,
            kept_by=found.rule,
            shape="x".join(map(str, shapes[0])),
            times=place.times,
            flops=flops(eqn) * place.times,
            source=place.source,
            inside=place.inside,
        )
        scopes = resolved(place.scopes)
        self.visits.append(Visit(row, eqn, step, scopes))


def _is_call(eqn: Eqn) -> bool:
    """Whether an equation's dtypes say nothing that those inside do not say."""
    return kind_of(eqn) is Kind.CALL


def _has_untouched_bodies(eqn: Eqn) -> bool:
    """Whether an equation has bodies that a reader takes for a part of the program."""
    name = eqn.primitive.name
    return name in RULES or not (kind_of(eqn) in CASTABLE or name == "pallas_call")


def _operand_value(value: Value | None, step: Step) -> Value | None:
    """Returns the value of an operand as the equation reads it."""
    if value is None or step.mode.is_float32:
        return None
    return LOW if step.mode is Mode.LOW else value


class Matching:
    """The equations of a walk, found by the traceback and the path of an emitted one.

    An emitted equation has the traceback of the original one, and so have its casts.

    Args:
      visits: the equations of the walk.
    """

    def __init__(self, visits: Iterable[Visit]):
        self._rows: dict[int, list[Equation]] = defaultdict(list)
        for visit in visits:
            self._rows[id(visit.eqn.source_info.traceback)].append(visit.row)

    def rows(self, place: Place) -> list[Equation]:
        """Returns the equations that may have become the one of a place."""
        rows = self._rows.get(id(place.eqn.source_info.traceback), [])
        path = place.path
        found = [row for row in rows if row.path == path]
        # What JAX takes out of a loop has lost the scopes around the loop.
        return found or [row for row in rows if f"/{row.path}".endswith(f"/{path}")]


# --- single equations ----------------------------------------------------------------


def dtypes_of(eqn: Eqn) -> Dtypes:
    """Returns the dtypes of an equation as it stands in its program."""
    operands, results = (
        tuple(str(getattr(v.aval, "dtype", "")) for v in atoms)
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Dtypes(operands, results)


def flops(eqn: Eqn) -> int:
    """Returns the operations of a product or a convolution of floats, else 0."""
    name, params = eqn.primitive.name, eqn.params
    if not is_matrix_product(eqn):
        return 0
    if not float_factors(dtypes_of(eqn).operands):
        return 0
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        terms = [n for i, n in enumerate(right.shape) if i != features]
        return known_size(2 * math.prod(out.shape) * math.prod(terms))
    if name == "dot_general":
        (_, contracting), (_, batch) = params["dimension_numbers"]
        shared = {*contracting, *batch}
    else:
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracting, *batch, *numbers.rhs_group_dimensions}
    free = [n for i, n in enumerate(right.shape) if i not in shared]
    return known_size(2 * math.prod(left.shape) * math.prod(free))
