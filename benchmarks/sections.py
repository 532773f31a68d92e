"""What the tables show: for each command its columns and its baseline."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
Cells = Mapping[str, Figures]  # by variant


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table; with `ratio`, the ratio to the baseline is shown, too.

    Its value is the figure under `key`, or what `of` makes of the samples there.
    """

    title: str
    key: str
    digits: int = 0
    ratio: bool = False
    of: Callable[[Any], Any] = lambda figure: figure

    def value(self, figures: Figures) -> Any:
        """Returns the value of a cell, or None where there is none."""
        figure = figures.get(self.key)
        return None if figure is None else self.of(figure)

    def text(self, figures: Figures, baselines: Sequence[Figures] = ()) -> str:
        """Returns the value as text, with its ratios to the baselines."""
        value = self.value(figures)
        if value is None or isinstance(value, str):
            return value or ""
        ratios = [self.ratio_to(figures, other) for other in baselines]
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
        return self._number(value, figures) + (f" ({told})" if told else "")

    def ratio_to(self, figures: Figures, baseline: Figures) -> float | None:
        """Returns the ratio of the value to a baseline's, where there is one."""
        value, other = self.value(figures), self.value(baseline)
        return value / other if self.ratio and value is not None and other else None

    def _number(self, value: Any, figures: Figures) -> str:
        return f"{value:.{self.digits}f}"


class EstimatedTime(Column):
    """XLA's estimate: in milliseconds if the clock is known, else in 1e6 cycles."""

    def value(self, figures: Figures) -> Any:
        return figures.get("estimated_ms") or figures.get("estimated_mcycles")

    def _number(self, value: Any, figures: Figures) -> str:
        unit = "ms" if figures.get("estimated_ms") else "Mcycles"
        unknown = figures.get("unknown_cycles")
        return f"{value:.3f} {unit}" + (f" and {unknown} unknown" if unknown else "")


class PairedRatio(Column):
    """The mean ratio of samples to those of a baseline, paired by seed."""

    def text(self, figures: Figures, baselines: Sequence[Figures] = ()) -> str:
        ratios = [self._ratios(figures, baseline) for baseline in baselines]
        return ", ".join(_mean_with_error(found) for found in ratios if found)

    def ratio_to(self, figures: Figures, baseline: Figures) -> float | None:
        ratios = self._ratios(figures, baseline)
        return statistics.fmean(ratios) if ratios else None

    def _ratios(self, figures: Figures, baseline: Figures) -> list[float]:
        pairs = zip(figures[self.key], baseline[self.key], strict=False)
        return [sample / other for sample, other in pairs if other]


def _hand(label: str) -> tuple[str, ...]:
    return ("hand_fp16",) if "fp16" in label else ("hand_bf16", "smcast_bf16")


@dataclasses.dataclass(frozen=True)
class Section:
    """The table of a command in the report.

    `baselines` names the variants that a variant is compared with. Figures that are
    `timed` are measured times, of which a ratio needs both from one run.
    """

    title: str
    note: str
    columns: tuple[Column, ...]
    baselines: Callable[[str], tuple[str, ...]] = _hand
    timed: bool = False

    def line(self, figures: Figures) -> str:
        """Returns the figures of a cell in one line, or why there are none."""
        texts = [(column.title, column.text(figures)) for column in self.columns]
        told = "  ".join(f"{title} {text}" for title, text in texts if text)
        return figures.get("error", told)

    def row(self, label: str, cells: Cells) -> list[str]:
        """Returns the texts of a variant that has figures."""
        others = self._compared_with(label, cells)
        return [column.text(cells[label], others) for column in self.columns]

    def ratios(self, title: str, label: str, cells: Cells) -> list[float]:
        """Returns the ratios in one column of a variant to its baselines."""
        if not _has_figures(label, cells):
            return []
        column = next(column for column in self.columns if column.title == title)
        others = self._compared_with(label, cells)
        found = [column.ratio_to(cells[label], other) for other in others]
        return [ratio for ratio in found if ratio is not None]

    def _compared_with(self, label: str, cells: Cells) -> list[Figures]:
        """Returns the figures of a variant's baselines that can be compared."""
        names = [name for name in self.baselines(label) if _has_figures(name, cells)]
        run = cells[label]["run"]
        return [cells[n] for n in names if cells[n]["run"] == run or not self.timed]


def _has_figures(label: str, cells: Cells) -> bool:
    return label in cells and "error" not in cells[label]


def _quartiles(samples: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(samples, n=4)
    return f"{low:.3f} to {high:.3f}"


def _mean_with_error(samples: Sequence[float]) -> str:
    mean = f"{statistics.fmean(samples):.3f}"
    if len(samples) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(samples) / len(samples) ** 0.5:.3f}"


def _percent(samples: Sequence[float]) -> str:
    return _mean_with_error([100 * sample for sample in samples])


_GB = Column("GB", "gb_accessed", 2, ratio=True)
_STATE = Column("state MB", "argument_mb", ratio=True)
_TEMP = Column("temp MB", "temp_mb", ratio=True)
_PEAK = Column("peak MB", "peak_mb", ratio=True)
_CONVERTS = Column("converts", "converts")
_KERNELS = Column("kernels", "kernels", ratio=True)
_TPU = (
    EstimatedTime("est. time", "", ratio=True),
    _GB,
    _TEMP,
    _PEAK,
    _STATE,
    _CONVERTS,
)

SECTIONS = {
    "tpu": Section(
        title="Compiled for a TPU",
        note="XLA's estimate of the time (in cycles where the clock is not known), "
        "bytes read and written (loops counted), temporary memory, and casts executed. "
        "`temp MB` may exceed what a program needs; `peak MB`, arguments included, is "
        'the most that lives at one time. "N unknown": XLA does not know the cycles '
        "of N operations on a TPU7x's sparse core; the sum is without them.",
        columns=_TPU,
    ),
    "gpu-aot": Section(
        title="Compiled for a GPU",
        note="Without the GPU, and so without its autotuning: temporary memory, "
        "kernels launched, casts executed, bytes read and written by the kernels.",
        columns=(_TEMP, _PEAK, _GB, _KERNELS, _CONVERTS),
    ),
    "gpu": Section(
        title="Measured on a GPU",
        note="Milliseconds of a step: the median over rounds in which all the variants "
        "of a model take turns, each with a burst of steps that ends with the device "
        "idle; then the quartiles. `peak MB` is arguments, results and temporaries by "
        "XLA's buffer assignment.",
        columns=(
            Column("ms", "step_ms", 3, ratio=True, of=statistics.median),
            Column("quartiles", "step_ms", of=_quartiles),
            _TEMP,
            _PEAK,
            _KERNELS,
            _CONVERTS,
        ),
        timed=True,
    ),
    "host": Section(
        title="Tracing and lowering",
        note="Seconds from a cold cache of traces, the variants in turn: medians, and "
        "the least processor time of both together, which other work on the machine "
        "disturbs least. The ratios are to float32.",
        columns=(
            Column("trace s", "trace_s", 3, of=statistics.median),
            Column("lower s", "lower_s", 3, of=statistics.median),
            Column("least CPU s", "cpu_s", 3, ratio=True, of=min),
            Column("StableHLO ops", "ops", ratio=True),
        ),
        baselines=lambda label: ("float32",),
        timed=True,
    ),
    "error": Section(
        title="Error of the gradients",
        note="Relative L2 error over all parameters against the float32 gradients, "
        "same data and weights, tiny sizes on the CPU: mean and standard error over "
        "seeds; the ratio is paired by seed. XLA may not keep more digits than a "
        "program asks for (`--xla_allow_excess_precision=false`), and matmuls of "
        "half-precision arrays add in float32 and are rounded once.",
        columns=(
            Column("error %", "errors", of=_percent),
            PairedRatio("ratio", "errors"),
            Column("seeds", "errors", of=len),
        ),
    ),
    "mesh": Section(
        title="FSDP on 256 chips",
        note="The scanned GPT (d 1024, 8 layers, batch 256), every parameter sharded "
        "over its largest axis that divides, the batch and the residual stream over "
        "their examples. Per chip; weights may travel as all-reduces too.",
        columns=_TPU,
    ),
    "fp8": Section(
        title="Matmuls in fp8",
        note="`amp_fp8`: matmuls by weights in fp8 where it pays; `amp_fp8_all`: also "
        "where it does not; `flax_fp8`: Flax's `Fp8DotGeneral` in the Dense layers of "
        "the hand-set model. `roofline` stands for the time on an H200: the sum over "
        "kernels of the time for their bytes (4.8 TB/s) or for their operations (1979, "
        "989 or 494 TFLOP/s by the dtype), whichever is longer. `fp8` and `others` "
        "count the matmuls of the traced step, loops counted, `compiled fp8` those in "
        "the program. `launches` are kernels without those that make one number. The "
        "ratios are to amp_bf16.",
        columns=(
            _TPU[0],
            Column("roofline ms", "roofline_ms", 3, ratio=True),
            _GB,
            _TEMP,
            _PEAK,
            Column("launches", "launches", ratio=True),
            Column("fp8", "fp8_products"),
            Column("others", "other_products"),
            Column("compiled fp8", "fp8_dots"),
        ),
        baselines=lambda label: ("amp_bf16",),
    ),
}
