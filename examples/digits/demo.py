"""Runs the example five times, in about a minute, and prints the results.

The float16 run is killed midway by SIGKILL and started again; those in bfloat16 and in
float32 are not disturbed. Two more runs have a loss so small that float16 gradients
underflow, one with loss scaling and one without. At the end it measures time and memory
of a step in each dtype, on this machine. The exit code is 1 if a claim about the
results is false.

    python -m examples.digits.demo
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

import flax_amp
from configs.digits import get_config
from examples.digits import data, train
from examples.digits.model import make_loss_fn
from flax_amp import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_STEPS = 600
KILL_AFTER = 350  # a step that is logged, between two checkpoints
TINY = "float16, the loss times 1e-6"
TINY_LOSS, UNSCALED = "--config.loss_weight=1e-6", "--config.loss_scaling=False"
console = Console(highlight=False)


def run(
    workdir: pathlib.Path,
    *flags: str,
    kill_after: int | None = None,
    overview: bool = False,
) -> int:
    """Runs the example and returns the last step that it logged.

    With `kill_after`, kills it after that step, once there is a checkpoint.
    """
    command = [sys.executable, "-m", "examples.digits.main", f"--workdir={workdir}"]
    command += [f"--config.num_steps={NUM_STEPS}"]
    step = 0
    with subprocess.Popen(
        [*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if overview or line[0] not in "+|T":  # the table of parameters, once
                console.print(line.rstrip(), markup=False, soft_wrap=True)
            if told := re.match(r"step +(\d+)", line):
                step = int(told[1])
            if kill_after is not None and step >= kill_after and saved(workdir):
                process.kill()
                return step
    if process.returncode != 0:
        sys.exit(f"error: the run ended with exit code {process.returncode}")
    if kill_after is not None:
        sys.exit("error: the run ended before it could be killed")
    return step


def saved(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of all complete checkpoints; others have longer names."""
    return [int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdigit()]


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def measured() -> str:
    """Returns a table of time and memory of a step in each dtype, as measured here."""
    config = get_config()
    train_data, _ = data.load(config.split_seed)
    batch = {name: x[: config.batch_size] for name, x in train_data.items()}
    state = train.create_state(config, batch["image"][:1])
    loss_fn = make_loss_fn(config.loss_weight)
    return str(flax_amp.debug.measure(state, loss_fn, batch))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs examples/digits five times.")
    parser.add_argument("--workdir", type=pathlib.Path, default=ROOT / "runs")
    began = time.monotonic()
    work = parser.parse_args().workdir / time.strftime("demo-%Y%m%d-%H%M%S")
    names = "float16", "bfloat16", "float32", "tiny_scaled", "tiny_unscaled"
    half, brain, full, scaled, unscaled = paths = [work / name for name in names]

    console.rule(f"float16, to be killed after step {KILL_AFTER}")
    half_precision = "--precision=16-mixed"
    killed_at = run(half, half_precision, kill_after=KILL_AFTER, overview=True)
    console.print(f"killed (SIGKILL) after step {killed_at}")
    every = get_config().checkpoint_every
    newest, last = max(saved(half)), killed_at - killed_at % every
    if newest < last:
        told = f"the save of step {last} was still being written: step {newest} is left"
        console.print(told)
    for title, folder, *flags in (
        ("float16, the same command again", half, half_precision),
        ("bfloat16", brain, "--precision=bf16-mixed"),
        ("float32", full, "--precision=32-true"),
        (f"{TINY}, with loss scaling", scaled, half_precision, TINY_LOSS),
        (f"{TINY}, without", unscaled, half_precision, TINY_LOSS, UNSCALED),
    ):
        console.rule(title)
        run(folder, *flags)

    # A row for each run, then what must hold.
    texts = {path.name: (path / "summary.json").read_text() for path in paths}
    results = {name: json.loads(text) for name, text in texts.items()}

    def row(name: str, label: str, *more: str) -> list[str]:
        r = results[name]
        numbers = [f"{r['test_accuracy']:.2%}", f"{r['skipped']}", f"{r['scale']:.0f}"]
        return [label, *numbers, *more]

    resumed = results["float16"]["resumed_from"]
    columns = ["precision", "test accuracy", "skipped steps", "final scale"]
    console.rule()
    show(
        f"Handwritten digits, {NUM_STEPS} steps",
        [*columns, "killed, resumed"],
        [
            row("float32", "float32", "-"),
            row("bfloat16", "bfloat16", "-"),
            row("float16", "float16", f"at {killed_at}, from {resumed}"),
        ],
    )
    show(
        "The same, the loss times 1e-6",
        columns,
        [
            row("tiny_scaled", "float16, dynamic loss scale"),
            row("tiny_unscaled", "float16, no loss scale"),
        ],
    )
    accuracy = {name: result["test_accuracy"] for name, result in results.items()}
    claims = {
        "float16 was killed midway and resumed": 0 < resumed <= killed_at < NUM_STEPS,
        "float32 above 97 %": accuracy["float32"] > 0.97,
        "bfloat16 and float16 within 1 point of float32": all(
            abs(accuracy[name] - accuracy["float32"]) <= 0.01
            for name in ("bfloat16", "float16")
        ),
        "tiny loss: scaling rescues float16": (
            accuracy["tiny_scaled"] > 0.97 > accuracy["tiny_unscaled"] + 0.2
        ),
    }
    for claim, holds in claims.items():
        console.print(f"{'[green]ok[/]    ' if holds else '[red]FAILED[/]'} {claim}")
    console.rule("a training step on this machine")
    console.print(measured(), markup=False, soft_wrap=True)
    took = time.monotonic() - began
    console.print(f"{took:.0f} s; checkpoints and logs: {work}", soft_wrap=True)
    console.print(f"its plot, in float16: {metrics.plot(half)}", soft_wrap=True)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
