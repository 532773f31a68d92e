"""Commands that call a function of the user with a tool of this folder."""

import argparse
import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, get_args

from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._compare import compare_precision
from flax_amp.debug._explain import ONLY, explain
from flax_amp.debug._measure import measure
from flax_amp.debug._nonfinite import find_nonfinite
from flax_amp.policy import Precision

_FORMS = (
    "(loss_fn, args) with a tuple of arguments",
    "(state, loss_fn, batch, *args)",
    "((model, optimizer), loss_fn, batch, *args)",
)
_TARGET = """MODULE is a module, or the path of its file. It is imported: keep training
under `if __name__ == "__main__":`. FUNCTION, by default to_explain, takes nothing and
returns what is asked about, with the loss before amp:
  {}
For explain, arrays may be shapes (jax.ShapeDtypeStruct, jax.eval_shape).
""".format("\n  ".join(_FORMS))
_PRECISION = dict(choices=get_args(Precision), help="by default that of the state")
_SCALE = dict(type=float, help="of the loss; by default that of the state")
_ONLY = dict(choices=ONLY, help="a part of the report")

# What a command tells, its tool, which results exit with 1, and its options.
_COMMANDS: dict[str, tuple[str, Any, Callable[[Any], bool], dict[str, Any]]] = {
    "explain": (
        "tell which module runs in which dtype, and why; exit with 1 for a problem",
        explain,
        lambda found: bool(found.problems),
        {"precision": _PRECISION, "only": _ONLY},
    ),
    "nonfinite": (
        "name what made an inf or a NaN; exit with 1 if there is one",
        find_nonfinite,
        lambda found: found.verdict != "nothing",
        {"precision": _PRECISION, "scale": _SCALE},
    ),
    "compare": (
        "compare gradients with those in float32; exit with 1 if they differ too much",
        compare_precision,
        lambda found: found.as_it_is.gradient_error > found.threshold,
        {"precision": _PRECISION, "scale": _SCALE},
    ),
    "measure": (
        "time steps in float32, bfloat16 and float16 on this device",
        measure,
        lambda found: False,
        {},
    ),
}


def add_commands(commands: Any) -> None:
    """Adds the commands to the parsers of all commands."""
    for name, (text, tool, is_bad, options) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_TARGET,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("target", metavar="MODULE[:FUNCTION]", help="see below")
        for option, given in options.items():
            command.add_argument(f"--{option}", **given)
        if name != "explain":  # it runs the program on the device that is here
            command.set_defaults(platforms=None)
        command.set_defaults(run=functools.partial(_run, tool, is_bad))


def _run(tool: Any, is_bad: Callable[[Any], bool], args: argparse.Namespace) -> int:
    """Returns the exit code; prints one line for an error, and returns 2."""
    given = {k: v for k, v in vars(args).items() if k in ("precision", "scale")}
    try:
        found = _call(tool, _returned_by(args.target), given)
        found._show(getattr(args, "only", None))
    except (Exception, SystemExit) as error:  # of the user's code, too
        cause = str(error).partition("\n")[0]
        message = f"error: {args.target}: {type(error).__name__}: {cause}"
        print(message, file=sys.stderr)
        return 2
    return int(is_bad(found))


def _returned_by(target: str) -> Any:
    """Returns what the function of a target returns."""
    module, _, name = target.partition(":")
    module = os.path.relpath(module) if os.sep in module else module
    module = module.removesuffix(".py").replace(os.sep, ".")
    sys.path.insert(0, "")  # which `python -m` does
    return pkgutil.resolve_name(f"{module}:{name or 'to_explain'}")()


def _call(tool: Any, given: Any, options: dict[str, Any]) -> Any:
    """Calls a tool with what a function has returned."""
    is_tuple = isinstance(given, tuple) and len(given) > 1
    if is_tuple and isinstance(given[0], AmpTrainState | tuple):
        return tool(*given, **options)
    if is_tuple and len(given) == 2 and isinstance(given[1], tuple):
        return tool(given[0], **options)(*given[1])
    expected = " or ".join(_FORMS)
    raise TypeError(f"it returned a {type(given).__name__}; expected {expected}.")
