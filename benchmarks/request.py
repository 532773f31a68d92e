"""What a command was asked to measure, and the loop over the cells that it measures."""

import dataclasses
import gc
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from benchmarks import variants
from benchmarks.results import FOLDER, Figures, Results
from benchmarks.tables import SECTIONS

T = TypeVar("T")
Measure = Callable[[str, list[str]], Iterable[tuple[str, Figures]]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure; no models or no variants means the command's own choice."""

    command: str
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    size: str = "full"
    folder: pathlib.Path = FOLDER
    resume: bool = False

    def cells(self) -> list[tuple[str, list[str]]]:
        """Returns each model with the variants that are asked for and can be made here.

        Without softmax in half precision a hand-set model has no `smcast_bf16`.
        """
        section = SECTIONS[self.command]
        asked = self.variants or section.variants.split()
        for package in filter(None, map(variants.missing_package, asked)):
            print(f"{package} is not installed, and left out", flush=True)
        found = [name for name in asked if variants.missing_package(name) is None]
        plain = [name for name in found if name != "smcast_bf16"]
        return [
            (model, found if model in variants.SOFTMAX_IN_HALF else plain)
            for model in self.models or section.models
        ]


def run_cells(asked: Request, target: str, measure: Measure) -> None:
    """Measures the cells asked for; writes and prints each as soon as it exists.

    To `resume` leaves out what was measured with what is here now.
    """
    results = Results.open(asked.folder, asked.command, target, asked.size)
    for model, names in asked.cells():
        if asked.resume:
            names = [n for n in names if not results.has(model, n)]
        for name, figures in measure(model, names) if names else ():
            results.put(model, name, figures)
            line = SECTIONS[asked.command].line(figures)
            print(f"{model:17}{name:18} {line}", flush=True)
            free_memory()


def guarded(measure: Callable[..., Figures], *args: Any) -> Figures:
    """Returns figures, or why there are none, whatever a package or XLA may raise."""
    try:
        return measure(*args)
    except Exception as error:
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """Returns one line that says why a cell has no figures, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    return text if len(text) <= 240 else text[:237] + "..."


def on_cpu(*flags: str) -> None:
    """Computes on the CPU, with flags that XLA reads when it is first used."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in flags if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([*missing, given]).strip()
    jax.config.update("jax_platforms", "cpu")


def free_memory() -> None:
    """Forgets what JAX traced and compiled, so that cells do not add up."""
    jax.clear_caches()
    gc.unfreeze()
    gc.collect()


def in_turns(
    calls: Sequence[Callable[[], T]], rounds: int, warm_up: int = 1
) -> list[list[T]]:
    """Calls each function once in each round; returns what each of them gave.

    The order rotates, so that other work on the machine and the drift of clocks hit
    all alike. What the rounds to warm up give is left out: JAX compiles in them.
    """
    found: list[list[T]] = [[] for _ in calls]
    for turn in range(warm_up + rounds):
        for i in range(len(calls)):
            now = (turn + i) % len(calls)
            found[now].append(calls[now]())
    return [each[warm_up:] for each in found]
