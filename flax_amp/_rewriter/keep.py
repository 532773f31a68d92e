"""What is kept in half precision: a sweep over a program, from its end to its start.

All arithmetic runs in float32. A value is *kept* if it lies in memory, whatever the
compiler fuses, on its way to a product (a matrix product or a convolution):

- a product reads it, or a move of data (a transpose, a slice, a selection) to one, and
  no arithmetic on the way to a product does: then the product alone casts it;
- it is read on the other side of a product, such as a residual stream, and neither
  repeated along an axis, such as the sums of the rows of a softmax, nor a divisor;
- a sum or a sigmoid reads it, and something else reads it as well, such as the
  exponentials of a softmax;
- it crosses the border of a loop, a branch, a checkpoint or a `custom_vjp`;
- the program itself casts it to the compute dtype.

It is then rounded to half precision, once, where it is computed. Of scalars, only the
carries of a scan over layers are. Only readers that lead to a product in half precision
count: what a loss, a metric or linear algebra reads changes nothing. In

    h:f32 = mul (dot x w) g         a sum and `sub` read it      -> half
    m:f32 = mean h                  a sum                        -> float32
    d:f32 = sub h m                 arithmetic alone reads it    -> float32
    y:f32 = mul d s                 a product reads it           -> half
    z:f32 = dot y v

With `loss = mean(d)` in the place of the last two lines, nothing would be kept.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import (
    Trait,
    gathers_once,
    gives_operands,
    has,
    is_matrix_product,
)
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.casts import is_exact
from flax_amp._rewriter.choice import Choice, Role
from flax_amp._rewriter.plan import Need, Needs, is_painted, rounded_needs


class Flow(NamedTuple):
    """What a sweep finds.

    Attributes:
      needs: what is needed of each variable.
      products_before: how many products of this jaxpr lie before each variable, at
        most; absent if none. A call with a product inside counts as one.
      broadcast: what was broadcast to its shape, such as a bias.
      choices: what each equation is for the rule; the sweep asks for it first.
    """

    needs: dict[Var, Need]
    products_before: dict[Var, int]
    broadcast: frozenset[Var]
    choices: dict[Eqn, Choice]

    def need(self, v: Var) -> Need:
        """Returns what is needed of a variable. A scalar takes no memory to keep."""
        need = self.needs.get(v, Need.NONE).settled()
        return need if getattr(v.aval, "shape", ()) else need & ~Need.KEPT

    def is_behind(self, eqn: Eqn, v: Atom) -> bool:
        """Whether an equation reads a variable on the other side of a product.

        A divisor does not count: one that float16 rounds to zero gives an infinity.
        """
        if isinstance(v, Literal) or _is_repeated(eqn, v) or _divides(eqn, v):
            return False
        before = self.products_before
        return _largest(eqn, before) > before.get(v, 0)

    def is_residual(self, eqn: Eqn) -> bool:
        """Whether an equation adds values with different numbers of products before.

        What has none before it, such as an input, does not count.
        """
        counts = {self.products_before.get(v, 0) for v in variables(eqn.invars)}
        return has(eqn, Trait.ADDITION) and len(counts - {0}) > 1

    def is_broadcast(self, v: Var, shape: tuple[int, ...]) -> bool:
        """Whether a variable repeats numbers, as an operand of a result of `shape`."""
        return v in self.broadcast or v.aval.shape != shape


class HasProduct:
    """Whether an equation is a product or has one inside."""

    def __init__(self) -> None:
        self._found: dict[Jaxpr, bool] = {}

    def __call__(self, eqn: Eqn) -> bool:
        if is_matrix_product(eqn):
            return True
        return any(map(self._inside, jaxprs_in_params(eqn.params)))

    def _inside(self, jaxpr: Jaxpr) -> bool:
        if jaxpr not in self._found:
            self._found[jaxpr] = any(map(self, _compat.open_jaxpr(jaxpr)[0].eqns))
        return self._found[jaxpr]


def find_flow(
    jaxpr: Jaxpr,
    out_needs: Needs,
    has_product: Callable[[Eqn], bool],
    reads: Callable[[Eqn, Needs, Flow], Sequence[Need]],
) -> Flow:
    """Returns what is needed of each variable, and how it is computed.

    Args:
      jaxpr: an open jaxpr.
      out_needs: what is needed of its results.
      has_product: whether an equation is a product or has one inside.
      reads: returns what an equation needs of each operand, from what is needed of its
        results and of the flow.
    """
    needs: dict[Var, Need] = {}
    broadcast = frozenset(
        v
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim"
        for v in eqn.outvars
    )
    flow = Flow(needs, _products_before(jaxpr, has_product), broadcast, {})

    def read(atom: Atom, need: Need) -> None:
        if not isinstance(atom, Literal):
            # The first reader finds no need, and adds its own as it is.
            needs[atom] = needs.get(atom, Need.NONE).together_with(need)

    for v, need in zip(jaxpr.outvars, out_needs, strict=True):
        read(v, need)
    for eqn in reversed(jaxpr.eqns):
        # Whatever reads a result stands behind the equation: its need is complete.
        results = tuple(needs.get(v, Need.NONE).settled() for v in eqn.outvars)
        for v, need in zip(eqn.invars, reads(eqn, results, flow), strict=True):
            read(v, need.kept_for(Need.BEHIND) if flow.is_behind(eqn, v) else need)
    return flow


def operand_needs(eqn: Eqn, role: Role, results: Needs, flow: Flow) -> Needs:
    """Returns what an equation without a rule of its own needs of each operand.

    Args:
      eqn: the equation.
      role: what it is for the rule.
      results: what is needed of its results.
      flow: the flow of its jaxpr, as far as the sweep has come.
    """
    # A barrier around several arrays hands on to each operand what is needed of its own
    # result. All other equations need the same of all operands.
    if role is Role.MOVE and gives_operands(eqn) and not has(eqn, Trait.RANKS):
        return rounded_needs(results)
    return (_operand_need(eqn, role, results, flow),) * len(eqn.invars)


def _operand_need(eqn: Eqn, role: Role, results: Needs, flow: Flow) -> Need:
    """Returns what an equation needs of its operands, which is the same for all."""
    if role is Role.PRODUCT:
        return Need.LATER | Need.PRODUCT | Need.READ_IN_HALF
    if role is Role.MOVE:
        if gathers_once(eqn):
            # In float32, the gradient would be a float32 array of the size of the
            # operand: of all logits, where a loss takes those of the labels.
            return Need.READ_IN_HALF | results[0]
        return _need_of_move(eqn, results)
    leads_on = _union(results) & Need.LATER
    reader = Need.ARITHMETIC if leads_on else Need.UNROUNDED
    if role is Role.PRECISE:
        # It leads to no product in half precision: a matrix that `inv` reads twice must
        # not be rounded because something reads it twice.
        return Need.READ_IN_FLOAT32 | reader
    if flow.is_residual(eqn) and results[0].is_kept:
        # `x + f(x)`, a residual stream that is kept. Its operands are kept, too, and
        # added as halves: XLA would write a float32 sum beside the rounded one.
        return Need.LATER | Need.BEHIND | Need.READ_IN_HALF | Need.ARITHMETIC
    need = Need.READ_IN_FLOAT32 | reader | leads_on | (_union(results) & Need.RANKED)
    if leads_on and (role is Role.UNROUNDED or has(eqn, Trait.SIGMOID)):
        need |= Need.COSTLY
    return need


def _need_of_move(eqn: Eqn, results: Needs) -> Need:
    """Returns what a move needs of its operands: what is needed of its results."""
    pairs = list(zip(results, eqn.outvars, strict=True))
    moved = [need for need, v in pairs if is_painted(v.aval)]
    need, leads_on = _union(moved), _union(results) & Need.LATER
    if has(eqn, Trait.RANKS):
        found = Need.LATER | Need.RANKED if leads_on else Need.UNROUNDED
        return need | found | Need.READ_IN_FLOAT32
    if not moved:
        # A comparison moves no floats: it reads them in whatever precision.
        return leads_on or Need.UNROUNDED
    if has(eqn, Trait.BOUND) and not _has_halves_as_bounds(eqn):
        # Like arithmetic: it runs in float32.
        arithmetic = leads_on and Need.ARITHMETIC
        return Need.READ_IN_FLOAT32 | arithmetic | (need & _OF_ALL_READERS)
    return _need_in_half(eqn, need, leads_on)


# What is known of readers behind an equation, whatever precision it runs in itself.
_OF_ALL_READERS = Need.LATER | Need.RANKED | Need.UNROUNDED


def _need_in_half(eqn: Eqn, need: Need, leads_on: Need) -> Need:
    """Returns what a move needs that runs in half precision if its result is kept."""
    if leads_on and eqn.primitive.name == "reduce_max":
        # That of a softmax, whose operand the subtraction reads as well.
        need = (need & ~Need.COMPARED) | Need.MAXIMUM
    is_half = need.is_kept or Need.COMPARED in need
    return need | Need.READ_IN_HALF if is_half else need


def _has_halves_as_bounds(eqn: Eqn) -> bool:
    """Whether half precision has the bounds of a maximum, a minimum or a clamp.

    In `log(clip(p, 1e-7, 1 - 1e-7))`, a `p` that was rounded to one would not be
    bounded. A bound that is an argument of a call may be any number.
    """
    bounds = [v.val for v in eqn.invars if isinstance(v, Literal)]
    dtypes: tuple[Any, ...] = (jnp.float16, jnp.bfloat16)
    return bool(bounds) and all(is_exact(b, dtype) for b in bounds for dtype in dtypes)


def _union(needs: Iterable[Need]) -> Need:
    return functools.reduce(operator.or_, needs, Need.NONE)


def _is_repeated(eqn: Eqn, v: Var) -> bool:
    """Whether an equation repeats an operand, such as the sum of each row.

    It is small, and the error of its rounding would be the same in the whole row.
    """
    shapes = [out.aval.shape for out in eqn.outvars if is_painted(out.aval)]
    # An axis of one that the result has longer: f32[8,1] in a division by f32[8,32].
    return is_painted(v.aval) and any(
        len(shape) == v.aval.ndim
        and any(n == 1 != m for n, m in zip(v.aval.shape, shape, strict=True))
        for shape in shapes
    )


def _divides(eqn: Eqn, v: Var) -> bool:
    return eqn.primitive.name == "div" and v is eqn.invars[1]


def _products_before(
    jaxpr: Jaxpr, has_product: Callable[[Eqn], bool]
) -> dict[Var, int]:
    """Counts the products on the longest path to each variable (see `Flow`).

    In this example the sum is a residual connection, of values with one and with two:

        y = dot x w        1
        a = tanh y         1
        z = dot a v        2
        r = add y z        2
    """
    counts: dict[Var, int] = {}
    for eqn in jaxpr.eqns:
        count = _largest(eqn, counts) + has_product(eqn)
        if count:
            counts |= dict.fromkeys(eqn.outvars, count)
    return counts


def _largest(eqn: Eqn, counts: Mapping[Var, int]) -> int:
    """Returns the largest count of an operand."""
    return max((counts.get(v, 0) for v in variables(eqn.invars)), default=0)
