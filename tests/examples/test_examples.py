"""The examples: each trains a few steps, resumes to the bit, refuses bad settings."""

import ast
import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import absl.flags
import jax
import numpy as np
import pytest

from configs.digits import get_config
from examples.digits import data, train
from flax_amp import metrics
from helpers import optimizing_environment

ROOT = Path(__file__).parents[2]


def small(precision="16-mixed", **overrides):
    """The config of examples/digits, shrunk to a few steps of a tiny network."""
    config = get_config().unlock()
    config.update(
        precision=precision,
        features=(4, 8),
        batch_size=16,
        num_steps=4,
        warmup_steps=1,
        scale_patience=1,  # so that the scale moves within the few steps
        log_every=1,
        eval_every=2,
        checkpoint_every=2,
    )
    config.update(overrides)
    return config


def bits(tree):
    """`{path: (dtype, bytes)}` of every array."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found[jax.tree_util.keystr(path)] = (str(x.dtype), np.asarray(x).tobytes())
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A float16 run that nothing disturbs: its folder, state and summary."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, *train.train_and_evaluate(small("16-mixed"), workdir)


def is_trained(workdir, state, summary, precision):
    assert summary["step"] == int(state.step) == 4
    assert summary["resumed_from"] == 0
    assert 0.0 <= summary["test_accuracy"] <= 1.0
    assert np.isfinite(summary["test_loss"])
    assert (summary["scale"] != 1.0) == (precision == "16-mixed")
    float_leaves = jax.tree.leaves((state.params, state.variables))
    assert {str(x.dtype) for x in float_leaves} == {"float32"}

    assert list(workdir.glob("events.out.tfevents.*"))  # which are tested with metrics
    written = {name: dict(steps) for name, steps in metrics.read(workdir).items()}
    assert np.isfinite(written["train/loss"][4])
    assert written["train/scale"][4] == summary["scale"]
    assert written["test/accuracy"][4] == pytest.approx(summary["test_accuracy"])
    assert 2 in written["test/accuracy"]


def test_digits_trains_in_float16(straight):
    is_trained(*straight, "16-mixed")


@pytest.mark.slow
def test_digits_trains_in_float32(tmp_path):
    found = train.train_and_evaluate(small("32-true"), tmp_path)
    is_trained(tmp_path, *found, "32-true")


@pytest.mark.slow
def test_digits_computes_in_the_precision_asked_for():
    images = np.zeros((2, 8, 8, 1), np.float32)
    batch = {"image": images, "label": np.zeros(2, np.int32)}
    for precision, name in {"bf16-mixed": "bf16", "16-mixed": "f16"}.items():
        config = small(precision)
        state = train.create_state(config, images)
        step = train.make_steps(config)[0]
        jaxpr = str(jax.make_jaxpr(step)(state, batch))
        outputs = re.findall(r":(\w+)\[[\d,]*\] = (?:dot_general|conv_general)", jaxpr)
        assert outputs, "no matrix product was found"
        assert set(outputs) == {name}


def test_digits_without_scaling_in_any_word_for_float16():
    images = np.zeros((2, 8, 8, 1), np.float32)
    for word in ("16-mixed", "fp16"):
        config = small(word, loss_scaling=False)
        scaler = train.create_state(config, images).scaler
        assert scaler["scaler"] == scaler["adjust_factor"] == 1


@pytest.mark.slow
def test_digits_resumes_to_the_bit(straight, tmp_path):
    workdir, straight_state, _ = straight
    config = small("16-mixed")
    stopped, summary = train.train_and_evaluate(
        config, tmp_path, should_stop=lambda step: step == 3
    )
    assert summary["step"] == int(stopped.step) == 3
    resumed, summary = train.train_and_evaluate(config, tmp_path)
    assert summary["resumed_from"] == 3
    assert bits(straight_state) == bits(resumed)
    again, summary = train.train_and_evaluate(config, tmp_path)
    assert summary["resumed_from"] == summary["step"] == 4  # nothing left to do
    assert bits(resumed) == bits(again)
    text = (tmp_path / "metrics.jsonl").read_text()
    logged = re.findall(r'"step": (\d+).*"(\w+)/loss"', text)
    assert len(logged) == len(set(logged)) == 7  # no step twice
    assert [s for s, _ in metrics.read(tmp_path)["train/loss"]] == [1, 2, 3, 4]
    assert metrics.read(workdir)["train/loss"] == metrics.read(tmp_path)["train/loss"]


@pytest.mark.slow
def test_digits_begins_in_bfloat16_with_the_weights_of_another_run(straight, tmp_path):
    workdir, first, _ = straight
    config = small("bf16-mixed", init_from=str(workdir / "checkpoints"))
    config.learning_rate = 0.0  # so that the weights can be seen in the end
    second, summary = train.train_and_evaluate(config, tmp_path)
    is_trained(tmp_path, second, summary, "bf16-mixed")
    assert bits(first.params) == bits(second.params)


def test_digits_data_is_split_once_and_for_all():
    (train_data, test_data), (again, _) = data.load(0), data.load(0)
    assert len(train_data["label"]) == 1437
    assert len(test_data["label"]) == 360
    np.testing.assert_array_equal(train_data["image"], again["image"])
    assert train_data["image"].min() == 0.0
    assert train_data["image"].max() == 1.0


def test_digits_batches_follow_from_seed_and_step():
    rows = {"label": np.arange(10, dtype=np.int32)}

    def labels(step, seed=0):
        batch = data.batch_at(rows, step, batch_size=5, seed=seed)
        return batch["label"].tolist()

    assert labels(3) == labels(3)
    assert sorted(labels(2) + labels(3)) == list(range(10))  # an epoch: each row once
    assert labels(0) + labels(1) != labels(2) + labels(3)
    assert labels(0) != labels(0, seed=1)


@pytest.mark.once
def test_digits_refuses_bad_settings(tmp_path):
    for overrides, message in (
        ({"precision": "float8"}, r"precision is 'float8'.*'bf16-mixed'.*'16-mixed'"),
        ({"batch_size": 2000}, r"batch_size=2000 must be between 1 and 1437"),
        ({"batch_size": 0}, r"batch_size=0 must be between 1 and 1437"),
    ):
        with pytest.raises(ValueError, match=message):
            train.train_and_evaluate(small(**overrides), tmp_path)


def test_every_setting_is_explained():
    for path in (ROOT / "configs").rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.match(r" +config\.\w+ = ", line):
                assert "  # " in line, f"{path.name}: no comment: {line.strip()}"


def test_example_files_are_short():
    for path in (ROOT / "examples").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path


def test_examples_log_before_they_may_raise():
    """`check_progress` may raise, and what was logged before shows why."""
    found = 0
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            body = getattr(node, "body", [])
            body = list(map(ast.unparse, body)) if isinstance(body, list) else []
            for index, line in enumerate(body):
                if line.startswith("flax_amp.check_progress("):
                    found += 1
                    late = [
                        x for x in body[index:] if re.match(r"(log|say|print)\(", x)
                    ]
                    assert not late, f"{path.name}: after check_progress: {late}"
    assert found == 7


def command(workdir, *flags):
    main = [sys.executable, "-m", "examples.digits.main", f"--workdir={workdir}"]
    return [*main, "--config=configs/digits.py", *flags]


@pytest.mark.slow
def test_digits_saves_and_ends_on_sigterm(tmp_path):
    flags = ("--precision=bf16-mixed", "--config.num_steps=100000")
    with subprocess.Popen(
        command(tmp_path, *flags), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
    assert process.returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 50 <= summary["step"] < 100000
    assert (tmp_path / "checkpoints" / str(summary["step"])).is_dir()


@pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections
def test_digits_refuses_unknown_flags():
    importlib.import_module("examples.digits.main")  # defines them
    for flag, error in {
        "--precision=float8": r"--precision=float8: value should be one of .*16-mixed",
        "--config.learing_rate=1": "learing_rate",
    }.items():
        with pytest.raises((absl.flags.Error, KeyError, AttributeError), match=error):
            absl.flags.FLAGS(["main", flag])


@pytest.mark.slow
def test_demo(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "examples.digits.demo", f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=optimizing_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout


@pytest.mark.slow
def test_a_planted_overflow_is_explained(tmp_path, capsys):
    config = small(gain=60000.0, debug_overflow=True, num_steps=2)
    _, summary = train.train_and_evaluate(config, tmp_path)
    assert summary["skipped"] == 2
    found = capsys.readouterr().out
    # Arithmetic runs in float32: what overflows is the rounding for the convolution.
    assert "the cast to float16 of " in found and " made inf" in found, found
    assert "ConvNet/gain, " in found
    assert '{"ConvNet/gain": jnp.float32, "ConvNet/Conv_1": jnp.float32}' in found
