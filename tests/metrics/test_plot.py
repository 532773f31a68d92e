"""The picture of a run: what is in it, in every situation that a run may be in."""

import math
import re

import matplotlib
import pytest

from flax_amp import __main__, metrics

pytestmark = pytest.mark.once

NAN = math.nan


def write(folder, steps, prefix="train/"):
    """Logs `(step, scalars)`."""
    with metrics.JsonlWriter(folder) as writer:
        for step, scalars in steps:
            writer.write_scalars(step, {prefix + k: v for k, v in scalars.items()})
    return folder


def step(i, rate=0.0, loss=None, **more):
    loss = 2.0 / i if loss is None else loss
    scale = 2.0**15 / 2 ** (i * rate)
    known = dict(loss=loss, scale=scale, grad_norm=1.0, learning_rate=1e-3)
    return i, {**known, "skip_rate": rate, "skipped_total": i * rate, **more}


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
    "fine": ([step(i) for i in range(1, 9)], ["no step was skipped"], []),
    "many": ([step(i) for i in range(1, 500)], ["no step was skipped"], []),
    "skips": ([step(i, 0.5 * (i % 2)) for i in range(1, 9)], [], ["no step was"]),
    "all skipped": (
        [step(i, 1.0, NAN, grad_norm=NAN) for i in range(1, 99)],
        ["every value is NaN"],
        ["no step was"],
    ),
    "one": ([step(50)], ["50"], []),
    "one skipped": ([step(1, 1.0, NAN)], ["every value is NaN"], []),
    "NaN between": ([step(i, loss=NAN if i % 2 else 1.0) for i in range(9)], [], []),
    "zero": ([step(i, loss=0.0, scale=0.0) for i in range(9)], [], []),
    "negative": ([step(i, loss=-1.0 * i) for i in range(9)], [], []),
    "bfloat16": ([step(i, scale=1.0) for i in range(1, 9)], [], ["loss scale"]),
    "a loss alone": (
        [(1, {"loss": 1.0}), (2, {"accuracy": 0.5})],
        [],
        ["loss scale", "gradient norm", "learning rate", "skip rate"],
    ),
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


def test_skipped_steps_are_red(tmp_path):
    """A band in each panel, and crosses on the scale."""
    run = write(tmp_path / "run", [step(i, 0.5 * (i == 4)) for i in range(1, 9)])
    picture = metrics.plot(run, out=tmp_path / "plot.svg").read_text()
    assert picture.count("c8102e") > 5


def test_runs_and_prefixes_are_named(tmp_path, texts):
    for name, rate in (("a/x", 0.0), ("b/x", 0.5)):
        write(tmp_path / name, [step(i, rate) for i in range(1, 5)])
        write(tmp_path / name, [(4, {"loss": 0.75})], prefix="")
    found = texts(tmp_path / "a/x", tmp_path / "b/x")
    assert {"2 runs", "a/x train", "b/x train", "a/x "} <= {*found}
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
