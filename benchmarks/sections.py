"""What the tables show: for each kind of measurement its columns and its baseline."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.request import plain_name

Figures = Mapping[str, Any]
Value = Callable[[Figures], Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      title: with the unit.
      value: takes it from the figures; None where there is none.
      digits: after the point.
      ratio: show the ratio to the baseline beside it.
      compare: makes the whole text of the figures and those of the baseline; there is
        no text without a baseline then.
    """

    title: str
    value: Value
    digits: int = 0
    ratio: bool = False
    compare: Callable[[Figures, Figures], str] | None = None

    def text(self, figures: Figures, baseline: Figures | None = None) -> str:
        """Returns the value as text, with its ratio to the baseline."""
        if self.compare is not None:
            return "" if baseline is None else self.compare(figures, baseline)
        value = self.value(figures)
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        text = f"{value:.{self.digits}f}"
        ratio = self.ratio_to(figures, baseline)
        return text if ratio is None else f"{text} ({ratio:.2f})"

    def ratio_to(self, figures: Figures, baseline: Figures | None) -> float | None:
        """Returns the ratio of the value to the baseline's, where there is one."""
        if not self.ratio or baseline is None:
            return None
        value, other = self.value(figures), self.value(baseline)
        return None if value is None or not other else value / other


@dataclasses.dataclass(frozen=True)
class Section:
    """One table of the report.

    Attributes:
      command: whose results it shows.
      part: of each cell.
      title: a headline.
      note: how to read it.
      columns: in order.
      baseline: the variant that a variant is compared with.
      timed: figures are measured times: a ratio needs both from one run.
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
        texts = [(c.title, c.text(figures)) for c in self.columns]
        return "  ".join(f"{title} {text}" for title, text in texts if text)

    def header(self) -> list[str]:
        """Returns the titles of the columns."""
        return ["model", "variant", *(column.title for column in self.columns)]

    def rows(self, model: str, variants: Mapping[str, Figures]) -> list[list[str]]:
        """Returns the rows of the variants of a model that have figures."""
        rows = []
        for label, figures in variants.items():
            if "error" not in figures:
                other = self.compared_with(label, variants)
                texts = [column.text(figures, other) for column in self.columns]
                rows.append([model, label, *texts])
        return rows

    def compared_with(
        self, label: str, variants: Mapping[str, Figures]
    ) -> Figures | None:
        """Returns the figures of a variant's baseline, if they can be compared."""
        other = variants.get(self.baseline(plain_name(label)))
        if other is None or "error" in other:
            return None
        if self.timed and other["run"] != variants[label]["run"]:
            return None
        return other

    def ratio(
        self, title: str, label: str, variants: Mapping[str, Figures]
    ) -> float | None:
        """Returns the ratio in one column of a variant to its baseline."""
        column = next(c for c in self.columns if c.title == title)
        figures = variants.get(label)
        if figures is None or "error" in figures:
            return None
        return column.ratio_to(figures, self.compared_with(label, variants))


def paired_ratios(figures: Figures, baseline: Figures) -> list[float]:
    """Returns the ratio of the error to the baseline's, for each seed of both."""
    others = dict(zip(baseline["seeds"], baseline["errors"], strict=True))
    errors = zip(figures["seeds"], figures["errors"], strict=True)
    return [error / others[seed] for seed, error in errors if others.get(seed)]


def _hand(variant: str) -> str:
    return "hand_fp16" if "fp16" in variant else "hand_bf16"


def _hand_bf16(variant: str) -> str:
    return "hand_bf16"


def _float32(variant: str) -> str:
    return "float32"


def _get(*keys: str, scale: float = 1.0) -> Value:
    """Returns what takes a number out of nested figures."""

    def value(figures: Figures) -> Any:
        found: Any = figures
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found * scale if isinstance(found, int | float) else found

    return value


def _half_share(figures: Figures) -> float | None:
    """Returns the share of the flops of matrix products with both factors half."""
    dots = figures.get("dots", {})
    total = sum(dot["flops"] for dot in dots.values())
    half = sum(dots[name]["flops"] for name in ("bf16", "f16") if name in dots)
    return 100 * half / total if total else None


def _median(key: str, scale: float = 1.0) -> Value:
    def value(figures: Figures) -> float | None:
        samples = figures.get(key)
        return statistics.median(samples) * scale if samples else None

    return value


def _quartiles(figures: Figures) -> str:
    low, _, high = statistics.quantiles(figures["step_ms"], n=4)
    return f"{low:.3f} to {high:.3f}"


def _least(key: str) -> Value:
    def value(figures: Figures) -> float | None:
        return min(figures[key]) if figures.get(key) else None

    return value


def _mean_with_error(samples: list[float], digits: int, scale: float = 1.0) -> str:
    mean = statistics.fmean(samples) * scale
    if len(samples) < 2:
        return f"{mean:.{digits}f}"
    error = statistics.stdev(samples) * scale / len(samples) ** 0.5
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _ratio_with_error(figures: Figures, baseline: Figures) -> str:
    return _mean_with_error(paired_ratios(figures, baseline), 3)


def _nothing(figures: Figures) -> None:
    return None


_SECONDS = (
    Column("trace s", _get("trace_s"), 2),
    Column("lower s", _get("lower_s"), 2),
    Column("compile s", _get("compile_s"), 1),
)
_CASTS = (
    Column("converts", _get("converts", "executed")),
    Column("half dots %", _half_share, 1),
)

SECTIONS = (
    Section(
        command="tpu",
        part="compiled",
        title="Compiled for a TPU",
        note="XLA's estimate of the time, bytes read and written (loops counted), "
        "temporary memory, casts executed, and the share of the flops of matrix "
        "products whose factors are both half precision in the compiled program. "
        "In brackets: the ratio to hand_bf16.",
        columns=(
            Column("est. ms", _get("estimated_ms"), 3, ratio=True),
            Column("GB", _get("gb_accessed"), 2, ratio=True),
            Column("temp MB", _get("temp_mb"), 0, ratio=True),
            *_CASTS,
            *_SECONDS,
        ),
        baseline=_hand_bf16,
    ),
    Section(
        command="gpu-aot",
        part="compiled",
        title="Compiled for a GPU",
        note="Without the GPU, and so without its autotuning: temporary memory, "
        "kernels launched, casts executed, bytes read and written by the kernels. "
        "In brackets: the ratio to hand_bf16, of float16 to hand_fp16.",
        columns=(
            Column("temp MB", _get("temp_mb"), 0, ratio=True),
            Column("GB", _get("gb_accessed"), 2, ratio=True),
            Column("kernels", _get("kernels", "executed"), 0, ratio=True),
            *_CASTS,
            *_SECONDS,
        ),
        baseline=_hand,
    ),
    Section(
        command="gpu",
        part="measured",
        title="Measured on a GPU",
        note="Milliseconds of a step: the median over rounds in which all the variants "
        "of a model take turns, each with a burst of steps that ends with the device "
        "idle; then the quartiles. `peak MB` is arguments, results and temporaries by "
        "XLA's buffer assignment; `peak MB (device)` is what the allocator saw, where "
        "the step raised it. In brackets: the ratio to hand_bf16, of float16 to "
        "hand_fp16.",
        columns=(
            Column("ms", _median("step_ms"), 3, ratio=True),
            Column("quartiles", _quartiles),
            Column("temp MB", _get("temp_mb"), 0, ratio=True),
            Column("peak MB", _get("peak_mb"), 0, ratio=True),
            Column("peak MB (device)", _get("device_peak_mb"), 0, ratio=True),
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
            Column("trace s", _median("trace_s"), 3),
            Column("lower s", _median("lower_s"), 3),
            Column("least CPU s", _least("cpu_s"), 3, ratio=True),
            Column("StableHLO ops", _get("ops"), 0, ratio=True),
        ),
        baseline=_float32,
        timed=True,
    ),
    Section(
        command="host",
        part="dispatch",
        title="Dispatch of a step",
        note="Tiny copies with as many leaves; medians in microseconds, the variants "
        "in turn. `call us`: a call of a step with the same arguments and results, but "
        "no work, which is what Python and JAX take; `dispatch us`: until the call of "
        "the step itself returns, its work begun on the same processor; `whole step "
        "us`: until its results are there. `amp_step_bf16` and `amp_fp16` are "
        "`make_train_step` over an `AmpTrainState`, the others bare jitted steps over "
        "a tuple. In brackets: the ratio to the bare step of amp_bf16.",
        columns=(
            Column("call us", _median("call_s", 1e6), 0, ratio=True),
            Column("dispatch us", _median("dispatch_s", 1e6), 0, ratio=True),
            Column("whole step us", _median("step_s", 1e6), 0),
            Column("leaves in", _get("leaves_in")),
            Column("leaves out", _get("leaves_out")),
        ),
        baseline=lambda variant: "amp_bf16",
        timed=True,
    ),
    Section(
        command="host",
        part="retraces",
        title="Retraces of `make_train_step`",
        note="A float16 run in which the scale grows, a step is skipped, and the state "
        "is saved and restored by Orbax midway. One trace of the loss is the least.",
        columns=(
            Column("steps", _get("steps")),
            Column("traces", _get("traces")),
            Column("growths", _get("growths")),
            Column("skips", _get("skips")),
            Column("restored at", _get("restored_at")),
        ),
        baseline=_hand,
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
            Column("error %", lambda f: _mean_with_error(f["errors"], 3, 100)),
            Column("ratio", _nothing, compare=_ratio_with_error),
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
        columns=(
            Column("est. ms", _get("estimated_ms"), 3, ratio=True),
            Column("GB", _get("gb_accessed"), 2, ratio=True),
            Column("temp MB", _get("temp_mb"), 0, ratio=True),
            *_CASTS,
            *_SECONDS,
        ),
        baseline=_hand_bf16,
    ),
)


def failures(
    parts: Iterable[tuple[str, Mapping[str, Figures]]],
) -> dict[str, list[str]]:
    """Returns the cells without figures, as "model variant", by the reason for it."""
    found: dict[str, list[str]] = {}
    for model, variants in parts:
        for label, figures in variants.items():
            if "error" in figures:
                found.setdefault(figures["error"], []).append(f"{model} {label}")
    return found


def section(command: str, part: str) -> Section:
    """Returns the section of a part of a command's cells."""
    return next(s for s in SECTIONS if (s.command, s.part) == (command, part))
