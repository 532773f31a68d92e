"""The picture of a run: what is in it, in every situation that a run may be in."""

import math
import re
import sys

import matplotlib
import numpy as np
import pytest

from flax_amp import __main__, metrics
from flax_amp.metrics import _plot

pytestmark = pytest.mark.once

NAN = math.nan


def write(folder, steps, prefix="train/", first_step=None):
    """Logs `(step, scalars)`."""
    with metrics.JsonlWriter(folder, first_step=first_step) as writer:
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
    "fine": ([step(i) for i in range(1, 9)], ["no step was skipped", "0.25"], ["red"]),
    "many": ([step(i) for i in range(1, 500)], ["no step was skipped"], ["red"]),
    "skips": ([step(i, 0.5 * (i % 2)) for i in range(1, 9)], ["red, ×"], ["no step"]),
    "all skipped": (
        [step(i, 1.0, NAN, grad_norm=NAN) for i in range(1, 99)],
        ["every value is NaN", "98 steps skipped", "100 %"],
        ["nan"],
    ),
    "one": ([step(50)], ["50", "0.04", "32768"], ["nan"]),
    "one skipped": ([step(1, 1.0, NAN)], ["1 step skipped", "every value is"], []),
    "NaN between": ([step(i, loss=NAN if i % 2 else 1.0) for i in range(9)], ["1"], []),
    "zero": ([step(i, loss=0.0, scale=0.0) for i in range(9)], ["0"], ["nan"]),
    "negative": ([step(i, loss=-1.0 * i) for i in range(9)], ["-8"], []),
    "bfloat16": ([step(i, scale=1.0) for i in range(1, 9)], ["1"], ["loss scale"]),
    "bfloat16 skips": (
        [step(i, 0.5, scale=1.0) for i in range(1, 9)],
        ["red: 4 steps skipped"],
        ["loss scale", "×"],
    ),
    "a loss alone": (
        [(1, {"loss": 1.0}), (2, {"accuracy": 0.5})],
        ["1"],
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
    assert found[-1] == "my_run" or "my_run" in found
    for text in present:
        assert any(text in one for one in found), (text, found)
    for text in absent:
        assert not any(text in one for one in found), (text, found)


def test_train_and_test_are_labelled_at_their_ends(tmp_path, texts):
    write(tmp_path / "run", [step(i) for i in range(1, 5)])
    write(tmp_path / "run", [(4, {"loss": 0.75})], prefix="test/")
    found = texts(tmp_path / "run")
    assert "train 0.5" in found and "test 0.75" in found


def test_runs_are_compared_by_the_parts_of_their_paths_that_differ(tmp_path, texts):
    for name, rate in (("a/x", 0.0), ("b/x", 0.5)):
        write(tmp_path / name, [step(i, rate) for i in range(1, 5)], prefix="")
    found = texts(tmp_path / "a/x", tmp_path / "b/x")
    assert {"a/x 0.5", "b/x 0.5", "a/x 32768", "b/x 8192", "2 runs"} <= set(found)
    assert "×: steps skipped" in found and "b/x 50 %" in found


def test_a_scale_of_one_is_drawn_beside_another_and_alone(tmp_path, texts):
    def run(name, value, rate=0.0, **more):
        steps = [step(i, rate, scale=value, **more) for i in range(1, 5)]
        return write(tmp_path / name, steps)

    ones = run("bf16", 1.0, 0.5), run("other", 1.0)
    found = texts(*ones)
    assert "loss scale" not in found and not any("×" in text for text in found)
    assert {"loss scale", "bf16 1"} <= {*texts(ones[0], run("f16", 8.0))}
    alone = write(tmp_path / "alone", [(1, {"scale": 1.0})])
    assert "loss scale" in texts(alone)


def test_finite_steps_in_windows_with_skipped_ones_have_dots(tmp_path):
    """Too many windows for a dot each: only where steps were skipped."""
    rates = [1.0, 0.5, 0.5, *[0.0] * 50]
    losses = [NAN, 3.0, 2.0, *[1.0] * 50]
    steps = [
        (i, {"loss": loss, "skip_rate": rate})
        for i, (rate, loss) in enumerate(zip(rates, losses, strict=True))
    ]
    run = write(tmp_path / "run", steps)
    (line,) = _plot._find_lines([run])["loss"]
    assert _plot._dots(line, "loss") == [1, 2] and not _plot._dots(line, "scale")


def test_labels_are_apart(tmp_path):
    runs = [write(tmp_path / f"run{i}", [step(1), step(2)]) for i in range(6)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = metrics.plot(*runs, out=tmp_path / "all.svg").read_text()
    for value in ("1", "32768", "0.001", "0 %"):
        pattern = rf'<text [^>]* y="([\d.]+)"[^>]*>run\d {value}</text>'
        heights = sorted(float(y) for y in re.findall(pattern, text))
        assert len(heights) >= 6
        gaps = [b - a for a, b in zip(heights, heights[1:], strict=False)]
        assert min(gaps) > 10, (value, heights)
    bottom = float(re.search(r'<text [^>]* y="([\d.]+)"[^>]*>step</text>', text)[1])
    assert max(heights) < bottom - 20  # they went up
    spread = lambda *heights: _plot._spread(np.array(heights), 30).tolist()  # noqa: E731
    assert spread(0, 1, 30) == [0, 12, 30] and spread(28, 29, 30) == [6, 18, 30]
    assert spread() == []


def test_the_command(tmp_path, capsys, monkeypatch):
    run = write(tmp_path / "run", [step(1), step(2)])
    other = write(tmp_path / "other", [step(1), step(2)])
    nothing = write(tmp_path / "empty", [(1, {"accuracy": 1.0})])
    assert __main__.main(["plot", str(run / "metrics.jsonl")]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'plot.png'}\n"
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["plot", str(run), str(other)]) == 0
    assert (tmp_path / "plot.png").exists()
    assert __main__.main(["plot", "run", "--out", "my.pdf"]) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(nothing)], "has logged none of loss, scale.*; expected one of them"),
        (["missing"], "missing does not exist; expected a folder with metrics.jsonl"),
        ([str(run), "--out", "x.doc"], r"ending '.doc' is no format; expected.*png"),
        ([str(run), "--out", "noext"], r"out is 'noext', whose ending '' is no form"),
        ([str(run), "--out", "no/x.png"], "folder no of out does not exist; expected"),
    ):
        assert __main__.main(["plot", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert __main__.main(["plot", str(run)]) == 2
    assert re.search(r"not installed.*clone.*'\.\[plot\]'", capsys.readouterr().err)


def test_out_may_be_a_folder_and_a_run_must_be_given(tmp_path):
    run, other = tmp_path / "run", tmp_path / "v1.0"
    write(run, [step(1)])
    other.mkdir()
    assert metrics.plot(run, out=other) == other / "plot.png"
    assert metrics.plot(run, out=other / "x.PNG").is_file()
    found = sorted(path.name for path in tmp_path.rglob("*"))
    assert found == ["metrics.jsonl", "plot.png", "run", "v1.0", "x.PNG"]
    with pytest.raises(ValueError, match="plot: got no run; expected the folder of"):
        metrics.plot()
