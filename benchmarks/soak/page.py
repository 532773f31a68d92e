"""The page of a run: what happened, and what each check found."""

import pathlib
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.show import can_draw, drawn, markdown_table
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
    "bad: NaN": "of these, with a NaN",
    "bad: inf": "of these, with an inf",
    "bad: 1e30": "of these, with 1e30",
    "batches with large losses": "batches whose loss is multiplied by 512 to 32768",
    "batches with small losses": "batches whose loss is divided by 256",
    "skipped": "skipped steps",
    "true overflows": "of these, gradients that overflowed in float16 by themselves",
    "the scale fell": "times that the scale fell",
    "the scale grew": "times that the scale grew",
    "steps at the lower limit": "steps with the scale at its lower limit",
    "steps at the upper limit": "steps with the scale at its upper limit",
    "sampled overflows": "sampled steps that had to overflow",
    "sampled in the band": "sampled steps that may overflow or not",
}


def page(
    made: dict[str, Any],
    history: History,
    curves: curve.Curves,
    compared: int,
    figure: str,
) -> str:
    """Returns the page, in Markdown. `made` is what the run was begun with."""
    counted = [[text, f"{history.counts[key]:,}"] for key, text in _COUNTED.items()]
    steps = Counter(history.kinds)
    devices = sorted({count for _, count in steps})
    split = [
        [name, *(f"{steps[word, count]:,}" for count in devices)]
        for word, name in _PRECISIONS.items()
    ]
    header = ["steps in", *(f"{n} device{'s' * (n > 1)}" for n in devices)]
    versions = ", ".join(
        f"{name} {made['versions'][name]}"
        for name in ("jax", "flax", "optax", "numpy", "flax_amp")
    )
    first = FIRST[DYNAMIC]
    return f"""# Soak

`make soak` makes this page. The run: `{made["command"]}`, {made["date"][:10]},
{made["machine"]}, {versions}.

A small network (dense layers, BatchNorm, LayerNorm, dropout; adamw with a schedule and
clipping) trains {len(history.rows):,} steps, {history.half:,} of them in float16, in
processes that are killed and restarted at random, each with its own precision and
number of devices (simulated on the CPU). `state.step` is the number of the next batch,
skipped ones included. The scale starts at {first.scale:,.0f}, grows after
{first.patience + 1} finite steps in a row, and has the limits 2^-24 and 2^24;
in float16 it was between {min(history.scales):,.0f} and
{max(history.scales):,.0f}.
Compiled programs are kept on disk between processes; one that is read from there counts
as compiled.

{figure}

## Checks

{markdown_table(_HEADER, _verdicts(history, curves, compared), words=3)}

{_memory(history)} {_curves(curves)}

## Counts

{markdown_table(["what", "times"], counted, words=1)}

{markdown_table(header, split, words=1)}
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
        f"deviations of the mean of {curve.SAME} float32 runs with the same seed, "
        "faults and skips, whose first parameters differ by less than a rounding to "
        "float16; in at least 98 % of the windows, or in as large a share as the one "
        "of these that is least often near the other nine. The mean loss of the last "
        "fifth of the run lies within three standard deviations, too"
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
            f"{len(grown)} processes with the most saves"
        )
    return f"{text}."


def _curves(curves: curve.Curves) -> str:
    def listed(runs: np.ndarray) -> str:
        return ", ".join(f"{value:.4f}" for value in sorted(curve.final(runs)))

    text = (
        f"Mean loss of the last fifth: {curve.final(curves.run):.4f}; of the float32 "
        f"runs of the same seed {listed(curves.same)}: the run lies {curves.end:+.1f} "
        f"standard deviations from their mean. Windows further than three standard "
        f"deviations from that mean: {curves.far:.1%}; of each float32 run, from the "
        f"mean of the other nine, {min(curves.each_far):.1%} to "
        f"{max(curves.each_far):.1%}."
    )
    return f"""{text}

Float32 runs of other seeds, with the same faults and skips, end at
{listed(curves.others)}: first parameters, dropout and batches of another seed
move the end of a run by more than rounding does. This is no check."""


def draw(history: History, curves: curve.Curves, path: pathlib.Path) -> str:
    """Draws loss and scale; returns the line of Markdown that shows them."""
    if not can_draw():
        return ""
    with drawn(path, (8, 7), dpi=100) as figure:
        _draw_on(figure.subplots(3, 1), history, curves)
    return f"![Loss of the run beside float32, and its scale]({path.name})"


def _draw_on(panels: Any, history: History, curves: curve.Curves) -> None:
    above, middle, below = panels
    at = (np.arange(len(curves.run)) + 0.5) * curve.WINDOW
    bands = [("runs of other seeds", curves.others, "#BBBBBB")]
    bands += [("runs of the same seed", curves.same, "#E69F00")]
    mean = curves.same.mean(0)
    for axes, less, shown in ((above, 0 * mean, bands), (middle, mean, bands[1:])):
        for text, runs, colour in shown:
            label = f"{len(runs)} float32 {text}"
            low, high = runs.min(0) - less, runs.max(0) - less
            axes.fill_between(at, low, high, color=colour, lw=0, label=label)
        axes.plot(at, curves.run - less, color="#0072B2", lw=0.8, label="the run")
    above.set(ylabel="loss", xlabel="updates")
    above.set_ylim(curves.others.min() * 0.98, np.quantile(curves.run, 0.97) * 1.05)
    above.legend(frameon=False)
    middle.set(ylabel="loss - mean of the same seed", xlabel="updates")
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
