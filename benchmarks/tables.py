"""What the tables show: for each command its figures and its baseline."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Any]
Cells = Mapping[str, Figures]  # by variant

# By the key of a figure: its title, its digits, and whether its ratio is shown
_TITLES = {
    "estimated_time": ("est. time", 3, True),
    "unknown_cycles": ("unknown", 0, False),
    "roofline_ms": ("roofline ms", 3, True),
    "step_ms": ("ms", 3, True),
    "cpu_s": ("CPU s", 3, True),
    "errors": ("error %", 3, True),
    "gb_accessed": ("GB", 2, True),
    "temp_mb": ("temp MB", 0, True),
    "peak_mb": ("peak MB", 0, True),
    "argument_mb": ("state MB", 0, True),
    "kernels": ("kernels", 0, True),
    "converts": ("converts", 0, False),
    "fp8_matmuls": ("fp8", 0, False),
    "collectives": ("collectives", 0, False),
}


@dataclasses.dataclass(frozen=True)
class Section:
    """The table of a command in the report.

    `baselines` are the variants that a variant is compared with. Figures that are
    `timed` are measured times, of which a ratio needs both from one run.
    """

    title: str
    note: str
    keys: str
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
        if not (_TITLES[key][2] and own.get(key)):
            return []
        return [_ratio(own[key], each[key]) for each in found if each.get(key)]


def _ratio(figure: Any, other: Any) -> float:
    """Returns a ratio; of samples, which are in pairs, the geometric mean."""
    if not isinstance(figure, list):
        return figure / other
    pairs = [(a, b) for a, b in zip(figure, other, strict=False) if b]
    return statistics.geometric_mean(a / b for a, b in pairs)


def _text(key: str, figures: Figures) -> str:
    """Returns a figure as text; of samples, the mean and its standard error."""
    figure, digits = figures.get(key), _TITLES[key][1]
    if isinstance(figure, list):
        error = statistics.stdev(figure) / len(figure) ** 0.5 if figure[1:] else 0.0
        return f"{statistics.fmean(figure):.{digits}f} ± {error:.{digits}f}"
    if isinstance(figure, str):
        return figure
    return f"{figure:.{digits}f}" if figure else ""


_TPU = "estimated_time unknown_cycles gb_accessed temp_mb peak_mb argument_mb converts"

SECTIONS = {
    "tpu": Section(
        title="Compiled for a TPU",
        note="XLA's estimate of the time (in ms on a v5e; elsewhere in 1e6 cycles, for "
        "the clock is not known), bytes read and written (loops counted), temporary "
        "memory, and casts executed. `temp MB` may exceed what a program needs; "
        "`peak MB`, arguments included, is the most that lives at one time. `unknown` "
        "operations, on a TPU7x's sparse core, are not in the time: XLA does not know "
        "their cycles.",
        keys=_TPU,
    ),
    "gpu-aot": Section(
        title="Compiled for a GPU",
        note="Without the GPU, and so without its autotuning: temporary memory, "
        "kernels launched, casts executed, bytes read and written by the kernels.",
        keys="temp_mb peak_mb gb_accessed kernels converts",
    ),
    "gpu": Section(
        title="Measured on a GPU",
        note="Milliseconds of a step: the mean and its standard error over rounds in "
        "which all the variants of a model take turns, each with a burst of steps that "
        "ends with the device idle; the ratio is a geometric mean over the rounds. "
        "`peak MB` is arguments, results and temporaries by XLA's buffer assignment.",
        keys="step_ms temp_mb peak_mb kernels converts",
        timed=True,
    ),
    "host": Section(
        title="Tracing and lowering",
        note="Seconds of processor time from a cold cache of traces: the least of "
        "three turns, which other work disturbs least. The ratios are to "
        "float32.",
        keys="cpu_s",
        baselines=("float32",),
        timed=True,
    ),
    "error": Section(
        title="Error of the gradients",
        note="Relative L2 error in percent over all parameters against the float32 "
        "gradients, same data and weights, tiny sizes on the CPU: the mean and its "
        "standard error over eight seeds; the ratio is a geometric mean over them. XLA "
        "may not keep more digits than a program asks for "
        "(`--xla_allow_excess_precision=false`), and matmuls of half-precision arrays "
        "add in float32 and are rounded once.",
        keys="errors",
    ),
    "mesh": Section(
        title="FSDP on 256 chips",
        note="The scanned GPT (d 1024, 8 layers, batch 256), every parameter sharded "
        "over its largest axis that divides, the batch and the residual stream over "
        "their examples. Per chip. The collectives are in MB sent or received; weights "
        "may travel as all-reduces too.",
        keys=f"{_TPU} collectives",
    ),
    "fp8": Section(
        title="Matmuls in fp8",
        note="`amp_fp8`: matmuls by weights in fp8 where it pays. `roofline` stands "
        "for the time on an H200: the sum over kernels of the time for their bytes "
        "(4.8 TB/s) or for their operations (1979, 989 or 494 TFLOP/s by the dtype), "
        "whichever is longer. `fp8` counts the matmuls in fp8 of the compiled program. "
        "The ratios are to amp_bf16.",
        keys="estimated_time roofline_ms gb_accessed temp_mb peak_mb fp8_matmuls",
        baselines=("amp_bf16",),
    ),
}
