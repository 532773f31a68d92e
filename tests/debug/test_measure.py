"""`measure`: what it runs, what it leaves alone, and how it prints. No time counts."""

import dataclasses
import io
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import flax_amp
from flax_amp import AmpTrainState, __main__
from flax_amp.debug import Figures, Measurement, measure

X = np.ones((4, 8), np.float32)  # of NumPy, as input pipelines give it
ROWS = ["float32", "bfloat16", "float16"]


class Linen(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(8, use_bias=False, dtype=self.dtype)(x)


def linen(dtype=None, **options):
    model = Linen(dtype)
    variables = model.init(jax.random.key(0), X)
    state = AmpTrainState.create(
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        tx=optax.sgd(0.1),
        rngs={"noise": jax.random.key(1)},
        **options,
    )

    def loss_fn(params, batch, *, state, rngs):
        variables = {"params": params, **state.variables}
        out, new = model.apply(variables, batch, mutable=["batch_stats"])
        return jnp.mean(out.astype(jnp.float32) ** 2), {"variables": new}

    return state, loss_fn, X


def by_hand():
    return linen(jnp.bfloat16, precision="32-true")


def nnx_loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def nnx_state():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return AmpTrainState.create(model=model, tx=optax.sgd(0.1)), nnx_loss, X


def plain(w, x):
    return jnp.sum(jnp.tanh(x @ w["kernel"]) ** 2)


W = {"kernel": jnp.ones((8, 8))}
SHAPES = jax.eval_shape(lambda: (W, X))


def to_explain():
    return plain, SHAPES


def function():
    return plain, (W, X)


def bits(tree):
    leaves = jax.tree.leaves(tree)
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


@pytest.fixture
def programs(monkeypatch):
    """The text of each program that is compiled, by order."""
    texts, lower = [], jax.stages.Traced.lower

    def spied(traced):
        texts.append(str(traced.jaxpr))
        return lower(traced)

    monkeypatch.setattr(jax.stages.Traced, "lower", spied)
    return texts


def products(text):
    """The dtypes of matrix products."""
    lines = [line for line in text.splitlines() if "= dot_general" in line]
    return {line.split(":")[1].partition("[")[0] for line in lines}


def test_a_state_stays_as_it_is(programs):
    state, loss_fn, batch = linen()
    before = [np.array(x) for x in bits(state)]
    found = measure(state, loss_fn, batch, beside=by_hand(), turns=2)
    assert [row.name for row in found.rows] == [*ROWS, "beside"]
    assert all(np.array_equal(x, y) for x, y in zip(before, bits(state), strict=True))
    # Each is traced twice; the last is the one that its author has cast.
    wanted = [{"f32"}, {"bf16"}, {"f16"}, {"bf16"}] * 2
    assert [*map(products, programs)] == wanted
    assert all(row.step_ms > 0 and row.temp_bytes for row in found.rows)
    assert (found.turns, found.program) == (2, "training step")


def test_nnx_state_and_options(programs):
    policy = flax_amp.default_amp_policy | {"Linear": jnp.float32}
    asked = nnx_state()
    options = {
        "amp_policy": policy,
        "has_aux": False,  # it is found out, as in `explain`
        "state_shardings": jax.tree.map(lambda x: x.sharding, asked[0]),
    }
    found = measure(*asked, turns=1, **options)
    assert [row.name for row in found.rows] == ROWS and found.name == "nnx_loss"
    assert {"f32"} == set().union(*map(products, programs))


@pytest.mark.parametrize(
    "make", [lambda: W, lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))]
)
def test_a_function(programs, make):
    first = make()
    loss = nnx_loss if isinstance(first, nnx.Module) else plain
    found = measure(loss, turns=1, beside=function())(first, X)
    assert [*map(products, programs)] == [{"f32"}, {"bf16"}, {"f16"}, {"f32"}] * 2
    assert all(row.step_ms > 0 for row in found.rows)
    assert not isinstance(jax.tree.leaves(first)[0], jax.core.Tracer)


@pytest.mark.parametrize(
    "call",
    [
        lambda: measure(plain)(*SHAPES),
        lambda: measure(nnx_loss)(
            nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))), X
        ),
        lambda: measure(jax.eval_shape(lambda: nnx_state()[0]), nnx_loss, SHAPES[1]),
    ],
    ids=["function", "module", "state"],
)
def test_shapes_are_compiled_only(call):
    found = call()
    assert found.turns == 0 and "not run" in str(found)
    for row in found.rows:
        assert row.step_ms is None and row.temp_bytes is not None and row.compile_s > 0


# --- what it prints ------------------------------------------------------------------

FOUND = Measurement(
    name="loss_fn",
    program="training step",
    platform="gpu",
    devices="1 x NVIDIA H100",
    turns=20,
    rows=(
        Figures("float32", 1.5, 20.0, 2345.6, 4_000_000_000, 80_000_000_000),
        Figures("bfloat16", 1.8, 30.0, 1172.8, 2_400_000_000, 44_000_000_000),
        Figures("float16", 1.8, 30.0, None, 2_400_000_000, None),
        Figures("beside", 1.5, 25.0, 1200.0, 0, 44_000_000_000),
    ),
    notes=("something",),
)


def test_figures_and_ratios(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(FOUND).splitlines()
    assert lines[:2] == [
        "loss_fn: training step on 1 x NVIDIA H100, the least of 20 turns",
        "Beside float32, bfloat16 takes 0.50 of the time and 0.60 of the temporary "
        "memory; float16 takes 0.60",
    ]
    rows = [line.split() for line in lines if line.startswith(("float", "bf", "bes"))]
    assert rows == [
        "float32 1.5 20 2,346 4 GB 80 GB".split(),
        "bfloat16 1.8 x1.20 30 x1.50 1,173 x0.50 2.4 GB x0.60 44 GB x0.55".split(),
        "float16 1.8 x1.20 30 x1.50 - 2.4 GB x0.60 -".split(),
        "beside 1.5 x1.00 25 x1.25 1,200 x0.51 0 44 GB x0.55".split(),
    ]
    assert lines[-1] == "Note: something."
    saved = json.loads(json.dumps(FOUND.to_dict()))
    assert saved["rows"][1]["step_ms"] == 1172.8
    assert saved["rows"][1]["to_float32"]["step_ms"] == 0.5
    assert saved["rows"][2]["to_float32"]["step_ms"] is None


def test_it_fits_a_terminal():
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width)
        console.print(FOUND.render())
        text = console.file.getvalue()
        assert "…" not in text and "x0.55" in text
    assert "Measurement of loss_fn on 1 x NVIDIA H100" in repr(FOUND)


def test_a_cpu_tells_little():
    text = str(dataclasses.replace(FOUND, platform="cpu"))
    assert "XLA emulates half precision" in text and "Beside float32" not in text


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: measure(plain, turns=0), "got turns=0; expected a number of steps"),
        (lambda: measure(W), "got dict; expected measure"),
        (lambda: measure(flax_amp.amp(plain)), "already rewritten by amp"),
        (lambda: measure(plain, beside=plain), "beside is a function; expected"),
        (lambda: measure(plain, beside=nnx_state()), "beside is a state, but what is"),
        (lambda: measure(lambda w, x: flax_amp.amp(plain)(w, x))(W, X), "calls a func"),
        (lambda: measure(lambda w: plain(w, X), compute=2)(W), "argument 'compute'"),
        (lambda: measure(lambda n: n + 1)(3), "has no float arrays"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_step_of_rewritten_code():
    state, _, batch = nnx_state()
    with pytest.raises(TypeError, match="calls a function that amp has rewritten"):
        measure(state, lambda m, x: flax_amp.amp(nnx_loss)(m, x), batch)


def test_a_program_that_cannot_run(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 80 GB")

    monkeypatch.setattr(jax.stages.Lowered, "compile", full)
    with pytest.raises(RuntimeError, match="measure: in float32: RESOURCE_EXHAUSTED"):
        measure(plain)(W, X)


# --- the command ---------------------------------------------------------------------


def run(capsys, *arguments):
    code = __main__.main(["measure", *arguments])
    return code, capsys.readouterr()


def test_command(capsys, tmp_path, monkeypatch):
    path, updates = tmp_path / "found.json", []
    monkeypatch.setattr(jax.config, "update", lambda *args: updates.append(args))
    beside = "--beside", "debug/test_measure:function"
    where = "debug/test_measure:function"
    code, printed = run(capsys, where, *beside, "--turns", "1", "--json", str(path))
    assert code == 0 and f"wrote {path}" in printed.out
    assert updates == []  # the device stays the user's
    saved = json.loads(path.read_text())
    assert [row["name"] for row in saved["rows"]] == [*ROWS, "beside"]
    code, printed = run(capsys, "debug/test_measure.py")
    assert code == 0 and "not run" in printed.out


def wrong():
    return plain, (W, X[:, :3])


@pytest.mark.parametrize("target", ["no.such", "debug/test_measure:wrong"])
def test_command_errors(capsys, target):
    code, printed = run(capsys, target)
    assert code == 2 and printed.err.startswith(f"error: {target}: ")
    assert not printed.out and len(printed.err.splitlines()) == 1
