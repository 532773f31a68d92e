"""What is logged: on disk before a call returns, once for each step, and drawn."""

import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from flax_amp import __main__, metrics

pytestmark = pytest.mark.once

NAN, INF = math.nan, math.inf
ROOT = Path(__file__).parents[2]


def log(folder, steps, scalars=None, **options):
    options = {"terminal": False, "tensorboard": False} | options
    with metrics.create_writer(folder, **options) as writer:
        for step in steps:
            writer.write_scalars(step, scalars or {"loss": float(step)})
    return folder


def shown(folder):
    """What TensorBoard shows: the events of a restarted run hide the earlier ones."""
    seen = []
    for path in sorted(Path(folder).glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.session_log.status == SessionLog.START:
                seen = [x for x in seen if x[1] < event.step]
            values = event.summary.value
            seen += [(v.tag, event.step, v.simple_value) for v in values]
    return seen


def test_every_place_has_what_was_written(tmp_path, capsys):
    scalars = {"train/loss": jnp.float32(0.1), "bad": NAN, "n": np.int32(3)}
    with metrics.create_writer(tmp_path, total_steps=90) as writer:
        writer.write_hparams({"rate": 0.1, "inner": {"clip": INF, "sizes": (1, NAN)}})
        writer.write_scalars(jnp.int32(50), scalars)
        writer.write_scalars(60, {"b": True, "half": jnp.bfloat16(0.5)})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        writer.write_images(50, {})  # which it cannot show
        writer.flush()
    first, second, _ = (json.loads(x, parse_constant=pytest.fail) for x in lines)
    inner = {"clip": None, "sizes": [1, None]}
    assert first == {"hparams": {"rate": 0.1, "inner": inner}}
    assert second.pop("wall_time") > 1e9
    assert [*second] == ["step", "train/loss", "bad", "n"] and second["bad"] is None
    read = metrics.read(tmp_path)
    assert math.isnan(read.pop("bad")[0][1])
    both = {"train/loss": [(50, 0.1)], "n": [(50, 3)], "b": [(60, 1)]}
    assert read == {**both, "half": [(60, 0.5)]}
    names = {name: (step, value) for name, step, value in shown(tmp_path)}
    assert names["train/loss"] == (50, np.float32(0.1)) and names["n"] == (50, 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "step 50/90  train/loss 0.1  bad nan  n 3"
    assert printed[1] == "step 60/90  b 1  half 0.5"


@pytest.mark.parametrize("resumed_at", [1, 5, 8, 20])
def test_a_resumed_run_shows_no_step_twice(tmp_path, resumed_at):
    log(tmp_path, range(1, 8), tensorboard=True)
    new = range(resumed_at, resumed_at + 3)
    log(tmp_path, new, first_step=resumed_at, tensorboard=True)  # in the same second
    expected = [*range(1, min(8, resumed_at)), *new]
    assert [step for _, step, _ in shown(tmp_path)] == expected
    assert [step for step, _ in metrics.read(tmp_path)["loss"]] == expected
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(expected)


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
    for i, step in enumerate(written):
        log(tmp_path, [step], {"x": i})
    last = {step: i for i, step in enumerate(written)}
    assert metrics.read(tmp_path)["x"] == [(step, last[step]) for step in expected]


def test_a_line_that_a_kill_has_cut_is_skipped_and_removed(tmp_path):
    path = log(tmp_path, [1, 2]) / "metrics.jsonl"
    whole = path.read_bytes()
    for end in range(len(whole.splitlines(True)[0]), len(whole)):
        path.write_bytes(whole[:end])
        assert metrics.read(path)["loss"] == [(1, 1.0)], end
    path.write_bytes(whole[:-5] + b"\xc3")  # half of a character
    log(tmp_path, [3])
    assert metrics.read(tmp_path)["loss"] == [(1, 1.0), (3, 3.0)]
    others = '[1]\n{"step": "4", "loss": 2}\n{"step": 5, "loss": "x", "ok": true}\n'
    path.write_text(others)  # of something else
    assert metrics.read(log(tmp_path, [])) == {"ok": [(5, True)]}
    assert path.read_text() == others.removeprefix("[1]\n")
    with pytest.raises(FileNotFoundError, match="nothing"):
        metrics.read(tmp_path / "nothing")


KILLED = """
import os, signal, sys
import flax_amp
flax_amp.metrics
print(*sys.modules, flush=True)
writer = flax_amp.metrics.create_writer(sys.argv[1])
for step in range(1, 101):
    writer.write_scalars(step, {"loss": step})
os.kill(os.getpid(), signal.SIGKILL)
"""
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(["clu", "tensorboardX", "matplotlib"])
import flax_amp
from flax_amp import metrics
flax_amp.AmpTrainState, metrics.read
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
"""


def run(program, folder):
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_killed_run_loses_nothing_and_extras_are_not_needed(tmp_path):
    killed = run(KILLED, tmp_path)
    assert killed.returncode == -9, killed.stderr
    assert metrics.read(tmp_path)["loss"] == [(i, i) for i in range(1, 101)]
    imported, *lines = killed.stdout.splitlines()
    assert not {"clu", "tensorboardX", "matplotlib"} & set(imported.split())
    assert len(lines) == 100 and "  loss 100" in lines[-1]
    done = run(WITHOUT, tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert metrics.read(tmp_path / "new") == {"loss": [(1, 1.0)]}


BAD = [
    (1, {"b": "x"}, ValueError, "'b' is .*'x'.*; expected one real number"),
    (1, {"b": 1j}, ValueError, "'b' is .*; expected one real number"),
    (1, {"b": None}, ValueError, "'b' is .*None.*; expected one real number"),
    (1, {"b": np.ones(2)}, ValueError, "'b' is .*; expected one real number"),
    (2.5, {}, TypeError, "float"),
    ("4", {}, TypeError, "str"),
]


def test_nothing_is_written_of_what_is_wrong_or_of_other_processes(
    tmp_path, monkeypatch
):
    with metrics.create_writer(tmp_path) as writer:
        for step, scalars, error, message in BAD:
            with pytest.raises(error, match=message):
                writer.write_scalars(step, {"a": 1.0, **scalars})
    assert metrics.read(tmp_path) == {} and not shown(tmp_path)
    with pytest.raises(AttributeError, match="MetricWriter has no 'wirte_scalars'"):
        writer.wirte_scalars(1, {})
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log(tmp_path / "second", [1])
    assert not (tmp_path / "second").exists()


# The picture of a run, in every situation that a run may be in


def step(i, rate=0.0, loss=None, **more):
    loss = 2.0 / i if loss is None else loss
    scale = 2.0**15 / 2 ** (i * rate)
    known = dict(loss=loss, scale=scale, grad_norm=1.0, learning_rate=1e-3)
    return i, {**known, "skip_rate": rate, "skipped_total": i * rate, **more}


def write(folder, steps, prefix="train/"):
    for number, scalars in steps:
        log(folder, [number], {prefix + k: v for k, v in scalars.items()})
    return folder


@pytest.fixture
def texts(tmp_path):
    """`texts(*runs)`: all the texts of the picture, from top to bottom."""

    def drawn(*runs):
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            path = metrics.plot(*runs, out=tmp_path / "plot.svg")
        found = re.findall(r"<text [^>]*>(.*?)</text>", path.read_text(), re.DOTALL)
        return ["".join(re.findall(r"(?:^|>)([^<]*)", text)) for text in found]

    return drawn


TITLES = ["loss", "loss scale", "gradient norm", "learning rate", "skip rate"]
RUNS = {  # what is logged, and texts that must be in the picture, and must not be
    "fine": ([step(i) for i in range(1, 9)], [], []),
    "many": ([step(i) for i in range(1, 60)], [], []),
    "skips": ([step(i, 0.5 * (i % 2)) for i in range(1, 9)], [], []),
    "all": ([step(i, 1.0, NAN) for i in range(1, 9)], [], []),
    "one": ([step(50)], ["50"], []),
    "one skipped": ([step(1, 1.0, NAN)], [], []),
    "NaN between": ([step(i, loss=NAN if i % 2 else 1.0) for i in range(9)], [], []),
    "zero": ([step(i, loss=0.0, scale=0.0) for i in range(9)], [], []),
    "negative": ([step(i, loss=-1.0 * i) for i in range(9)], [], []),
    "bfloat16": ([step(i, scale=1.0) for i in range(1, 9)], [], ["loss scale"]),
    "a loss alone": ([(1, {"loss": 1.0}), (2, {"accuracy": 0.5})], [], TITLES[1:]),
    "huge": ([step(i, loss=10.0**i, scale=2.0 ** (90 - i)) for i in range(9)], [], []),
}


@pytest.mark.parametrize("name", RUNS)
def test_pictures(name, tmp_path, texts):
    steps, present, absent = RUNS[name]
    found = texts(write(tmp_path / "my_run", steps))
    titles = [text for text in TITLES if text not in absent]
    assert [text for text in found if text in TITLES] == titles
    assert {"my_run", "step", *present} <= {*found}
    assert not any(text in one for one in found for text in absent)
    is_red = "c8102e" in (tmp_path / "plot.svg").read_text()
    assert is_red == any(scalars.get("skip_rate") for _, scalars in steps)


def test_runs_and_prefixes_are_named(tmp_path, texts):
    for name, rate in (("a/x", 0.0), ("b/x", 0.5)):
        write(tmp_path / name, [step(i, rate) for i in range(1, 5)])
        write(tmp_path / name, [(4, {"loss": 0.75})], prefix="")
    found = texts(tmp_path / "a/x", tmp_path / "b/x")
    assert {"2 runs", f"{tmp_path}/a/x train", f"{tmp_path}/b/x train"} <= {*found}
    assert {"train", "x"} <= {*texts(tmp_path / "a/x")}


def test_the_command_and_what_is_wrong(tmp_path, capsys, monkeypatch):
    run = write(tmp_path / "run", [step(i) for i in range(1, 5)])
    assert __main__.main(["plot", str(run)]) == 0
    assert f"wrote {run}/plot.png" in capsys.readouterr().out
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert metrics.plot(run, run).resolve() == tmp_path / "plot.png"
    other = write(tmp_path / "other", [(1, {"accuracy": 1.0})])
    for arguments, told in [
        ([tmp_path / "nowhere"], "nowhere"),
        ([other], "other has logged none of loss, scale"),
        ([run, "--out", "x/plot.png"], "x/plot.png"),
        ([run, "--out", "plot.docx"], "docx"),
    ]:
        assert __main__.main(["plot", *map(str, arguments)]) == 2
        assert told in capsys.readouterr().err
