"""`benchmarks/`: models and variants build, commands run, the report renders."""

import dataclasses
import importlib
import json
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import fp8, models, plots, report, request, softmax, variants
from benchmarks.commands import casts, compiled, error, gpu, host, optim, save, step
from benchmarks.environment import command_line
from benchmarks.models import efficientnet, gpt, resnet, vit
from benchmarks.request import Request
from benchmarks.results import Results, read_all
from benchmarks.sections import SECTIONS
from helpers import MATMULS, dtypes_of

INSTALLED = [name for name in variants.NAMES if variants.reason_missing(name) is None]


@pytest.fixture(autouse=True)
def _as_a_user_has_it():
    """Models of users add biases of lower rank without a thought."""
    with jax.numpy_rank_promotion("allow"):
        yield


FEWER = dict.fromkeys(
    "llama moe bert t5 griffin gat dit clip mamba mixer wavenet "
    "linear_attention".split(),
    {"layers": 1},
) | {
    "convnext": {"depths": (1, 0, 1, 0)},
    "unet": {"factors": (1,), "attended": 0},
    "swin": {"depths": (2, 1), "heads": (3, 6)},
}


@pytest.fixture
def shallow(monkeypatch):
    """Makes the deep models quick to trace: a layer of each kind."""
    monkeypatch.setattr(gpt, "TINY", gpt.TINY | {"layers": 1})
    monkeypatch.setattr(resnet, "STAGES", (1,))
    monkeypatch.setattr(efficientnet, "STAGES", ((1, 3, 2, 1, 16), (2, 5, 2, 6, 24)))
    tables = [(sizes, {"layers": 1}) for sizes in vit.CONFIGS.values()]
    for name, fewer in FEWER.items():
        module = importlib.import_module(f"benchmarks.models.{name}")
        tables.append((module.SIZES, fewer))
    for sizes, fewer in tables:
        for key, config in sizes.items():
            monkeypatch.setitem(sizes, key, config._replace(**fewer))


def signature(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


SLOW = [pytest.param(m, marks=pytest.mark.slow) for m in models.NAMES if m != "mlp"]


@pytest.mark.filterwarnings("ignore:amp. no matrix product")  # too small for fp8
@pytest.mark.parametrize("model", ["mlp", *SLOW])
def test_steps_keep_their_carries(model, shallow):
    """All variants of one model, and of each model those with most in the carry."""
    for name in INSTALLED if model == "mlp" else ("hand_bf16", "amp_fp16"):
        training = variants.training(name, model, "tiny")
        carry, batch = training.shapes()
        new, loss = jax.eval_shape(training.step, carry, batch)
        assert signature(new) == signature(carry), name
        assert (loss.shape, loss.dtype) == ((), jnp.float32), name


SCANNED = "gpt_scan lstm llama bert dlrm t5 mamba mamba_loop".split()
UNROLLED = "gat dit swin clip mixer wavenet linear_attention nnx_gpt".split()


@pytest.mark.parametrize(
    "model", SCANNED + [pytest.param(m, marks=pytest.mark.slow) for m in UNROLLED]
)
def test_sizes_differ_in_shapes_only(model):
    tiny, full = (
        jax.eval_shape(models.problem(model, size).init, jax.random.key(0))
        for size in models.SIZES
    )
    assert jax.tree.structure(tiny) == jax.tree.structure(full)


def dtypes(training, function, primitive):
    """Returns the dtypes of the first operands of equations."""
    (params, others, *_), batch = training.shapes()
    found = dtypes_of(function, params, others, batch, primitive=primitive)
    return [first for first, *_ in found]


# They have the layers of another one, in another loop or in another size.
SAME_LAYERS = (
    "gpt_unroll gpt_scan_noremat gpt_24 gpt_fsdp llama_noremat llama_1b griffin_loop "
    "mamba_loop vit_s16 llama_4k mlp_4k"
).split()


@pytest.mark.once
@pytest.mark.parametrize("model", [m for m in models.NAMES if m not in SAME_LAYERS])
class TestHandSet:
    """A layer to which a hand-set model forgot to give its dtype is a false twin."""

    VARIANTS = "hand_bf16", "smcast_bf16"
    # The router with its gates, and the states, are in float32 in public ones, too.
    WIDE = dict(moe=2, mamba=1)

    def test_products_are_in_half(self, model, shallow):
        training = variants.training("hand_bf16", model, "tiny")
        found = dtypes(training, training.problem.loss, MATMULS)
        assert found.count("float32") == self.WIDE.get(model, 0)
        assert {*found} - {"float32"} == {"bfloat16"}

    @pytest.mark.slow
    def test_the_softmax_of_the_expert_is_in_float32(self, model, shallow):
        """The other models have none, or one that is in float32 as it is."""
        hand, expert = (variants.training(v, model, "tiny") for v in self.VARIANTS)
        in_half = [
            dtypes(x, x.gradients, ("exp",)).count("bfloat16") for x in (hand, expert)
        ]
        assert softmax.is_in_half(model) == (in_half[0] > in_half[1])
        forward = softmax.in_float32(hand.problem.loss)
        left = "bfloat16" in dtypes(hand, forward, ("exp",))
        assert left == (model == "gat")  # it is written out there


@pytest.mark.parametrize("model", ["gpt_scan", "moe"])
def test_products_in_fp8(model, shallow):
    """A layer of attention and a dense MLP has six such products; experts are no Dense.

    Each of them has two more in the backward pass, and so has the head. The scanned
    layer, under `nn.remat`, computes those again whose results the backward pass needs,
    five. The last layer of `moe` is Dense.
    """
    found = {}
    for name in ("amp_bf16", "amp_fp8_all", "flax_fp8"):
        training = variants.training(name, model, "tiny")
        carry, batch = training.shapes()
        new, _ = jax.eval_shape(training.step, carry, batch)
        assert signature(new) == signature(carry), name
        counts = fp8.products(training.step, carry, batch)
        found[name] = counts["fp8_products"]
    assert found == {
        "amp_bf16": 0,
        "amp_fp8_all": 7 * 3 + 5 if model == "gpt_scan" else 5 * 3,
        "flax_fp8": 6 * 3 + 5 if model == "gpt_scan" else 5 * 3,
    }


def test_a_mixture_of_experts_sows_a_term_of_its_loss(shallow):
    task = models.problem("moe", "tiny")
    params, others, batch = task.shapes()
    assert not others
    loss = jax.make_jaxpr(task.loss)(params, others, batch)
    assert "mul 0.00999" in str(loss)


def test_unknown_names_and_missing_packages(monkeypatch):
    for variant, model in (("amp_int8", "mlp"), ("float32", "perceptron")):
        with pytest.raises(ValueError, match="expected one of"):
            variants.training(variant, model)
    monkeypatch.setitem(sys.modules, "jmp", None)
    assert "pip install jmp" in variants.reason_missing("jmp_bf16")


def test_cells_labels_and_reasons():
    asked = Request(models=("mlp", "vit_small"), options={"recompute": False})
    hand = ["hand_bf16", "smcast_bf16"]
    assert asked.cells((), hand) == [("mlp", hand[:1]), ("vit_small", hand)]
    assert asked.label("amp_bf16") == "amp_bf16[recompute=False]"
    assert asked.label("hand_bf16") == "hand_bf16"
    asked = Request(models=("llama", "t5"))  # the one casts its scores itself
    assert asked.cells((), hand) == [("llama", hand[:1]), ("t5", hand)]
    text = request.reason(RuntimeError("no /home/me/venv/lib/x.so: f32[8]/2\nmore"))
    assert text == "RuntimeError: no x.so: f32[8]/2"
    assert len(request.reason(ValueError("a" * 1000))) == 240


def test_a_recorded_command_has_no_path(monkeypatch):
    typed = "/venv/bin/python -m benchmarks tpu --results /home/me/results"
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    assert command_line() == "python -m benchmarks tpu --results results"


def test_command_line(capsys):
    line = "gpu --models mlp,lstm --option recompute=False --platform cpu --resume"
    parsed = cli.parser().parse_args(line.split())
    assert parsed.models == ("mlp", "lstm")
    assert parsed.option == [("recompute", False)]
    assert (parsed.platform, parsed.resume, parsed.size) == ("cpu", True, "full")
    assert cli.parser().parse_args(["tpu", "--target", "v6e"]).target == "v6e"
    for line in (
        "",
        "tpu --target v4",
        "tpus",
        "tpu --models moon",
        "tpu --option recompute",
    ):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(line.split())
        assert "usage" in capsys.readouterr().err, line
    assert {
        *SECTIONS,
        *"step casts convergence corpus faults optim save soak report".split(),
    } == {*cli.COMMANDS}


def test_the_softmax_of_the_expert():
    """Scores are cast up and probabilities back; other softmaxes stay."""

    def loss(scores):
        narrow = scores.astype(jnp.bfloat16)
        parts = (nn.softmax(narrow), jax.nn.softmax(narrow, axis=0))
        return sum(parts).astype(jnp.float32) + jax.nn.softmax(scores)

    scores, seen = jnp.linspace(-3.0, 3.0, 12).reshape(3, 4), []
    narrow = scores.astype(jnp.bfloat16).astype(jnp.float32)
    made = softmax.in_float32(loss, lambda: seen.append(True))(scores)
    parts = (jax.nn.softmax(narrow, axis).astype(jnp.bfloat16) for axis in (-1, 0))
    wanted = sum(parts).astype(jnp.float32) + jax.nn.softmax(scores)
    np.testing.assert_array_equal(made, wanted)
    assert len(seen) == 2 and not np.array_equal(loss(scores), wanted)


class TestCasts:
    def test_every_cast_is_listed(self, tmp_path):
        casts.run(Request(("mlp", "gpt_scan"), size="tiny", folder=tmp_path))
        text = (tmp_path / "casts.md").read_text()
        for model, table in zip(
            ("mlp", "gpt_scan"), text.split("## ")[1:], strict=True
        ):
            totals = casts.explained(model, "tiny").totals
            rows = [line.split("|") for line in table.splitlines() if "`" in line]
            for column, expected in ((2, totals.casts_down), (3, totals.casts_up)):
                assert (
                    sum(int(row[column].strip() or 0) for row in rows) == expected > 0
                )
        assert "| `MLP/Dense_*` |" in text


class TestSave:
    @pytest.mark.slow
    def test_command(self, tmp_path, monkeypatch):
        monkeypatch.setattr(save, "ROUNDS", 1)
        save.run(Request(size="tiny", folder=tmp_path))
        text = (tmp_path / "save.md").read_text()
        assert "| plain Orbax | " in text and "| flax_amp.checkpoint | " in text


@pytest.mark.slow
def test_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "LAYERS", (1,))
    step.run(Request(size="tiny", folder=tmp_path), rounds=5)
    text = (tmp_path / "step.md").read_text()
    assert text.count("| `make_train_step` | ") == 2 + 2 and "`import flax_amp`" in text


@pytest.mark.slow
class TestOptim:
    def test_command(self, tmp_path, monkeypatch):
        monkeypatch.setattr(optim, "LEAVES", 2)
        optim.run(Request(folder=tmp_path), only="sgd", rounds=1)
        text = (tmp_path / "optim.md").read_text()
        assert "| `sgd` | exact | exact |" in text and "noise" in text

    def test_failures_are_told(self, tmp_path):
        with pytest.raises(SystemExit, match="nothing: AttributeError"):
            optim.run(Request(folder=tmp_path), only="nothing", rounds=0)
        assert "| `nothing` | FAILED |" in (tmp_path / "optim.md").read_text()


def test_results_are_merged(tmp_path, monkeypatch):
    first = Results.open(tmp_path, "tpu", "v5e")
    first.put("mlp", "float32", {"temp_mb": 1})
    first.put("mlp", "amp_bf16", {"error": "OOM"})
    second = Results.open(tmp_path, "tpu", "v5e")
    assert second.has("mlp", "float32") and not second.has("mlp", "amp_bf16")
    second.put("mlp", "amp_bf16", {"temp_mb": [1, 2.5]})
    (found,) = read_all(tmp_path)
    assert [run["versions"]["jax"] for run in found.runs] == [jax.__version__] * 2
    assert found.cells["mlp"] == {
        "float32": {"run": 0, "temp_mb": 1},
        "amp_bf16": {"run": 1, "temp_mb": [1, 2.5]},
    }
    monkeypatch.setattr("benchmarks.environment.versions", lambda: {"jax": "0"})
    assert not second.has("mlp", "float32")  # other versions are measured again


RUN = {
    "command": "python -m benchmarks tpu",
    "date": "2026-01-01T00:00:00+00:00",
    "machine": "2 x cpu",
    "versions": {"jax": "0.12"},
}


PRODUCTS = ("amp_bf16", "amp_fp8", "flax_fp8")


def compiled_cell(ms, gb, mb):
    moved = {"kind": "all-gather", "dtype": "bf16", "bytes": 8e6, "text_bytes": 1e6}
    found = {"run": 0, "estimated_ms": ms, "gb_accessed": gb, "temp_mb": mb}
    return found | {"converts": 4, "kernels": 30, "collectives": [moved]}


@pytest.fixture
def figures(tmp_path):
    """A folder with results of every command."""
    cells = {
        "hand_bf16": compiled_cell(2, 4, 100),
        "smcast_bf16": compiled_cell(4, 6, 88),
        "amp_bf16": compiled_cell(1, 3, 110),
        "jmp_bf16": {"run": 0, "error": "XlaRuntimeError: no room"},
    }
    times = {
        "hand_fp16": {"run": 0, "temp_mb": 1, "step_ms": [1.0, 2.0, 3.0]},
        "amp_fp16": {"run": 0, "temp_mb": 1, "step_ms": [1.0, 1.0, 3.0]},
        "amp_fp16[a=1]": {"run": 1, "temp_mb": 1, "step_ms": [1.0, 1.0]},
    }
    trace = {"run": 0, "trace_s": [1.0, 2.0], "lower_s": [1.0, 1.0], "ops": 10}
    trace |= {"cpu_s": [2.0, 3.0]}
    errors = {
        "hand_bf16": {"run": 0, "errors": [0.02, 0.04]},
        "amp_bf16": {"run": 0, "errors": [0.01, 0.04]},
    }
    cycles = {"estimated_ms": None, "estimated_mcycles": 6.0, "unknown_cycles": 2}
    other_clock = {name: cells[name] | cycles for name in ("hand_bf16", "amp_bf16")}
    other_clock["amp_bf16"] |= {"estimated_mcycles": 3.0, "unknown_cycles": 0}
    exchange = dict(
        kind="all-reduce", runs=9, scalar_runs=7, in_text=5, scalar_in_text=3
    )
    in_fp8 = {"roofline_ms": 2.0, "exchanges": [exchange], "fp8_products": 12}
    fp8_cells = {name: compiled_cell(None, 4, 100) | in_fp8 for name in PRODUCTS}
    fp8_cells["amp_fp8"] |= {"roofline_ms": 1.5}
    for command, target, model, of_model in (
        ("tpu", "v5e", "mlp", cells),
        ("tpu", "tpu7x", "mlp", other_clock),
        ("gpu-aot", "h200", "mlp", cells),
        ("mesh", "v5e:16x16", "mlp", cells),
        ("state", "v5e", "mlp", cells),
        ("fp8", "h200", "mlp", fp8_cells),
        ("gpu", "NVIDIA H200", "mlp", times),
        ("host", "cpu", "gpt_24", {"float32": trace, "amp_bf16": trace}),
        ("error", "cpu", "mlp", errors),
    ):
        content = {"command": command, "target": target, "size": "full"}
        content |= {"runs": [RUN] * 2, "cells": {model: of_model}}
        (tmp_path / f"{command}-{target[:4]}.json").write_text(json.dumps(content))
    (tmp_path / "convergence.json").write_text('{"made": [], "runs": {}}')  # not read
    return tmp_path


def test_tables(figures, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *args: [])
    report.run(Request(folder=figures))
    text = (figures / "README.md").read_text()
    row = "| mlp | amp_bf16 | 1.000 ms (0.50, 0.25) | 3.00 (0.75, 0.50) | 110 (1.10, "
    assert row in text
    assert "| mlp | hand_bf16 | 6.000 Mcycles and 2 unknown (1.00) |" in text
    assert "| mlp | amp_bf16 | 3.000 Mcycles (0.50) |" in text
    assert "- No figures for mlp jmp_bf16: `XlaRuntimeError: no room`" in text
    assert "| mlp | amp_fp16 | 1.000 (0.50) | 1.000 to 3.000 | 1 (1.00) |" in text
    assert "| mlp | amp_fp16[a=1] | 1.000 | 1.000 to 1.000 | 1 |" in text  # other run
    assert "| mlp | amp_bf16 | 8.0 (1.0) |" in text  # collectives
    assert "| mlp | amp_fp8 |  | 1.500 (0.75) | 4.00 (1.00) |" in text
    assert "| mlp | amp_fp8 | all-reduce | 9 | 7 | 5 | 3 |" in text
    assert "| mlp | amp_bf16 | 2.500 ± 1.500 | 0.750 ± 0.250 | 2 |" in text
    assert "`python -m benchmarks tpu`, 2026-01-01T00:00:00+00:00" in text
    for section in SECTIONS.values():
        assert section.title in text and section.note in text
    summary = text.split("## ")[1].removeprefix("Summary")
    assert summary.strip() in capsys.readouterr().out
    lines = [
        line.strip("| ").split(" | ") for line in summary.splitlines() if "|" in line
    ]
    row = dict(zip(lines[0], lines[2], strict=False))
    assert row["v5e time"] == "0.50, 0.25" and row["tpu7x time"] == "0.50"
    assert row["v5e memory"] == row["h200 compiled memory"] == "1.10, 1.25"
    assert row["NVIDIA H200 time, float16 step"] == "0.50" and row["error"] == "0.75"


def test_plots(figures):
    pytest.importorskip("matplotlib")
    names = plots.draw_all(read_all(figures), figures)
    assert names == ["tpu-v5e.png", "h200-memory.png"]
    assert all((figures / name).stat().st_size > 10000 for name in names)


def test_no_results(tmp_path):
    with pytest.raises(SystemExit, match="no results"):
        report.run(Request(folder=tmp_path))


class TestCommands:
    """Those that need no accelerator and no compiler for one, on the smallest model."""

    @pytest.mark.slow
    def test_error(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("XLA_FLAGS", error._EXACT)  # what the command would add
        monkeypatch.setattr(error, "SEEDS", 1)
        asked = Request(("mlp",), ("amp_bf16", "amp_fp16"), folder=tmp_path)
        error.run(asked)
        (found,) = read_all(tmp_path)
        (wrong,) = found.cells["mlp"]["amp_bf16"]["errors"]
        (in_float16,) = found.cells["mlp"]["amp_fp16"]["errors"]
        assert 0 < in_float16 < wrong < 0.3
        error.run(dataclasses.replace(asked, resume=True))
        assert capsys.readouterr().out.count("amp_bf16") == 1

    def test_relative_error(self):
        grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.zeros(())}
        assert error.relative_error(grads, grads) == 0
        wrong = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(())}
        assert error.relative_error(wrong, grads) == pytest.approx(0.2)

    @pytest.mark.slow
    def test_host(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host, "REPEATS", 1)
        asked = Request(("mlp",), ("float32",), size="tiny", folder=tmp_path)
        host.run(asked)
        (found,) = read_all(tmp_path)
        figures = found.cells["mlp"]["float32"]
        assert all(len(figures[key]) == 1 for key in ("trace_s", "lower_s", "cpu_s"))
        assert figures["ops"] > 100

        def refuse(*args, **kwargs):
            raise RuntimeError("out of memory")

        monkeypatch.setattr("benchmarks.timing.lower", refuse)
        reason = {"error": "RuntimeError: out of memory"}
        names = ["float32", "amp_bf16"]
        assert host.trace(asked, "mlp", names) == dict.fromkeys(names, reason)

    @pytest.mark.slow
    def test_timing(self, monkeypatch):
        monkeypatch.setattr(gpu, "_TURN_S", 0.001)
        names = ["amp_fp16", "float32"]
        cells = gpu.time_model(Request(size="tiny"), "mlp", names, rounds=2)
        for name in names:
            cell = cells[name]
            assert len(cell["step_ms"]) == 2 and min(cell["step_ms"]) > 0
            assert cell["peak_mb"] > 0 and np.isfinite(cell["loss"])

    def test_gpus_are_described_by_the_plugin(self, tmp_path, monkeypatch):
        texts = [
            f'gpu_device_info {{ {n} }}\ndevice_description_str: "{name}"\n'
            for n, name in enumerate(("A", compiled.GPUS["b200"]))
        ]
        (tmp_path / "xla_cuda_plugin.so").write_bytes("\0 # \n".join(texts).encode())
        spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
        assert compiled._description(compiled.GPUS["b200"]) == texts[1]
        with pytest.raises(SystemExit, match="does not describe NVIDIA H200"):
            compiled._description(compiled.GPUS["h200"])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(SystemExit, match="pip install 'jax-cuda12-plugin"):
            compiled._description("A")

    def test_fsdp_takes_the_largest_axis_that_divides(self):
        over = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        shapes = {"w": (12, 16, 32), "odd": (3, 5), "scalar": ()}
        tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        specs = {k: s.spec for k, s in compiled.fsdp(tree, over).items()}
        spec = jax.sharding.PartitionSpec
        assert specs == {
            "w": spec(None, None, "data"),
            "odd": spec(),
            "scalar": spec(),
        }
