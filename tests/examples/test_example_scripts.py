"""The examples of one file each, run as a user runs them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import optimizing_environment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def command(name, *flags):
    return [sys.executable, "-m", f"examples.{name}", *flags]


def run(name, *flags, env=None):
    """Returns what an example prints."""
    result = subprocess.run(
        command(name, *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


def test_nnx_finetune():
    text = run("nnx_finetune", "--keep-optimizer")  # `train` and `train_in_place`
    trained, negatives, adapted = numbers(r"accuracy ([\d.]+)%", text)
    assert trained > 95 > adapted > 80 > negatives
    assert "2048 of 24010" in text and "kept their bits" in text


def test_linen_sequences():
    text = run("linen_sequences")
    plain, averaged = numbers(r"([\d.]+)%", text)
    assert plain > 94 and averaged > 96
    assert f"{299 * 64} examples used, 1 steps skipped" in text


def test_accumulate():
    text = run("accumulate", env=optimizing_environment())
    rows = re.findall(r"(\d+) +(\d+) +([\d.]+) +(\S+)$", text, re.MULTILINE)
    steps, skipped, memory, distance = zip(*rows, strict=True)
    assert steps == ("10", "10", "80", "20")
    assert set(skipped) == {"0"}
    assert all(float(other) < float(memory[0]) / 4 for other in memory[1:])
    assert all(float(other) < 1e-3 for other in distance)


def test_sweep(tmp_path):
    text = run("sweep", "--plot", str(tmp_path / "sweep.svg"))
    pattern = r"^ +(\S+) +([\d.]+) +([\d.]+)% +\d+(.*)$"
    *columns, marks = zip(*re.findall(pattern, text, re.MULTILINE), strict=True)
    rates, losses, accuracies = (list(map(float, column)) for column in columns)
    (best,) = (index for index, mark in enumerate(marks) if "lowest loss" in mark)
    assert losses[best] == min(losses)
    assert float(re.search(r"best: (\S+), by the loss", text)[1]) == rates[best]
    assert len(rates) == 16 and rates == sorted(rates)
    assert max(accuracies) > 97 and min(accuracies) < 20
    assert losses[0] > 2 > 0.1 > min(losses) and "compiled once" in text
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


def test_sharded():
    rows = re.findall(r"([\d.]+) +(\d+) +(\S+)$", run("sharded"), re.MULTILINE)
    losses, held, distances = zip(*rows, strict=True)
    assert len(rows) == 5
    assert all(abs(float(loss) - float(losses[0])) < 1e-3 for loss in losses)
    one, data_parallel, fsdp, tensor, shard_map = map(int, held)
    assert one == data_parallel == shard_map > 3 * tensor > 6 * fsdp
    assert all(float(distance) < 2e-3 for distance in distances)


def ends(text):
    """The fingerprints of what the processes hold in the end."""
    found = dict(re.findall(r"process (\d) ends with (\w{64})", text))
    assert set(found) == {"0", "1"} and found["0"] != found["1"], text
    told = text.index("SHA-256 of its own part of the state")
    assert told < text.index("ends with " + found["0"])
    return found


FLAGS = ("--steps=40", "--save-every=10", "--log-every=1")


def test_processes_killed_and_resumed_are_bit_identical(tmp_path):
    straight = run("processes", f"--workdir={tmp_path}/straight", *FLAGS)
    broken = command("processes", f"--workdir={tmp_path}/broken", *FLAGS)
    pids = {}
    with subprocess.Popen(
        broken, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        for line in launcher.stdout:
            if found := re.search(r"process (\d) has pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
            saved = sorted(int(p.name) for p in numbered(tmp_path / "broken"))
            if saved and line.startswith(f"step {saved[-1] + 5} "):
                os.kill(pids[1], signal.SIGKILL)
        assert launcher.wait(timeout=60) != 0
    for pid in pids.values():  # the other one did not outlive it
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    resumed = run("processes", f"--workdir={tmp_path}/broken", *FLAGS)
    assert numbers(r"^resumed at step (\d+)", resumed)[0] in (10, 20, 30)
    assert ends(resumed) == ends(straight)


def test_processes_save_and_end_on_sigterm(tmp_path):
    flags = ("--steps=100000", "--save-every=100000", "--log-every=1")
    with subprocess.Popen(
        command("processes", f"--workdir={tmp_path}", *flags),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        for line in launcher.stdout:
            if line.startswith("step 5 "):
                launcher.terminate()
            if found := re.match(r"step (\d+)", line):
                last = int(found[1])
        assert launcher.wait(timeout=60) == 0
    assert max(int(path.name) for path in numbered(tmp_path)) == last < 100000


def numbered(workdir):
    """The complete checkpoints: one being written has a longer name."""
    return [path for path in workdir.glob("checkpoints/*") if path.name.isdigit()]
