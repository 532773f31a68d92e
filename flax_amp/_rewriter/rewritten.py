"""Functions that `amp` has rewritten, and tools that take the function before that.

A mark tells of a function, and of what JAX makes of it, which copies attributes. Inside
of other code, only the call tells.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_flax_amp_rewritten"
# Of the running thread: another one may call what `amp` has rewritten.
_refused_by = contextvars.ContextVar("refused_by", default="")


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
        _refuse(caller, "is already rewritten by amp")


@contextlib.contextmanager
def only_before_amp(caller: str) -> Iterator[None]:
    """Lets every call of a function that `amp` has rewritten raise a TypeError."""
    token = _refused_by.set(caller)
    try:
        yield
    finally:
        _refused_by.reset(token)


def refuse_if_asked() -> None:
    """Raises a TypeError inside of `only_before_amp`."""
    if caller := _refused_by.get():
        _refuse(caller, "calls a function that amp has rewritten")


def _refuse(caller: str, what: str) -> None:
    tool = caller.partition(":")[0]
    raise TypeError(
        f"{caller} {what}; expected the function before amp: {tool}(loss), not "
        f"{tool}(amp(loss)), its gradient or a train step."
    )
