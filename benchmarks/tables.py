"""The commands whose figures are in the report: what they measure and what it shows."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import models

Figures = Mapping[str, Any]
Cells = Mapping[str, Figures]  # by variant

# By the key of a figure: its title, its digits, and whether its ratio is shown
_TITLES = {
    "estimated_time": ("est. time", 3, True),
    "roofline_ms": ("roofline ms", 3, True),
    "step_ms": ("ms", 3, True),
    "forward_ms": ("forward ms", 3, True),
    "step_ms:least": ("step, least ms", 1, True),
    "step_ms:median": ("median", 1, True),
    "forward_ms:least": ("forward, least ms", 1, True),
    "forward_ms:median": ("median", 1, True),
    "grad_error": ("error %", 2, True),
    "cpu_s": ("CPU s", 3, True),
    "errors": ("error %", 3, True),
    "gb_accessed": ("GB", 2, True),
    "temp_mb": ("temp MB", 0, True),
    "peak_mb": ("peak MB", 0, True),
    "argument_mb": ("state MB", 0, True),
    "kernels": ("kernels", 0, True),
    "converts": ("converts", 0, False),
    "fp8_matmuls": ("fp8", 0, False),
}
_SUMMARIES: dict[str, Callable[[Any], float]] = {
    "least": min,
    "median": statistics.median,
}
_BFLOAT16 = """
    float32 hand_bf16 smcast_bf16 amp_bf16 amp_step_bf16 jmp_bf16 mpx_bf16 jaxamp_bf16
"""
_FLOAT16 = " hand_fp16 amp_fp16"


@dataclasses.dataclass(frozen=True)
class Section:
    """A command and its table in the report.

    `variants` and `models` are measured if none are asked for. `baselines` are the
    variants that a variant is compared with. Figures that are `timed` are measured
    times, of which a ratio needs both from one run.
    """

    title: str
    keys: str
    variants: str = _BFLOAT16
    models: tuple[str, ...] = models.COMPARED
    baselines: tuple[str, ...] = ("hand_bf16", "smcast_bf16")
    timed: bool = False

    @property
    def titles(self) -> list[str]:
        """The heads of the columns."""
        return [_TITLES[key][0] for key in self.keys.split()]

    def line(self, figures: Figures) -> str:
        """Returns the figures of a cell in one line, or why there are none."""
        texts = [(_TITLES[key][0], _text(key, figures)) for key in self.keys.split()]
        told = "  ".join(f"{title} {text}" for title, text in texts if text)
        return figures.get("error", told)

    def row(self, label: str, cells: Cells) -> list[str]:
        """Returns the texts of a variant that has figures."""
        texts = []
        for key in self.keys.split():
            ratios = ", ".join(f"{x:.2f}" for x in self.ratios(key, label, cells))
            text = _text(key, cells[label])
            texts.append(f"{text} ({ratios})" if ratios else text)
        return texts

    def ratios(self, key: str, label: str, cells: Cells) -> list[float]:
        """Returns the ratios of a figure of a variant to those of its baselines."""
        own = cells.get(label, {})
        names = ("hand_fp16",) if "fp16" in label else self.baselines
        found = [cells[name] for name in names if name in cells]
        if self.timed:
            found = [each for each in found if each["run"] == own.get("run")]
        value = _value(key, own)
        if not (_TITLES[key][2] and value):
            return []
        others = [_value(key, each) for each in found]
        return [_ratio(value, other) for other in others if other]


def _value(key: str, figures: Figures) -> Any:
    """Returns a figure: "step_ms:least" is the least of the samples of "step_ms"."""
    name, _, summary = key.partition(":")
    value = figures.get(name)
    return _SUMMARIES[summary](value) if summary and value else value


def _ratio(figure: Any, other: Any) -> float:
    """Returns a ratio; of samples, which are in pairs, the geometric mean."""
    if not isinstance(figure, list):
        return figure / other
    pairs = [(a, b) for a, b in zip(figure, other, strict=False) if b]
    return statistics.geometric_mean(a / b for a, b in pairs)


def _text(key: str, figures: Figures) -> str:
    """Returns a figure as text; of samples, the mean and its standard error."""
    figure, digits = _value(key, figures), _TITLES[key][1]
    if isinstance(figure, list):
        error = statistics.stdev(figure) / len(figure) ** 0.5 if figure[1:] else 0.0
        return f"{statistics.fmean(figure):.{digits}f} ± {error:.{digits}f}"
    return f"{figure:.{digits}f}" if figure else ""


_TPU = "estimated_time gb_accessed temp_mb peak_mb argument_mb converts"

SECTIONS = {
    "tpu": Section("Compiled for a TPU", _TPU),
    "gpu-aot": Section(
        "Compiled for a GPU, without its autotuning",
        "temp_mb peak_mb gb_accessed kernels converts",
        _BFLOAT16 + _FLOAT16,
    ),
    "gpu": Section(
        "Measured on a GPU",
        "step_ms forward_ms temp_mb peak_mb kernels converts",
        _BFLOAT16 + _FLOAT16,
        timed=True,
    ),
    "cpu": Section(
        "Measured on a CPU",
        "step_ms:least step_ms:median forward_ms:least forward_ms:median "
        "temp_mb grad_error",
        "float32 hand_bf16 smcast_bf16 amp_bf16 amp_step_bf16",
        models=tuple(models.ON_CPU),
        baselines=("float32",),
        timed=True,
    ),
    "host": Section(
        "Tracing and lowering", "cpu_s", baselines=("float32",), timed=True
    ),
    "error": Section(
        "Error of the gradients",
        "errors",
        "hand_bf16 smcast_bf16 amp_bf16 amp_fp8_emulated" + _FLOAT16,
    ),
    "mesh": Section("FSDP on 256 chips", _TPU, models=("gpt_fsdp",)),
    "fp8": Section(
        "Matmuls in fp8",
        "estimated_time roofline_ms gb_accessed temp_mb peak_mb fp8_matmuls",
        "amp_bf16 amp_fp8",
        models=("llama_4k",),
        baselines=("amp_bf16",),
    ),
}
