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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Array, Eqn, Jaxpr, evaluate
from flax_amp._rewriter.primitives import Trait, has
from flax_amp._rewriter.stored import stored_p
from flax_amp._tree import fill, pick
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.debug._place import Location
from flax_amp.debug._rows import Matching, Visit


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """Where an array is made. Two of them are different arrays."""

    at: Location


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that the backward pass stores, and where it is made."""

    at: Location
    dtype: str
    bytes: int


def _origins(jaxpr: Jaxpr, operands: Sequence[Any], start: Location) -> list[Any]:
    """Returns the origin of each result, or something else for what was given."""

    def run(eqn: Eqn, given: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is stored_p:
            return [given[0]] * len(eqn.outvars)
        body = _called(eqn)
        if body is not None:
            return _inside(eqn, body, given, start.within(eqn))
        moves = has(eqn, Trait.LAYOUT) or eqn.primitive.name == "pvary"
        if moves and not any(isinstance(x, _Origin) for x in given):
            return [None] * len(eqn.outvars)
        return [_Origin(start.of(eqn)) for _ in eqn.outvars]

    return list(evaluate(jaxpr, operands, run))


def _inside(eqn: Eqn, body: Jaxpr, given: Sequence[Any], start: Location) -> list[Any]:
    """Returns the origins of the results of a call, in its body."""
    inputs = _compat.open_jaxpr(body)[0].invars
    operands = list(given[len(given) - len(inputs) :])  # behind a predicate
    if eqn.primitive.name == "scan":
        # What an iteration gets from the one before was made there, and is another
        # array than what it makes itself.
        first, count = _compat.scan_counts(eqn)
        operands[first : first + count] = _origins(body, operands, start)[:count]
    return _origins(body, operands, start)


def _called(eqn: Eqn) -> Jaxpr | None:
    """Returns the body of what is known to be a call, with the same results."""
    if eqn.primitive.name in ("while", "pallas_call"):
        return None
    body = next(iter(jaxprs_in_params(eqn.params)), None)
    jaxpr = None if body is None else _compat.open_jaxpr(body)[0]
    return body if jaxpr and len(jaxpr.outvars) == len(eqn.outvars) else None


def stored_arrays(
    function: Callable[..., Sequence[Array]], arrays: Sequence[Any], moving: Any
) -> list[Stored]:
    """Returns what the backward pass of a function of arrays stores.

    Its first result is the loss if that is a scalar; `moving` tells for each argument
    whether it is differentiated.
    """
    if not any(moving):
        raise ValueError("the first argument has no float arrays")

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
    for atom, origin in zip(atoms, _origins(closed, arrays, Location()), strict=True):
        if isinstance(origin, _Origin):
            size = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
            stored = Stored(origin.at, str(atom.aval.dtype), size)
            found[origin, atom.aval.shape] = stored
    return list(found.values())


def bytes_by_dtype(stored: Sequence[Stored]) -> Counter[str]:
    """Returns the sum of bytes for each dtype."""
    sizes: Counter[str] = Counter()
    for item in stored:
        sizes[item.dtype] += item.bytes
    return sizes


def attach(stored: Sequence[Stored], visits: Sequence[Visit]) -> list[Equation]:
    """Adds what is stored to the rows of the equations that made it.

    Returns:
      Rows for what none of them made: the rule of a custom derivative has equations of
      its own. They may be those of the function that it belongs to.
    """
    matching = Matching(visits)
    others: list[Equation] = []
    for item in stored:
        at, name = item.at, item.at.eqn.primitive.name
        found = matching.rows(at)
        rows = sorted(found, key=lambda row: row.primitive != name) or [
            visit.row
            for visit in visits
            if (visit.row.path, visit.row.primitive) == (at.path, name)
            and not visit.row.stored
            and visit.eqn.outvars[0].aval.shape == at.eqn.outvars[0].aval.shape
        ]
        if not rows:
            reason = "stored by the rule of a derivative"
            dtypes = Dtypes((), (item.dtype,))
            rows = [Equation(at.path, name, dtypes, dtypes, reason, source=at.source)]
            others += rows
        rows[0].stored[item.dtype] += item.bytes
    return others
