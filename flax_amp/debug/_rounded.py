"""Finds faults of rounded numbers: in a loss, in ranks and integers, in positions.

Each search follows the graph of the program, and asks the plan of `amp` which values
are in half precision.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._compat import Atom, DType
from flax_amp._rewriter.flow import HALF_ROLES
from flax_amp._rewriter.primitives import is_layout, is_matmul
from flax_amp.debug._graph import Graph, Step, Value
from flax_amp.debug._record import Equation


class Remark(NamedTuple):
    """A problem of an equation, or a note about the equation."""

    kind: str
    message: str
    row: Equation


def _is_half_step(step: Step) -> bool:
    """Whether an equation runs in half precision, as a matmul or by a policy key."""
    return step.visit is not None and step.visit.why.role in HALF_ROLES


def _rounds(step: Step) -> bool:
    """Whether an equation runs in half precision, and its result is half as well."""
    return _is_half_step(step) and step.visit is not None and step.visit.is_planned_half


def _floats(step: Step) -> list[Value]:
    """Returns the float operands of an equation: no conditions and no indices."""
    return [value for value in step.operands if value.is_float]


# --- the loss ------------------------------------------------------------------------


def _scalar(graph: Graph) -> Value | None:
    """Returns the first result if that is a float scalar, as a loss is."""
    first = next(iter(graph.results), None)
    if first is None or not first.is_float or first.v.aval.shape:
        return None
    return first


def loss_reads(graph: Graph) -> tuple[str, ...]:
    """Returns the matmuls whose half-precision results the arithmetic of a loss reads.

    The loss is the first result, a scalar. A value that only decides, such as the
    condition of a loop or an index, does not count as a number that the loss is
    computed from.
    """

    def follow(step: Step) -> list[Value]:
        # The walk ends at half precision. A matmul in float32 is followed as all
        # arithmetic is.
        return [] if _is_half_step(step) else _floats(step)

    loss = _scalar(graph)
    if loss is None:
        return ()
    found = set(filter(_rounds, graph.behind([loss], follow)))
    rows = [x.visit.row for x in graph.steps if x in found and x.visit]
    names = [f"{row.primitive} of {row.path}".removesuffix(" of ") for row in rows]
    pairs = zip(names, rows, strict=True)
    return tuple(dict.fromkeys(f"{name}, {row.source}" for name, row in pairs))


def _trained_loss(graph: Graph) -> Value | None:
    """Returns the loss, if floats alone lead from an input to the loss.

    A count, such as the number of correct classes, comes from a comparison instead.
    """
    loss = _scalar(graph)
    if loss is None:
        return None
    inputs = set(graph.inputs)
    for step in graph.behind([loss], _floats):
        for value in _floats(step):
            if not inputs.isdisjoint(graph.sources(value)):
                return loss
    return None


# --- ranks and integers --------------------------------------------------------------

# Neighboring numbers stay neighbors under these primitives. So a ranking of the result
# is as unsure as a ranking of the rounded operand.
_KEEPS_ORDER = frozenset(
    """add sub add_any neg mul div abs max min clamp sqrt select_n gather dynamic_slice
    dynamic_update_slice convert_element_type reduce_precision""".split()
)
_TO_INTEGERS = ("floor", "ceil", "round")
_REMEDY = (
    "Give its module, or a jax.named_scope around it, the value "
    "flax_amp.use_float32_result in amp_policy; or jnp.float32, if rounded factors are "
    "too rough as well."
)
_RANKED = (
    "{0} ranks the rounded result of a matmul, which makes equals of neighbors. "
    + _REMEDY
)
_INTEGERS = "{0} makes integers of the rounded result of a matmul. " + _REMEDY
_MAY_DIFFER = (
    "{0}{1} ranks the rounded result of a matmul{2}: of near equals another one may "
    "come first than in float32, unless its module has the value "
    "flax_amp.use_float32_result in amp_policy"
)


def ranks(graph: Graph) -> Iterator[Remark]:
    """Yields the matmuls whose rounded results are ranked, or become integers.

    A ranking is a problem if the loss depends on the ranks. Metrics beside the loss do
    not count. In a function without a loss, a ranking is a problem if an array is
    computed from the ranks, or if the ranked numbers are differences of large numbers,
    as in the search for the nearest neighbor. A class that the function only returns is
    a note.
    """
    loss = _trained_loss(graph)
    for step in graph.steps:
        keys, given = _ranking(step)
        chain = list(graph.behind(step.values(keys), _in_order))
        matmuls = [x for x in chain if _rounds(x) and is_matmul(x.eqn)]
        if not matmuls:
            continue
        severity = _severity(graph, loss, step, step.values(given), chain, matmuls)
        for row in (x.visit.row for x in matmuls if severity and x.visit):
            yield _remark(step, row, severity)


def _remark(step: Step, row: Equation, severity: str) -> Remark:
    """Returns the remark that a step ranks the result of the matmul of a row."""
    if severity == "note":
        at = f" at {step.visit.row.source}" if step.visit else ""
        of = f" of {row.path}" if row.path else ""
        return Remark("note", _MAY_DIFFER.format(step.name, at, of), row)
    if step.name in (*_TO_INTEGERS, "convert_element_type"):
        return Remark("integers", _INTEGERS.format(step.name), row)
    return Remark("ranks", _RANKED.format(step.name), row)


def _ranking(step: Step) -> tuple[Sequence[Atom], Sequence[Atom]]:
    """Returns the ranked operands of an equation, and its ranks or integers.

    The sorted numbers of `sort` and `top_k` are left out: where near equals change
    places, the sorted numbers stay nearly the same.
    """
    eqn = step.eqn
    name = step.name
    if name in ("argmax", "argmin", *_TO_INTEGERS):
        return eqn.invars[:1], eqn.outvars
    if name in ("top_k", "approx_top_k"):
        return eqn.invars[:1], eqn.outvars[1:]
    if name == "sort":
        return eqn.invars[: eqn.params["num_keys"]], eqn.outvars[1:]
    is_cast = name == "convert_element_type"
    if is_cast and jnp.issubdtype(eqn.params["new_dtype"], jnp.integer):
        return eqn.invars, eqn.outvars
    return (), ()


def _in_order(step: Step) -> list[Value]:
    """Returns the float operands of a step that moves, scales or adds; else none."""
    keeps_order = step.name in _KEEPS_ORDER and not _is_half_step(step)
    if is_layout(step.eqn) or keeps_order:
        return _floats(step)
    return []


def _severity(
    graph: Graph,
    loss: Value | None,
    step: Step,
    given: Sequence[Value],
    chain: Sequence[Step],
    matmuls: Sequence[Step],
) -> str:
    """Says whether a ranking is a "problem" or a "note"; empty if neither."""
    reached = graph.ahead(given)
    if loss is not None and loss in reached:
        return "problem"
    results = [x for x in graph.results if x is not None and x in reached]
    moved = [x for x in results if step in set(graph.behind([x], _moves))]
    # A scalar that is computed from the ranks is a metric, and does not count.
    arrays = [x for x in results if x.v.aval.shape or x in moved]
    if not arrays:
        return ""
    if loss is not None:
        return "note"
    is_read_again = any(x not in moved for x in arrays)
    return "problem" if is_read_again or _cancels(graph, chain, matmuls) else "note"


def _moves(step: Step) -> list[Value]:
    if step.name == "convert_element_type" or is_layout(step.eqn):
        return step.operands
    return []


def _cancels(graph: Graph, chain: Sequence[Step], matmuls: Sequence[Step]) -> bool:
    """Whether an array is added to a matmul that is no bias and not computed from it.

    A bias is an argument or a constant, moved or cast up at most.
    """
    after = graph.ahead([value for x in matmuls for value in x.results])
    for step in chain:
        if step.name in ("add", "sub") and step.visit is not None:
            origins = step.visit.why.plan.origins
            others = [x for x in step.operands if x not in after and x.v.aval.shape]
            if any(not origins.read(x.v).is_argument for x in others):
                return True
    return False


# --- positions -----------------------------------------------------------------------

_ADDS = ("add", "sub", "add_any")
_SCALES = ("mul", "div")
_TAKES_FIRST = ("gather", "dynamic_slice")  # all operands but the first are indices
# A constant may hold positions if its largest magnitude is between `_FAR` and
# `_TOO_FAR`. In bfloat16, a position up to 64 is off by at most an eighth of a step, a
# position up to 32 by a sixteenth, and a position up to 128 by a quarter.
_FAR = 64
# Masks hold larger numbers, such as -1e9. The exact number does not matter: a minute of
# sound at 16 kHz has 960,000 positions.
_TOO_FAR = 1e6
# Constants of that many elements and more are not read: on a CPU, 2**20 elements take
# some 10 ms to read, 2**21 elements 20 ms, and 2**24 elements 250 ms.
_LARGE = 2**20
_POSITIONS = (
    "is a sum that begins at positions, and half on the way to a matmul: {0} has no "
    "odd numbers above {1}. Put the sum and what reads it under flax_amp.amp_stop, or "
    "give its module jnp.float32 in amp_policy."
)


def positions(graph: Graph, are_data: Sequence[bool], half: DType) -> Iterator[Remark]:
    """Yields the sums of positions and results of matmuls that are half in the plan.

    Positions come from an `iota`, from a constant with numbers as large as positions,
    or from data: arguments that are no parameters. Data that the sum repeats, as a bias
    is repeated, is left out. Positions are moved and scaled at most before the sum.
    """
    message = _POSITIONS.format(half.name, 2 ** (jnp.finfo(half).nmant + 1))
    if not graph.steps:  # the program has no equation
        return
    search = _Positions(graph, are_data)
    for step in graph.steps:
        is_sum = search.add(step)
        if is_sum and step.visit is not None and step.visit.is_planned_half:
            # A softmax takes the maximum of its operand. The operand is a sum of scores
            # and a mask or a bias, and no sum from positions.
            readers = [x.name for value in step.results for x in graph.readers(value)]
            if "reduce_max" not in readers:
                yield Remark("positions", message, step.visit.row)


class _Positions:
    """Finds which values are positions, step by step."""

    def __init__(self, graph: Graph, are_data: Sequence[bool]):
        self.graph = graph
        pairs = zip(graph.inputs, are_data, strict=True)
        # Data may also be a bias of each example: `add` leaves out data that a sum
        # repeats.
        self.data = {x for x, is_one in pairs if is_one and x.is_float and _size(x) > 1}
        self.grids = {x for x, const in graph.consts.items() if _is_grid(const)}

    def add(self, step: Step) -> bool:
        """Adds the results of a step; says if a matmul's result is added to positions.

        Such a sum counts as positions for the steps that follow, which may add to the
        sum again.
        """
        values = [x for x in step.operands if x.v.aval.shape]
        if step.name == "iota":
            self.grids.update(step.results)
        if not (values and step.results) or _is_half_step(step):
            return False
        if step.name in _TAKES_FIRST:
            values = values[:1]
        kinds = (self.grids, self.data)
        return any(self._add_to(found, step, values) for found in kinds)

    def _add_to(self, found: set[Value], step: Step, values: Sequence[Value]) -> bool:
        """Adds the results of a step to `grids` or to `data`; says the same as `add`.

        `values` are the operands that may be positions.
        """
        # Data with fewer elements than the result is repeated: a bias.
        least = _size(step.results[0]) if found is self.data else 0
        are_found = [self._is_in(found, x) and _size(x) >= least for x in values]
        if not any(are_found):
            return False
        pairs = zip(values, are_found, strict=True)
        others = [x for x, is_found in pairs if not is_found]
        is_computed = any(_is_after_matmul(step, x) for x in values)
        grows = step.name in _ADDS and is_computed
        if grows or self._is_copy(step, others):
            found.update(step.results)
        return grows

    def _is_copy(self, step: Step, others: Sequence[Value]) -> bool:
        """Whether a step only moves positions, or scales or shifts them by numbers.

        `others` are the operands that are no positions.
        """
        if step.name in (*_SCALES, *_ADDS):
            return all(self._is_number(step, x) for x in others)
        names = ("neg", "convert_element_type", *_TAKES_FIRST)
        return not others and (is_layout(step.eqn) or step.name in names)

    def _is_in(self, found: set[Value], value: Value) -> bool:
        return not found.isdisjoint(self.graph.sources(value))

    def _is_number(self, step: Step, value: Value) -> bool:
        """Whether all elements of an operand are one number, or are positions too."""
        if step.visit is not None and value.v in step.visit.why.plan.numbers:
            return True
        return self._is_in(self.grids, value) or self._is_in(self.data, value)


def _size(value: Value) -> int:
    return math.prod(value.v.aval.shape)


def _is_after_matmul(step: Step, value: Value) -> bool:
    if step.visit is None:
        return False
    return bool(step.visit.why.plan.origins.read(value.v).after_matmul)


def _is_grid(const: Any) -> bool:
    """Whether the numbers of a constant are as large as positions, and no larger."""
    is_known = isinstance(const, np.ndarray | jax.Array)
    if not is_known or isinstance(const, jax.core.Tracer):
        return False
    if not getattr(const, "is_fully_addressable", True):
        return False
    if not jnp.issubdtype(const.dtype, jnp.floating) or not 1 < const.size < _LARGE:
        return False
    largest = float(np.abs(np.asarray(const, np.float64)).max())
    return _FAR < largest < _TOO_FAR
