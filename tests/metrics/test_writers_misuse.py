"""Writers that share a folder, and what is given to them wrongly."""

import io
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from flax_amp import metrics

pytestmark = pytest.mark.once

MAKERS = {
    "all": lambda path, more: metrics.create_writer(path, writers=[more]),
    "tensorboard": lambda path, more: metrics.TensorBoardWriter(path),
    "jsonl": lambda path, more: metrics.JsonlWriter(path),
    "terminal": lambda path, more: metrics.TerminalWriter(
        console=Console(file=io.StringIO())
    ),
}


class Remember(metrics.MetricWriter):
    def __init__(self):
        self.calls = []

    def write_scalars(self, step, scalars):
        self.calls.append((step, scalars))

    def close(self):
        self.calls.append("close")


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


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


def test_a_file_is_replaced_only_if_lines_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", None)
    with metrics.JsonlWriter(tmp_path) as writer:
        writer.write_scalars(1, {"x": 1.0})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "x"')  # cut by a kill
    for first_step in (None, 2):
        metrics.JsonlWriter(tmp_path, first_step=first_step).close()
    assert path.read_text().count("\n") == 1 and path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([100, 300, 200], [100, 200, 300]),
        ([300, 200, 100], [100, 200, 300]),
        ([1, 2, 3, 2], [1, 2]),  # resumed
        ([1, 2, 3, 2, 3, 4], [1, 2, 3, 4]),
        ([5, 5], [5]),
    ],
)
def test_steps_in_any_order(tmp_path, written, expected):
    with metrics.JsonlWriter(tmp_path) as writer:
        for i, step in enumerate(written):
            writer.write_scalars(step, {"x": i})
    last = {step: i for i, step in enumerate(written)}
    assert metrics.read(tmp_path)["x"] == [(step, last[step]) for step in expected]


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


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_written_of_what_is_wrong(tmp_path, maker, bad):
    step, scalars, error, message = BAD[bad]
    more = Remember()
    with MAKERS[maker](tmp_path, more) as writer:
        before = sizes(tmp_path)
        with pytest.raises(error, match=message):
            writer.write_scalars(step, {"a": 1.0, **scalars})
        assert sizes(tmp_path) == before and not more.calls


@pytest.mark.parametrize("bad", ["2.5", "3.0", "text", "True"])
@pytest.mark.parametrize("make", [metrics.create_writer, metrics.JsonlWriter])
def test_a_first_step_is_an_integer(tmp_path, make, bad):
    with metrics.JsonlWriter(tmp_path) as writer:
        writer.write_scalars(1, {"x": 1.0})
    with pytest.raises(TypeError, match="first_step is .*; expected an integer"):
        make(tmp_path, first_step=BAD[bad][0])
    assert metrics.read(tmp_path)["x"] == [(1, 1.0)]


@pytest.mark.parametrize("line", ['"step": "4"', '"step": null', '"step": [1]'])
@pytest.mark.parametrize("more", ['"loss": 1.0', '"loss": "x"', ""])
def test_a_log_of_others(tmp_path, line, more):
    """Texts as steps, or as values, in a file that something else has written."""
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "loss": null, "ok": true}\n{"hparams": {"name": "x"}}\n'
    path.write_text(good + f"{{{line}{', ' * bool(more)}{more}}}\n")
    for call in (
        lambda: metrics.read(tmp_path),
        lambda: metrics.plot(tmp_path),
        lambda: metrics.JsonlWriter(tmp_path, first_step=2),
    ):
        with pytest.raises(ValueError, match=r"jsonl:3: 'step' is .*; expected a numb"):
            call()
    path.write_text(good + '{"step": 2, "loss": "x"}\n')
    with pytest.raises(ValueError, match="jsonl:3: 'loss' is 'x'; expected a number"):
        metrics.plot(tmp_path)
    path.write_text(good)
    assert set(metrics.read(tmp_path)) == {"loss", "ok"}


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


@pytest.mark.parametrize("maker", MAKERS)
def test_closed_twice_and_written_to_afterwards(tmp_path, maker):
    more = Remember()
    writer = MAKERS[maker](tmp_path, more)
    writer.write_scalars(1, {"a": 1.0})
    writer.close()
    writer.close()
    before = sizes(tmp_path)
    with pytest.raises(ValueError, match="the writer is closed; expected an open one"):
        writer.write_scalars(2, {"a": 1.0})
    assert sizes(tmp_path) == before
    assert more.calls in ([], [(1, {"a": 1.0}), "close"])


@pytest.mark.parametrize("method", ["write_hparams", "write_texts", "flush"])
def test_every_method_of_a_closed_writer(tmp_path, method):
    writer = metrics.create_writer(tmp_path, terminal=False)
    writer.close()
    arguments = {"write_hparams": ({},), "write_texts": (1, {}), "flush": ()}[method]
    with pytest.raises(ValueError, match="MultiWriter: the writer is closed"):
        getattr(writer, method)(*arguments)


@pytest.mark.parametrize("values", [[], [np.nan], [np.nan, np.inf, 1.0], [1e39, 0.0]])
def test_histograms_show_what_is_finite(tmp_path, values):
    with metrics.TensorBoardWriter(tmp_path) as writer:
        before = sizes(tmp_path)
        writer.write_histograms(3, {"h": np.array(values)})
        has_any = bool(np.isfinite(values).any())
        assert (sizes(tmp_path) != before) == has_any
        writer.write_histograms(4, {"h": jax.numpy.ones(3, jnp.bfloat16)})
