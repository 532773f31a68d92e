"""Commands that call a function of the user with a tool of this folder."""

import argparse
import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, get_args

from flax_amp.debug._compare import compare_precision
from flax_amp.debug._explain import ONLY, explain
from flax_amp.debug._measure import measure
from flax_amp.debug._nonfinite import find_nonfinite
from flax_amp.policy import Precision

_TARGET = """MODULE is a module, or the path of its file. It is imported: keep training
under `if __name__ == "__main__":`. FUNCTION, by default to_explain, takes nothing and
returns what is asked about, with the loss before amp:
  (loss_fn, args) with a tuple of arguments
  (state, loss_fn, batch, *args)
  ((model, optimizer), loss_fn, batch, *args)
For explain, arrays may be shapes (jax.ShapeDtypeStruct, jax.eval_shape).
The exit code is 1 if there is something to act on, and 2 for an error.
"""
_PRECISION = {
    "precision": dict(choices=get_args(Precision), help="by default that of the state")
}
_SCALE = dict(type=float, help="of the loss; by default that of the state")
_NUMERIC = _PRECISION | {"scale": _SCALE}
_ONLY = {"only": dict(choices=ONLY, help="a part of the report")}

# The tool of a command, which results exit with 1, and options.
_COMMANDS: dict[str, tuple[Any, Callable[[Any], Any], dict[str, Any]]] = {
    "explain": (explain, lambda x: x.problems, _PRECISION | _ONLY),
    "nonfinite": (find_nonfinite, lambda x: x.verdict != "nothing", _NUMERIC),
    "compare": (
        compare_precision,
        lambda x: x.as_it_is.gradient_error > x.threshold,
        _NUMERIC,
    ),
    "measure": (measure, lambda _: False, {}),
}


def add_commands(commands: Any) -> None:
    """Adds the commands to the parsers of all commands."""
    for name, (tool, is_bad, options) in _COMMANDS.items():
        text = (tool.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_TARGET,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("target", metavar="MODULE[:FUNCTION]", help="see below")
        for option, given in options.items():
            command.add_argument(f"--{option}", **given)
        if name != "explain":  # it runs the program on the device that is here
            command.set_defaults(platforms=None)
        command.set_defaults(run=functools.partial(_report, tool, is_bad))


def _report(tool: Any, is_bad: Callable[[Any], Any], args: argparse.Namespace) -> int:
    """Returns the exit code; prints one line for an error, and returns 2."""
    options = {k: v for k, v in vars(args).items() if k in ("precision", "scale")}
    try:
        match _returned_by(args.target):
            case (fun, tuple() as given):
                found = tool(fun, **options)(*given)
            case of_step:
                found = tool(*of_step, **options)
        found._show(getattr(args, "only", None))
    except (Exception, SystemExit) as error:  # of the user's code, too
        cause = str(error).partition("\n")[0]
        message = f"error: {args.target}: {type(error).__name__}: {cause}"
        print(message, file=sys.stderr)
        return 2
    return int(bool(is_bad(found)))


def _returned_by(target: str) -> Any:
    """Returns what the function of a target returns."""
    module, _, name = target.partition(":")
    module = os.path.relpath(module) if os.sep in module else module
    module = module.removesuffix(".py").replace(os.sep, ".")
    sys.path.insert(0, "")  # which `python -m` does
    return pkgutil.resolve_name(f"{module}:{name or 'to_explain'}")()
