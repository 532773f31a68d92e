"""`benchmarks/`: models and variants build, commands run, the report renders."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import models, report, request, results, variants
from benchmarks.commands import error, gpu, host, step
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.tables import SECTIONS
from helpers import MATMULS, dtypes_of

pytestmark = pytest.mark.once
INSTALLED = [name for name in variants.NAMES if not variants.missing_package(name)]
# The router with its gates, and the states, are in float32 in public models, too.
WIDE = dict(moe=12, mamba=1)
# They have the layers of another one.
SAME = {"gpt_scan_noremat", "gpt_fsdp", "llama_4k"}


@pytest.fixture(autouse=True)
def _as_a_user_has_it():
    """Models of users add biases of lower rank without a thought."""
    with jax.numpy_rank_promotion("allow"):
        yield


def signature(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


@pytest.mark.filterwarnings("ignore:amp. no matrix product")  # too small for fp8
@pytest.mark.parametrize("variant", INSTALLED)
def test_steps_keep_their_carries(variant):
    training = variants.training(variant, "mlp", "tiny")
    carry, batch = training.shapes()
    new, loss = jax.eval_shape(training.step, carry, batch)
    assert signature(new) == signature(carry)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("model", [m for m in models.NAMES if m not in SAME])
def test_a_hand_set_model_forgets_no_layer(model):
    """A layer without its dtype would make a false baseline."""
    tiny, full = (
        jax.eval_shape(models.problem(model, size).init, jax.random.key(0))
        for size in models.SIZES
    )
    assert jax.tree.structure(tiny) == jax.tree.structure(full)
    task = models.problem(model, "tiny", jnp.bfloat16)
    rows = dtypes_of(task.loss, *task.shapes(), primitive=MATMULS)
    found = [first for first, *_ in rows]
    assert found.count("float32") == WIDE.get(model, 0)
    assert {*found} - {"float32"} == {"bfloat16"}


def test_the_expert_casts_scores_up_and_probabilities_back():
    def loss(scores):
        low = jax.nn.softmax(scores.astype(jnp.bfloat16))
        return low.astype(jnp.float32) + jax.nn.softmax(scores)

    scores = jnp.linspace(-3.0, 3.0, 12).reshape(3, 4)
    narrow = scores.astype(jnp.bfloat16).astype(jnp.float32)
    made = variants.softmax_in_float32(loss)(scores)
    wanted = jax.nn.softmax(narrow).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(made, wanted + jax.nn.softmax(scores))


def test_what_is_asked_for_and_why_it_failed():
    hand = ["hand_bf16", "smcast_bf16"]
    asked = Request(("mlp", "t5"))
    assert asked.cells((), hand) == [("mlp", hand[:1]), ("t5", hand)]
    text = request.reason(RuntimeError("no /home/me/venv/lib/x.so: f32[8]/2\nmore"))
    assert text == "RuntimeError: no x.so: f32[8]/2"
    parsed = cli.parser().parse_args("gpu --models mlp,lstm --platform cpu".split())
    assert (parsed.models, parsed.platform) == (("mlp", "lstm"), "cpu")
    for line in ("", "tpu --target v4", "tpu --models moon"):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(line.split())
    assert {*SECTIONS} < {*cli.COMMANDS}


def test_results_are_merged_and_resumed(tmp_path, monkeypatch):
    first = Results.open(tmp_path, "tpu", "v5e")
    first.put("mlp", "float32", {"temp_mb": 1})
    first.put("mlp", "amp_bf16", {"error": "OOM"})
    second = Results.open(tmp_path, "tpu", "v5e")
    assert second.has("mlp", "float32") and not second.has("mlp", "amp_bf16")
    second.put("mlp", "amp_bf16", {"temp_mb": [1, 2.5]})
    (found,) = read_all(tmp_path)
    assert found.cells["mlp"] == {
        "float32": {"run": 0, "temp_mb": 1},
        "amp_bf16": {"run": 1, "temp_mb": [1, 2.5]},
    }
    monkeypatch.setattr("benchmarks.environment.versions", lambda: {"jax": "0"})
    assert not second.has("mlp", "float32")  # other versions are measured again


def test_the_page_of_the_repository_is_made_of_its_figures(tmp_path, monkeypatch):
    for path in results.FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(report.plots, "can_draw", lambda: False)
    report.run(Request(folder=tmp_path))
    made, there = (f / "README.md" for f in (tmp_path, results.FOLDER))
    assert made.read_text() == there.read_text(), "run `python -m benchmarks report`"
    with pytest.raises(SystemExit, match="no results"):
        report.run(Request(folder=tmp_path / "none"))


def test_what_is_compared():
    """Times with those of the same run, float16 with float16, and no failures."""
    times = {
        "hand_fp16": {"run": 0, "step_ms": [1.0, 2.0]},
        "amp_fp16": {"run": 0, "step_ms": [4.0, 2.0], "kernels": 3},
        "float32": {"run": 1, "step_ms": [1.0, 1.0]},
        "hand_bf16": {"run": 0, "error": "no memory"},
    }
    gpu = SECTIONS["gpu"]
    assert gpu.row("amp_fp16", times) == ["3.000 ± 1.000 (2.00)", "", "", "3", ""]
    assert gpu.row("float32", times)[0] == "1.000 ± 0.000"
    assert gpu.line(times["hand_bf16"]) == "no memory"
    host = {"float32": {"run": 0, "cpu_s": 2.0}, "amp_bf16": {"run": 1, "cpu_s": 3.0}}
    assert SECTIONS["host"].ratios("cpu_s", "amp_bf16", host) == []  # of two runs


@pytest.mark.slow
class TestCommands:
    """Those that need no accelerator, on the smallest model."""

    def test_error(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("XLA_FLAGS", error._EXACT)  # what the command would add
        monkeypatch.setattr(error, "SEEDS", 1)
        asked = Request(("mlp",), ("amp_bf16", "amp_fp16"), folder=tmp_path)
        error.run(asked)
        (found,) = read_all(tmp_path)
        assert found.size == "full"  # the models are tiny; the report shows it
        wrong, in_float16 = (found.cells["mlp"][v]["errors"][0] for v in asked.variants)
        assert 0 < in_float16 < wrong < 30

    def test_host(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host, "REPEATS", 1)
        host.run(Request(("mlp",), ("float32",), size="tiny", folder=tmp_path))
        (found,) = read_all(tmp_path)
        assert found.cells["mlp"]["float32"]["cpu_s"] > 0

    def test_timing(self, monkeypatch):
        monkeypatch.setattr(gpu, "_TURN_S", 0.001)
        names = ["amp_fp16", "float32"]
        cells = gpu.time_model(Request(size="tiny"), "mlp", names, rounds=2)
        for name in names:
            assert len(cells[name]["step_ms"]) == 2 and min(cells[name]["step_ms"]) > 0
            assert cells[name]["peak_mb"] > 0 and np.isfinite(cells[name]["loss"])

    def test_step(self, tmp_path, monkeypatch):
        monkeypatch.setattr(step, "LAYERS", (1,))
        step.run(Request(folder=tmp_path), rounds=5)
        text = (tmp_path / "step.md").read_text()
        assert text.count("| `make_train_step` | ") == len(step.DEVICES)
