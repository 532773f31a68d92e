"""Functions that `amp` has rewritten, and tools that take the function before that.

A mark tells of a function, and of what JAX makes of it, which copies attributes.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_flax_amp_rewritten"


def rewritten(fun: F) -> F:
    """Marks a function that runs in mixed precision."""
    vars(fun)[_MARK] = True
    return fun


def is_rewritten(fun: Any) -> bool:
    """Whether a function runs in mixed precision already."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, _MARK, False)


def refuse_rewritten(caller: str, fun: Any) -> None:
    """Raises a TypeError if `fun` is marked; `caller` is the tool and the function."""
    if is_rewritten(fun):
        tool = caller.partition(":")[0]
        raise TypeError(
            f"{caller} is already rewritten by amp; expected the function before amp: "
            f"{tool}(loss), not {tool}(amp(loss)), its gradient or a train step."
        )
