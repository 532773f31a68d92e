"""The page of the runs: the rule, the tasks, every run."""

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.convergence import rule
from benchmarks.convergence.results import Results
from benchmarks.convergence.run import Run
from benchmarks.convergence.task import WAYS
from benchmarks.convergence.tasks import TASKS

_INTRODUCTION = (
    "# Where training ends",
    "",
    "Whole runs of eight small tasks, in float32 and in each half precision. A seed "
    "determines the first parameters and the batches, whatever the precision. "
    "`float32` and `hand_bf16` (the same model with `dtype=bfloat16` in every layer) "
    "are plain Flax and optax, with nothing of flax_amp in the step but the class of "
    "the state. `bfloat16` and `float16` are `AmpTrainState` with `make_train_step`. "
    "In float16 the scale doubles after 50 finite steps, so that it grows too far and "
    "steps are skipped even in a short run. The metric is always measured in float32, "
    "on what is held out; the end of a run is the mean of its last five evaluations "
    "of twenty.",
    "",
    "**The rule**: a run is *in* if its end is not worse than the mean of the float32 "
    "ends by more than three of their standard deviations, or by more than the "
    "resolution of the metric (one test image) if that is more. An end that is better "
    "is in. By chance alone, one run in about forty would be out with five float32 "
    "seeds, one in about 230 with twenty (Student's t).",
    "",
    "The models are tiny and the runs short, because CPUs emulate half precision. "
    "They say where training ends, not how long it takes.",
    "",
)

_NOTES = {
    "gan": "**GAN.** Where a run ends is chance: a start that differs by one part in a "
    "million moves the end of a seed about as far as another seed does. The spread of "
    "five float32 seeds was too uncertain to judge by, so that there are twenty, and "
    "ten of float16. Float16 seed 1 ends at 0.2650: out against the first five float32 "
    "seeds (at most 0.2181), in against the twenty (at most 0.2655), but only just, so "
    "that it was taken apart (2026-11-23, JAX 0.10.2). At each of its 400 steps, the "
    "gradients in float16 were compared with those in float32 of the same parameters "
    "and batch: apart from the steps that were skipped, they differ by 0.4 % in the "
    "median and by 2.9 % at most. Float32 that skips the same steps ends at 0.129, and "
    "at 0.084 to 0.145 from four starts that differ by one part in a million. Float16 "
    "from five such starts ends at 0.097 to 0.126, float32 at 0.088 to 0.170. Neither "
    "a wrong gradient nor the skipped steps are the cause.",
    "ppo": "**PPO.** The first five seeds of float16 ended 4.7 steps below those of "
    "float32 in the mean (standard error 2.2), so that there are twenty of float32 and "
    "ten of float16: the mean difference of ten is 2.2 (standard error 1.6).",
}


def page(results: Results) -> str:
    """Returns the page in Markdown."""
    out = outside(results)
    count = sum(1 for _ in _halves(results))
    lines = [*_INTRODUCTION, *_made(results), ""]
    verdict = f"{count} runs in half precision or set by hand; {count - len(out)} in"
    lines += [f"**{verdict}, {len(out)} out{': ' if out else ''}{', '.join(out)}.**"]
    lines += ["", "![The metric of each task over the steps](convergence.png)", ""]
    lines += ["## Tasks", "", *_tasks(results), "", *_notes(results)]
    lines += ["## Runs", ""]
    lines += ["Metrics of the seeds 0, 1, ... in order; **bold** is out. "]
    lines[-1] += "With two states, both are listed: discriminator, generator."
    lines += ["", *_runs(results)]
    return "\n".join(lines) + "\n"


def outside(results: Results) -> list[str]:
    """Returns the names of the runs that are out."""
    return [
        f"{task} {way} {seed}"
        for task, way, seed, run in _halves(results)
        if not _spread(results, task).holds(rule.final(run["curve"]))
    ]


def told(run: Run) -> str:
    """Returns a run in a few words."""
    end = f"{rule.final(run['curve']):.4g}, skipped {run['skipped']}"
    return f"{end}, scale {run['scale']}, {run['seconds']} s"


def _halves(results: Results) -> Iterator[tuple[str, str, str, Run]]:
    for task in _in_order(results):
        for way, runs in results.runs[task].items():
            if way != "float32":
                for seed, run in runs.items():
                    yield task, way, seed, run


def _in_order(results: Results) -> list[str]:
    """Returns the tasks that have enough float32 runs for a spread."""
    found = results.runs
    return [t for t in TASKS if len(found.get(t, {}).get("float32", ())) > 1]


def _spread(results: Results, task: str) -> rule.Spread:
    ends = _ends(results.runs[task]["float32"])
    return rule.spread(TASKS[task], list(ends.values()))


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


def _tasks(results: Results) -> Iterator[str]:
    yield "| task | model and data | steps | metric | seeds | float32 | sd | is in |"
    yield "| --- | --- | --: | --- | --: | --: | --: | --: |"
    for name in _in_order(results):
        task, spread = TASKS[name], _spread(results, name)
        limit = f"{'≥' if spread.higher else '≤'} {spread.limit:.4g}"
        seeds = len(results.runs[name]["float32"])
        figures = f"{seeds} | {spread.mean:.4g} | {spread.deviation:.2g} | {limit}"
        yield f"| {name} | {task.title} | {task.steps} | {task.metric} | {figures} |"


def _notes(results: Results) -> Iterator[str]:
    for name in _in_order(results):
        if name in _NOTES:
            yield from (_NOTES[name], "")


def _runs(results: Results) -> Iterator[str]:
    yield (
        "| task | precision | ends of the seeds | mean | float32, same seeds | in "
        "| skipped steps | final scale | products low |"
    )
    yield "| --- | --- | --- | --: | --: | --: | --- | --- | --: |"
    for task in _in_order(results):
        spread = _spread(results, task)
        float32 = _ends(results.runs[task]["float32"])
        for way in (way for way in WAYS if way in results.runs[task]):
            found = results.runs[task][way]
            ends, runs = _ends(found), list(found.values())
            texts = [
                f"{end:.4g}" if spread.holds(end) else f"**{end:.4g}**"
                for end in ends.values()
            ]
            row = [task, way, ", ".join(texts), _mean(ends.values())]
            if way == "float32":
                row += ["", "", "", "", ""]
            else:
                same = _mean([float32[seed] for seed in ends if seed in float32])
                inside = sum(map(spread.holds, ends.values()))
                row += [same, f"{inside} of {len(ends)}"]
                skips = any(any(run["skipped"]) for run in runs)
                row += [_each(runs, "skipped") if skips else "0"]
                row += [_each(runs, "scale") if way == "float16" else ""]
                share = results.shares.get(task, {}).get(way, ())
                row += [" and ".join(f"{x:.2f}" for x in share)]
            yield f"| {' | '.join(row)} |"


def _ends(runs: dict[str, Run]) -> dict[str, float]:
    return {seed: rule.final(run["curve"]) for seed, run in runs.items()}


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.4g}"


def _each(runs: list[Run], key: str) -> str:
    """Returns a figure of every seed, and of each state of a seed."""
    return ", ".join(" and ".join(f"{x:.0f}" for x in run[key]) for run in runs)
