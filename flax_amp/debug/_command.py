"""Commands that call a function of the user with a tool of this room."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._compare import compare_precision
from flax_amp.debug._explain import ONLY, explain
from flax_amp.debug._measure import measure
from flax_amp.debug._nonfinite import find_nonfinite
from flax_amp.debug._report import show
from flax_amp.policy import Precision

_FORMS = (
    "(loss_fn, args) with a tuple of arguments",
    "(state, loss_fn, batch, *args)",
    "((model, optimizer), loss_fn, batch, *args)",
)
_EXPECTED = f"expected a function without arguments that returns {' or '.join(_FORMS)}"
_TARGET = """MODULE is a module, or the path of its file. It is imported: keep training
under `if __name__ == "__main__":`. FUNCTION, by default to_explain, takes nothing and
returns what is asked about, with the loss before amp:
  {}
For explain, arrays may be shapes (jax.ShapeDtypeStruct, jax.eval_shape).
""".format("\n  ".join(_FORMS))
_PRECISION = dict(choices=get_args(Precision), help="by default that of the state")
_SCALE = dict(type=float, help="of the loss; by default that of the state")


# What a command tells, its tool, the tool's options, and which results exit with 1.
_COMMANDS: dict[str, tuple[str, Any, dict[str, Any], Callable[[Any], bool]]] = {
    "explain": (
        "tell which module runs in which dtype, and why; exit with 1 for a problem",
        explain,
        {"precision": _PRECISION},
        lambda found: bool(found.problems),
    ),
    "nonfinite": (
        "name what made an inf or a NaN; exit with 1 if there is one",
        find_nonfinite,
        {"precision": _PRECISION, "scale": _SCALE},
        lambda found: found.verdict != "nothing",
    ),
    "compare": (
        "compare gradients with those in float32; exit with 1 if they differ too much",
        compare_precision,
        {
            "precision": _PRECISION,
            "scale": _SCALE,
            "remedies": dict(type=int, default=3, help="modules in float32 (3)"),
        },
        lambda found: found.as_it_is.gradient_error > found.threshold,
    ),
    "measure": (
        "time steps in float32, bfloat16 and float16 on this device",
        measure,
        {"turns": dict(type=int, default=20, help="steps in each dtype (20)")},
        lambda found: False,
    ),
}


def add_commands(commands: Any) -> None:
    """Adds the commands to the parsers of all commands."""
    for name, (text, _, options, _) in _COMMANDS.items():
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
        if name == "explain":
            command.add_argument("--only", choices=ONLY, help="a part of the report")
            command.add_argument("--html", type=Path, metavar="FILE", help="of a page")
        else:  # which runs the program on the device that is here
            command.set_defaults(platforms=None)
        command.set_defaults(run=_run, name=name)


def _run(args: argparse.Namespace) -> int:
    """Returns the exit code; prints one line for an error, and returns 2."""
    _, tool, options, is_bad = _COMMANDS[args.name]
    try:
        found = _call(tool, args.target, **{k: getattr(args, k) for k in options})
        shown = (args.only,) if args.name == "explain" else ()
        parts = list(found._parts(*shown))
        if getattr(args, "html", None):
            args.html.write_text(found.to_html(), encoding="utf-8")
    except (Exception, SystemExit) as error:  # of the user's code, too
        cause = str(error).partition("\n")[0]
        if isinstance(error, SystemExit):
            cause += ": it ends when it is imported; expected a module without effects"
        message = f"error: {args.target}: {type(error).__name__}: {cause}"
        print(message, file=sys.stderr)
        return 2
    show(parts)
    return int(is_bad(found))


def _call(tool: Any, target: str, **options: Any) -> Any:
    """Calls a tool with what the function of a target returns."""
    given = _function(target)()
    is_tuple = isinstance(given, tuple) and len(given) > 1
    if is_tuple and isinstance(given[0], AmpTrainState | tuple):
        return tool(*given, **options)
    if is_tuple and len(given) == 2 and isinstance(given[1], tuple):
        return tool(given[0], **options)(*given[1])
    raise TypeError(f"it returned a {type(given).__name__}; {_EXPECTED}.")


def _function(target: str) -> Callable[[], Any]:
    """Returns the function that a target names."""
    module, _, name = target.partition(":")
    name = name or "to_explain"
    module = os.path.relpath(module) if os.sep in module else module
    sys.path.insert(0, "")  # which `python -m` does
    found = importlib.import_module(module.removesuffix(".py").replace(os.sep, "."))
    function = getattr(found, name, None)
    if not callable(function):
        raise TypeError(f"{found.__name__} has no function {name}; {_EXPECTED}.")
    return function
