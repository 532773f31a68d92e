"""What a command was asked to measure, and the loop over the cells that it measures."""

import ast
import dataclasses
import gc
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from benchmarks import models, show, variants
from benchmarks.results import Results
from benchmarks.sections import section
from benchmarks.variants import Training

# gpt_24 is for tracing and gpt_fsdp for many chips, each in a command of its own.
MODELS = tuple(name for name in models.NAMES if name not in ("gpt_24", "gpt_fsdp"))
FLOAT16 = ("hand_fp16", "amp_fp16")
BFLOAT16 = tuple(name for name in variants.NAMES if name not in FLOAT16)
# The others have no softmax in the model, or one that is in float32 as it is.
_SOFTMAX = ("vit_small", "vit_s16", "gpt_")

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure; no models or no variants means the command's own choice.

    Attributes:
      models: their names.
      variants: their names.
      options: keywords for the variants of flax_amp.
      size: "full" or "tiny".
      folder: of the results.
      resume: leave out what was measured before with the same versions.
    """

    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: str = "full"
    folder: pathlib.Path = pathlib.Path("benchmarks/results")
    resume: bool = False

    def cells(
        self, models: Iterable[str], names: Iterable[str]
    ) -> list[tuple[str, list[str]]]:
        """Returns the variants of each model that are asked for and can be made here.

        Args:
          models: the command's own choice.
          names: the command's own choice of variants.
        """
        chosen = []
        for name in self.variants or names:
            if missing := variants.reason_missing(name):
                print(f"{name} is left out: {missing}", flush=True)
            else:
                chosen.append(name)
        return [
            (model, [v for v in chosen if v != "smcast_bf16" or _has_softmax(model)])
            for model in self.models or models
        ]

    def label(self, variant: str) -> str:
        """Returns the name of a variant together with its options."""
        options = self.options_of(variant)
        listed = ",".join(f"{key}={value}" for key, value in options.items())
        return f"{variant}[{listed}]" if listed else variant

    def training(self, variant: str, model: str) -> Training:
        """Makes the training of a cell, with its options."""
        options = self.options_of(variant)
        return variants.training(variant, model, self.size, **options)

    def options_of(self, variant: str) -> dict[str, Any]:
        """Returns the options of a variant: those of flax_amp take all, others none."""
        return dict(self.options) if variant.startswith("amp_") else {}


def run_cells(
    asked: Request,
    results: Results,
    part: str,
    cells: list[tuple[str, list[str]]],
    measure: Callable[[str, list[str]], Iterator[tuple[str, Figures]]],
    together: bool = False,
) -> None:
    """Measures cells; writes the figures of each at once, prints them and the tables.

    Args:
      asked: the request.
      results: where the figures go.
      part: of each cell.
      cells: models with their variants.
      measure: yields variants of a model with their figures.
      together: the variants of a model are compared with each other, so that `resume`
        leaves out either all of them or none.
    """
    shown = section(results.command, part)
    for model, names in cells:
        missing = [
            name
            for name in names
            if not (asked.resume and results.has(model, asked.label(name), part))
        ]
        if together and missing:
            missing = names
        for name in names:
            if name not in missing:
                print(f"{model:17}{asked.label(name):24} there already", flush=True)
        for name, figures in measure(model, missing) if missing else ():
            label = asked.label(name)
            results.put(model, label, part, figures)
            print(f"{model:17}{label:24} {shown.line(figures)}", flush=True)
            free_memory()
    show.results(results)


def guarded(measure: Callable[..., Figures], *args: Any) -> Figures:
    """Returns figures, or why there are none, whatever a package or XLA may raise."""
    try:
        return measure(*args)
    except Exception as error:
        return {"error": reason(error)}


def free_memory() -> None:
    """Forgets what JAX traced and compiled, so that cells do not add up."""
    jax.clear_caches()
    gc.collect()


def reason(error: BaseException) -> str:
    """Returns one line that says why a cell has no figures, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    return text if len(text) <= 240 else text[:237] + "..."


def parse_option(text: str) -> tuple[str, Any]:
    """Reads "key=value"; a value that is no Python literal is a string.

    Raises:
      ValueError: if there is no key or no value.
    """
    key, separator, value = text.partition("=")
    if not (key.isidentifier() and separator and value):
        raise ValueError(f"option {text!r}; expected key=value, as recompute=never.")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def _has_softmax(model: str) -> bool:
    return model.startswith(_SOFTMAX)
