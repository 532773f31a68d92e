"""Branches of a factory on its numbers, taken alike with known and with traced ones.

`0.0 if peak_value == 0.0 else end_value / peak_value`, writes optax, and a traced
number cannot tell. The branch is taken once, with the number as it is given; the answer
becomes a part of the structure; and a trace repeats it. It also computes whether the
answer still holds: where it does not, since the number is another one by now, the
result is NaN and not that of a wrong branch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp


class Decisions:
    """The answers that a factory gets, in their order, while it runs.

    Args:
      answers: those to repeat; `None` to find them, of numbers that know their value.

    Attributes:
      open: whether the factory still runs.
      given: the answers so far.
    """

    def __init__(self, answers: Iterable[bool] | None = None):
        self._answers = None if answers is None else iter(answers)
        self.open = True
        self.given: list[bool] = []
        self._held: list[Any] = []

    def answer(self, traced: Any, known: Callable[[], Any]) -> bool:
        """Returns what to take for a traced bool."""
        found = known() if self._answers is None else next(self._answers, None)
        if found is None:  # more than were found
            return bool(traced)
        found = bool(found)
        self.given.append(found)
        self._held.append(traced == found)
        return found

    def guard(self) -> Callable[[Any], Any]:
        """Ends the run of the factory: what is asked later has no order.

        Returns:
          What makes NaN of results, unless all answers hold.
        """
        self.open = False
        if not self._held:
            return lambda tree: tree
        holds = jnp.all(jnp.stack(self._held))

        def guarded(leaf: Any) -> Any:
            leaf = jnp.asarray(leaf)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return leaf
            return jnp.where(holds, leaf, jnp.asarray(jnp.nan, leaf.dtype))

        return lambda tree: jax.tree.map(guarded, tree)


class Question:
    """A traced bool that can be asked for its value while its factory runs."""

    def __init__(self, traced: Any, known: Callable[[], Any], decisions: Decisions):
        self._traced, self._known, self._decisions = traced, known, decisions

    def __bool__(self) -> bool:
        return self._decisions.answer(self._traced, self._known)

    def __jax_array__(self) -> Any:
        return jnp.asarray(self._traced)
