"""What the backward pass stores, equation by equation.

JAX itself decides that: the gradient of the emitted program is traced, and what its
forward pass hands to its backward pass is counted. Nothing is compiled or run. The
interpreter goes through that program with the origins of arrays in their place, so that
each result brings along the equation that made it, also out of loops and calls:

    a, s = scan[body={... s = tanh y; return y, s}] x        s: stored
    tanh stands in the body, under the scope `Block` and at the user's line

What the function was given (its parameters and its batch) is in memory anyway, and is
not counted, nor is what only moves its data, such as a transposed weight.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Array, Eqn, Jaxpr
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.traits import Trait, has
from flax_amp._rewriter.recompute.stored import stored_p
from flax_amp._tree import fill, pick
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.debug._place import Place
from flax_amp.debug._walk import Matching, Visit


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that the backward pass stores, and where it is made."""

    place: Place
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """The equation that makes an array. Two of them are different arrays.

    Attributes:
      eqn: the equation.
      around: the place of the jaxpr that it stands in.
    """

    eqn: Eqn
    around: Place


def _origins(jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
    """Returns the origin of each result, or something else for what was given.

    Args:
      jaxpr: the program.
      operands: the origins of its inputs; anything else for inputs of the function.
      place: where it stands.
    """

    def run(eqn: Eqn, given: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is stored_p:
            return [given[0]] * len(eqn.outvars)
        body = _called(eqn)
        if body is not None:
            return _inside(eqn, body, given, place.within(eqn))
        moves = has(eqn, Trait.LAYOUT) or eqn.primitive.name == "pvary"
        if moves and not any(isinstance(x, _Origin) for x in given):
            return [None] * len(eqn.outvars)
        return [_Origin(eqn, place) for _ in eqn.outvars]

    return list(evaluate(jaxpr, operands, run))


def _inside(eqn: Eqn, body: Jaxpr, given: Sequence[Any], place: Place) -> list[Any]:
    """Returns the origins of the results of a call, in its body."""
    inputs = _compat.open_jaxpr(body)[0].invars
    operands = list(given[len(given) - len(inputs) :])  # behind a predicate
    if eqn.primitive.name == "scan":
        # What an iteration gets from the one before was made there, and is another
        # array than what it makes itself.
        start, count = _compat.scan_counts(eqn)
        before = _origins(body, operands, place)[:count]
        operands[start : start + count] = before
    return _origins(body, operands, place)


def _called(eqn: Eqn) -> Jaxpr | None:
    """Returns the body of what is known to be a call, with the same results."""
    for body in jaxprs_in_params(eqn.params):
        jaxpr = _compat.open_jaxpr(body)[0]
        has_results = len(jaxpr.outvars) == len(eqn.outvars)
        is_known = eqn.primitive.name not in ("while", "pallas_call")
        return body if has_results and is_known else None
    return None


def stored_arrays(
    function: Callable[..., Sequence[Array]], arrays: Sequence[Any], moving: Any
) -> list[Stored]:
    """Returns what the backward pass of a function stores.

    Args:
      function: a function of arrays, whose first result is the loss if it is a scalar.
      arrays: its arguments, or their shapes.
      moving: for each, whether it is differentiated.
    """

    def residuals(*arrays: Array) -> list[Array]:
        def loss(*chosen: Array) -> Any:
            outs = function(*fill(chosen, moving, arrays))
            outs = [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
            return outs[:1] if outs and outs[0].ndim == 0 else outs

        outs, pullback = jax.vjp(jax.jit(loss), *pick(arrays, moving))
        # Only its use tells whether there is one: a `while` has none.
        pullback(jax.tree.map(jnp.ones_like, outs))
        leaves = jax.tree.leaves(pullback)
        return [x for x in leaves if isinstance(x, jax.Array)]

    closed = jax.make_jaxpr(residuals)(*arrays)
    atoms = _compat.open_jaxpr(closed)[0].outvars
    found: dict[Any, Stored] = {}
    for atom, origin in zip(atoms, _origins(closed, arrays, Place()), strict=True):
        if isinstance(origin, _Origin):
            size = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
            at = origin.around.of(origin.eqn)
            stored = Stored(at, str(atom.aval.dtype), size)
            found[origin, atom.aval.shape] = stored
    return list(found.values())


def bytes_by_dtype(stored: Sequence[Stored]) -> Counter[str]:
    """Returns the sum of bytes for each dtype."""
    sizes: Counter[str] = Counter()
    for item in stored:
        sizes[item.dtype] += item.bytes
    return sizes


def attach(stored: Sequence[Stored], visits: Sequence[Visit]) -> list[Equation]:
    """Adds what is stored to the equations that made it.

    The rule of a custom derivative has tracebacks of its own, and equations like those
    of the function that it belongs to.

    Returns:
      Equations for what none of them made: only the rule has these.
    """
    matching = Matching(visits)
    alike: dict[Any, list[Equation]] = defaultdict(list)
    for visit in visits:
        alike[_kind(visit.row.path, visit.eqn)].append(visit.row)
    others: list[Equation] = []
    for item in stored:
        eqn = item.place.eqn
        found = matching.rows(item.place)
        same = [row for row in found if row.primitive == eqn.primitive.name]
        unused = [r for r in alike[_kind(item.place.path, eqn)] if not r.stored]
        candidates = same or found or unused
        if not candidates:
            candidates = [_rule(item)]
            others += candidates
        candidates[0].stored[item.dtype] += item.bytes
    return others


def _kind(path: str, eqn: Eqn) -> tuple[str, str, Any]:
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]  # none of a print
    return path, eqn.primitive.name, shapes[0] if shapes else ()


def _rule(item: Stored) -> Equation:
    dtypes = Dtypes((), (item.dtype,))
    return Equation(
        item.place.path,
        item.place.eqn.primitive.name,
        before=dtypes,
        after=dtypes,
        reason="stored by the rule of a derivative",
        source=item.place.source,
    )
