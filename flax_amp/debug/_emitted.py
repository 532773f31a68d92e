"""What an emitted program tells: its casts, and what a user's function did."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._rewriter.casts import saturate_p
from flax_amp._rewriter.plan import Mode
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.debug._scopes import Place
from flax_amp.debug._walk import Matching, Visit, dtypes_of

_CASTS = ("convert_element_type", saturate_p.name)


def attach_emitted(
    closed: Jaxpr, visits: Sequence[Visit], compute_dtype: str
) -> list[Equation]:
    """Adds what an emitted program tells to the equations of the user's function.

    That is the casts, to the equations that they are put in for, and the dtypes that a
    user's precision function chose.

    Returns:
      An equation for the results of the function, if they get their dtypes back.
    """
    matching = Matching(visits)
    called = Matching(visit for visit in visits if visit.step.mode is Mode.CALL)
    low, full = (compute_dtype,), ("float32",)
    results = Equation(
        path="",
        primitive="return",
        before=Dtypes(full, full),
        after=Dtypes(low, full),
        reason="results keep their dtypes",
    )
    for nested, times in _equations(closed, Place()):
        eqn, path = nested[0]
        for row in called.rows(path, eqn):
            if row.primitive == eqn.primitive.name:
                row.after = dtypes_of(eqn)
                if row.kept:
                    first = row.before.results.index("float32")
                    row.kept = row.after.results[first]
        direction = eqn.primitive.name in _CASTS and _direction(dtypes_of(eqn))
        if direction:
            # A cast in a function of this package belongs to the call.
            found = (matching.rows(path, around) for around, path in nested)
            _add_cast(next(filter(None, found), [results]), direction, times)
    return [results] if results.casts_down + results.casts_up else []


def _add_cast(rows: Sequence[Equation], direction: int, times: int) -> None:
    first = rows[0]
    if first.primitive in _CASTS and _direction(first.before) == direction:
        return  # the user's own
    # A function that is called twice in one place has the same lines both times.
    row = min(rows, key=lambda row: row.casts_down + row.casts_up)
    if direction < 0:
        row.casts_down += times
    else:
        row.casts_up += times


def _equations(
    jaxpr: Jaxpr, place: Place, around: tuple[tuple[Eqn, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[Eqn, str], ...], int]]:
    """Yields each equation with those around it and their paths, innermost first.

    With them comes how often it runs.
    """
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        path = place.path(eqn)
        nested = ((eqn, path), *around)
        yield nested, place.times
        for body in jaxprs_in_params(eqn.params):
            yield from _equations(body, place.within(eqn), nested)


def _direction(dtypes: Dtypes) -> int:
    """Returns -1 for a cast to a narrower float, 1 for one to a wider, or 0."""
    (before, *_), (after, *_) = dtypes.operands or ("",), dtypes.results or ("",)
    if before == after or "float" not in before or "float" not in after:
        return 0
    return 1 if jnp.dtype(after).itemsize > jnp.dtype(before).itemsize else -1
