"""Costs of mixed precision, for each model and each way to train it.

Raw figures go into benchmarks/results/, a file for each command and target; cells that
are measured again replace what is there. See benchmarks/README.md, and `report` for the
tables.
"""

import argparse
import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import models, results, variants
from benchmarks.commands import compiled
from benchmarks.request import Request


def _target(default: str, *names: str) -> dict[str, dict[str, Any]]:
    return {"--target": dict(choices=names, default=default)}


# command: the module whose `run` it is, help, options of its own for `add_argument`
COMMANDS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "tpu": ("compiled", "for a TPU (needs libtpu)", _target("v5e", *compiled.TPUS)),
    "gpu-aot": ("compiled", "for a GPU (CUDA plugin)", _target("h200", *compiled.GPUS)),
    "mesh": ("compiled", "FSDP on 256 described chips", {}),
    "fp8": ("compiled", "matmuls in fp8", _target("tpu7x", *compiled.TPUS, "h200")),
    "gpu": (
        *("timed", "measured on the GPU that is here"),
        {"--rounds": dict(type=int, default=30, help="turns of each variant")},
    ),
    "cpu": (
        *("timed", "measured on the CPU that is here"),
        {"--rounds": dict(type=int, default=10, help="turns of each variant")},
    ),
    "host": ("host", "tracing and lowering on the CPU", {}),
    "error": ("error", "error of the gradients, on the CPU", {}),
    "step": ("step", "what make_train_step adds to a step by hand", {}),
    "soak": (
        *("soak", "a long run with kills, bad batches and damage"),
        {
            "--steps": dict(type=int, default=50_000, help="length of the run"),
            "--seed": dict(type=int, default=0, help="of batches, faults and kills"),
        },
    ),
    "corpus": (
        *("corpus", "programs of other packages"),
        {"--only": dict(default="", help="parts of PACKAGE/NAME, as A,B")},
    ),
    "convergence": (
        *("convergence", "whole runs in each precision"),
        {
            "--tasks": dict(default="", help="some of the tasks, as A,B"),
            "--ways": dict(default="", help="some of the precisions, as A,B"),
            "--seeds": dict(type=int, default=5, help="runs in each precision"),
            "--steps": dict(type=int, default=0, help="by default those of the task"),
        },
    ),
    "report": ("report", "writes the tables and the plot of all results", {}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command of the command line, by default that of this process."""
    options = vars(parser().parse_args(arguments))
    common = ("command", "models", "variants", "size", "folder", "resume")
    given = {key: options.pop(key) for key in common}
    if given["size"] is None:
        given["size"] = "cpu" if given["command"] == "cpu" else "full"
    asked = Request(**given)
    module = importlib.import_module(
        f"benchmarks.commands.{COMMANDS[asked.command][0]}"
    )
    module.run(asked, **options)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    add: Callable[..., Any] = common.add_argument
    for flag, known in (("--models", models.NAMES), ("--variants", variants.NAMES)):
        text = f"of {', '.join(known)}"
        add(flag, type=_names(known), default=(), metavar="A,B", help=text)
    add("--size", choices=models.SIZES, help="by default full; cpu for the command cpu")
    text = "leave out what was measured with the same versions and sources"
    add("--resume", action="store_true", help=text)
    where: Any = dict(type=pathlib.Path, dest="folder", default=results.FOLDER)
    add("--results", **where, help="where the figures are stored")
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name, (_, text, flags) in COMMANDS.items():
        command = commands.add_parser(
            name, parents=[common], help=text, description=text
        )
        for flag, given in flags.items():
            command.add_argument(flag, **given)
    return made


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not {*names} <= {*known}:
            expected = ", ".join(known)
            raise argparse.ArgumentTypeError(f"{text!r}: expected some of {expected}")
        return names

    return parse


if __name__ == "__main__":
    main()
