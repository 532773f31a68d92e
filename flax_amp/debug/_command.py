"""Commands that call a function of the user with a tool of this folder."""

import argparse
import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, get_args

from flax_amp._checks import check_type
from flax_amp.debug._compare_precision import compare_precision
from flax_amp.debug._compare_training import compare_training
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
_TRAINING = """MODULE is a module, or the path of its file. It is imported: keep
training under `if __name__ == "__main__":`. FUNCTION, by default setup, takes nothing
and returns the arguments of flax_amp.debug.compare_training, by name:
  dict(make=make, loss_fn=loss_fn, batches=batches, has_aux=True)
Options of the command line replace the arguments of the function. The exit code is 1
if a precision is outside, and 2 for an error.
"""
_PRECISION = {
    "precision": dict(
        choices=get_args(Precision), help="by default the precision of the state"
    )
}
_SCALE = dict(type=float, help="of the loss; by default the scale of the state")
_NUMERIC = _PRECISION | {"scale": _SCALE}
_ONLY = {"only": dict(choices=ONLY, help="a part of the report")}

_TRAINING_OPTIONS: dict[str, dict[str, Any]] = {
    "precision": dict(
        action="append",
        dest="precisions",
        choices=get_args(Precision),
        help="of a run; may be given several times",
    ),
    "steps": dict(type=int, help="of each run"),
    "seeds": dict(type=int, help="runs of each precision"),
    "directory": dict(
        help="where runs are stored, to continue where they were stopped"
    ),
}

# For each command: the tool, the test for results that exit with 1, and the options.
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
        command = _add_command(commands, name, tool, _TARGET, options)
        # All tools but `explain` run the program, on any device of this machine.
        if name != "explain":
            command.set_defaults(platforms=None)
        command.set_defaults(run=functools.partial(_report, tool, is_bad))
    command = _add_command(
        commands, "compare-training", compare_training, _TRAINING, _TRAINING_OPTIONS
    )
    command.add_argument("--plot", metavar="FILE", help="draws a .png, .svg or .pdf")
    command.set_defaults(platforms=None, run=_report_training)


def _add_command(
    commands: Any, name: str, tool: Any, epilog: str, options: dict[str, Any]
) -> argparse.ArgumentParser:
    text = (tool.__doc__ or "").partition("\n")[0]
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("target", metavar="MODULE[:FUNCTION]", help="see below")
    for option, given in options.items():
        command.add_argument(f"--{option}", **given)
    return command


def _report(tool: Any, is_bad: Callable[[Any], Any], args: argparse.Namespace) -> int:
    """Prints the report of a tool, and returns the exit code: 2 for an error."""
    options = {k: v for k, v in vars(args).items() if k in ("precision", "scale")}
    only = getattr(args, "only", None)
    if only == "parameters":
        options["parameters"] = True

    def ask() -> Any:
        match _returned_by(args.target, "to_explain"):
            case (fun, tuple() as given):
                found = tool(fun, **options)(*given)
            case of_step:
                found = tool(*of_step, **options)
        found._show(only)
        return is_bad(found)

    return _exit_code(args.target, ask)


def _report_training(args: argparse.Namespace) -> int:
    """Prints the report of `compare_training`, and returns the exit code."""
    names = ("precisions", "steps", "seeds", "directory")
    options = {k: v for k in names if (v := getattr(args, k)) is not None}

    def ask() -> Any:
        given = _returned_by(args.target, "setup")
        check_type(given, dict, "setup", "a dict of arguments of compare_training.")
        found = compare_training(**given | options)
        found._show()
        if args.plot:
            print(f"wrote {found.plot(args.plot)}")
        return found.outside

    return _exit_code(args.target, ask)


def _exit_code(target: str, ask: Callable[[], Any]) -> int:
    """Returns 1 if there is something to act on, else 0.

    An error is printed in a single line, and 2 is returned.
    """
    try:
        return int(bool(ask()))
    except (Exception, SystemExit) as error:  # the user's code may raise any error
        cause = str(error).partition("\n")[0]
        print(f"error: {target}: {type(error).__name__}: {cause}", file=sys.stderr)
        return 2


def _returned_by(target: str, default: str) -> Any:
    """Calls the function of a target, and returns its result."""
    module, _, name = target.partition(":")
    if os.sep in module:
        module = os.path.relpath(module)
    module = module.removesuffix(".py").replace(os.sep, ".")
    # `python -m` does the same, so that modules of the working directory are found.
    sys.path.insert(0, "")
    return pkgutil.resolve_name(f"{module}:{name or default}")()
