"""The examples of one file each; most run in the process of the tests."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns what an example prints, with other settings if they are given."""

    def printed(name, **settings):
        module = importlib.import_module(f"examples.{name}")
        for setting, value in settings.items():
            monkeypatch.setattr(module, setting, value)
        module.main()
        return capsys.readouterr().out

    return printed


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


def test_nnx_finetune(run):
    text = run("nnx_finetune")
    trained, negatives, adapted = numbers(r"accuracy ([\d.]+)%", text)
    assert trained > 95 > adapted > 80 > negatives
    assert "2048 of 24010" in text and "kept their bits" in text


def test_linen_sequences(run):
    text = run("linen_sequences")
    plain, averaged = numbers(r"([\d.]+)%", text)
    assert plain > 94 and averaged > 96
    assert f"{299 * 64} examples used, 1 steps skipped" in text


def test_accumulate(run):
    text = run("accumulate", UPDATES=1)
    rows = re.findall(r"(\d+) +(\d+) +([\d.]+) +(\S+)$", text, re.MULTILINE)
    steps, skipped, memory, distance = zip(*rows, strict=True)
    assert steps == ("1", "1", "8", "2")
    assert set(skipped) == {"0"}
    assert all(float(other) < float(memory[0]) / 4 for other in memory[1:])
    assert all(float(other) < 1e-3 for other in distance)


def test_sweep(run):
    peaks = np.geomspace(1e-5, 1.0, 4, dtype=np.float32)
    text = run("sweep", PEAKS=peaks)
    pattern = r"^ +(\S+) +([\d.]+) +([\d.]+)% +\d+(.*)$"
    *columns, marks = zip(*re.findall(pattern, text, re.MULTILINE), strict=True)
    rates, losses, accuracies = (list(map(float, column)) for column in columns)
    (best,) = (index for index, mark in enumerate(marks) if "lowest loss" in mark)
    assert losses[best] == min(losses)
    assert float(re.search(r"best: (\S+), by the loss", text)[1]) == rates[best]
    assert len(rates) == 4 and rates == sorted(rates)
    assert max(accuracies) > 97 and min(accuracies) < 20
    assert losses[0] > 2 > 0.1 > min(losses) and "compiled once" in text


def test_sharded():
    command = [sys.executable, "-m", "examples.sharded"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    rows = re.findall(r"([\d.]+) +(\d+) +(\S+)$", text, re.MULTILINE)
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


class Processes(subprocess.Popen):
    """`examples.processes`, which saves every five steps and logs each."""

    def __init__(self, workdir, steps):
        flags = [f"--workdir={workdir}", f"--steps={steps}", "--save-every=5"]
        super().__init__(
            [sys.executable, "-m", "examples.processes", *flags, "--log-every=1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def test_processes_end_on_sigterm_and_resume_to_the_bit(tmp_path):
    """SIGTERM ends a run, which saves first; another run is killed at that many steps.

    The second one, resumed, ends with the same bits as the first.
    """
    ended = ""
    with Processes(tmp_path / "straight", 100_000) as launcher:
        for line in launcher.stdout:
            ended += line
            if line.startswith("step 12 "):
                launcher.terminate()
        assert launcher.wait(timeout=60) == 0
    last = int(numbers(r"^step (\d+)", ended)[-1])
    assert max(saved(tmp_path / "straight")) == last < 100_000

    pids = {}
    with Processes(tmp_path / "broken", last) as launcher:
        for line in launcher.stdout:
            if found := re.search(r"process (\d) has pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
            if 5 in saved(tmp_path / "broken") and line.startswith("step "):
                os.kill(pids[1], signal.SIGKILL)
                break
        launcher.stdout.read()
        assert launcher.wait(timeout=60) != 0
    for pid in pids.values():  # the other one did not outlive it
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    with Processes(tmp_path / "broken", last) as launcher:
        resumed = launcher.stdout.read()
    assert launcher.returncode == 0
    assert numbers(r"^resumed at step (\d+)", resumed)[0] in (5, 10)
    assert ends(resumed) == ends(ended)


def saved(workdir):
    """The steps of complete checkpoints: one being written has a longer name."""
    found = workdir.glob("checkpoints/*")
    return [int(path.name) for path in found if path.name.isdigit()]
