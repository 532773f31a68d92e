"""examples/char_lm: its text, its two models, and whole runs of a few steps."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from configs.char_lm import get_config
from examples.char_lm import curves, data, train
from examples.char_lm.model import forward, loss_fn
from flax_amp import make_train_step, metrics
from helpers import equations

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TINY = dict(
    length=16,
    width=8,
    layers=2,
    heads=2,
    batch_size=4,
    num_steps=4,
    warmup_steps=1,
    scale_patience=1,  # so that the scale moves within the few steps
    sample_chars=5,
    log_every=2,
    eval_every=2,
    eval_windows=4,
    checkpoint_every=2,
)


def small(**overrides):
    config = get_config()
    config.update(TINY | overrides)
    return config


@pytest.fixture
def sources(tmp_path):
    """Twenty files of 100 characters each; those to test on hold b."""
    for index in range(20):
        letter = "b" if index % 10 == 9 else "a"
        (tmp_path / f"{index:02}.py").write_text(letter * 100)
    (tmp_path / "notes.txt").write_text("c")
    return small(text_dir=str(tmp_path))


def test_char_lm_splits_its_text_by_file(sources):
    train_text, test_text = data.load(sources)
    assert set(train_text) == {ord("a")} and len(train_text) == 1800
    assert set(test_text) == {ord("b")} and len(test_text) == 200
    sources.max_chars = 1050
    assert list(map(len, data.load(sources))) == [950, 100]


def test_char_lm_refuses_too_little_text(tmp_path):
    for train_size, test_size, max_chars in (
        (0, 0, 1000),
        (0, 1000, 1000),  # of nine empty files, and one to test on
        (16, 1000, 1016),
        (900, 16, 1000),
        (900, 17, 916),
    ):
        for index in range(9):
            (tmp_path / f"{index}.py").write_text(
                "a" * (train_size if not index else 0)
            )
        (tmp_path / "9.py").write_text("b" * test_size)
        config = small(text_dir=str(tmp_path), max_chars=max_chars)
        found = (
            f"{train_size} characters .* {min(test_size, max_chars - train_size)} to"
        )
        with pytest.raises(FileNotFoundError, match=f"{found} .*than length=16 .*ten"):
            data.load(config)
    config.max_chars = 917  # one character more, and there is a window of each
    assert list(map(len, data.load(config))) == [900, 17]


def test_char_lm_reads_the_standard_library():
    train_text, test_text = data.load(get_config())
    assert len(train_text) + len(test_text) == 4_000_000
    assert 0.05 < len(test_text) / 4e6 < 0.2
    assert max(train_text.max(), test_text.max()) < data.VOCABULARY
    assert data.encode("é\r\n\tx".encode()).tolist() == [63, 63, 10, 9, 120]


def test_char_lm_batches_follow_from_seed_and_step():
    config, text = small(), np.arange(1000, dtype=np.int32)

    def rows(step, **overrides):
        return data.train_batch(small(**overrides), text, step)["input"]

    batch = data.train_batch(config, text, 3)
    np.testing.assert_array_equal(batch["target"], batch["input"] + 1)
    np.testing.assert_array_equal(rows(3), rows(3))
    assert (rows(3) != rows(4)).any() and (rows(3) != rows(3, seed=1)).any()
    test = data.test_batch(config, text)
    assert test["input"][0, 0] == 0 and test["target"][-1, -1] == 999
    assert data.test_batch(config, text[:17])["input"].shape == (4, 16)


def test_char_lm_baselines_are_entropies():
    text = np.array([0, 1] * 50_000, np.int32)
    found = data.baselines(text, data.test_batch(small(), text))
    assert found["characters"] == pytest.approx(1, abs=0.01)
    assert found["pairs"] == pytest.approx(0, abs=0.01)


@pytest.fixture(scope="module")
def states():
    """The states of both models, which differ in their first parameters only."""
    return {api: train.create_state(small(api=api)) for api in ("linen", "nnx")}


def test_char_lm_is_the_same_model_in_linen_and_nnx(states):
    shapes = {api: jax.tree.map(np.shape, s.params) for api, s in states.items()}
    assert shapes["linen"] == shapes["nnx"]
    params, tokens = states["linen"].params, np.arange(32).reshape(2, 16)
    nnx_model = nnx.merge(
        states["nnx"].graphdef, params, nnx.State(states["nnx"].variables)
    )
    expected = forward(params, tokens, states["linen"])
    found = forward(nnx_model, tokens, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    tokens[:, 9] += 1  # no character sees a later one
    changed = np.abs(forward(params, tokens, states["linen"]) - expected).max((0, 2))
    assert (changed[:9] == 0).all() and (changed[9:] > 0).all()


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_char_lm_computes_in_half_inside_scan_and_remat(states, api):
    batch = {name: np.zeros((4, 16), np.int32) for name in ("input", "target")}
    step = make_train_step(loss_fn, has_aux=True, jit=False)
    jaxpr = jax.make_jaxpr(step)(states[api], batch)
    dots = [(p, e) for p, e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert {str(eqn.outvars[0].aval.dtype) for _, eqn in dots} == {"float16"}
    assert any("scan" in path for path, _ in dots)
    assert any("remat2" in path or "checkpoint" in path for path, _ in dots)


def test_char_lm_refuses_another_api():
    with pytest.raises(ValueError, match="api is 'torch'; expected 'linen' or 'nnx'"):
        train.create_state(small(api="torch"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing disturbs: its folder, state and summary."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, *train.train_and_evaluate(small(), workdir)


@pytest.mark.slow
def test_char_lm_resumes_to_the_bit(straight, tmp_path):
    _, expected, summary = straight
    assert summary["step"] == 4 and 5 < summary["bits"] < 12
    assert len(summary["sample"]) == 16 + 5
    stopped, saved = train.train_and_evaluate(
        small(), tmp_path, should_stop=lambda step: step == 3
    )
    assert int(stopped.step) == saved["step"] == 3
    assert "bits" not in saved and "sample" not in saved  # it only saves
    resumed, again = train.train_and_evaluate(small(), tmp_path)
    assert again == summary | {"resumed_from": 3}
    for leaf, other in zip(*map(jax.tree.leaves, (resumed, expected)), strict=True):
        np.testing.assert_array_equal(leaf, other)
    logged = metrics.read(tmp_path)["test/bits"]
    assert [step for step, _ in logged] == [2, 4]
    assert logged[-1][1] == pytest.approx(summary["bits"])


@pytest.mark.slow
def test_char_lm_in_nnx_is_evaluated_after_a_stop_at_the_end(tmp_path):
    config = small(api="nnx")
    train.train_and_evaluate(config, tmp_path, should_stop=lambda step: step == 4)
    assert [step for step, _ in metrics.read(tmp_path)["test/bits"]] == [2]
    _, summary = train.train_and_evaluate(config, tmp_path)
    assert summary["step"] == summary["resumed_from"] == 4
    assert 5 < summary["bits"] < 12 and len(summary["sample"]) == 16 + 5
    assert [step for step, _ in metrics.read(tmp_path)["test/bits"]] == [2, 4]


def flags(workdir, **settings):
    given = TINY | settings
    return [f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in given.items())]


@pytest.mark.slow
def test_char_lm_saves_and_ends_on_sigterm(tmp_path):
    command = [sys.executable, "-m", "examples.char_lm.main"]
    command += flags(tmp_path, num_steps=100000, precision="bf16-mixed")
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
    assert process.returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 2 <= summary["step"] < 100000 and "sample" not in summary
    assert (tmp_path / "checkpoints" / str(summary["step"])).is_dir()


@pytest.mark.slow
def test_char_lm_draws_three_curves(straight, tmp_path, monkeypatch):
    """Of three runs of `examples.char_lm.main`, which is left out here."""
    run, _, summary = straight
    precisions = []

    def main(command, check):
        precision, workdir = (flag.partition("=")[2] for flag in command[-2:])
        assert command[1:-2] == ["-m", "examples.char_lm.main", "--config.width=8"]
        precisions.append(precision)
        shutil.copytree(run, workdir)
        told = json.dumps(summary | {"api": "linen"})
        Path(workdir, "summary.json").write_text(told)

    monkeypatch.setattr(curves.subprocess, "run", main)
    arguments = [f"--workdir={tmp_path}", "--config.width=8"]
    monkeypatch.setattr(sys, "argv", ["curves", *arguments])
    curves.main()
    assert precisions == ["32-true", "bf16-mixed", "16-mixed"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
