"""Checks of arguments for several packages, and the text of values in messages.

A message names the given value, the expected value and the remedy.
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
    value: Any, shown: str, counted: str = "", least: int = 1, most: int | None = None
) -> int:
    """Returns a count as an int, or raises a ValueError.

    A count is an integer from `least` to `most`. The message shows the argument as
    `shown`, and names the counted things by `counted`, such as "of steps".
    """
    # A bool counts as an integer, because jaxamp annotates `redo_on_nan` as a bool.
    with contextlib.suppress(TypeError):
        count = operator.index(value)
        if least <= count and (most is None or count <= most):
            return count
    expected = f"from {least} to {most}"
    if most is None:
        expected = f"of at least {least}"
    if counted:
        expected += f", the number {counted}"
    raise ValueError(f"{shown}; expected an integer {expected}.")


# --- values in messages --------------------------------------------------------------


def first_of(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Returns the first items as text, and the number of further items.

    The exact `count` does not matter: a message shows examples, and stays short.
    """
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def describe(value: Any) -> str:
    """Returns the dtype and shape of a number or an array, or the type of an object."""
    if _tree.is_numeric(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    name = type(value).__name__
    article = "an" if name[0] in "AEIOUaeio" else "a"
    return f"{article} {name}"
