"""The user's scopes, source lines and names of arrays, for profiles and errors.

The equations of a rewritten program are bound under the scopes and the source lines of
the original equations. The inputs keep the names that JAX gives to the arguments of the
user's function.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from flax_amp._compat import (
    Arrays,
    Eqn,
    InternalFloatingPointError,
    Jaxpr,
    open_jaxpr,
)

# Profiles and errors show the user's line of an operation, not a line of this package.
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
source_info_util.register_exclusion(_PACKAGE)

_JAX_FOLDER = os.path.dirname(jax.__file__)

# --- the source of an equation -------------------------------------------------------


def scopes(eqn: Eqn) -> tuple[Any, ...]:
    """Returns all scopes around an equation within its jaxpr, outermost first."""
    return tuple(eqn.source_info.name_stack.stack)


def scope_names(eqn: Eqn) -> tuple[str, ...]:
    """Returns the `jax.named_scope` names around an equation, outermost first.

    Names are relative to the jaxpr that holds the equation. Entries that JAX's own
    transformations add (`jvp`, `transpose`, ...) are not scopes and are left out.
    """
    stack = eqn.source_info.name_stack.stack
    return tuple(entry.name for entry in stack if type(entry).__name__ == "Scope")


def user_frames(eqn: Eqn) -> Iterator[tuple[str, int]]:
    """Yields files and lines of the code outside of JAX that an equation comes from.

    The innermost frame comes first. Frames of this package are left out, too.
    """
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not frame.file_name.startswith((_JAX_FOLDER, _PACKAGE)):
            yield frame.file_name, frame.line_num


def source_of(closed: Jaxpr) -> str:
    """Returns the name and the place of a function of JAX that was traced to a jaxpr.

    For functions outside of JAX the text is empty.
    """
    info = getattr(open_jaxpr(closed)[0], "debug_info", None)
    source = str(getattr(info, "func_src_info", ""))
    return source if _JAX_FOLDER in source else ""


def is_numerics_of_jax(eqn: Eqn) -> bool:
    """Whether an equation stands in code of JAX that chooses its own precision.

    Such code is JAX's linear algebra, and its scaling of images.
    """
    frames = getattr(eqn.source_info.traceback, "frames", ())
    files = (frame.file_name for frame in frames)
    of_jax = itertools.takewhile(lambda file: file.startswith(_JAX_FOLDER), files)
    return any({"linalg", "image"} & set(re.findall(r"\w+", file)) for file in of_jax)


# --- scopes and lines of a bound equation --------------------------------------------


def opened(eqn: Eqn, call: Eqn, keeps_line: bool) -> Any:
    """Returns an equation of a called jaxpr as it stands in the place of the call.

    An equation without a line of the user's code, as in a function of JAX, gets the
    line of the call. The scopes of the call come before the scopes of the equation.
    """
    has_line = keeps_line or next(user_frames(eqn), None) is not None
    info = (eqn if has_line else call).source_info
    stack = type(info.name_stack)((*scopes(call), *scopes(eqn)))
    return eqn.replace(source_info=info.replace(name_stack=stack))


def equation_context(eqn: Eqn) -> contextlib.ExitStack:
    """Restores an equation's scopes, source line and JAX context around its bind."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = restored_line(eqn, stack)
    context.enter_context(eqn.ctx.manager)
    return context


def restored_line(eqn: Eqn, name_stack: Any = None) -> contextlib.ExitStack:
    """Restores an equation's source line, also in the traceback of a NaN."""
    context = contextlib.ExitStack()
    context.push(_show_line)  # leaves after the context that is entered below
    traceback = eqn.source_info.traceback
    context.enter_context(
        source_info_util.user_context(traceback, name_stack=name_stack)
    )
    return context


_REWRITTEN = "The last frames are those of the function that flax_amp has rewritten."


def _show_line(kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Ends the traceback of a NaN where the user's function has the operation.

    JAX gives the error a cause with the user's frames, and `jax.jit` drops this cause.
    A bound jit raises an internal error instead of a `FloatingPointError`.
    """
    if isinstance(error, InternalFloatingPointError):
        raise FloatingPointError(f"invalid value ({error.ty}) in {error.name}")
    if not isinstance(error, FloatingPointError):
        return
    if _REWRITTEN in getattr(error, "__notes__", ()):
        return  # an inner equation has set the line, which is more precise
    source = error.__cause__
    name = type(source).__name__
    if source is not None and name == "JaxStackTraceBeforeTransformation":
        error.__traceback__ = _behind_package(source.__traceback__)
        error.add_note(_REWRITTEN)


def _behind_package(traceback: Any) -> Any:
    """Returns the part of a traceback below the last frame of this package."""
    last = traceback
    frame = traceback
    while frame and frame.tb_next:
        is_own = frame.tb_frame.f_code.co_filename.startswith(_PACKAGE)
        frame = frame.tb_next
        if is_own:
            last = frame
    return last


# --- names of arrays in errors -------------------------------------------------------


def name_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any, arrays: Arrays
) -> list[str]:
    """Returns the names of arrays in JAX's messages, such as `batch['x']`.

    An array that is no argument has an empty name.
    """
    names: Any = jax.api_util.debug_info("amp", fun, args, kwargs).arg_names
    # In reverse, so that an array that is passed twice gets its first name.
    leaves = reversed(jax.tree.leaves((args, kwargs)))
    by_array = dict(zip(map(id, leaves), reversed(names), strict=False))
    return [by_array.get(id(x), "") for x in arrays]


def traced_as(
    function: Callable[..., Any], fun: Callable[..., Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Returns `function` of arrays, which JAX's errors call by the name of `fun`.

    `fun` is the user's function. `names` are the names of the arrays among the
    arguments of `fun`.
    """
    info: Any = jax.api_util.debug_info("amp", fun, (), {})
    # JAX reads this attribute for the name of a function that wraps another function.
    vars(function)["__fun_debug_info__"] = info._replace(arg_names=tuple(names))
    return function
