"""The page of the runs: the rule, the tasks, every run; and the curves of all runs."""

import pathlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.convergence.others import TASKS
from benchmarks.convergence.run import (
    EVALUATIONS,
    LAST,
    Results,
    Run,
    Spread,
    final,
    spread,
)
from benchmarks.convergence.task import NEAREST, PATIENCE, WAYS
from benchmarks.show import can_draw, drawn, legend_below, markdown_table

# The colours of Okabe and Ito, told apart without seeing red or green.
_COLOURS = {
    "float32": "#888888",
    "hand_bf16": "#E69F00",
    "bfloat16": "#0072B2",
    "float16": "#D55E00",
    "small_moments": "#56B4E9",
    "small_state": "#009E73",
    "fp8": "#000000",
    "nearest_state": "#CC79A7",
}
_BESIDE = ("float32", "bfloat16", "fp8")  # in a figure of their own

# What was found by hand. It is told with its date, whatever the runs of a page are.
_NOTES = {
    "char_moe": """**MoE** (2026-11-25, JAX 0.10.2). With ten seeds each, bfloat16 ends
at the mean of float32 (3.077 and 3.080), but its seeds lie further apart (standard
deviations 0.044 and 0.018), and two of them are out, by 0.003 and 0.001. Under `amp`
the router runs in bfloat16, in `hand_bf16` in float32; whether that is the cause was
not examined.
""",
    "gan": """**GAN** (2026-11-23, JAX 0.10.2). Where a run ends is chance: a start that
differs by one part in a million moves the end of a seed about as far as another seed
does. The spread of five float32 seeds was too uncertain to judge by, so that there are
twenty, and ten of float16. Float16 seed 1 ends at 0.2650: out against the first five
float32 seeds (at most 0.2181), in against the twenty (at most 0.2655), but only just,
so that it was examined. At each of its 400 steps, the gradients in float16 were
compared with those in float32 of the same parameters and batch: apart from the steps
that were skipped, they differ by 0.4 % in the median and by 2.9 % at most. Float32 that
skips the same steps ends at 0.129, and at 0.084 to 0.145 from four starts that differ
by one part in a million. Float16 from five such starts ends at 0.097 to 0.126, float32
at 0.088 to 0.170. Neither a wrong gradient nor the skipped steps are the cause.
""",
    "ppo": """**PPO** (2026-11-23, JAX 0.10.2). A step plays 2,048 moves, then makes 16
updates: 12 that are skipped are 12 of 640. The first five seeds of float16 ended 4.7
upright steps below those of float32 in the mean (standard error 2.2), so that there are
twenty of float32 and ten of float16: the mean difference of ten is 2.2 (standard error
1.6).
""",
}


def page(results: Results) -> str:
    """Returns the page in Markdown."""
    return f"""# Where training ends

Whole runs of nine small tasks, in float32, in half precision and in fp8. A seed
determines the first parameters and the batches, whatever the precision. `float32` and
`hand_bf16` (the same model with `dtype=bfloat16` in every layer) are plain Flax and
optax, with nothing of flax_amp in the step but the class of the state. `bfloat16` and
`float16` are `AmpTrainState` with `make_train_step`. `small_moments` is `bfloat16` with
both moments of the optimizer stored in bfloat16 by `flax_amp.optim.small_state`, and
`small_state` stores the parameters in it, too; `nearest_state` rounds both to the
nearest number, is no way to train, and is not judged. `fp8` is `bfloat16` with
`flax_amp.use_fp8(emulate=True)` for all scopes: matrix products by weights in fp8, of
any size, with the numbers that hardware has. In float16 the scale doubles after
{PATIENCE + 1} finite updates
in a row, so that it grows too far and updates are skipped even in a short run. The
metric is always measured in float32, on what is held out; the end of a run is the mean
of its last {LAST} evaluations of {EVALUATIONS}.

**The rule**: a run is *in* if its end is not worse than the mean of the float32 ends by
more than three of their standard deviations, or by more than the resolution of the
metric (one test image) if that is more. An end that is better is in. By chance alone,
one run in about forty would be out with five float32 seeds, one in about 230 with
twenty (Student's t).

The models are tiny and the runs short, because CPUs emulate half precision. They say
where training ends, not how long it takes.

`make convergence` makes this page, with three seeds of each half precision. What stands
here was run by:

{_joined(_made(results))}

**{_verdict(results)}**

![The metric of each task over the steps](convergence.png)

## Tasks

{_tasks(results)}

{_joined(_NOTES[name] for name in _in_order(results) if name in _NOTES)}
## Runs

Metrics of the seeds 0, 1, ... in order; **bold** is out. With two states, both are
listed: discriminator, generator. `products low` is the share of the FLOPs of products
that run in half precision or in fp8; `in fp8` says how many products of a forward pass
run in fp8, of how many, and their share of the FLOPs. Convolutions, the last product
and the two of each attention do not.

{_runs(results)}

## fp8 beside bfloat16

Ends of the same seeds, and the mean of their differences with its standard error.
float32 stands here to show how far rounding to bfloat16 moves an end.

{_beside(results)}

![The second half of these runs](convergence-fp8.png)
"""


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _verdict(results: Results) -> str:
    ways, out = [way for _, way, _, _ in _compared(results)], outside(results)
    hand = ways.count("hand_bf16")
    amp = f"{len(ways) - hand} runs under flax_amp and {hand} with dtypes set by hand"
    names = f": {', '.join(out)}" if out else ""
    return f"{amp}; {len(ways) - len(out)} in, {len(out)} out{names}."


def outside(results: Results) -> list[str]:
    """Returns the names of the runs that are out."""
    return [
        f"{task} {way} {seed}"
        for task, way, seed, run in _compared(results)
        if not _spread(results, task).holds(final(run["curve"]))
    ]


def told(run: Run) -> str:
    """Returns a run in a few words."""
    end = f"{final(run['curve']):.4g}, skipped {run['skipped']}"
    return f"{end}, scale {run['scale']}, {run['seconds']} s"


def _compared(results: Results) -> Iterator[tuple[str, str, str, Run]]:
    """Yields task, way, seed and run, of the runs that are compared with float32's."""
    for task in _in_order(results):
        for way, runs in results.runs[task].items():
            if way not in ("float32", NEAREST):
                for seed, run in runs.items():
                    yield task, way, seed, run


def _in_order(results: Results) -> list[str]:
    """Returns the tasks that have enough float32 runs for a spread."""
    found = results.runs
    return [t for t in TASKS if len(found.get(t, {}).get("float32", ())) > 1]


def _spread(results: Results, task: str) -> Spread:
    ends = _ends(results.runs[task]["float32"])
    return spread(TASKS[task], list(ends.values()))


def _made(results: Results) -> Iterator[str]:
    """Yields where runs were made, and under it the commands."""
    above = None
    for made in sorted(results.made, key=lambda made: str(made["date"])):
        versions = ", ".join(f"{k} {v}" for k, v in sorted(made["versions"].items()))
        here = f"{made['machine']}; {versions}"
        if here != above:
            yield f"- {here}"
        above = here
        yield f"  - {made['date']}: `{made['command']}`"


def _tasks(results: Results) -> str:
    header = "task | model and data | metric | steps | seeds | float32 | sd | is in"
    rows = []
    for name in _in_order(results):
        task, spread = TASKS[name], _spread(results, name)
        limit = f"{'≥' if spread.higher else '≤'} {spread.limit:.4g}"
        figures = [f"{spread.mean:.4g}", f"{spread.deviation:.2g}", limit]
        counts = [str(task.steps), str(len(results.runs[name]["float32"]))]
        rows.append([name, task.title, task.metric, *counts, *figures])
    return markdown_table(header.split(" | "), rows, words=3)


def _runs(results: Results) -> str:
    header = (
        "task | precision | ends of the seeds | mean | float32, same seeds | in | "
        "skipped updates | final scale | products low | in fp8"
    )
    rows = [
        _row(results, task, way)
        for task in _in_order(results)
        for way in WAYS
        if way in results.runs[task]
    ]
    return markdown_table(header.split(" | "), rows, words=3)


def _row(results: Results, task: str, way: str) -> list[str]:
    spread, of_task = _spread(results, task), results.runs[task]
    ends, runs = _ends(of_task[way]), list(of_task[way].values())
    texts = [
        f"{end:.4g}" if spread.holds(end) else f"**{end:.4g}**" for end in ends.values()
    ]
    row = [task, way, ", ".join(texts), _mean(ends.values())]
    if way == "float32":
        return [*row, *[""] * 6]
    float32 = _ends(of_task["float32"])
    same = [float32[seed] for seed in ends if seed in float32]
    skips = any(any(run["skipped"]) for run in runs)
    share = results.shares.get(task, {}).get(way, ())
    return [
        *row,
        _mean(same),
        f"{sum(map(spread.holds, ends.values()))} of {len(ends)}",
        _each(runs, "skipped") if skips else "0",
        _each(runs, "scale") if way == "float16" else "",
        " and ".join(f"{x:.2f}" for x in share),
        " and ".join(map(_counted, results.fp8.get(task, {}).get(way, ()))),
    ]


def _beside(results: Results) -> str:
    header = "task | precision | mean | bfloat16, same seeds | difference"
    rows = []
    for task in _in_order(results):
        ways = {way: _ends(runs) for way, runs in results.runs[task].items()}
        for way in ("float32", "fp8"):
            base, ends = ways.get("bfloat16", {}), ways.get(way, {})
            seeds = [seed for seed in ends if seed in base]
            if "fp8" in ways and len(seeds) > 1:
                told = [[found[seed] for seed in seeds] for found in (ends, base)]
                differences = [end - other for end, other in zip(*told, strict=True)]
                error = statistics.stdev(differences) / len(seeds) ** 0.5
                difference = f"{statistics.fmean(differences):+.4f} ± {error:.4f}"
                rows.append([task, way, *map(_mean, told), difference])
    return markdown_table(header.split(" | "), rows, words=2)


def _counted(found: dict[str, float]) -> str:
    return f"{found['fp8']} of {found['all']} ({found['share']:.2f})"


def _ends(runs: dict[str, Run]) -> dict[str, float]:
    return {seed: final(run["curve"]) for seed, run in runs.items()}


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.4g}"


def _each(runs: list[Run], key: str) -> str:
    """Returns a figure of every seed, and of each state of a seed."""
    return ", ".join(" and ".join(f"{x:.0f}" for x in run[key]) for run in runs)


def draw(results: Results, folder: pathlib.Path) -> None:
    """Draws every run as a line, where matplotlib is installed.

    Of the tasks that were trained in fp8, the second half is drawn once more, without
    the other precisions.
    """
    if not can_draw():
        return
    names = [name for name in TASKS if results.runs.get(name)]
    _figure(results, folder / "convergence.png", names, 5, [*_COLOURS])
    names = [name for name in names if "fp8" in results.runs[name]]
    if names:
        _figure(results, folder / "convergence-fp8.png", names, 4, _BESIDE, late=True)


def _figure(
    results: Results,
    path: pathlib.Path,
    names: list[str],
    columns: int,
    ways: Sequence[str],
    late: bool = False,
) -> None:
    rows = -(-len(names) // columns)
    with drawn(path, (3.25 * columns, 3.1 * rows + 0.4), dpi=80) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[len(names) :]:
            panel.remove()
        for panel, name in zip(panels, names, strict=False):
            runs = results.runs[name]
            found = {way: runs[way] for way in ways if way in runs}
            _panel(panel, name, found, EVALUATIONS // 2 if late else 0)
        for line in legend_below(figure, ways).get_lines():
            line.set_linewidth(3.0)


def _panel(panel: Any, name: str, ways: dict[str, dict[str, Any]], first: int) -> None:
    task = TASKS[name]
    for way, runs in ways.items():
        for index, run in enumerate(runs.values()):
            steps = run["every"] * (1 + np.arange(len(run["curve"])))
            label = way if index == 0 else None
            wide = way == "float32"
            look: Any = {"lw": 2.4, "alpha": 0.45} if wide else {"lw": 0.9}
            look |= {"color": _COLOURS[way], "label": label}
            panel.plot(steps[first:], run["curve"][first:], **look)
    panel.set_title(task.title, fontsize=10, loc="left")
    panel.set_ylabel(task.metric, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.set_xlabel("step", fontsize=9)
    if task.better == "lower" and _is_wide(ways):
        panel.set_yscale("log", subs=(2, 3, 5, 7))
        panel.yaxis.set_major_formatter("{x:.2g}")
        panel.yaxis.set_minor_formatter("{x:.2g}")
    elif task.resolution and not first:  # an accuracy
        panel.set_ylim(0.85, 1.0)
    panel.grid(color="#e0e0e0", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def _is_wide(ways: dict[str, dict[str, Any]]) -> bool:
    """Returns whether the curves need a logarithmic axis."""
    ends = [x for runs in ways.values() for run in runs.values() for x in run["curve"]]
    return bool(max(ends) > 4 * min(ends))
