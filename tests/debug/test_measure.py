"""`measure`: what it runs, what it leaves alone, and how it prints. No time counts."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState
from flax_amp.debug import Figures, Measurement, _measure, _processor, measure
from helpers import assert_identical

X = np.ones((4, 8), np.float32)  # of NumPy, as input pipelines give it
DTYPES = ["float32", "bfloat16", "float16"]


def nnx_loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def nnx_pair():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), nnx_loss, X


def plain(w, x):
    return jnp.sum(jnp.tanh(x @ w["kernel"]) ** 2)


W = {"kernel": jnp.ones((8, 8))}


def of_state(has_aux=True):
    def loss_fn(params, batch, weight, *, state, rngs):
        loss = plain(params, batch) * weight
        return (loss, {"loss": loss}) if has_aux else loss

    options = dict(tx=optax.sgd(0.1), rngs={"noise": jax.random.key(1)})
    return AmpTrainState.create(params=W, **options), loss_fn, X, jnp.float32(2)


@pytest.fixture
def programs(monkeypatch):
    """The text of each program that is compiled, by order."""
    texts, lower = [], jax.stages.Traced.lower

    def spied(traced):
        texts.append(str(traced.jaxpr))
        return lower(traced)

    monkeypatch.setattr(jax.stages.Traced, "lower", spied)
    return texts


def matmuls(text):
    """The dtypes of matmuls."""
    lines = [line for line in text.splitlines() if "= dot_general" in line]
    return {line.split(":")[1].partition("[")[0] for line in lines}


@pytest.mark.once
@pytest.mark.parametrize("make", [of_state, lambda: of_state(False), nnx_pair])
def test_what_is_measured_stays_as_it_is(programs, make):
    first, *step = make()
    model = first[0] if isinstance(first, tuple) else nnx.Dict()
    before = jax.tree.map(jnp.copy, (first, nnx.state(model)))
    found = measure(first, *step, steps=2)
    assert list(found.figures) == DTYPES and found.steps == 2
    assert found.name == step[0].__name__
    assert_identical(before, (first, nnx.state(model)))
    assert [*map(matmuls, programs)] == [{"f32"}, {"bf16"}, {"f16"}]
    assert all(row.step_ms > 0 and row.temp_mb for row in found.figures.values())
    # Of a state it is a whole step, with the update and the new step count.
    is_step = all(" add " in text and "i32" in text for text in programs)
    assert is_step or isinstance(first, tuple)


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
def test_a_function_with_a_policy(programs):
    policy = flax_amp.default_amp_policy | {jax.lax.dot_general_p: jnp.float32}
    found = measure(plain, steps=1, amp_policy=policy)(W, X)
    assert {"f32"} == set().union(*map(matmuls, programs))
    assert all(row.step_ms > 0 for row in found.figures.values())


# --- what it prints ------------------------------------------------------------------

FOUND = Measurement(
    name="loss_fn",
    platform="gpu",
    devices="1 x NVIDIA H100",
    steps=20,
    figures={
        "float32": Figures(20.0, 2345.6, 4000.0),
        "bfloat16": Figures(30.0, 1172.8, 2400.0),
        "float16": Figures(30.0, 1172.8, None),
    },
)


def test_table():
    title, _, *lines = str(FOUND).splitlines()
    assert title == "loss_fn on 1 x NVIDIA H100, the least of 20 steps"
    assert [line.split() for line in lines] == [
        "compile, s step, ms temporary, MB".split(),
        "float32 20 x1.00 2,346 x1.00 4,000 x1.00".split(),
        "bfloat16 30 x1.50 1,173 x0.50 2,400 x0.60".split(),
        "float16 30 x1.50 1,173 x0.50 -".split(),
    ]
    assert max(map(len, lines)) <= 80


# The line of /proc/cpuinfo with the flags, and what is said of this CPU
CPUS = {
    "flags : fma f16c": [
        "this CPU has no instructions for bfloat16 or float16: "
        "XLA computes in float32 and casts"
    ],
    "flags : f16c avx512_bf16 amx_bf16": [
        "this CPU has avx512_bf16, amx_bf16 for bfloat16",
        "this CPU has no instructions for float16: XLA computes in float32 and casts",
    ],
    "Features : asimd asimdhp bf16": [
        "this CPU has bf16 for bfloat16 and asimdhp for float16"
    ],
    None: ["whether this CPU has instructions for half precision is not known"],
}


@pytest.mark.parametrize("flags, expected", CPUS.items())
def test_what_is_said_of_a_cpu(flags, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(f"processor : 0\nmodel name : CPU\n{flags}\n")
    monkeypatch.setattr(_processor, "_CPUINFO", path)
    assert _processor.about_cpu(_processor.half_instructions()) == expected


def test_the_dtypes_take_turns_and_the_first_round_warms_up(monkeypatch):
    """With a clock that measures more at each call, the order shows in the times."""
    calls = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: next(calls) ** 2)
    monkeypatch.setattr(_measure, "time", clock)
    found = measure(plain, steps=1)(W, X)
    # Six calls while compiling, six in the round that warms up: 13 ** 2 - 12 ** 2
    step_ms = {name: figures.step_ms for name, figures in found.figures.items()}
    assert step_ms == {"bfloat16": 25e3, "float16": 29e3, "float32": 33e3}
    assert found.platform == "cpu"
    assert found.notes[-1].endswith("on a CPU say nothing of a GPU or a TPU")
    assert str(found).endswith(f"Note: {found.notes[-1]}.")


# --- errors --------------------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct((4, 8), jnp.float32)
ERRORS = {
    "steps": (lambda: measure(plain, steps=0)(W, X), "measure: steps=0; expected an "),
    "no floats": (lambda: measure(lambda n: n + 1)(3), "has no float arrays"),
    "a shape": (lambda: measure(plain)(W, SHAPE), "expected arrays with values"),
    "in jit": (
        lambda: jax.jit(lambda w: str(measure(plain)(w, X)))(W),
        "outside of jax.jit",
    ),
}


@pytest.mark.parametrize("call, message", ERRORS.values(), ids=ERRORS)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
