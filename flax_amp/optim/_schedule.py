"""Schedules as pytrees; `flax_amp.optim` makes their classes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from flax_amp.optim._bound import Bound
from flax_amp.optim._transformation import settled_leaf


class Schedule(Bound):
    """A schedule whose numbers are leaves: a function of the count of updates.

    Example:
      >>> from flax_amp import optim
      >>> schedule = optim.cosine_decay_schedule(init_value=0.1, decay_steps=100)
      >>> float(schedule.replace(init_value=0.2)(0))
      0.2...
    """

    def __call__(self, count: Any) -> jax.Array:
        """Returns the value at a count of updates, float32[]."""
        return settled_leaf(jnp.asarray(self.as_argument()(count)))

    def as_argument(self) -> Callable[[Any], Any]:
        """Returns the plain schedule, whose value promotes as that of optax does."""

        def schedule(count: Any) -> Any:
            made, guarded = self._build()
            return guarded(made(count))

        return schedule

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other arguments, by name.

        Raises:
          TypeError: if there is no such argument, or it is of a wrong type.
        """
        self._check_values("replace")
        check_names(self, changes, self._fixed.values)
        return self._replace_own(changes)

    @classmethod
    def _uses(cls) -> Sequence[Callable[[Any], Any]]:
        def call(made: Any) -> jax.Array:
            return jnp.asarray(made(jnp.zeros((), jnp.int32)))

        return [call]


def check_names(bound: Bound, changes: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises a TypeError if there is a name that is not known."""
    if unknown := sorted(changes.keys() - set(known)):
        several = [
            n for n in known if n.endswith(tuple(f"/{name}" for name in unknown))
        ]
        hint = " Say which, by its path." if several else ""
        raise TypeError(
            f"{type(bound).__name__}.replace: no {', '.join(unknown)}; expected some "
            f"of {', '.join(sorted({*(several or known)}))}.{hint}"
        )
