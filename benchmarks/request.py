"""What a command was asked to measure, and cells that fail with a reason."""

import ast
import dataclasses
import gc
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from benchmarks import problem, variants
from benchmarks.method import Training

# For tracing and for many chips, each in a command of its own.
_SPECIAL = ("gpt_24", "gpt_fsdp")
MODELS = tuple(name for name in problem.NAMES if name not in _SPECIAL)
_PEERS = ("jmp_bf16", "mpx_bf16", "jaxamp_bf16")
BFLOAT16 = (
    "float32",
    "hand_bf16",
    "smcast_bf16",
    "amp_bf16",
    "amp_step_bf16",
    *_PEERS,
)
FLOAT16 = ("hand_fp16", "amp_fp16", "amp_fp16_cond", "jmp_fp16")
# The others have no softmax in the model, or one that is in float32 as it is.
_SOFTMAX = ("vit_small", "vit_s16", "gpt_")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
      models: their names; empty for the command's own choice.
      variants: their names; empty for the command's own choice.
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
        self, models: Iterable[str], variants: Iterable[str]
    ) -> list[tuple[str, list[str]]]:
        """Returns the variants of each model that are asked for and can be made here.

        Those of packages that are not installed are left out, with a word about it.

        Args:
          models: the command's own choice.
          variants: the command's own choice.

        Returns:
          Each model with its variants.
        """
        chosen = [v for v in self.variants or variants if _is_installed(v)]
        return [
            (model, [v for v in chosen if not _is_the_same_as_hand(v, model)])
            for model in self.models or models
        ]

    def label(self, variant: str) -> str:
        """Returns the name of a variant together with its options."""
        options = self.options_of(variant)
        if not options:
            return variant
        listed = ",".join(f"{key}={value}" for key, value in options.items())
        return f"{variant}[{listed}]"

    def training(self, variant: str, model: str) -> Training:
        """Makes the training of a cell, with its options."""
        options = self.options_of(variant)
        return variants.training(variant, model, self.size, **options)

    def options_of(self, variant: str) -> dict[str, Any]:
        """Returns the options of a variant: those of flax_amp take all, others none."""
        return dict(self.options) if variant.startswith("amp_") else {}


def plain_name(label: str) -> str:
    """Returns the name of a variant without its options."""
    return label.split("[")[0]


def parse_option(text: str) -> tuple[str, Any]:
    """Reads "key=value"; a value that is no Python literal is a string.

    Raises:
      ValueError: if there is no key or no value.

    Example:
      >>> parse_option("recompute=never"), parse_option("accum_steps=2")
      (('recompute', 'never'), ('accum_steps', 2))
    """
    key, separator, value = text.partition("=")
    if not (key.isidentifier() and separator and value):
        raise ValueError(f"option {text!r}; expected key=value, as recompute=never.")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def reason(error: BaseException) -> str:
    """Returns one line that says why a cell has no figures, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    return text if len(text) <= 240 else text[:237] + "..."


def free_memory() -> None:
    """Forgets what JAX traced and compiled, so that cells do not add up."""
    jax.clear_caches()
    gc.collect()


def _is_installed(variant: str) -> bool:
    missing = variants.reason_missing(variant)
    if missing is not None:
        print(f"{variant} is left out: {missing}", flush=True)
    return missing is None


def _is_the_same_as_hand(variant: str, model: str) -> bool:
    return variant == "smcast_bf16" and not model.startswith(_SOFTMAX)
