"""Commands that call a function of the user: `explain` and `measure`."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._explain import explain
from flax_amp.debug._explanation import ONLY, render
from flax_amp.debug._measure import measure
from flax_amp.debug._report import show

_EXPECTED = (
    "(loss_fn, args) with a tuple of arguments, or (state, loss_fn, batch, *args)"
)
_TARGET = f"a function without arguments that returns {_EXPECTED}"


def add_explain(commands: Any) -> None:
    """Adds the command to the parsers of all commands."""
    text = "tell which layer runs in which dtype, and why"
    command = commands.add_parser("explain", help=text, description=text)
    add = command.add_argument
    add("target", metavar="MODULE[:FUNCTION]", help=f"{_TARGET} (default: to_explain)")
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, help="by default that of the state, or bfloat16")
    add("--depth", type=int, help="levels of modules to show")
    add("--only", choices=ONLY)
    add("--html", type=Path, metavar="FILE", help="write a page, too")
    command.set_defaults(run=lambda args: _or_error(_explain, args))


def add_measure(commands: Any) -> None:
    """Adds the command to the parsers of all commands."""
    text = "time steps in float32, bfloat16 and float16 on this device"
    command = commands.add_parser("measure", help=text, description=text)
    add = command.add_argument
    add("target", metavar="MODULE[:FUNCTION]", help=f"{_TARGET} (default: to_explain)")
    add("--turns", type=int, default=20, help="steps in each dtype (default: 20)")
    command.set_defaults(run=lambda args: _or_error(_measure, args), platforms=None)


def _or_error(run: Callable[[argparse.Namespace], int], args: Any) -> int:
    """Returns the exit code; prints one line for an error, and returns 2."""
    try:
        return run(args)
    except (Exception, SystemExit) as error:  # of the user's code, too
        cause = str(error).partition("\n")[0]
        if isinstance(error, SystemExit):
            cause += ": it ends when it is imported; expected a module without effects"
        message = f"error: {args.target}: {type(error).__name__}: {cause}"
        print(message, file=sys.stderr)
        return 2


def _explain(args: argparse.Namespace) -> int:
    dtype = args.dtype and jnp.dtype(args.dtype)
    found = _call(explain, args.target, compute_dtype=dtype)
    parts = render(found, depth=args.depth, only=args.only)
    if args.html:
        args.html.write_text(found.to_html(), encoding="utf-8")
    show(parts)
    if args.html:
        print(f"\nwrote {args.html}")
    return int(bool(found.problems))


def _measure(args: argparse.Namespace) -> int:
    print(_call(measure, args.target, turns=args.turns))
    return 0


def _call(tool: Any, target: str, **options: Any) -> Any:
    """Calls a tool with what the function of a target returns."""
    given = _function(target)()
    if isinstance(given, tuple) and given and isinstance(given[0], AmpTrainState):
        return tool(*given, **options)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple):
        return tool(given[0], **options)(*given[1])
    raise TypeError(f"it returned a {type(given).__name__}; expected {_EXPECTED}.")


def _function(target: str) -> Callable[[], Any]:
    """Returns the function that a target names."""
    module, _, name = target.partition(":")
    if os.sep in module:
        module = os.path.relpath(module)
        if module.startswith(".."):
            raise ValueError(
                f"it is outside of {os.getcwd()}; expected a module, or a path below."
            )
    module = module.removesuffix(".py").replace(os.sep, ".")
    function = getattr(importlib.import_module(module), name or "to_explain", None)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}; expected a function.")
    return function
