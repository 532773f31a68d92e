"""`benchmarks/`: models and variants build, commands run, the report renders."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import models, peers, request, results, variants
from benchmarks.commands import error, host, report, step, timed
from benchmarks.request import Request
from benchmarks.results import Results
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


@pytest.mark.filterwarnings("ignore:amp. no matmul")  # too small for fp8
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
        for size in ("tiny", "full")
    )
    assert jax.tree.structure(tiny) == jax.tree.structure(full)
    task = models.problem(model, "tiny", jnp.bfloat16)
    rows = dtypes_of(task.loss, *task.shapes(), primitive=MATMULS)
    found = [first for first, *_ in rows]
    assert found.count("float32") == WIDE.get(model, 0)
    assert {*found} - {"float32"} == {"bfloat16"}


def test_the_expert_casts_scores_up_and_probabilities_back():
    scores = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    made = peers.softmax_in_float32(lambda x: jax.nn.softmax(x))
    assert dtypes_of(made, scores, primitive="exp") == [("float32",)]
    assert jax.eval_shape(made, scores).dtype == jnp.bfloat16


def test_what_is_asked_for_and_why_it_failed():
    hand = "hand_bf16", "smcast_bf16"
    asked = Request("tpu", ("mlp", "t5"), hand)
    assert asked.cells() == [("mlp", [hand[0]]), ("t5", [*hand])]
    text = request.reason(RuntimeError("no /home/me/venv/lib/x.so: f32[8]/2\nmore"))
    assert text == "RuntimeError: no x.so: f32[8]/2"
    parsed = cli.parser().parse_args("gpu --models mlp,lstm --rounds 3".split())
    assert (parsed.models, parsed.rounds) == (("mlp", "lstm"), 3)
    for line in ("", "tpu --target v4", "tpu --models moon", "gpu --platform cpu"):
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
    assert Results.read(first.path).cells["mlp"] == {
        "float32": {"run": 0, "temp_mb": 1},
        "amp_bf16": {"run": 1, "temp_mb": [1, 2.5]},
    }
    monkeypatch.setattr("benchmarks.results.versions", lambda: {"jax": "0"})
    assert not second.has("mlp", "float32")  # other versions are measured again


def test_the_page_of_the_repository_is_made_of_its_figures(tmp_path, monkeypatch):
    for path in results.FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(report, "draw_gain", lambda *_: None)
    report.run(Request("report", folder=tmp_path))
    for page in ("README.md", "cpu.md"):
        made, there = ((f / page).read_text() for f in (tmp_path, results.FOLDER))
        assert made == there, "run `python -m benchmarks report`"
    with pytest.raises(SystemExit, match="no results"):
        report.run(Request("report", folder=tmp_path / "none"))


def test_what_is_compared():
    """Times with those of the same run, float16 with float16, and no failures."""
    times = {
        "hand_fp16": {"run": 0, "step_ms": [1.0, 2.0]},
        "amp_fp16": {"run": 0, "step_ms": [4.0, 2.0], "kernels": 3},
        "float32": {"run": 1, "step_ms": [1.0, 1.0]},
        "hand_bf16": {"run": 0, "error": "no memory"},
    }
    gpu = SECTIONS["gpu"]
    row = gpu.row("amp_fp16", times)
    assert row == ["3.000 ± 1.000 (2.00)", "", "", "", "3", ""]
    assert gpu.row("float32", times)[0] == "1.000 ± 0.000"
    assert gpu.line(times["hand_bf16"]) == "no memory"
    cpu = {
        "float32": {"run": 0, "step_ms": [3.0, 2.0, 7.0]},
        "amp_bf16": {"run": 0, "step_ms": [9.0, 5.0, 6.0], "grad_error": 1.5},
        "mpx_bf16": {"run": 0, "step_ms": [5.0]},  # it has no forward pass
    }
    row = SECTIONS["cpu"].row("amp_bf16", cpu)
    assert row == ["5.0 (2.50)", "6.0 (2.00)", "", "", "", "1.50"]
    assert SECTIONS["cpu"].row("mpx_bf16", cpu)[:2] == ["5.0 (2.50)", "5.0 (1.67)"]
    host = {"float32": {"run": 0, "cpu_s": 2.0}, "amp_bf16": {"run": 1, "cpu_s": 3.0}}
    assert SECTIONS["host"].ratios("cpu_s", "amp_bf16", host) == []  # of two runs


@pytest.mark.slow
def test_models_for_a_cpu():
    for model in models.ON_CPU:
        params, *_ = models.problem(model, "cpu").shapes()
        assert sum(x.size for x in jax.tree.leaves(params)) < 2e7


def test_a_size_that_a_model_does_not_have():
    message = "no size 'cpu'; expected one of full, tiny"
    with pytest.raises(ValueError, match=message):
        models.problem("lstm", "cpu")


def test_a_forward_pass_is_in_the_precision_of_its_variant():
    for variant in ("float32", "hand_bf16", "amp_bf16", "amp_step_bf16", "amp_fp16"):
        training = variants.training(variant, "mlp", "tiny")
        shapes = training.problem.shapes()
        rows = dtypes_of(training.forward, *shapes, primitive=MATMULS)
        found = {first for first, *_ in rows}
        name = {"float32": "float32", "amp_fp16": "float16"}.get(variant, "bfloat16")
        assert found == {name}


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch):
    """Those that need no accelerator, on the smallest model."""
    monkeypatch.setenv("XLA_FLAGS", error._EXACT)  # what the command would add
    for module, name, least in (
        (error, "SEEDS", 1),
        (host, "REPEATS", 1),
        (timed, "_TURN_S", 0.001),
        (step, "LAYERS", (1,)),
    ):
        monkeypatch.setattr(module, name, least)
    for line in (
        "error --variants amp_bf16,amp_fp16",
        "host --size tiny --variants float32",
        "cpu --size tiny --variants amp_fp16,float32 --rounds 2",
        "step",
    ):
        cli.main([*line.split(), "--models", "mlp", "--results", str(tmp_path)])
    files = map(Results.read, tmp_path.glob("*.json"))
    found = {each.command: each.cells["mlp"] for each in files}
    wrong, in_float16 = (
        found["error"][v]["errors"][0] for v in ("amp_bf16", "amp_fp16")
    )
    assert 0 < in_float16 < wrong < 30
    assert found["host"]["float32"]["cpu_s"] > 0
    for cell in found["cpu"].values():
        assert len(cell["step_ms"]) == 2 and min(cell["step_ms"]) > 0
        assert len(cell["forward_ms"]) == 2 and min(cell["forward_ms"]) > 0
        assert cell["peak_mb"] > 0 and np.isfinite(cell["loss"])
    assert found["cpu"]["float32"]["grad_error"] == 0
    assert 0 < found["cpu"]["amp_fp16"]["grad_error"] < 30
    text = (tmp_path / "step.md").read_text()
    assert text.count("| `make_train_step` | ") == len(step.DEVICES)
