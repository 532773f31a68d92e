"""`compare_training`: whether training in a precision ends elsewhere than float32."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from flax_amp._checks import check_count, check_type
from flax_amp.debug._gap import POWER, Gap, judge
from flax_amp.debug._report import Block, Report, plural, table
from flax_amp.debug._training_runs import (
    Made,
    Plan,
    Reference,
    Run,
    Store,
    Trainer,
    check_equal,
    check_made,
    name_of,
)
from flax_amp.policy import Precision

# A word, or options of the step with `precision`, `make` and `loss_fn`.
Variant = Precision | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainedPrecision:
    """The runs of a precision; a tuple has an entry for each seed."""

    name: str  #: the name or the word that the user gave
    #: the numbers to compare; infinite if a run skips all of its last steps
    ends: tuple[float, ...]
    #: for each twentieth of a run (or step, if fewer) the mean loss, or the evaluation
    curves: tuple[tuple[float, ...], ...]
    skipped: tuple[int, ...]  #: steps that were not finite, and changed nothing
    scales: tuple[float, ...]  #: the loss scale at the end
    step_ms: float | None  #: of a step with its batch, the median over the parts
    temp_mb: float | None  #: temporary memory on each device, if the backend tells
    gap: Gap | None = None  #: to the reference; `None` for the reference itself

    @property
    def end(self) -> float:
        """The mean of the ends."""
        return statistics.fmean(self.ends)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainingComparison(Report):
    """Where runs end in each precision. Made by `compare_training`."""

    steps: int  #: of each run
    seeds: int  #: how many runs there are of each precision
    measure: str  #: the measure of an end: `loss`, or the name of `evaluate`
    device: str  #: the kind of the first device
    steps_of_parts: tuple[int, ...]  #: the step at which each part of a curve ends
    reference: TrainedPrecision  #: the runs that the precisions are compared with
    precisions: tuple[TrainedPrecision, ...]  #: in the order that was asked for

    @property
    def outside(self) -> tuple[TrainedPrecision, ...]:
        """The precisions that end elsewhere, and worse."""
        return tuple(x for x in self.precisions if x.gap and not x.gap.is_inside)

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        runs = f"{plural(self.steps, 'step')}, {plural(self.seeds, 'seed')}"
        yield f"{self.name}: where training ends, {runs}, on {self.device}"
        yield ""
        headers = ["", self.measure, "gap", "limit", "", "step, ms", "temporary, MB"]
        trained = self.reference, *self.precisions
        yield table(headers, map(self._cells, trained))
        for precision in self.precisions:
            yield Text(f"\n{' '.join(self._sentences(precision))}")

    def _cells(self, trained: TrainedPrecision) -> list[str]:
        first = self.reference
        gap = trained.gap
        of_gap = ["", "", ""]
        if gap is not None:
            of_gap = [f"{gap.mean:+.2g}", f"{gap.limit:.2g}", _verdict(gap)]
        return [
            trained.name,
            f"{trained.end:.4g}",
            *of_gap,
            _ratio(trained.step_ms, first.step_ms),
            _ratio(trained.temp_mb, first.temp_mb),
        ]

    def _sentences(self, trained: TrainedPrecision) -> Iterator[str]:
        gap = trained.gap
        assert gap is not None
        where = f"{trained.name} is {_verdict(gap)}"
        if not math.isfinite(gap.mean):
            yield f"{where}: a run ends with a {self.measure} that is not finite,"
            yield "or with skipped steps alone."
        else:
            side = "at most" if gap.is_inside else "above"
            yield f"{where}: its mean gap of {gap.mean:+.2g} is {side} the limit."
            yield (
                f"A true gap of {gap.detectable:.2g} would be called outside in "
                f"{100 * POWER:.0f} % of such comparisons, a smaller one less often."
            )
        if any(trained.skipped):
            yield f"Skipped steps: {_each(trained.skipped)}."
        if any(scale != 1 for scale in trained.scales):
            yield f"Loss scale at the end: {_each(trained.scales)}."

    def plot(self, out: str | os.PathLike[str]) -> Path:
        """Draws the curves, and the gap of each seed beside the limit.

        Args:
          out: the file, whose ending is the format, such as `.png` or `.svg`.

        Returns:
          The path of the picture.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot needs matplotlib. In a clone of flax_amp: pip install '.[plot]'"
            ) from error
        # The exact sizes do not matter: the picture has to be readable.
        figure = Figure(figsize=(10, 4), layout="constrained")
        curves, gaps = figure.subplots(1, 2, width_ratios=[3, 2])
        self._draw_curves(curves)
        self._draw_gaps(gaps)
        path = Path(out)
        figure.savefig(path, dpi=150)
        return path

    def _draw_curves(self, axes: Any) -> None:
        for index, trained in enumerate((self.reference, *self.precisions)):
            # The lines of the reference are broad, because the lines of a precision
            # that is inside cover them.
            color = f"C{index - 1}"
            width = 1.2
            if trained is self.reference:
                color = "#afb8c1"
                width = 4.0
            for seed, curve in enumerate(trained.curves):
                label = trained.name if seed == 0 else None
                options: Any = dict(color=color, lw=width, alpha=0.8, label=label)
                axes.plot(self.steps_of_parts, curve, **options)
        values = [y for curve in self.reference.curves for y in curve]
        # On a linear axis, values below a twentieth of the largest value would lie in
        # the lowest 5 % of the picture, and look alike.
        if min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
        axes.set_title(f"{self.measure}, a line for each seed", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)

    def _draw_gaps(self, axes: Any) -> None:
        reference = self.reference.name
        names = [x.name for x in self.precisions]
        for row, trained in enumerate(self.precisions):
            gap = trained.gap
            assert gap is not None
            finite = [x for x in gap.gaps if math.isfinite(x)]
            axes.plot(
                finite, [row] * len(finite), "o", ms=5, alpha=0.6, color=f"C{row}"
            )
            limit: Any = dict(color="#c8102e", lw=2)
            axes.plot([gap.limit] * 2, [row - 0.3, row + 0.3], **limit)
            if math.isfinite(gap.mean):
                axes.plot([gap.mean] * 2, [row - 0.2, row + 0.2], color=f"C{row}", lw=2)
        axes.axvline(0, color="#57606a", lw=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        title = f"gap to {reference}: seeds, mean, and limit (red)"
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)


def _verdict(gap: Gap) -> str:
    return "inside" if gap.is_inside else "outside"


def _each(values: Sequence[float]) -> str:
    """Returns a single number if the numbers of all seeds are equal, else all."""
    if len(set(values)) == 1:
        values = values[:1]
    return ", ".join(f"{x:.8g}" for x in values)


def _ratio(value: float | None, base: float | None) -> str:
    """Returns a figure with its ratio to the figure of the reference."""
    if value is None:
        return "-"
    if not base:
        return f"{value:.3g}"
    return f"{value:.3g} x{value / base:.2f}"


def compare_training(
    make: Callable[[int], Made],
    loss_fn: Callable[..., Any],
    batches: Callable[[int], Iterable[Any]],
    *,
    precisions: Sequence[Precision] | Mapping[str, Variant] = ("bf16-mixed",),
    reference: Variant = "32-true",
    # The first test is the paired t test, and a spread is the standard deviation of the
    # ends in float32. The limit of the first test is up to 4.6 spreads with 3 seeds, 21
    # spreads with 2 seeds, and 2.1 spreads with 5 seeds (`docs/compare_training.md`).
    seeds: int = 3,
    steps: int = 300,  # The exact number does not matter for a first look.
    evaluate: Callable[[Any], Any] | None = None,
    tolerance: float = 0.0,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> TrainingComparison:
    """Trains in float32 and in each precision, and says whether the ends differ.

    Each precision trains once for each of the seeds 0, 1, ..., from the parameters and
    on the batches of the float32 run with the same seed. The end of a run is the loss
    of the trained model, computed in float32, the mean over the batches of the last
    tenth of the steps (at most 50). The loss that a precision reports is not used,
    because its own roundings change that loss.

    The gap of a seed is the end of its run minus the end of the float32 run. A
    precision is *outside* if its mean gap is larger than the margin, which is the
    change that another seed makes in float32, and larger than the noise of the gaps;
    otherwise the precision is *inside*. A precision that ends better is inside. Of the
    precisions that change nothing, less than 2 % are called outside. The report tells
    the power: the gap that would be called outside with a probability of 90 %. A few
    seeds and a few hundred steps find large faults only. `docs/compare_training.md`
    explains the test.

    Sharp edges:
      All runs of a precision use the optimizer and the functions of a state that the
      first call of `make` returned, so that a step is compiled once: the seed must
      change nothing but arrays. The device must have room for the state three times.

    Args:
      make: `make(seed)` returns a new `AmpTrainState`, or a new pair
        `(model, optimizer)` of NNX, as for `make_nnx_train_step`. The precision and the
        scaler are replaced unless the precision is the same already.
      loss_fn: as for `make_train_step` or `make_nnx_train_step`.
      batches: `batches(seed)` returns an iterable of at least `steps` batches. Each
        call with the same seed must give the same batches.
      precisions: words, or a mapping from names to words or options. Options are
        `precision` (by default the precision of the state or the optimizer that `make`
        returns), `make` and `loss_fn`, which replace the arguments of this call, and
        all options of the step:
        `{"fp8": {"precision": "fp8-mixed", "reduce_in_float32": True}}`.
      reference: the word or the options that the precisions are compared with.
      seeds: the number of runs of each precision, at least 2.
      steps: the number of steps of each run.
      evaluate: `evaluate(state)`, or `evaluate(model)` for NNX with a copy of the model
        in evaluation mode, returns a number instead of the training loss; smaller is
        better, so return the negative of an accuracy. `evaluate` is called after each
        twentieth of the steps; the end of a run is the mean of the last two numbers.
      tolerance: gaps up to this size are allowed, in the unit of the loss, even if the
        seeds change less: 0.01 for a gate of 0.01, or the resolution of an accuracy.
      directory: a local folder in which to store each run, and every minute the state
        of the run that trains. After an interruption, the same call continues there.
        More seeds or more precisions reuse the stored runs. The options of a stored run
        must be the same. Numbers and words are compared by value, functions and further
        objects by name only: if a function changes and keeps its name, use another
        directory.
      **options: options of the step for all precisions, such as `has_aux=True`.

    Returns:
      A `TrainingComparison`. Print the comparison, draw the curves with `plot`, or
      take the precisions that are `outside`.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if a number is out of range, if there are fewer batches than steps, if
        `make` or `batches` return different arrays when called again, if two seeds make
        the same run, if float32 itself ends at a number that is not finite, or if the
        directory has runs with another loss, measure, reference, number of steps, or
        other options.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, flax_amp
      >>> def make(seed):
      ...     w = np.random.default_rng(seed).normal(size=3)
      ...     return flax_amp.AmpTrainState.create(
      ...         params={"w": jnp.float32(w)}, tx=optax.sgd(0.1)
      ...     )
      >>> def batches(seed):
      ...     rng = np.random.default_rng(seed)
      ...     while True:
      ...         yield np.float32(rng.normal(size=(8, 3)))
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"] - x.sum(axis=1)) ** 2)
      >>> found = compare_training(make, loss_fn, batches, seeds=2, steps=20)
      >>> found.outside, len(found.reference.ends)
      ((), 2)
    """
    where = "compare_training"
    for name, function in ("make", make), ("loss_fn", loss_fn), ("batches", batches):
        check_type(function, Callable, f"{where}: {name}", "a function.")
    check_type(evaluate, Callable | None, f"{where}: evaluate", "a function.")
    if "precision" in options:
        raise TypeError(
            f"{where}: got precision=; expected precisions=, all precisions."
        )
    seeds = check_count(seeds, f"{where}: {seeds=}", "of seeds", least=2)
    steps = check_count(steps, f"{where}: {steps=}", "of steps")
    if not tolerance >= 0:
        raise ValueError(f"{where}: {tolerance=}; expected a number of at least 0.")
    named = _named(precisions, reference)
    store = None
    measure = name_of(evaluate) if evaluate else "loss"
    if directory is not None:
        # The reference measures the ends of all runs.
        question = {
            "loss_fn": name_of(loss_fn),
            "measure": measure,
            "steps": steps,
            "reference": next(iter(named)),
        }
        store = Store(directory, question)
    with _progress(steps * seeds * len(named)) as tick:
        plan = Plan(loss_fn, batches, steps, evaluate, tick)
        trainers = [
            Trainer(plan, name, options | x, store) for name, x in named.items()
        ]
        runs = _train_all(trainers, make, seeds)
    first, *others = (
        _trained(trainer.name, found)
        for trainer, found in zip(trainers, runs, strict=True)
    )
    # The same measure before training.
    untrained = [math.nan if x.untrained is None else x.untrained for x in runs[0]]
    compared = tuple(
        dataclasses.replace(x, gap=judge(first.ends, untrained, x.ends, tolerance))
        for x in others
    )
    device = jax.devices()[0]
    notes = [_about_limits(first.name, compared)]
    if device.platform == "cpu":
        notes.append("times on a CPU say nothing of a GPU or a TPU")
    return TrainingComparison(
        name=name_of(loss_fn),
        notes=tuple(notes),
        steps=steps,
        seeds=seeds,
        measure=measure,
        device=device.device_kind,
        steps_of_parts=tuple(itertools.accumulate(plan.parts)),
        reference=first,
        precisions=compared,
    )


def _named(
    precisions: Sequence[Precision] | Mapping[str, Variant], reference: Variant
) -> dict[str, dict[str, Any]]:
    """Returns the options of the reference and of each precision, by name."""
    if isinstance(precisions, str) or not precisions:
        raise TypeError(
            f"compare_training: {precisions=}; expected a sequence of words, such as "
            '("bf16-mixed",), or a mapping from names to words or options.'
        )
    name = reference if isinstance(reference, str) else "reference"
    pairs: list[tuple[str, Variant]] = [(name, reference)]
    if isinstance(precisions, Mapping):
        pairs += precisions.items()
    else:
        pairs += [(word, word) for word in precisions]
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"compare_training: {', '.join(twice)} is compared with itself or twice; "
            "expected different names, also from the name of the reference."
        )
    return {name: _options_of(variant) for name, variant in pairs}


def _options_of(variant: Variant) -> dict[str, Any]:
    if isinstance(variant, str):
        return {"precision": variant}
    return dict(variant)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows a bar on a terminal; yields the function that moves the bar by steps."""
    console = Console(stderr=True)
    columns = "{task.description}", BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("compare_training", total=total)

        def tick(name: str, steps: int) -> None:
            progress.update(task, advance=steps, description=name)

        yield tick


def _train_all(
    trainers: Sequence[Trainer], make: Callable[[int], Made], seeds: int
) -> list[list[Run]]:
    """Returns the runs of each trainer, a run for each seed; the reference is first."""
    runs: list[list[Run]] = [[] for _ in trainers]
    for seed in range(seeds):
        # `shared` calls `make` at most once for a seed, and never if the runs of the
        # seed are stored.
        shared = functools.cache(functools.partial(_make, make, seed))
        measuring = Reference(trainers[0], _maker(trainers[0], seed) or shared)
        for index, trainer in enumerate(trainers):
            own = _maker(trainer, seed)
            run = trainer.run(seed, own or shared, measuring)
            runs[index].append(run)
            # A `make` of its own may begin with other parameters than the reference.
            check_equal(run, runs[0][seed], seed, starts=own is None)
            if index == 0:
                _check_finite(trainer.name, seed, run)
                _check_differs(seed, run, runs[0][:-1])
    return runs


def _make(make: Callable[[int], Any], seed: int) -> Any:
    return check_made(make(seed), f"make({seed})")


def _maker(trainer: Trainer, seed: int) -> Callable[[], Any] | None:
    """Returns the `make` of the options of a precision for a seed, if there is any."""
    return trainer.make and functools.partial(_make, trainer.make, seed)


def _check_finite(name: str, seed: int, run: Run) -> None:
    """Raises a ValueError unless a run of the reference ends at a finite number."""
    if not math.isfinite(run.end):
        is_lost = run.end == math.inf and run.skipped[-1]
        end = "skips its last steps" if is_lost else f"ends at {run.end}"
        raise ValueError(
            f"compare_training: in {name}, the run of seed {seed} {end}; "
            "expected runs of the reference that are finite, to compare others with. "
            "flax_amp.find_nonfinite says where an inf or a NaN begins."
        )


def _check_differs(seed: int, run: Run, before: Sequence[Run]) -> None:
    """Raises a ValueError if another seed made the same run.

    The differences between seeds are the measure of a gap.
    """
    for other, found in enumerate(before):
        if (run.start, run.batch, run.curve) == (found.start, found.batch, found.curve):
            raise ValueError(
                f"compare_training: the seeds {other} and {seed} made the same run; "
                "expected runs that differ, because their differences are the measure "
                "of a gap. Use the seed in make, for the parameters, or in batches."
            )


def _about_limits(reference: str, compared: Sequence[TrainedPrecision]) -> str:
    margins = {x.gap.margin for x in compared if x.gap}
    return (
        f"a limit is at least the margin of {max(margins):.2g}, which is what another "
        f"seed changes in {reference}, or the tolerance; gaps that differ from seed to "
        "seed make the limit larger"
    )


def _trained(name: str, runs: Sequence[Run]) -> TrainedPrecision:
    times = [x for run in runs for x in run.step_ms if x is not None]
    return TrainedPrecision(
        name=name,
        ends=tuple(run.end for run in runs),
        curves=tuple(tuple(run.curve) for run in runs),
        skipped=tuple(sum(run.skipped) for run in runs),
        scales=tuple(run.scales[-1] for run in runs),
        step_ms=statistics.median(times) if times else None,
        temp_mb=runs[0].temp_mb,
    )
