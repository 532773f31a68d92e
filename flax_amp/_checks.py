"""Checks of arguments that several packages make, and how their messages show values.

A message says what was given, what was expected, and what to do.
"""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from flax_amp import _tree


def check_type(value: object, types: Any, name: str, expected: str) -> None:
    """Raises a TypeError unless `isinstance(value, types)`."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {describe(value)}; expected {expected}")


def check_count(
    value: Any, seen: str, what: str = "", least: int = 1, most: int | None = None
) -> int:
    """Returns a count as an int; raises a ValueError if it is none, or out of range.

    `seen` and `what` are for the message: what was given, and what is counted.
    """
    # jaxamp annotates `redo_on_nan` as a bool, which is an integer.
    with contextlib.suppress(TypeError):
        count = operator.index(value)
        if least <= count and (most is None or count <= most):
            return count
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    expected += f", the number {what}" if what else ""
    raise ValueError(f"{seen}; expected an integer {expected}.")


# --- values in messages --------------------------------------------------------------


def first_of(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Returns the first items as text, and how many more there are."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def describe(value: Any) -> str:
    """Returns dtype and shape of a number or an array; the type of all else."""
    if _tree.is_numeric(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"
