"""The rows of `explain`: what the emitter records, one equation after the other.

The emitter calls a `Recorder` with each equation of the user's program, the arrays that
it was bound to, and why. Casts, and what the backward pass stores, are read from the
programs that come out: their equations are found again by their traceback, which is
that of the user's equation.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._rewriter.primitives import Kind, is_matrix_product, kind_of
from flax_amp._rewriter.roles import Role
from flax_amp.debug._model import Dtypes, Equation, float_factors, is_half
from flax_amp.debug._place import Location, known_size, places

# What they run is all that there is to tell about them.
CALLS = frozenset(
    """jit remat2 shard_map closed_call eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vmap_call""".split()
)
# Their reason tells why they stay in float32.
_IN_OWN_DTYPES = (Role.ORIGINAL, Role.CALLED, Role.PRECISE)
_CASTS = ("convert_element_type", "flax_amp_saturate")


class Visit(NamedTuple):
    """A row, with what else is known of its equation."""

    row: Equation
    eqn: Eqn  # as the user wrote it
    scopes: tuple[str, ...]  # as keys of a policy match them
    why: Any  # the emitter's `Why`
    whole: Eqn = None  # the equation around it if that runs as a whole, and has the why


class _Event(NamedTuple):
    """What the emitter tells of an equation."""

    eqn: Eqn
    place: Any
    after: Dtypes
    why: Any


class Recorder:
    """Collects what an emitter tells; an instance is its `record`."""

    def __init__(self) -> None:
        # With the ids of the equations around it and its own. The events keep these
        # equations alive.
        self._events: list[tuple[tuple[int, ...], _Event]] = []

    def __call__(
        self, eqn: Eqn, place: Any, operands: Any, results: Any, why: Any
    ) -> None:
        after = Dtypes(_dtypes(eqn.invars, operands), _dtypes(eqn.outvars, results))
        key = (*map(id, place.around), id(eqn))
        self._events.append((key, _Event(eqn, place, after, why)))

    def visits(self, closed: Jaxpr = None) -> list[Visit]:
        """Returns the equations, in the order of the user's program if that is given.

        The emitter takes regions of arithmetic together.
        """
        # What stands around an equation was entered.
        entered = {key[:end] for key, _ in self._events for end in range(1, len(key))}
        found: list[Visit] = []
        for key, event in self._events:
            start = functools.reduce(Location.within, event.place.around, Location())
            found += _visits(event, start, key in entered)
        if closed is None:
            return found
        numbers: dict[Any, list[int]] = defaultdict(list)
        for i, at in enumerate(places(closed, enter=_may_enter)):
            numbers[_key(at.eqn, at.path)].insert(0, i)

        def number(visit: Visit) -> int:
            indices = numbers.get(_key(visit.eqn, visit.row.path), [len(found)])
            return indices.pop() if len(indices) > 1 else indices[0]

        return sorted(found, key=number)


def _key(eqn: Eqn, path: str) -> Any:
    return id(eqn.source_info.traceback), eqn.primitive.name, path


def _may_enter(eqn: Eqn) -> bool:
    """Whether an equation has bodies that a reader takes for a part of the program."""
    castable = Kind.PRODUCT, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM
    return kind_of(eqn) not in castable and eqn.primitive.name != "pallas_call"


def _visits(event: _Event, start: Location, is_entered: bool) -> Iterator[Visit]:
    """Yields the row of an equation, and those of its bodies if they run as a whole."""
    eqn, place, after, why = event
    at, name, before = start.of(eqn), eqn.primitive.name, dtypes_of(eqn)
    scopes = place.scopes + _compat.scope_names(eqn)
    if name not in CALLS:
        yield Visit(_row(at, after, why), eqn, scopes, why)
    if is_entered or not _may_enter(eqn):
        return
    # Its bodies are called with halves if it is, as a `relu` on the way to a product.
    pairs = zip(before.operands, after.operands, strict=True)
    float_ = next((y for x, y in pairs if x == "float32" and is_half(y)), "float32")
    last = None
    for body in jaxprs_in_params(eqn.params):
        for inner in places(body, start.within(eqn), _may_enter):
            if inner.eqn.primitive.name in CALLS:
                continue
            sides = dtypes_of(inner.eqn)
            own = (tuple(float_ if x == "float32" else x for x in xs) for xs in sides)
            row = _row(inner, Dtypes(*own), why)
            if why.role is Role.STRUCTURED:  # no key decided
                row.reason = kind_of(inner.eqn).value
            row.result = ""
            names = inner.scopes[len(at.scopes) :]
            last = Visit(row, inner.eqn, scopes + names, why, eqn)
            yield last
    if last is not None:
        last.row.result = why.result


def _row(at: Location, after: Dtypes, why: Any) -> Equation:
    eqn, result = at.eqn, why.result
    if why.role in _IN_OWN_DTYPES and result.startswith("float32"):
        result = f"float32: {why.reason}"
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars] or [()]
    return Equation(
        path=at.path,
        primitive=eqn.primitive.name,
        before=dtypes_of(eqn),
        after=after,
        reason=why.reason,
        result=result,
        shape="x".join(map(str, shapes[0])),
        times=at.times,
        flops=flops(eqn) * at.times,
        source=at.source,
        inside=at.inside,
    )


# --- single equations ----------------------------------------------------------------


def dtypes_of(eqn: Eqn) -> Dtypes:
    """Returns the dtypes of an equation as it stands in its program."""
    return Dtypes(_dtypes(eqn.invars), _dtypes(eqn.outvars))


def _dtypes(atoms: Sequence[Any], arrays: Sequence[Any] = ()) -> tuple[str, ...]:
    """Returns the dtypes of arrays; a number has that of its atom."""
    pairs = zip(atoms, arrays or atoms, strict=True)
    return tuple(
        str(getattr(x, "dtype", getattr(v.aval, "dtype", ""))) for v, x in pairs
    )


def flops(eqn: Eqn) -> int:
    """Returns the operations of a product or a convolution of floats, else 0."""
    name, params = eqn.primitive.name, eqn.params
    factors = float_factors(dtypes_of(eqn).operands)
    if not is_matrix_product(eqn) or not factors:
        return 0
    # A multiplication of complex numbers is four of real ones.
    each = 2 * 2 ** sum("complex" in dtype for dtype in factors)
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        terms = [n for i, n in enumerate(right.shape) if i != features]
        return known_size(each * math.prod(out.shape) * math.prod(terms))
    if name == "dot_general":
        (_, contracting), (_, batch) = params["dimension_numbers"]
        shared = {*contracting, *batch}
    else:
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracting, *batch, *numbers.rhs_group_dimensions}
    free = [n for i, n in enumerate(right.shape) if i not in shared]
    return known_size(each * math.prod(left.shape) * math.prod(free))


# --- emitted programs ----------------------------------------------------------------


class Matching:
    """The rows of the user's equations, found by the location of an emitted one."""

    def __init__(self, visits: Iterable[Visit]):
        self._rows: dict[int, list[Equation]] = defaultdict(list)
        for visit in visits:
            self._rows[id(visit.eqn.source_info.traceback)].append(visit.row)
            if visit.whole is not None and visit.row.result:
                self._rows[id(visit.whole.source_info.traceback)].append(visit.row)

    def rows(self, at: Location) -> list[Equation]:
        """Returns the rows that may have become the equation of a location."""
        rows = self._rows.get(id(at.eqn.source_info.traceback), [])
        path = at.path
        found = [row for row in rows if row.path == path]
        # What JAX takes out of a loop has lost the scopes around the loop.
        return found or [row for row in rows if f"/{row.path}".endswith(f"/{path}")]


def count_casts(closed: Jaxpr, visits: Sequence[Visit], low: str) -> list[Equation]:
    """Adds the casts of an emitted program to the rows that they are put in for.

    What a user's precision function has made of operands is read there, too.

    Returns:
      A row for all other casts, such as those of results, if there are any.
    """
    matching, reason = Matching(visits), "results keep their dtypes"
    before, after = Dtypes(("float32",), ("float32",)), Dtypes((low,), ("float32",))
    others = Equation("", "return", before, after, reason)
    called = Matching(visit for visit in visits if visit.why.role is Role.CALLED)
    for at in places(closed):
        for row in called.rows(at):
            if row.primitive == at.eqn.primitive.name:
                row.after = dtypes_of(at.eqn)
        is_cast = at.eqn.primitive.name in _CASTS
        down = _is_down(dtypes_of(at.eqn)) if is_cast else None
        if down is None:
            continue
        rows = next(filter(None, map(matching.rows, at.chain())), [others])
        if rows[0].primitive in _CASTS and _is_down(rows[0].before) is down:
            continue  # the user's own
        # A function that is called twice in one place has the same lines both times.
        row = min(rows, key=lambda row: row.casts_down + row.casts_up)
        if down:
            row.casts_down += at.times
        else:
            row.casts_up += at.times
    return [others] if others.casts_down + others.casts_up else []


def _is_down(dtypes: Dtypes) -> bool | None:
    """Whether a cast is to a narrower float; `None` if it is not between floats."""
    before, after = dtypes.operands[0], dtypes.results[0]
    if before == after or "float" not in before or "float" not in after:
        return None
    return jnp.dtype(after).itemsize <= jnp.dtype(before).itemsize
