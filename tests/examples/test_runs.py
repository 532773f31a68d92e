"""The three examples with a config: they train, resume to the bit, refuse bad settings.

Each is shrunk to a few steps of a tiny network.
"""

import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import absl.flags
import jax
import numpy as np
import pytest
from flax import nnx

import configs.char_lm
import configs.digits
import configs.imagenet.default
from examples.char_lm import model as char_lm
from examples.char_lm import train as train_char_lm
from examples.digits import train as train_digits
from examples.imagenet import input_pipeline
from examples.imagenet import model as imagenet
from examples.imagenet import train as train_imagenet
from flax_amp import init_scaler, metrics
from flax_amp.policy import long_word
from helpers import assert_identical, optimizing_environment

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


class Example(NamedTuple):
    train: Any  # its module
    config: Any  # makes its config
    settings: dict[str, Any]
    tested: str  # what the summary says of the test data


# The scale moves within the few steps.
STEPS = 4
FEW = dict(num_steps=STEPS, warmup_steps=1, scale_patience=1, eval_every=2)
FEW |= dict(checkpoint_every=2)
DIGITS = dict(precision="16-mixed", features=(4, 8), batch_size=16, log_every=1)
TEXT = dict(length=16, width=8, layers=2, heads=2, batch_size=4)
TEXT |= dict(sample_chars=5, log_every=2, eval_windows=4)
IMAGES = dict(precision="16-mixed", model="ResNetTiny", width=4, dataset="synthetic")
IMAGES |= dict(synthetic_classes=3, image_size=32, batch_size=16, log_every_steps=2)
IMAGES |= dict(num_train_steps=STEPS, warmup_epochs=0.25, num_epochs=1.0)
EXAMPLES = {
    "digits": Example(
        train_digits, configs.digits.get_config, FEW | DIGITS, "test_accuracy"
    ),
    "char_lm": Example(train_char_lm, configs.char_lm.get_config, FEW | TEXT, "bits"),
    "imagenet": Example(
        train_imagenet, configs.imagenet.default.get_config, IMAGES, "test_loss"
    ),
}


def small(name, **overrides):
    example = EXAMPLES[name]
    config = example.config().unlock()
    config.update(example.settings | overrides)
    return config


def run(name, workdir, stop=None, **overrides):
    """Trains; returns the state and the summary."""
    options = {} if stop is None else {"should_stop": lambda step: step == stop}
    config = small(name, **overrides)
    return EXAMPLES[name].train.train_and_evaluate(config, workdir, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_resumes_to_the_bit(name, tmp_path):
    expected, summary = run(name, tmp_path / "straight")
    tested = EXAMPLES[name].tested
    assert summary["step"] == int(expected.step) == STEPS
    assert summary["resumed_from"] == 0 and np.isfinite(summary[tested])

    broken = tmp_path / "broken"
    stopped, saved = run(name, broken, STEPS - 1)
    assert saved["step"] == int(stopped.step) == STEPS - 1
    resumed, again = run(name, broken)
    assert again == summary | {"resumed_from": STEPS - 1}
    assert_identical(jax.tree.leaves(resumed), jax.tree.leaves(expected))
    logged = metrics.read(broken)
    steps = [step for step, _ in logged["train/loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    last = logged["test/" + tested.removeprefix("test_")][-1]
    assert last == (STEPS, pytest.approx(summary[tested]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "char_lm"])
def test_it_saves_and_ends_on_sigterm(name, tmp_path):
    settings = EXAMPLES[name].settings
    settings = settings | {"num_steps": 100000, "precision": "bf16-mixed"}
    command = [sys.executable, "-m", f"examples.{name}.main", f"--workdir={tmp_path}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as main:
        for line in main.stdout:
            if line.startswith("step"):
                main.send_signal(signal.SIGTERM)
                break
        main.stdout.read()
    assert main.returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 1 <= summary["step"] < 100000
    assert (tmp_path / "checkpoints" / str(summary["step"])).is_dir()


REFUSED = [  # example, settings, message
    ("digits", {"precision": "float8"}, r"precision is 'float8'.*'bf16-mixed'"),
    ("digits", {"batch_size": 2000}, r"batch_size=2000 must be between 1 and 1437"),
    ("digits", {"batch_size": 0}, r"batch_size=0 must be between 1 and 1437"),
    ("char_lm", {"api": "torch"}, "api is 'torch'; expected 'linen' or 'nnx'"),
    ("imagenet", {"batch_size": 12}, "batch_size=12 does not split over 8 devices"),
    ("imagenet", {"model": "ResNet51"}, "model is 'ResNet51'; expected one of"),
    ("imagenet", {"precision": "float8"}, "precision is 'float8'"),
]


@pytest.mark.parametrize("name, settings, message", REFUSED)
def test_it_refuses_bad_settings(name, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(name, tmp_path, **settings)


def test_every_setting_is_explained():
    for path in (ROOT / "configs").rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.match(r" +config\.\w+ = ", line):
                assert "  # " in line, f"{path.name}: no comment: {line.strip()}"


# --- digits --------------------------------------------------------------------------


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
def test_the_search_for_a_scale_is_not_explained(tmp_path, capsys, monkeypatch):
    """The scale fits after the step, so that the next one would find nothing."""
    create = train_digits.create_state

    def with_a_large_scale(*args):
        scaler = init_scaler(scaler=2.0**22)
        return create(*args).replace(scaler=scaler)

    monkeypatch.setattr(train_digits, "create_state", with_a_large_scale)
    _, summary = run("digits", tmp_path, debug_overflow=True, num_steps=8)
    assert summary["skipped"] > 0
    assert "in float16, scale" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_planted_overflow_is_explained(tmp_path, capsys):
    settings = dict(gain=60000.0, debug_overflow=True, num_steps=2)
    _, summary = run("digits", tmp_path, **settings)
    assert summary["skipped"] == 2
    found = capsys.readouterr().out
    # Arithmetic runs in float32: what overflows is the rounding for the convolution.
    assert "the cast to float16 of " in found and " made inf" in found, found
    assert "ConvNet/gain, " in found
    assert '{"ConvNet/Conv_1": jnp.float32}' in found


# --- char_lm -------------------------------------------------------------------------


def test_char_lm_is_the_same_model_in_linen_and_nnx():
    linen, of_nnx = (
        train_char_lm.create_state(small("char_lm", api=api))
        for api in ("linen", "nnx")
    )
    params, tokens = linen.params, np.arange(32).reshape(2, 16)
    shapes = [jax.tree.map(np.shape, tree) for tree in (params, of_nnx.params)]
    assert shapes[0] == shapes[1]
    model = nnx.merge(of_nnx.graphdef, params, nnx.State(of_nnx.variables))
    expected = char_lm.forward(params, tokens, linen)
    found = char_lm.forward(model, tokens, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# --- imagenet ------------------------------------------------------------------------


def test_imagenet_variants_change_the_default():
    known = set(configs.imagenet.default.get_config())
    for path in (ROOT / "configs" / "imagenet").glob("[!_]*.py"):
        config = importlib.import_module(f"configs.imagenet.{path.stem}").get_config()
        assert set(config) == known and long_word(config.precision, "")
        assert config.batch_size % 8 == 0  # devices


def test_imagenet_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"imagenet2012.*--config.dataset=synthetic"):
        input_pipeline.load(configs.imagenet.default.get_config())


def test_imagenet_resnet50_has_its_parameters():
    net = imagenet.create("ResNet50", num_classes=1000, width=64)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.uint8)
    init = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, train=False), image)
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(init["params"])]
    assert sum(sizes) == 25_557_032  # as everywhere
    decays = train_imagenet.is_kernel(init["params"])
    assert sum(jax.tree.leaves(decays)) == 53 + 1  # convolutions and the last layer
