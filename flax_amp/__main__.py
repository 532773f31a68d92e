"""Commands of flax_amp.

`python -m flax_amp checkpoint DIR` lists what a directory of checkpoints holds. The
exit code is 0 if every step is intact, 1 if a step is damaged, and 2 if there is no
such directory. An old step that was half deleted when a run was killed is not damaged.

`python -m flax_amp explain MODULE:FUNCTION` tells what mixed precision does to a loss,
and why. The function takes nothing and returns `(loss_fn, args)`, or `(state, loss_fn,
batch)` for a training state; the arguments may be abstract. Without a name, it is
`to_explain`; the module may be a path: `examples/digits`. The exit code is 0 if there
is no problem, 1 if there is one, and 2 if it cannot be explained.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from flax_amp import checkpoint
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._explain import explain
from flax_amp.debug._model import Explanation
from flax_amp.debug._terminal import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flax_amp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "checkpoint", help="list steps, sizes, scaler values and integrity"
    )
    command.add_argument("directory", help="the directory of a checkpoint manager")
    command.set_defaults(run=lambda args: _checkpoint(args.directory))
    command = commands.add_parser(
        "explain", help="tell which layer runs in which dtype, and why"
    )
    command.add_argument("target", metavar="MODULE[:FUNCTION]")
    dtypes = ("float16", "bfloat16", "float32")
    command.add_argument(
        "--dtype", choices=dtypes, help="by default that of the state, or float16"
    )
    command.add_argument("--depth", type=int, help="levels of modules to show")
    command.add_argument("--only", choices=["problems"])
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    command.set_defaults(run=_explain)
    args = parser.parse_args(arguments)
    # A run may hold the accelerator at the same time.
    jax.config.update("jax_platforms", "cpu")
    return args.run(args)


def _explain(args: argparse.Namespace) -> int:
    module, _, name = args.target.partition(":")
    module = module.rstrip("/").removesuffix(".py").replace("/", ".")
    try:
        function = getattr(importlib.import_module(module), name or "to_explain")
    except (ImportError, AttributeError, ValueError) as error:
        print(f"error: {args.target}: {error}", file=sys.stderr)
        return 2
    if not callable(function):
        kind = type(function).__name__
        print(
            f"error: {args.target} is a {kind}; expected a function.", file=sys.stderr
        )
        return 2
    try:
        found = _found(args, function)
        report = render(found, depth=args.depth, only=args.only)
        if args.html:
            args.html.write_text(found.to_html(), encoding="utf-8")
    except Exception as error:  # of the user's code, too
        cause = str(error).partition("\n")[0]
        message = f"error: {args.target}: {type(error).__name__}: {cause}"
        print(message, file=sys.stderr)
        return 2
    Console(highlight=False).print(report)
    if args.html:
        print(f"\nwrote {args.html}")
    return int(bool(found.problems))


def _found(args: argparse.Namespace, function: Any) -> Explanation:
    """Explains what the user's function returns."""
    dtype = args.dtype and jnp.dtype(args.dtype)
    given: Any = function()
    if isinstance(given, tuple) and given and isinstance(given[0], AmpTrainState):
        return explain(*given, compute_dtype=dtype)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple):
        return explain(given[0], compute_dtype=dtype)(*given[1])
    raise TypeError(
        f"it returned a {type(given).__name__}; expected (loss_fn, args) with a tuple "
        "of arguments, or (state, loss_fn, batch)."
    )


def _checkpoint(directory: str) -> int:
    try:
        reports = checkpoint.verify(directory)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'step':>8} {'MB':>10} {'scale':>12} {'resets':>7}  integrity")
    for report in reports:
        scale, resets = (
            f"{report.scaler[key]:g}" if key in report.scaler else "-"
            for key in ("scaler", "total_resets")
        )
        size = f"{report.size / 1e6:.3f}"
        print(f"{report.step:8} {size:>10} {scale:>12} {resets:>7}  {_state(report)}")
    if not reports:
        print(f"no steps in {directory}")
    return int(any(report.problem and not report.half_deleted for report in reports))


def _state(report: checkpoint.StepReport) -> str:
    if report.half_deleted:
        return "half deleted, a newer step is intact"
    if report.problem:
        return f"DAMAGED: {report.problem}"
    return "intact" if report.has_checksums else "readable, no checksums"


if __name__ == "__main__":
    sys.exit(main())
