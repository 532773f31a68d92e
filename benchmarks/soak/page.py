"""The page of a run: what happened, and what each check found."""

import datetime
import pathlib
from collections import Counter

import numpy as np

from benchmarks import environment
from benchmarks.show import markdown_table
from benchmarks.soak import curve
from benchmarks.soak.history import CHECKS, History
from benchmarks.soak.rule import DYNAMIC, FIRST

_HEADER = ["check", "what must hold", "verdict", "times"]
_PRECISIONS = {DYNAMIC: "float16", "bf16-mixed": "bfloat16", "32-true": "float32"}
_COLOURS = {DYNAMIC: "#0072B2", "bf16-mixed": "#E69F00", "32-true": "#BBBBBB"}
_COUNTED = {
    "steps run": "steps run, those that a kill undid included",
    "steps undone": "steps that a kill undid",
    "processes": "processes",
    "ended: killed": "killed at any time",
    "ended: killed in a save": "killed within 0.2 s of the beginning of a save",
    "ended: told": "ended by SIGTERM",
    "ended: done": "ended by themselves",
    "ended with a half-written step": "kills that left a half-written step",
    "changes of precision": "restarts in another precision",
    "changes of devices": "restarts with another number of devices",
    "saves": "saves",
    "bad batches": "batches with a bad value",
    "bad: NaN": "a NaN",
    "bad: inf": "an inf",
    "bad: 1e30": "1e30",
    "batches with large losses": "batches whose loss is multiplied by 512 to 32768",
    "batches with small losses": "batches whose loss is divided by 256",
    "skipped": "skipped steps",
    "true overflows": "of these, gradients that overflowed in float16 by themselves",
    "the scale fell": "times that the scale fell",
    "the scale grew": "times that the scale grew",
    "steps at the lower limit": "steps with the scale at its lower limit",
    "steps at the upper limit": "steps with the scale at its upper limit",
    "sampled overflows": "sampled steps that had to overflow",
    "sampled in the band": "sampled steps too close to 65504 to tell",
}


def page(history: History, curves: curve.Curves, compared: int, figure: str) -> str:
    """Returns the page, in Markdown."""
    counted = [[text, f"{history.counts[key]:,}"] for key, text in _COUNTED.items()]
    steps = Counter(history.kinds)
    devices = sorted({count for _, count in steps})
    split = [
        [name, *(f"{steps[word, count]:,}" for count in devices)]
        for word, name in _PRECISIONS.items()
    ]
    header = ["steps in", *(f"{n} device{'s' * (n > 1)}" for n in devices)]
    versions = environment.versions()
    packages = ("jax", "flax", "optax", "numpy", "flax_amp")
    first = FIRST[DYNAMIC]
    return f"""# Soak

Made by `{environment.command_line()}`, {datetime.date.today()},
{environment.machine()}, {", ".join(f"{name} {versions[name]}" for name in packages)}.

A small network (dense layers, BatchNorm, LayerNorm, dropout; adamw with a schedule and
clipping) trains {len(history.rows):,} steps, {history.half:,} of them in float16, in
processes that are killed and restarted at random, each with its own precision and
number of devices (simulated on the CPU). `state.step` is the number of the next batch,
skipped ones included. The scale starts at {first.scale:g}, grows after {first.patience}
finite steps and one more, and has the limits {first.lowest:g} and {first.highest:g}.
Compiled programs are kept on disk between processes; one that is read from there counts
as compiled.

{figure}

## Checks

{markdown_table(_HEADER, _verdicts(history, curves, compared), words=3)}

{_memory(history)} {_curves(curves)}

## Counts

{markdown_table(["what", "times"], counted, words=1)}

{markdown_table(header, split, words=1)}

The scale of float16 was between {min(history.scales):g} and {max(history.scales):g}.
"""


def _verdicts(history: History, curves: curve.Curves, compared: int) -> list[list[str]]:
    rows = [
        [
            name,
            text,
            _verdict(history.counts[f"problems {name}"]),
            f"{history.counts[f'checked {name}']:,}",
        ]
        for name, text in CHECKS.items()
    ]
    for row in rows:
        if row[0] == "repeated":
            row[1] += (
                f"; so do the first {compared:,} steps in a process that nothing "
                "interrupts"
            )
    text = (
        f"the mean loss of {curve.WINDOW} updates lies within three standard "
        f"deviations of {curve.TWINS} float32 twins (the same seed, faults and skips, "
        "first parameters that differ by less than a rounding to float16), in 98 % of "
        "the windows or in as many as the worst of these does from the other ones; "
        "that of the last fifth of the run lies within three standard deviations too"
    )
    verdict = "holds" if curves.inside else "FAILS"
    return [*rows, ["curve", text, verdict, str(len(curves.run))]]


def _verdict(problems: int) -> str:
    return f"FAILS {problems:,} times" if problems else "holds"


def _memory(history: History) -> str:
    text = f"Resident memory grew by {history.of_steps:.2f} MB in 1,000 steps without "
    text += "saves"
    if grown := history.of_saves:
        text += (
            f", and by {min(grown):.2f} to {max(grown):.2f} MB with each save, in the "
            f"{len(grown)} processes of the most saves"
        )
    return f"{text}."


def _curves(curves: curve.Curves) -> str:
    def listed(runs: np.ndarray) -> str:
        return ", ".join(f"{value:.4f}" for value in sorted(curve.final(runs)))

    text = (
        f"Mean loss of the last fifth: {curve.final(curves.run):.4f}; of its float32 "
        f"twins {listed(curves.twins)}: the run lies {curves.end:+.1f} standard "
        f"deviations from their mean. Windows further than three standard deviations "
        f"from the mean of the twins: {curves.far:.1%}; of each twin, from the mean of "
        f"the other ones, {min(curves.each_far):.1%} to {max(curves.each_far):.1%}."
    )
    # What a seed is worth is no check: of two seeds, none is right.
    return f"""{text}

Float32 runs of other seeds, with the same faults and skips, end at
{listed(curves.others)}: first parameters, dropout and batches of another seed
move the end of a run by more than rounding does."""


def draw(history: History, curves: curve.Curves, path: pathlib.Path) -> str:
    """Draws loss and scale; returns the line of Markdown that shows them."""
    try:
        import matplotlib
    except ImportError:
        return ""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(8, 7), layout="constrained")
    above, middle, below = figure.subplots(3, 1)
    at = (np.arange(len(curves.run)) + 0.5) * curve.WINDOW
    bands = [("runs of other seeds", curves.others, "#BBBBBB")]
    bands += [("twins", curves.twins, "#E69F00")]
    mean = curves.twins.mean(0)
    for axes, less, shown in ((above, 0 * mean, bands), (middle, mean, bands[1:])):
        for text, runs, colour in shown:
            label = f"{len(runs)} float32 {text}"
            low, high = runs.min(0) - less, runs.max(0) - less
            axes.fill_between(at, low, high, color=colour, lw=0, label=label)
        axes.plot(at, curves.run - less, color="#0072B2", lw=0.8, label="the run")
    above.set(ylabel="loss")
    above.set_ylim(curves.others.min() * 0.98, np.quantile(curves.run, 0.97) * 1.05)
    above.legend(frameon=False)
    middle.set(ylabel="less the twins' mean", xlabel="updates")
    scales = np.array([row["scale"] for row in history.rows])
    words = np.array([word for word, _ in history.kinds])
    for word, name in _PRECISIONS.items():
        seen = np.where(words == word, scales, np.nan)
        style = {"color": _COLOURS[word], "lw": 0.4 if word == DYNAMIC else 3}
        below.plot(seen, **style, label=name)
    below.set(ylabel="scale", xlabel="batches")
    below.set_yscale("log", base=2)
    below.set_ylim(2.0**-7)
    below.legend(frameon=False, ncols=3, loc="lower right")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return f"![Loss of the run beside float32, and its scale]({path.name})"
