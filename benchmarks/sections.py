"""What the tables show: for each kind of measurement its columns and its baseline."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Figures = Mapping[str, Any]
Cells = Mapping[str, Figures]  # by variant
Parts = Iterable[tuple[str, Cells]]  # by model
Value = Callable[[Figures], Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table; with `ratio`, the ratio to the baseline is shown, too.

    `value` takes it from the figures, and is None where there is none.
    """

    title: str
    value: Value
    digits: int = 0
    ratio: bool = False

    def text(self, figures: Figures, baseline: Figures | None = None) -> str:
        """Returns the value as text, with its ratio to the baseline."""
        value = self.value(figures)
        if value is None or isinstance(value, str):
            return value or ""
        ratio = self.ratio_to(figures, baseline)
        return f"{value:.{self.digits}f}" + ("" if ratio is None else f" ({ratio:.2f})")

    def ratio_to(self, figures: Figures, baseline: Figures | None) -> float | None:
        """Returns the ratio of the value to the baseline's, where there is one."""
        if not self.ratio or baseline is None:
            return None
        value, other = self.value(figures), self.value(baseline)
        return None if value is None or not other else value / other


class PairedErrors(Column):
    """The ratio of the error to the baseline's, paired by seed, with its error."""

    def text(self, figures: Figures, baseline: Figures | None = None) -> str:
        if baseline is None:
            return ""
        return _mean_with_error(_paired_ratios(figures, baseline), 3)

    def ratio_to(self, figures: Figures, baseline: Figures | None) -> float | None:
        if baseline is None:
            return None
        return statistics.fmean(_paired_ratios(figures, baseline))


@dataclasses.dataclass(frozen=True)
class Section:
    """One table of the report, of a part of the cells of a command.

    `baseline` names the variant that a variant is compared with. Figures that are
    `timed` are measured times, of which a ratio needs both from one run.
    """

    command: str
    part: str
    title: str
    note: str
    columns: tuple[Column, ...]
    baseline: Callable[[str], str]
    timed: bool = False

    def line(self, figures: Figures) -> str:
        """Returns the figures of a cell in one line, or why there are none."""
        if "error" in figures:
            return figures["error"]
        texts = [(column.title, column.text(figures)) for column in self.columns]
        return "  ".join(f"{title} {text}" for title, text in texts if text)

    def header(self) -> list[str]:
        """Returns the titles of the columns."""
        return ["model", "variant", *(column.title for column in self.columns)]

    def rows(self, parts: Parts) -> list[list[str]]:
        """Returns the rows of the cells that have figures."""
        rows = []
        for model, cells in parts:
            for label, figures in cells.items():
                if "error" not in figures:
                    other = self._compared_with(label, cells)
                    texts = [column.text(figures, other) for column in self.columns]
                    rows.append([model, label, *texts])
        return rows

    def _compared_with(self, label: str, cells: Cells) -> Figures | None:
        """Returns the figures of a variant's baseline, if they can be compared."""
        other = cells.get(self.baseline(label))
        if other is None or "error" in other:
            return None
        if self.timed and other["run"] != cells[label]["run"]:
            return None
        return other

    def ratio(self, title: str, label: str, cells: Cells) -> float | None:
        """Returns the ratio in one column of a variant to its baseline."""
        column = next(c for c in self.columns if c.title == title)
        figures = cells.get(label)
        if figures is None or "error" in figures:
            return None
        return column.ratio_to(figures, self._compared_with(label, cells))


def _hand(label: str) -> str:
    return "hand_fp16" if "fp16" in label else "hand_bf16"


def _float32(label: str) -> str:
    return "float32"


def _get(*keys: str) -> Value:
    """Returns what takes a number out of nested figures."""

    def value(figures: Figures) -> Any:
        found: Any = figures
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    return value


def _of(function: Callable[[list[float]], Any], key: str) -> Value:
    """Returns what makes one value of the samples under a key."""
    return lambda figures: function(figures[key]) if figures.get(key) else None


def _half_share(figures: Figures) -> float | None:
    """Returns the share of the flops of matrix products with both factors half."""
    dots = figures.get("dots", {})
    total = sum(dot["flops"] for dot in dots.values())
    half = sum(dots[name]["flops"] for name in ("bf16", "f16") if name in dots)
    return 100 * half / total if total else None


def _quartiles(samples: list[float]) -> str:
    low, _, high = statistics.quantiles(samples, n=4)
    return f"{low:.3f} to {high:.3f}"


def _mean_with_error(samples: list[float], digits: int) -> str:
    mean = f"{statistics.fmean(samples):.{digits}f}"
    if len(samples) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(samples) / len(samples) ** 0.5:.{digits}f}"


def _paired_ratios(figures: Figures, baseline: Figures) -> list[float]:
    others = dict(zip(baseline["seeds"], baseline["errors"], strict=True))
    errors = zip(figures["seeds"], figures["errors"], strict=True)
    return [error / others[seed] for seed, error in errors if others.get(seed)]


_CASTS = (
    Column("converts", _get("converts", "executed")),
    Column("half dots %", _half_share, 1),
)
_SECONDS = (
    Column("trace s", _get("trace_s"), 2),
    Column("lower s", _get("lower_s"), 2),
    Column("compile s", _get("compile_s"), 1),
)
_GB = Column("GB", _get("gb_accessed"), 2, ratio=True)
_TEMP = Column("temp MB", _get("temp_mb"), 0, ratio=True)
_PEAK = Column("peak MB", _get("peak_mb"), 0, ratio=True)
_TPU = (
    Column("est. ms", _get("estimated_ms"), 3, ratio=True),
    _GB,
    _TEMP,
    _PEAK,
    *_CASTS,
    *_SECONDS,
)
_KERNELS = Column("kernels", _get("kernels", "executed"), 0, ratio=True)

SECTIONS = (
    Section(
        command="tpu",
        part="compiled",
        title="Compiled for a TPU",
        note="XLA's estimate of the time, bytes read and written (loops counted), "
        "temporary memory, casts executed, and the share of the flops of matrix "
        "products whose factors are both half precision in the compiled program. "
        "`temp MB` may exceed what a program needs; `peak MB`, arguments included, is "
        "the most that lives at one time. In brackets: the ratio to hand_bf16.",
        columns=_TPU,
        baseline=_hand,
    ),
    Section(
        command="gpu-aot",
        part="compiled",
        title="Compiled for a GPU",
        note="Without the GPU, and so without its autotuning: temporary memory, "
        "kernels launched, casts executed, bytes read and written by the kernels. "
        "In brackets: the ratio to hand_bf16, of float16 to hand_fp16.",
        columns=(_TEMP, _GB, _KERNELS, *_CASTS, *_SECONDS),
        baseline=_hand,
    ),
    Section(
        command="gpu",
        part="measured",
        title="Measured on a GPU",
        note="Milliseconds of a step: the median over rounds in which all the variants "
        "of a model take turns, each with a burst of steps that ends with the device "
        "idle; then the quartiles. `peak MB` is arguments, results and temporaries by "
        "XLA's buffer assignment. In brackets: the ratio to hand_bf16, of float16 to "
        "hand_fp16.",
        columns=(
            Column("ms", _of(statistics.median, "step_ms"), 3, ratio=True),
            Column("quartiles", _of(_quartiles, "step_ms")),
            _TEMP,
            _PEAK,
            Column("kernels", _get("kernels", "executed")),
            *_CASTS,
            Column("compile s", _get("compile_s"), 1),
        ),
        baseline=_hand,
        timed=True,
    ),
    Section(
        command="host",
        part="trace",
        title="Tracing and lowering",
        note="Seconds from a cold cache of traces, the variants in turn: medians, and "
        "the least processor time of both together with its ratio to float32, which "
        "other work on the machine disturbs least. The step is the whole one, with "
        "adamw.",
        columns=(
            Column("trace s", _of(statistics.median, "trace_s"), 3),
            Column("lower s", _of(statistics.median, "lower_s"), 3),
            Column("least CPU s", _of(min, "cpu_s"), 3, ratio=True),
            Column("StableHLO ops", _get("ops"), 0, ratio=True),
        ),
        baseline=_float32,
        timed=True,
    ),
    Section(
        command="error",
        part="gradients",
        title="Error of the gradients",
        note="Relative L2 error over all parameters against the float32 gradients, "
        "same data and weights, tiny sizes on the CPU: mean and standard error over "
        "seeds, and the ratio to hand_bf16 (of float16 to hand_fp16), paired by seed. "
        "XLA may keep more digits than a program asks for; it is told not to "
        "(`--xla_allow_excess_precision=false`), so that every rounding in a program "
        "happens. The CPU multiplies half-precision matrices in float32 and rounds the "
        "product, as accelerators do.",
        columns=(
            Column(
                "error %", lambda f: _mean_with_error([100 * e for e in f["errors"]], 3)
            ),
            PairedErrors("ratio", _get("errors"), ratio=True),
            Column("seeds", lambda f: len(f["errors"])),
        ),
        baseline=_hand,
    ),
    Section(
        command="mesh",
        part="compiled",
        title="FSDP on 256 chips",
        note="The scanned GPT (d 1024, 8 layers, batch 256), every parameter sharded "
        "over its largest axis that divides, the batch and the residual stream over "
        "their examples. Per chip; weights may travel as all-reduces too. In brackets: "
        "the ratio to hand_bf16.",
        columns=_TPU,
        baseline=_hand,
    ),
)


def failures(parts: Parts) -> dict[str, list[str]]:
    """Returns the cells without figures, as "model variant", by the reason for it."""
    found: dict[str, list[str]] = {}
    for model, cells in parts:
        for label, figures in cells.items():
            if "error" in figures:
                found.setdefault(figures["error"], []).append(f"{model} {label}")
    return found


def section(command: str, part: str) -> Section:
    """Returns the section of a part of a command's cells."""
    return next(s for s in SECTIONS if (s.command, s.part) == (command, part))
