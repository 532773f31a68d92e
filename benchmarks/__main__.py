"""Costs of mixed precision, for each model and each way to train it.

Raw figures go into benchmarks/results/, a file for each command and environment;
cells that are measured again replace what is there. See `report` for the tables.
"""

import argparse
import importlib
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import problem, request, results, variants

# command: (module, function, help)
COMMANDS = {
    "tpu": ("compiled", "run_tpu", "compiled for a TPU v5e (needs libtpu, no TPU)"),
    "gpu-aot": ("compiled", "run_gpu", "compiled for an H200 (CUDA plugin, no GPU)"),
    "gpu": ("gpu", "run", "measured on the GPU that is here"),
    "host": ("host", "run", "tracing, lowering, dispatch and retraces on the CPU"),
    "error": ("error", "run", "error of the gradients, on the CPU"),
    "mesh": ("mesh", "run", "FSDP on 256 described chips of a TPU v5e"),
    "casts": (
        "casts",
        "run",
        "lists every cast of a forward pass, and why it is there",
    ),
    "save": ("save", "run", "what digests add to saving and restoring 1 GB"),
    "faults": ("faults", "run", "kills, damages and fills up disks; what is lost"),
    "optim": ("optim", "run", "every pytree optimizer under every transformation"),
    "report": ("report", "run", "writes tables and plots of all results"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
      arguments: of the command line, by default those of this process.
    """
    options = vars(parser().parse_args(arguments))
    module, function, _ = COMMANDS[options.pop("command")]
    asked = request.Request(
        models=options.pop("models"),
        variants=options.pop("variants"),
        options=dict(options.pop("option")),
        size=options.pop("size"),
        folder=options.pop("results"),
        resume=options.pop("resume"),
    )
    command = importlib.import_module(f"benchmarks.commands.{module}")
    getattr(command, function)(asked, **options)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name, (_, _, text) in COMMANDS.items():
        _add_common(commands.add_parser(name, help=text, description=text))
    gpu = commands.choices["gpu"]
    gpu.add_argument("--platform", default="cuda", help="cpu tries the command out")
    gpu.add_argument("--rounds", type=int, default=30, help="turns of each variant")
    gpu.add_argument("--burst-ms", type=float, default=100, help="length of a turn")
    host = commands.choices["host"]
    host.add_argument("--repeats", type=int, default=3, help="traces of each variant")
    host.add_argument("--calls", type=int, default=200, help="calls of each step")
    error = commands.choices["error"]
    error.add_argument("--seeds", type=int, default=8, help="weights and batches")
    faults = commands.choices["faults"]
    faults.add_argument("--kills", type=int, default=50, help="processes to kill")
    optim = commands.choices["optim"]
    optim.add_argument("--only", default="", metavar="A;B", help="optimizers, by name")
    optim.add_argument("--rounds", type=int, default=50, help="turns of the timing")
    return made


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--models",
        type=_names(problem.NAMES),
        default=(),
        metavar="A,B",
        help=f"of {', '.join(problem.NAMES)}",
    )
    command.add_argument(
        "--variants",
        type=_names(variants.NAMES),
        default=(),
        metavar="A,B",
        help=f"of {', '.join(variants.NAMES)}",
    )
    command.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword for amp or make_train_step, for the variants amp_*",
    )
    command.add_argument("--size", choices=problem.SIZES, default="full")
    command.add_argument(
        "--resume",
        action="store_true",
        help="leave out what was measured with the same versions and sources",
    )
    command.add_argument(
        "--results",
        type=pathlib.Path,
        default=results.FOLDER,
        metavar="FOLDER",
        help="where the figures are kept (default: benchmarks/results)",
    )


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown) or text!r} unknown; expected some of "
                f"{', '.join(known)}"
            )
        return names

    return parse


def _option(text: str) -> tuple[str, Any]:
    try:
        return request.parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
