"""What a command was asked to measure, and the loop over the cells that it measures."""

import argparse
import ast
import dataclasses
import gc
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from benchmarks import models, variants
from benchmarks.results import Results
from benchmarks.sections import SECTIONS
from benchmarks.softmax import is_in_half
from benchmarks.variants import Training

MODELS = tuple(name for name in models.NAMES if name not in models.OTHERS)
FLOAT16 = ("hand_fp16", "amp_fp16")
FP8 = ("amp_fp8", "amp_fp8_all", "flax_fp8")
# These run if they are asked for, or in a command of their own.
_ELSEWHERE = (*FLOAT16, *FP8, *variants.STATES, "amp_fp8_emulated", "twin_bf16")
BFLOAT16 = tuple(name for name in variants.NAMES if name not in _ELSEWHERE)

Figures = dict[str, Any]
Cells = list[tuple[str, list[str]]]  # models with their variants


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure; no models or no variants means the command's own choice."""

    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: str = "full"
    folder: pathlib.Path = pathlib.Path("benchmarks/results")
    resume: bool = False

    def cells(self, models: Iterable[str], names: Iterable[str]) -> Cells:
        """Returns the variants of each model that are asked for and can be made here.

        Without softmax in half precision a hand-set model has no `smcast_bf16`.
        """
        missing = {v: variants.reason_missing(v) for v in self.variants or names}
        for name, why in missing.items():
            if why:
                print(f"{name} is left out: {why}", flush=True)
        found = [name for name, why in missing.items() if why is None]
        without = [name for name in found if name != "smcast_bf16"]
        return [
            (model, without if without == found or not is_in_half(model) else found)
            for model in self.models or models
        ]

    def label(self, variant: str) -> str:
        """Returns the name of a variant together with its options."""
        options = self._options_of(variant).items()
        listed = ",".join(f"{key}={value}" for key, value in options)
        return f"{variant}[{listed}]" if listed else variant

    def training(self, variant: str, model: str) -> Training:
        """Makes the training of a cell, with its options."""
        options = self._options_of(variant)
        return variants.training(variant, model, self.size, **options)

    def _options_of(self, variant: str) -> Mapping[str, Any]:
        """Returns all options for a variant of flax_amp, and none for others."""
        return self.options if variant.startswith("amp_") else {}


Measure = Callable[[str, list[str]], Iterable[tuple[str, Figures]]]


def run_cells(
    asked: Request,
    command: str,
    target: str,
    models: Iterable[str],
    variants: Iterable[str],
    measure: Measure,
) -> None:
    """Measures the cells asked for; writes and prints each as soon as it exists.

    `models` and `variants` are the command's own choice. To `resume` leaves out what
    was measured with what is here now.
    """
    results = Results.open(asked.folder, command, target, asked.size)
    for model, names in asked.cells(models, variants):
        if asked.resume:
            names = [n for n in names if not results.has(model, asked.label(n))]
        for name, figures in measure(model, names) if names else ():
            label = asked.label(name)
            results.put(model, label, figures)
            line = SECTIONS[command].line(figures)
            print(f"{model:17}{label:24} {line}", flush=True)
            free_memory()


def guarded(measure: Callable[..., Figures], *args: Any) -> Figures:
    """Returns figures, or why there are none, whatever a package or XLA may raise."""
    try:
        return measure(*args)
    except Exception as error:
        return {"error": reason(error)}


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


def reason(error: BaseException) -> str:
    """Returns one line that says why a cell has no figures, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    return text if len(text) <= 240 else text[:237] + "..."


def parse_option(text: str) -> tuple[str, Any]:
    """Reads "key=value"; a value that is no Python literal is a string."""
    key, separator, value = text.partition("=")
    if not (key.isidentifier() and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected such as recompute=False")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value
