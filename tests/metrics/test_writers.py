"""What writers write: on disk before a call returns, and once for each step."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from flax_amp import metrics

pytestmark = pytest.mark.once

NAN, INF = math.nan, math.inf
SCALARS = {"train/loss": jnp.float32(0.1), "bad": NAN, "n": np.int32(3)}


def log(folder, steps, first_step=None, **options):
    options = {"terminal": False} | options
    with metrics.create_writer(folder, first_step=first_step, **options) as writer:
        for step in steps:
            writer.write_scalars(step, {"loss": float(step), "scale": 2.0})


def events(folder):
    """The events on disk, file by file, decoded by hand."""
    for path in sorted(Path(folder).glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]


def shown(folder):
    """What TensorBoard shows: the events of a restarted run hide the earlier ones."""
    seen = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            seen = [x for x in seen if x[1] < event.step]
        seen += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return [x for x in seen if x[0] == "loss"]


def test_tensorboard_and_json_lines_have_what_was_written(tmp_path):
    with metrics.create_writer(tmp_path, terminal=False) as writer:
        writer.write_hparams({"rate": 0.1, "inner": {"clip": INF, "sizes": (1, NAN)}})
        writer.write_scalars(50, SCALARS)
        writer.write_texts(50, {"note": "**hello**"})
        arrays = {"w": jnp.arange(9.0), "none": np.array([NAN, INF])}
        writer.write_histograms(50, arrays)
        writer.write_videos(50, {})  # nobody shows these
        writer.flush()
        on_disk = list(events(tmp_path))  # before it is closed
    values = {v.tag: v for event in on_disk for v in event.summary.value}
    assert values["train/loss"].simple_value == np.float32(0.1)
    assert math.isnan(values["bad"].simple_value)
    assert b"**hello**" in values["note/text_summary"].tensor.string_val[0]
    assert b"rate | 0.1" in values["hparams/text_summary"].tensor.string_val[0]
    assert values["w"].histo.num == 9 and "none" not in values

    text = (tmp_path / "metrics.jsonl").read_text()
    first, second = (
        json.loads(x, parse_constant=pytest.fail) for x in text.splitlines()
    )
    inner = {"clip": None, "sizes": [1, None]}
    assert first == {"hparams": {"rate": 0.1, "inner": inner}}
    assert second.pop("wall_time") > 1e9
    assert list(second.items()) == [
        ("step", 50),
        ("train/loss", 0.1),
        ("bad", None),
        ("n", 3),
    ]
    read = metrics.read(tmp_path)
    assert math.isnan(read.pop("bad")[0][1])
    assert read == {"train/loss": [(50, 0.1)], "n": [(50, 3)]}


@pytest.mark.parametrize("resumed_at", [1, 5, 8, 20])
def test_a_resumed_run_shows_no_step_twice(tmp_path, resumed_at):
    log(tmp_path, range(1, 8))
    new = range(resumed_at, resumed_at + 3)
    log(tmp_path, new, first_step=resumed_at)  # in the same second: its own file
    expected = [*range(1, min(8, resumed_at)), *new]
    assert [step for _, step, _ in shown(tmp_path)] == expected
    assert [step for step, _ in metrics.read(tmp_path)["loss"]] == expected
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(expected)
    assert len(list(tmp_path.glob("events.*"))) == 2


def test_a_line_that_a_kill_has_cut_is_skipped_and_removed(tmp_path):
    log(tmp_path, [1, 2], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for end in range(len(whole.splitlines(True)[0]), len(whole)):
        path.write_bytes(whole[:end])
        assert metrics.read(path)["loss"] == [(1, 1.0)], end
    path.write_bytes(whole[:-5] + b"\xc3")  # half of a character
    log(tmp_path, [3], tensorboard=False)
    assert metrics.read(tmp_path)["loss"] == [(1, 1.0), (3, 3.0)]


KILLED = """
import os, signal, sys
import flax_amp
flax_amp.metrics
print(*sys.modules, flush=True)
writer = flax_amp.metrics.create_writer(sys.argv[1])
for step in range(1, 101):
    writer.write_scalars(step, {"loss": step, "scale": 2.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_loses_nothing(tmp_path):
    """And the package imported nothing of what its writers need."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == -9, result.stderr
    assert metrics.read(tmp_path)["loss"] == [(i, i) for i in range(1, 101)]
    assert [step for _, step, _ in shown(tmp_path)][-1] == 100
    imported, *lines = result.stdout.splitlines()
    assert not {"clu", "tensorboardX", "matplotlib"} & set(imported.split())
    assert len(lines) == 100
    assert lines[0] == "step 1  loss 1  scale 2" and "steps/s  loss 100" in lines[-1]


WITHOUT = """
import sys
sys.modules |= dict.fromkeys(["clu", "tensorboardX", "matplotlib"])
import flax_amp
from flax_amp import metrics
flax_amp.AmpTrainState, metrics.trained_norms
for use, extra in [
    (lambda: metrics.StepMetrics, "logs"),
    (lambda: metrics.create_writer(sys.argv[1]), "logs"),
    (lambda: metrics.plot(sys.argv[1]), "plot"),
]:
    try:
        use()
    except ImportError as error:
        assert f"pip install '.[{extra}]'" in str(error), error
    else:
        raise AssertionError(extra)
with metrics.create_writer(sys.argv[1], tensorboard=False) as writer:
    writer.write_scalars(1, {"loss": 1.0})
print(metrics.read(sys.argv[1]))
"""


def test_without_what_the_extras_install(tmp_path):
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "{'loss': [(1, 1.0)]}" in done.stdout


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([300, 100, 200], [100, 200, 300]),
        ([1, 2, 3, 2], [1, 2]),  # resumed
        ([1, 2, 3, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_steps_in_any_order(tmp_path, written, expected):
    """Without a first step nothing is dropped, and the later value counts."""
    with metrics.JsonlWriter(tmp_path) as writer:
        writer.write_scalars(written[0], {"y": 1.0})
        for i, step in enumerate(written):
            writer.write_scalars(step, {"x": i})
    last = {step: i for i, step in enumerate(written)}
    found = metrics.read(tmp_path)
    assert found["x"] == [(step, last[step]) for step in expected]
    assert found["y"] == [(written[0], 1.0)]


def test_a_file_is_replaced_at_once_if_lines_are_dropped(tmp_path, monkeypatch):
    log(tmp_path, [1, 2, 3], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()

    def fail(*args):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="killed"):
            log(tmp_path, [2], first_step=2, tensorboard=False)
        metrics.JsonlWriter(tmp_path, first_step=4).close()
    assert path.read_bytes() == before
    log(tmp_path, [2], first_step=2, tensorboard=False)
    assert metrics.read(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


class Other:
    """A writer of clu, or a run of Weights & Biases; every call is remembered."""

    def __init__(self, fails=False):
        self.calls, self.config, self.fails = [], {}, fails

    def write_scalars(self, step, scalars):
        self.calls.append((step, scalars))

    def write_hparams(self, hparams):
        self.config.update(hparams)

    def write_images(self, step, images):
        self.calls.append((step, images))

    def close(self):
        self.calls.append("closed")
        if self.fails:
            raise OSError("no network")


class Run:
    def __init__(self):
        self.calls, self.config = [], {}

    def log(self, scalars, step):
        self.calls.append((step, scalars))

    def finish(self):
        self.calls.append("closed")


def test_writers_of_clu_and_runs_of_wandb_drop_in(tmp_path):
    theirs, run = Other(), Run()
    options = dict(terminal=False, writers=[theirs, run])
    with metrics.create_writer(tmp_path, **options) as writer:
        writer.write_hparams({"a": 1})
        writer.write_scalars(jnp.int32(5), {"loss": jnp.float32(0.5), "a": np.ones(1)})
        writer.write_images(5, {})
    first = (5, {"loss": 0.5, "a": 1.0})
    assert theirs.calls == [first, (5, {}), "closed"]
    assert type(theirs.calls[0][1]["loss"]) is float
    assert run.calls == [first, "closed"]
    assert run.config == theirs.config == {"a": 1}


def test_closing(tmp_path):
    """One that fails does not keep the others open; a second time does nothing."""
    first, second = Other(), Other(fails=True)
    writer = metrics.create_writer(tmp_path, writers=[first, second, first])
    with pytest.raises(OSError, match="no network"):
        writer.close()
    writer.close()
    assert first.calls == ["closed", "closed"]
    for write in (
        lambda: writer.write_scalars(2, {}),
        lambda: writer.write_texts(1, {}),
    ):
        with pytest.raises(ValueError, match="the writer is closed; expected an open"):
            write()


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log(tmp_path, [1], writers=[Other()])
    assert not list(tmp_path.iterdir())


BAD = {
    "string": (1, {"b": "x"}, ValueError, "'b' is .*'x'.*; expected one real number"),
    "complex": (1, {"b": 1j}, ValueError, "'b' is .*; expected one real number"),
    "None": (1, {"b": None}, ValueError, "'b' is None; expected one real number"),
    "array": (1, {"b": np.ones(2)}, ValueError, r"'b' is .*; expected one real num"),
    "key": (1, {1: 1.0}, ValueError, "a scalar is named 1; expected a string"),
    "step": (1, {"step": 1}, ValueError, "named 'step'; .*adds to each line"),
    "no name": (1, {"": 1}, ValueError, "is named ''; expected a string"),
    "2.5": (2.5, {}, TypeError, "the step is 2.5; expected an integer"),
    "text": ("4", {}, TypeError, "the step is '4'; expected an integer"),
    "True": (True, {}, TypeError, "the step is True; expected an integer"),
    "no step": (None, {}, TypeError, "the step is None; expected an integer"),
}


def test_nothing_is_written_of_what_is_wrong(tmp_path):
    more = Other()
    with metrics.create_writer(tmp_path, writers=[more]) as writer:
        before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        for step, scalars, error, message in BAD.values():
            with pytest.raises(error, match=message):
                writer.write_scalars(step, {"a": 1.0, **scalars})
        after = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        assert after == before and not more.calls
    with pytest.raises(TypeError, match="the step is 2.5; expected an integer"):
        metrics.create_writer(tmp_path, first_step=2.5)


def test_a_log_of_others(tmp_path):
    """Texts as steps, or as values, in a file that something else has written."""
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "loss": null, "ok": true}\n{"hparams": {"name": "x"}}\n'
    for line, name in (('"step": "4"', "step"), ('"step": 2, "loss": "x"', "loss")):
        path.write_text(f"{good}{{{line}}}\n")
        for call in (
            lambda: metrics.read(tmp_path),
            lambda: metrics.plot(tmp_path),
            lambda: metrics.JsonlWriter(tmp_path, first_step=2),
        ):
            message = f"jsonl:3: '{name}' is .*; expected a numb"
            with pytest.raises(ValueError, match=message):
                call()
    path.write_text(good)
    assert set(metrics.read(tmp_path)) == {"loss", "ok"}
    with pytest.raises(FileNotFoundError, match="nothing"):
        metrics.read(tmp_path / "nothing")
