"""Writers: several at once, runs killed and resumed, and what is given wrongly."""

import importlib.util
import inspect
import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import clu
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog

from flax_amp import metrics

pytestmark = pytest.mark.once

NAN, INF = math.nan, math.inf
SCALARS = {"train/loss": jnp.float32(0.1), "bad": jnp.float32(NAN), "n": 3}


def events(logdir):
    """All events in `logdir`, file by file; every checksum is checked."""
    for path in sorted(Path(logdir).glob("events.out.tfevents.*")):
        content, start = path.read_bytes(), 0
        while start < len(content):  # length, its CRC, the event, its CRC
            (length,) = struct.unpack_from("<Q", content, start)
            for first, size in ((start, 8), (start + 12, length)):
                (crc,) = struct.unpack_from("<I", content, first + size)
                found = crc32c(content[first : first + size])
                assert crc == (((found >> 15) | (found << 17)) + 0xA282EAD8) % 2**32
            yield Event.FromString(content[start + 12 :][:length])
            start += 12 + length + 4


def shown(logdir):
    """`[(tag, step, value)]` that TensorBoard shows: it obeys a START of a session."""
    found = []
    for event in events(logdir):
        if event.session_log.status == SessionLog.START:
            found = [entry for entry in found if entry[1] < event.step]
        for value in event.summary.value:
            found.append((value.tag, event.step, value.simple_value))
    return found


def log(logdir, steps, **options):
    with metrics.create_writer(logdir, terminal=False, **options) as writer:
        for step in steps:
            writer.write_scalars(step, {"loss": float(step)})


def clu_interface():
    """clu's own class, whose package would import TensorFlow."""
    path = Path(clu.__path__[0]) / "metric_writers/interface.py"
    spec = importlib.util.spec_from_file_location("clu_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MetricWriter


def test_the_methods_are_those_of_clu():
    theirs = clu_interface()
    for name in theirs.__abstractmethods__:
        expected = inspect.signature(getattr(theirs, name)).parameters
        ours = inspect.signature(getattr(metrics.MetricWriter, name)).parameters
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]
        assert getattr(metrics.MultiWriter, name) != getattr(metrics.MetricWriter, name)


def test_tensorboard_and_json_lines_have_what_was_written(tmp_path):
    with metrics.create_writer(tmp_path, terminal=False) as writer:
        writer.write_hparams({"rate": 0.1, "inner": {"clip": INF, "sizes": (1, NAN)}})
        writer.write_scalars(50, SCALARS)
        writer.write_texts(50, {"note": "**hello**"})
        writer.write_images(
            50, {"one": np.zeros((4, 4, 3)), "n": np.ones((2, 4, 4, 1))}
        )
        writer.write_histograms(50, {"w": jnp.arange(9.0)}, num_buckets={"w": 3})
        writer.write_audios(50, {}, sample_rate=1)  # nobody shows these
        writer.write_videos(50, {})
        writer.write_summaries(50, {})
        writer.flush()
        on_disk = list(events(tmp_path))  # before it is closed
    values = {v.tag: v for event in on_disk for v in event.summary.value}
    assert on_disk[0].file_version == "brain.Event:2"
    assert {event.step for event in on_disk[2:]} == {50}
    assert values["train/loss"].simple_value == np.float32(0.1)
    assert math.isnan(values["bad"].simple_value)
    assert b"**hello**" in values["note/text_summary"].tensor.string_val[0]
    assert b"rate | 0.1" in values["hparams/text_summary"].tensor.string_val[0]
    assert values["one"].image.width == 4 and values["w"].histo.num == 9

    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    first, second = (json.loads(x, parse_constant=fail) for x in text.splitlines())
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


def test_the_stock_tensorboard_reads_it(tmp_path):
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name).EventAccumulator(str(tmp_path))
    log(tmp_path, range(1, 8))
    log(tmp_path, range(5, 10), first_step=5)
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("loss")] == list(range(1, 10))


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
    assert result.returncode == -9
    assert metrics.read(tmp_path)["loss"] == [(i, i) for i in range(1, 101)]
    assert [step for tag, step, _ in shown(tmp_path) if tag == "loss"][-1] == 100
    imported = result.stdout.partition("\n")[0].split()
    assert not {"clu", "tensorboardX", "matplotlib", "rich.live"} & set(imported)


@pytest.mark.parametrize("first_step", [None, 2, 1])
def test_writers_share_a_folder(tmp_path, first_step):
    options = dict(terminal=False, tensorboard=False)
    with metrics.create_writer(tmp_path, **options) as a:
        a.write_scalars(1, {"x": 1.0})
        with metrics.create_writer(tmp_path, first_step=first_step, **options) as b:
            b.write_scalars(1, {"eval": 2.0})
        a.write_scalars(2, {"x": 1.0})
    steps = [step for step, _ in metrics.read(tmp_path)["x"]]
    assert steps == ([2] if first_step == 1 else [1, 2])
    assert metrics.read(tmp_path)["eval"] == [(1, 2.0)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([300, 100, 200], [100, 200, 300]),
        ([1, 2, 3, 2], [1, 2]),  # resumed
        ([1, 2, 3, 2, 3, 4], [1, 2, 3, 4]),
        ([5, 5], [5]),
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
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(written)


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
        path.write_bytes(before + b'{"step": 4, "x"')  # cut by a kill
        for first_step in (None, 4):
            metrics.JsonlWriter(tmp_path, first_step=first_step).close()
    assert path.read_bytes() == before
    log(tmp_path, [2], first_step=2, tensorboard=False)
    assert metrics.read(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


class CluLike(clu_interface()):
    """A writer of clu; every call is remembered."""

    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def close(self):
        self.calls.append(("close",))
        if self.fails:
            raise OSError("no network")


for _name in CluLike.__abstractmethods__:

    def _method(self, *args, _name=_name, **kwargs):
        self.calls.append((_name, *args, *kwargs.values()))

    setattr(CluLike, _name, _method)
CluLike.__abstractmethods__ = frozenset()


class Run:
    """Like a run of Weights & Biases."""

    def __init__(self):
        self.calls, self.config = [], {}

    def log(self, scalars, step):
        self.calls.append((step, scalars))

    def finish(self):
        self.calls.append("finish")


def test_writers_of_clu_and_runs_of_wandb_drop_in(tmp_path):
    theirs, run = CluLike(), Run()
    options = dict(terminal=False, writers=[theirs, run])
    with metrics.create_writer(tmp_path, **options) as writer:
        writer.write_hparams({"a": 1})
        writer.write_scalars(jnp.int32(5), {"loss": jnp.float32(0.5), "a": np.ones(1)})
        writer.write_texts(5, {"note": "x"})
    assert theirs.calls == [
        ("write_hparams", {"a": 1}),
        ("write_scalars", 5, {"loss": 0.5, "a": 1.0}),
        ("write_texts", 5, {"note": "x"}),
        ("close",),
    ]
    assert type(theirs.calls[1][2]["loss"]) is float
    assert run.calls == [(5, {"loss": 0.5, "a": 1.0}), "finish"]
    assert run.config == {"a": 1}


def test_one_that_fails_to_close_does_not_keep_the_others_open():
    first, second = CluLike(), CluLike(fails=True)
    writer = metrics.MultiWriter([first, second, first])
    with pytest.raises(OSError, match="no network"):
        writer.close()
    assert len(first.calls) == 2


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log(tmp_path, [1], writers=[CluLike()])
    assert not list(tmp_path.iterdir())


def test_messages(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match=r"got a int as a writer; expected an object"):
        metrics.create_writer(tmp_path, writers=[3])
    with (
        metrics.JsonlWriter(tmp_path) as writer,
        pytest.raises(ValueError, match=r"'x' has the shape \(2,\); expected a scalar"),
    ):
        writer.write_scalars(1, {"x": jnp.ones(2)})
    with pytest.raises(FileNotFoundError, match=r"nothing.* does not exist; expected"):
        metrics.read(tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "flax_amp.metrics._tensorboard", raising=False)
    with pytest.raises(
        ImportError, match=r"is not installed; expected.*pip install te"
    ):
        metrics.create_writer(tmp_path)
    metrics.create_writer(tmp_path, tensorboard=False, terminal=False).close()


# What is given wrongly

MAKERS = {
    "all": lambda path, more: metrics.create_writer(path, writers=[more]),
    "tensorboard": lambda path, more: metrics.TensorBoardWriter(path),
    "jsonl": lambda path, more: metrics.JsonlWriter(path),
    "terminal": lambda path, more: metrics.TerminalWriter(
        console=Console(file=io.StringIO())
    ),
}


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


BAD = {
    "string": (1, {"b": "x"}, TypeError, "'b' is 'x'; expected a real number"),
    "complex": (1, {"b": 1j}, TypeError, "'b' is 1j; expected a real number"),
    "None": (1, {"b": None}, TypeError, "'b' is None; expected a real number"),
    "dict": (1, {"b": {"c": 1}}, TypeError, "expected a real number"),
    "array": (1, {"b": np.ones(2)}, ValueError, r"has the shape \(2,\); expected a sc"),
    "key": (1, {1: 1.0}, TypeError, "1 is the name of a scalar; expected a string"),
    "step": (1, {"step": 1}, ValueError, "named 'step', which.*another name. Rename"),
    "time": (1, {"wall_time": 1}, ValueError, "a scalar is named 'wall_time'"),
    "lines": (1, {"a\nb": 1}, ValueError, r"'a\\nb'; expected.*without line breaks"),
    "no name": (1, {"": 1}, ValueError, "is named ''; expected a non-empty string"),
    "2.5": (2.5, {}, TypeError, "step is 2.5; expected an integer"),
    "3.0": (3.0, {}, TypeError, "step is 3.0; expected an integer"),
    "text": ("4", {}, TypeError, "step is '4'; expected an integer"),
    "True": (True, {}, TypeError, "step is True; expected an integer"),
    "array bool": (jnp.bool_(1), {}, TypeError, "expected an integer"),
    "no step": (None, {}, TypeError, "step is None; expected an integer"),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_written_of_what_is_wrong(tmp_path, maker):
    more = CluLike()
    with MAKERS[maker](tmp_path, more) as writer:
        before = sizes(tmp_path)
        for step, scalars, error, message in BAD.values():
            with pytest.raises(error, match=message):
                writer.write_scalars(step, {"a": 1.0, **scalars})
        assert sizes(tmp_path) == before and not more.calls


@pytest.mark.parametrize("make", [metrics.create_writer, metrics.JsonlWriter])
def test_a_first_step_is_an_integer(tmp_path, make):
    with metrics.JsonlWriter(tmp_path) as writer:
        writer.write_scalars(1, {"x": 1.0})
    for step in (2.5, 3.0, "4", True):
        with pytest.raises(TypeError, match="first_step is .*; expected an integer"):
            make(tmp_path, first_step=step)
    assert metrics.read(tmp_path)["x"] == [(1, 1.0)]


def test_a_log_of_others(tmp_path):
    """Texts as steps, or as values, in a file that something else has written."""
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "loss": null, "ok": true}\n{"hparams": {"name": "x"}}\n'
    for line in (
        '"step": "4"',
        '"step": null, "loss": "x"',
        '"step": [1], "loss": 1.0',
    ):
        path.write_text(f"{good}{{{line}}}\n")
        for call in (
            lambda: metrics.read(tmp_path),
            lambda: metrics.plot(tmp_path),
            lambda: metrics.JsonlWriter(tmp_path, first_step=2),
        ):
            message = r"jsonl:3: 'step' is .*; expected a numb"
            with pytest.raises(ValueError, match=message):
                call()
    path.write_text(good + '{"step": 2, "loss": "x"}\n')
    with pytest.raises(ValueError, match="jsonl:3: 'loss' is 'x'; expected a number"):
        metrics.plot(tmp_path)
    path.write_text(good)
    assert set(metrics.read(tmp_path)) == {"loss", "ok"}


@pytest.mark.parametrize("maker", MAKERS)
def test_closed_twice_and_written_to_afterwards(tmp_path, maker):
    more = CluLike()
    writer = MAKERS[maker](tmp_path, more)
    writer.write_scalars(1, {"a": 1.0})
    writer.close()
    writer.close()
    before = sizes(tmp_path)
    calls = [lambda: writer.write_scalars(2, {"a": 1.0})]
    if maker == "all":
        calls += [lambda: writer.write_hparams({}), lambda: writer.write_texts(1, {})]
        calls += [writer.flush]
    for call in calls:
        with pytest.raises(ValueError, match="the writer is closed; expected an open"):
            call()
    assert sizes(tmp_path) == before
    assert more.calls in ([], [("write_scalars", 1, {"a": 1.0}), ("close",)])


def test_numbers_of_all_kinds(tmp_path):
    given = {"bf16": jnp.bfloat16(0.5), "f8": ml_dtypes.float8_e4m3fn(2), "ok": True}
    given |= {"f32": np.float32(0.1), "n": jnp.uint8(3), "hparams": np.ones(1)}
    with metrics.create_writer(tmp_path, terminal=False) as writer:
        writer.write_hparams({"a": 1})
        for step in (1, np.int64(2), jnp.int32(3)):
            writer.write_scalars(step, given)
    expected = dict(bf16=0.5, f8=2.0, ok=1, f32=0.1, n=3, hparams=1.0)
    found = metrics.read(tmp_path)
    assert found == {k: [(i, v) for i in (1, 2, 3)] for k, v in expected.items()}


@pytest.mark.parametrize("values", [[], [NAN], [NAN, INF, 1.0], [1e39, 0.0]])
def test_histograms_show_what_is_finite(tmp_path, values):
    with metrics.TensorBoardWriter(tmp_path) as writer:
        before = sizes(tmp_path)
        writer.write_histograms(3, {"h": np.array(values)})
        has_any = bool(np.isfinite(values).any())
        assert (sizes(tmp_path) != before) == has_any
        writer.write_histograms(4, {"h": jnp.ones(3, jnp.bfloat16)})
