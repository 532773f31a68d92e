"""`explain`: what it takes, what it returns, and how that prints."""

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, explain
from flax_amp.debug._report import as_data

X = jnp.ones((4, 8))


@pytest.fixture(scope="module")
def found():
    return explain(linen_state(), linen_loss, X, compute_dtype=jnp.bfloat16)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.relu(nn.Dense(8)(nn.LayerNorm()(x))))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(6):
            x = Block()(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return self.head(nn.BatchNorm(use_running_average=not train)(x))

    @nn.compact
    def head(self, x):
        return nn.Dense(2, name="out")(x)


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.norm(x)


def linen_loss(params, batch, state, rngs):
    out, updates = Linen().apply(
        {"params": params, **state.variables}, batch, rngs=rngs, mutable=["batch_stats"]
    )
    return (out**2).mean(), {"variables": updates}


def nnx_loss(model, batch):
    return (model(batch) ** 2).mean()


def linen_state():
    variables = dict(Linen().init(jax.random.key(0), X, train=False))
    return AmpTrainState.create(
        apply_fn=Linen().apply,
        params=variables.pop("params"),
        variables=variables,
        rngs={"dropout": jax.random.key(1)},
        tx=optax.adam(1e-3),
        precision="16-mixed",
    )


def nnx_state():
    return AmpTrainState.create(model=NNX(nnx.Rngs(0)), tx=optax.sgd(0.1))


def paths(found):
    return {equation.path for equation in found.equations}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


@pytest.mark.once
def test_a_state_and_a_loss():
    """As `make_train_step` takes them, and without a scope key in the policy."""
    for shape in (lambda x: x, abstract):
        linen = explain(shape(linen_state()), linen_loss, shape(X))
        assert {"Linen/Block_5/Dense_1", "Linen/out"} <= paths(linen)
        assert linen.name == "linen_loss" and linen.totals.low_share == 1
        assert linen.totals.stored["float16"] > 0
        assert not linen.problems + linen.notes
        found = explain(shape(nnx_state()), nnx_loss, shape(X))
        assert {"NNX/blocks/2", "NNX/norm"} <= paths(found)
        assert found.totals.flops == 3 * 2 * 4 * 8 * 8
    state = linen_state().replace(precision="bf16-mixed")
    assert "bfloat16" in explain(state, linen_loss, X).totals.stored


@pytest.mark.once
def test_further_arguments_of_a_step():
    def loss_fn(model, batch, weight, scales):
        return nnx_loss(model, batch) * (weight @ scales["one"]).mean()

    one = {"one": jnp.ones((16, 2))}
    found = explain(nnx_state(), loss_fn, X, jnp.ones((4, 16)), one)
    plain = explain(nnx_state(), nnx_loss, X)
    assert found.totals.flops == plain.totals.flops + 2 * 4 * 16 * 2
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        explain(nnx_state(), loss_fn, X, jnp.ones((4, 16)))


def test_a_function_of_modules_and_other_arguments():
    model = NNX(nnx.Rngs(0))
    before = nnx.state(model)
    found = explain(lambda m, x, mode, k: m(x) * k)(model, X, "train", k=2.0)
    assert {"NNX/blocks/0", "NNX/norm"} <= paths(found)
    assert jax.tree.map(lambda x, y: x is y, nnx.state(model), before)
    shapes = nnx.eval_shape(lambda: NNX(nnx.Rngs(0)))
    again = explain(lambda m, x: m(x) * 2.0)(shapes, abstract(X))
    assert again.totals == found.totals


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.block = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.block
        self.by = nnx.List([self.block])

    def __call__(self, x):
        return self.block(x)


def test_a_shared_module_has_the_first_path_by_the_alphabet():
    def explained(key):
        policy = flax_amp.default_amp_policy | {key: jnp.float32}
        return explain(lambda m, x: m(x), amp_policy=policy)(Shared(nnx.Rngs(0)), X)

    found = explained("Shared/again")
    assert paths(found) - {""} == {"Shared/again"}
    assert found.totals.low_share == 0
    (problem,) = explained("Shared/block").problems
    assert "'Shared/block'" in problem.message
    assert "a shared one that of its first path by the alphabet" in problem.message


def test_modules_that_must_be_equal_have_no_names():
    def averaged(model, x):
        return jax.tree.map(lambda a, b: (a + b) / 2, *model.blocks[:2])(x)

    found = explain(averaged)(NNX(nnx.Rngs(0)), X)
    assert found.notes == ("modules have no names: the code needs equal modules",)

    def loss(model, x):
        return jnp.mean(averaged(model, x) ** 2)

    state = flax_amp.AmpTrainState.create(model=NNX(nnx.Rngs(0)), tx=optax.sgd(0.1))
    for tool in (explain, flax_amp.find_nonfinite, flax_amp.compare_precision):
        assert tool(state, loss, X).notes == found.notes, tool
    policy = flax_amp.default_amp_policy | {"norm": jnp.float32}  # needs the names
    with pytest.raises(ValueError, match="different pytree metadata"):
        explain(averaged, amp_policy=policy)(NNX(nnx.Rngs(0)), X)
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: x / (1 // 0))(X)


def test_a_function_that_changes_the_structure_of_its_module():
    def grow(model, x):
        model.more = nnx.Param(x)
        return model(x)

    with pytest.raises(ValueError, match="explain: grow changed the structure"):
        explain(grow)(NNX(nnx.Rngs(0)), X)


def test_rows():
    def fun(w, x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)
        return jnp.exp(jax.jit(jnp.sin)(x))

    found = explain(fun)(jnp.ones((8, 8)), X)
    rows = {e.primitive: e for e in found.equations}
    dot = rows["dot_general"]
    assert str(dot.before) == "f32 -> f32" and dot.after.operands == ("bfloat16",) * 2
    assert (dot.times, dot.flops, dot.shape) == (3, 3 * 2 * 4 * 8 * 8, "4x8")
    assert dot.inside == ("scan x3",) and dot.reason == "primitive dot_general"
    assert dot.source.startswith("tests/debug/test_explain.py:")
    assert rows["exp"].after.operands == ("float32",)
    assert "scan" in rows and "jit" not in rows


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: explain(3), "explain: got int; expected explain"),
        (lambda: explain(nnx_loss, X), "got function, .*expected explain"),
        (
            lambda: explain(nnx_state(), nnx_loss),
            r"got AmpTrainState, function; expected .*batch, \*args\)",
        ),
        (lambda: explain(nnx_state(), 3, X), "explain: loss_fn is "),
        (lambda: explain(nnx_loss, compute_dtype=jnp.int8), "compute_dtype: got"),
        (lambda: explain(nnx_loss, recompute="no"), "recompute='no'; expected True"),
        (lambda: explain(nnx_loss, precision="half"), "precision is 'half'; expected"),
        (lambda: explain(jnp.sin)(X).report(only="modules"), "got only='modules'"),
        (lambda: explain(jnp.sin)(X).report(depth=-1), "got depth=-1"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_dict_for_json(found):
    data = json.loads(json.dumps(found.to_dict()))
    assert data["compute_dtype"] == "bfloat16" and data["name"] == "linen_loss"
    rows, totals = [*data["equations"], *data["added"]], found.totals
    for name in ("flops", "casts_down", "casts_up"):
        assert sum(row[name] for row in rows) == getattr(totals, name), name
    stored = sum(sum(row["stored"].values()) for row in rows)
    assert stored == totals.stored.total() > 0
    assert rows[0].keys() >= {"before", "after", "reason", "source", "times"}


def test_infinities_in_json():
    infinite = np.float32("inf"), np.float64("-inf"), jnp.bfloat16(2)
    assert as_data({"x": infinite}) == {"x": ["inf", "-inf", 2.0]}


def test_the_report_folds_equal_layers(found):
    text = str(found)
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 120, text
    assert lines[0].split() == ["linen_loss", "in", "bfloat16"]
    # The layers of all blocks are one line, with how many there are.
    blocks = [line.split() for line in lines if "Block_" in line]
    assert blocks[0][:2] == ["Block_*", "x6"] and len(blocks) == 1
    assert "Dense_*  x12" in text and "\n    out " in text
    assert "100 %" in text and "LayerNorm_0" in text


def test_parts_of_the_report(found):
    short = found.report(depth=0)
    assert "  Linen" not in short and "No problems" in short
    assert len(short) < len(found.report(depth=1)) < len(found.report(depth=9))
    assert "stored\n" not in found.report(only="problems")
    assert found.report(only="problems").splitlines()[-1] == "No problems found."
    assert repr(found).startswith("<Explanation of linen_loss: ")
    totals = found.totals
    assert f"{totals.casts_down}/{totals.casts_up}" in found.report(depth=9)


@pytest.mark.parametrize("width", [80, 120])
def test_no_width_drops_figures(width, monkeypatch):
    def fun(w, x):
        with jax.named_scope("VeryLongNameOfAModule/AndOneMoreInsideOfIt"):
            y = jnp.sin(x @ w)
            with jax.named_scope("norm_of_the_module_with_a_long_name_[bold]"):
                y = y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True))
        with jax.named_scope("head"):
            return (y @ w).sum()

    monkeypatch.setenv("COLUMNS", str(width))
    found = explain(fun)(jnp.ones((8, 8)), X)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= width
    (head,) = (line for line in lines if line.startswith("  head"))
    figures = ("512", "100 %", "1/1", "reduce_sum")
    assert all(figure in head for figure in figures), head
    shown = re.sub(r"\s", "", str(found))
    assert ("with_a_long_name_[bold]" in shown) == (width == 120)


def test_float32_changes_nothing():
    found = explain(linen_state(), linen_loss, X, compute_dtype=jnp.float32)
    assert [e for e in found.equations if e.before != e.after] == []
    assert (found.totals.casts_down, found.totals.low_share) == (0, 0)
    assert not found.problems


def test_nothing_is_compiled_or_run(found):
    state = linen_state()
    with jax.no_execution():
        explain(state, linen_loss, X)
    calls = []
    jax.eval_shape(lambda x: calls.append(x), X)
    explain(lambda x: calls.append(x) or jax.debug.callback(calls.append, x) or x)(X)
    assert all(isinstance(x, jax.core.Tracer) for x in calls)


# --- what the loss reads, and what was deleted ----------------------------------------


def gated(w, x, behind):
    with jax.named_scope("gate"):
        t = jax.nn.sigmoid(x @ w)
    with jax.named_scope("head"):
        y = t @ w
    return -jnp.log(1 + t * (y**2 if behind else 1.0)).mean() + y.mean()


@pytest.mark.parametrize("behind", [False, True])
def test_rounded_numbers_that_a_loss_reads(behind):
    """The gate is read as it was in its own region, and rounded behind the matmul."""
    found = explain(lambda w, x: gated(w, x, behind))(jnp.ones((8, 8)), X)
    places = {text.partition(",")[0] for text in found.loss_reads}
    wanted = {"dot_general of head"} | ({"logistic of gate"} if behind else set())
    assert places == wanted
    assert "the loss  reads bf16: " in str(found)
    # Of a result that is no loss there is nothing to tell.
    assert not explain(lambda w, x: x @ w)(jnp.ones((8, 8)), X).loss_reads


def test_an_argument_that_a_step_has_deleted():
    state = nnx_state()
    flax_amp.make_train_step(nnx_loss)(state, X)
    for tool in (explain, flax_amp.find_nonfinite, flax_amp.compare_precision):
        name = tool.__name__
        with pytest.raises(RuntimeError, match=f"^{name}: state.* was deleted"):
            tool(state, nnx_loss, X)
        call = tool(lambda params, x: jnp.mean(params["norm"]["scale"] * x))
        with pytest.raises(RuntimeError, match=f"^{name}: <lambda>: .* was deleted"):
            call(state.params, X)
