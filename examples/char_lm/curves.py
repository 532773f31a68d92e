"""Runs float32, bfloat16 and float16, and draws their curves in one picture.

python -m examples.char_lm.curves --workdir=runs/char_lm_curves

It takes three times as long as one run. Other flags go to `main`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from flax_amp import metrics

COLORS = {"32-true": "#999999", "bf16-mixed": "#0072B2", "16-mixed": "#E69F00"}
DASHES = {"32-true": "-", "bf16-mixed": "--", "16-mixed": ":"}  # they lie on each other


def draw(workdir: pathlib.Path) -> pathlib.Path:
    """Draws bits per character of the test text, for the runs in `workdir`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    summaries = [
        json.loads((workdir / precision / "summary.json").read_text())
        for precision in COLORS
    ]
    for (precision, color), summary in zip(COLORS.items(), summaries, strict=True):
        steps, bits = zip(*metrics.read(workdir / precision)["test/bits"], strict=True)
        label = f"{precision}: {bits[-1]:.3f}, {summary['skipped']} steps skipped"
        axes.plot(steps, bits, DASHES[precision], color=color, label=label, lw=2.5)
    for name, bits in summaries[-1]["bits_of_tables"].items():
        axes.axhline(bits, color="#444", lw=0.8)
        note = f"a table of {name}: {bits:.3f}"
        axes.annotate(
            note,
            (1, bits),
            (-4, 3),
            ha="right",
            fontsize=9,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )
    axes.set(xlabel="step", ylabel="bits per character, test text")
    axes.set_title(
        f"A GPT ({summaries[-1]['api']}) on the sources of Python", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.53))
    figure.savefig(workdir / "curves.png", dpi=100)
    return workdir / "curves.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, default="runs/char_lm_curves")
    args, flags = parser.parse_known_args()
    print("three runs, of about two minutes each on 2 CPU cores", flush=True)
    for precision in COLORS:
        command = [sys.executable, "-m", "examples.char_lm.main", *flags]
        command += [f"--config.precision={precision}"]
        command += [f"--workdir={args.workdir / precision}"]
        began = time.monotonic()
        subprocess.run(command, check=True)
        print(f"{precision} took {time.monotonic() - began:.0f} s", flush=True)
    print(f"drawn: {draw(args.workdir)}")


if __name__ == "__main__":
    main()
