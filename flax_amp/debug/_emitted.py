"""What an emitted program tells: its casts, and what a user's function did."""

from collections.abc import Sequence

import jax.numpy as jnp

from flax_amp._compat import Jaxpr
from flax_amp._rewriter.casts import saturate_p
from flax_amp._rewriter.plan import Mode
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.debug._place import places
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
    for place in places(closed):
        eqn = place.eqn
        for row in called.rows(place):
            if row.primitive == eqn.primitive.name:
                row.after = dtypes_of(eqn)
                if row.kept:
                    first = row.before.results.index("float32")
                    row.kept = row.after.results[first]
        direction = eqn.primitive.name in _CASTS and _direction(dtypes_of(eqn))
        if direction:
            # A cast in a function of this package belongs to the call.
            found = map(matching.rows, place.chain())
            _add_cast(next(filter(None, found), [results]), direction, place.times)
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


def _direction(dtypes: Dtypes) -> int:
    """Returns -1 for a cast to a narrower float, 1 for one to a wider, or 0."""
    (before, *_), (after, *_) = dtypes.operands or ("",), dtypes.results or ("",)
    if before == after or "float" not in before or "float" not in after:
        return 0
    return 1 if jnp.dtype(after).itemsize > jnp.dtype(before).itemsize else -1
