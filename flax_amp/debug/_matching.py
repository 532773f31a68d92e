"""Finds the equation of the user's function that an emitted one stands for."""

from collections import defaultdict
from collections.abc import Iterable

from flax_amp._compat import Eqn
from flax_amp.debug._model import Equation
from flax_amp.debug._walk import Visit


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

    def rows(self, path: str, eqn: Eqn) -> list[Equation]:
        """Returns the equations that may have become `eqn`, which stands in `path`."""
        rows = self._rows.get(id(eqn.source_info.traceback), [])
        found = [row for row in rows if row.path == path]
        # What JAX takes out of a loop has lost the scopes around the loop.
        return found or [row for row in rows if f"/{row.path}".endswith(f"/{path}")]
