"""The terminal: a live line with the time that is left, and lines in a file."""

import io
import time

import pytest
from rich.console import Console

from flax_amp import metrics

pytestmark = pytest.mark.once

SCALARS = {"train/loss": 0.25, "train/scale": 32768.0, "train/hyperparams/b1": 0.9}


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets time pass."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_a_file_gets_lines_with_speed_and_time_left(clock):
    file = io.StringIO()
    console = Console(file=file, highlight=False, width=40)  # lines are not broken
    with metrics.TerminalWriter(
        first_step=101, total_steps=1000, console=console
    ) as writer:
        for step in (200, 300, 1000):
            clock(10)
            writer.write_scalars(step, SCALARS)
        writer.write_scalars(1000, {"test/[b]acc": float("nan"), "plain": 1e-7})
    assert file.getvalue().splitlines() == [
        "step  200/1000  10 steps/s  ETA 0:01:20  train: loss 0.25  scale 32768",
        "step  300/1000  10 steps/s  ETA 0:01:10  train: loss 0.25  scale 32768",
        "step 1000/1000  30 steps/s  train: loss 0.25  scale 32768",
        "step 1000/1000  30 steps/s  test: [b]acc nan  plain 1e-07",
    ]


def test_a_file_gets_lines_without_a_total(clock):
    file = io.StringIO()
    writer = metrics.TerminalWriter(console=Console(file=file, highlight=False))
    writer.write_scalars(5, {"loss": 1.0})
    clock(2)
    writer.write_scalars(6, {"loss": 12345.678})
    writer.close()
    lines = ["step 5  loss 1", "step 6  0.5 steps/s  loss 1.235e+04"]
    assert file.getvalue().splitlines() == lines


def test_the_speed_is_that_of_the_last_calls(clock):
    file = io.StringIO()
    writer = metrics.TerminalWriter(
        first_step=1, console=Console(file=file, highlight=False)
    )
    clock(600)  # the first step compiles
    for step in range(1, 6):
        writer.write_scalars(step, {})
        clock(0.5)
    assert file.getvalue().splitlines()[-1] == "step 5  2 steps/s"


def test_a_terminal_shows_the_last_metrics_of_each_group(clock):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    writer = metrics.TerminalWriter(first_step=1, total_steps=100, console=console)
    for step in (10, 20):
        clock(10)
        writer.write_scalars(step, {"train/loss": 1 / step})
        writer.write_scalars(step, {"test/loss": 2 / step})
    console.print("of somebody else")
    clock(30)  # the time left goes on while nothing is written
    writer.close()
    writer.close()
    *above, bar, train, test, end = file.getvalue().splitlines()
    assert "step  20/100" in bar and "1 steps/s  ETA 0:00:50" in bar and "━" in bar
    assert "ETA 0:01:20" in "".join(above) and "of somebody else" in "".join(above)
    assert train.endswith("train: loss 0.05") and "test: loss 0.1" in test
    assert "\x1b[?25l" in file.getvalue() and end == "\x1b[?25h"  # the cursor is back


def test_nothing_is_drawn_or_left_open_without_metrics():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)
    metrics.TerminalWriter(total_steps=10, console=console).close()
    assert file.getvalue() == ""
