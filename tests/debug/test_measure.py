"""`measure`: what it runs, what it leaves alone, and how it prints. No time counts."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, __main__
from flax_amp.debug import Figures, Measurement, measure
from helpers import assert_identical

X = np.ones((4, 8), np.float32)  # of NumPy, as input pipelines give it
DTYPES = ["float32", "bfloat16", "float16"]
TRACED = [{dtype} for _ in range(2) for dtype in ("f32", "bf16", "f16")]  # in turn


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(8, use_bias=False)(x)


def linen():
    model = Linen()
    variables = model.init(jax.random.key(0), X)
    state = AmpTrainState.create(
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        tx=optax.sgd(0.1),
        rngs={"noise": jax.random.key(1)},
    )

    def loss_fn(params, batch, weight, *, state, rngs):
        variables = {"params": params, **state.variables}
        out, new = model.apply(variables, batch, mutable=["batch_stats"])
        return jnp.mean(out**2) * weight, {"variables": new}

    return state, loss_fn, X


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


@pytest.mark.once
def test_a_state_stays_as_it_is(programs):
    state, loss_fn, batch = linen()
    before = jax.tree.map(jnp.copy, state)
    found = measure(state, loss_fn, batch, jnp.float32(2), turns=2)
    assert list(found.figures) == DTYPES and found.turns == 2
    assert_identical(before, state)
    assert [*map(products, programs)] == TRACED
    assert all(row.step_ms > 0 and row.temp_mb for row in found.figures.values())


@pytest.mark.once
def test_a_scale_is_searched_for_once(monkeypatch):
    """The turns that are timed have the scale that the first one found."""
    seen, call = [], jax.stages.Compiled.__call__

    def spied(compiled, state, batch):
        seen.append((state.precision, float(state.scaler["scaler"])))
        return call(compiled, state, batch)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", spied)
    state = AmpTrainState.create(params=W, tx=optax.sgd(0.1), precision="16-mixed")
    loss = lambda params, x: 1e3 * jnp.sum((x @ params["kernel"]) ** 2)  # noqa: E731
    measure(state, loss, X, redo_on_nan=20, turns=3)
    scales = [scale for precision, scale in seen if precision == "16-mixed"]
    assert scales[0] == 2**15 > scales[1] and len(set(scales[1:])) == 1
    assert state.scaler["scaler"] == 2**15


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
def test_nnx_state_and_options(programs):
    policy = flax_amp.default_amp_policy | {"Linear": jnp.float32}
    asked = nnx_state()
    options = {
        "amp_policy": policy,
        "has_aux": False,  # it is found out, as in `explain`
        "state_shardings": jax.tree.map(lambda x: x.sharding, asked[0]),
    }
    found = measure(*asked, turns=1, **options)
    assert list(found.figures) == DTYPES and found.name == "nnx_loss"
    assert {"f32"} == set().union(*map(products, programs))


@pytest.mark.parametrize(
    "make", [lambda: W, lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))]
)
def test_a_function(programs, make):
    first = make()
    loss = nnx_loss if isinstance(first, nnx.Module) else plain
    found = measure(loss, turns=1)(first, X)
    assert [*map(products, programs)] == TRACED
    assert all(row.step_ms > 0 for row in found.figures.values())
    assert not isinstance(jax.tree.leaves(first)[0], jax.core.Tracer)


@pytest.mark.once
def test_the_bytes_of_a_state():
    """A kernel of 8 x 8 in bfloat16, and a bias of 8, with a momentum of each."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    tx = flax_amp.optim.small_state(optax.sgd(0.1, momentum=0.9))
    state = AmpTrainState.create(model=model, tx=tx, param_dtype=jnp.bfloat16)
    found = measure(jax.eval_shape(lambda: state), nnx_loss, X)
    params, rest = found.state_mb
    assert params == (64 * 2 + 8 * 4) / 1e6
    assert 0 < rest - params < 100 / 1e6  # the step, the scaler and counters


def test_shapes_are_compiled_only():
    model = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(lambda: nnx_state()[0])
    for found in (
        measure(plain)(*SHAPES),
        measure(nnx_loss)(model, X),
        measure(state, nnx_loss, SHAPES[1]),
    ):
        assert found.turns == 0 and "not run" in str(found)
        for row in found.figures.values():
            assert row.step_ms is None and row.temp_mb is not None
            assert row.compile_s > 0


# --- what it prints ------------------------------------------------------------------

FOUND = Measurement(
    name="loss_fn",
    platform="gpu",
    devices="1 x NVIDIA H100",
    turns=20,
    figures={
        "float32": Figures(1.5, 20.0, 2345.6, 4000.0),
        "bfloat16": Figures(1.8, 30.0, 1172.8, 2400.0),
        "float16": Figures(1.8, 30.0, None, 0.0),
    },
)


def test_table():
    title, _, *lines = str(FOUND).splitlines()
    assert title == "loss_fn on 1 x NVIDIA H100, the least of 20 turns"
    assert [line.split() for line in lines] == [
        "trace + lower, s compile, s step, ms temporary, MB".split(),
        "float32 1.5 x1.00 20 x1.00 2,346 x1.00 4,000 x1.00".split(),
        "bfloat16 1.8 x1.20 30 x1.50 1,173 x0.50 2,400 x0.60".split(),
        "float16 1.8 x1.20 30 x1.50 - 0 x0.00".split(),
    ]
    assert max(map(len, lines)) <= 80
    with_state = str(dataclasses.replace(FOUND, state_mb=(500.0, 1000.0)))
    _, state, *_ = with_state.splitlines()
    assert state == "its state: 500 MB of parameters, 1,000 MB beside them"
    on_a_cpu = str(dataclasses.replace(FOUND, platform="cpu"))
    assert "XLA emulates half precision" in on_a_cpu


# --- errors --------------------------------------------------------------------------


ERRORS = {
    "turns": (lambda: measure(plain, turns=0), "measure: turns=0; expected an in"),
    "no function": (lambda: measure(W), "got dict; expected measure"),
    "inside": (
        lambda: measure(nnx_state()[0], lambda m, x: flax_amp.amp(nnx_loss)(m, x), X),
        "calls a function that amp has rewritten",
    ),
    "of a step": (lambda: measure(*nnx_state(), foo=1), "argument 'foo'"),
    "no floats": (lambda: measure(lambda n: n + 1)(3), "has no float arrays"),
}


@pytest.mark.parametrize("call, message", ERRORS.values(), ids=ERRORS)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_inside_of_a_trace():
    def of_state(w):
        return measure(AmpTrainState.create(params=w, tx=optax.sgd(0.1)), plain, X)

    for call in (lambda w: measure(plain)(w, X), of_state, lambda _: of_state(W)):
        with pytest.raises(RuntimeError, match="expected a call outside of jax.jit"):
            jax.jit(lambda w, call=call: str(call(w)))(W)


def test_a_deleted_state():
    state, loss_fn, batch = nnx_state()
    flax_amp.make_train_step(loss_fn)(state, batch)
    with pytest.raises(RuntimeError, match=r"^measure: state\.step was deleted"):
        measure(state, loss_fn, batch)
    with pytest.raises(RuntimeError, match=r"^measure: args\[0\].* was deleted"):
        measure(plain)(state.params, batch)


# --- the command ---------------------------------------------------------------------


def run(capsys, *arguments):
    code = __main__.main(["measure", *arguments])
    return code, capsys.readouterr()


@pytest.mark.once
def test_command(capsys, monkeypatch):
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *args: updates.append(args))
    code, printed = run(capsys, "debug/test_measure:function", "--turns", "1")
    assert code == 0 and "the least of 1 turns" in printed.out
    assert updates == []  # the device stays the user's
    code, printed = run(capsys, "debug/test_measure.py")
    assert code == 0 and "not run" in printed.out


def function():
    return plain, (W, X)
