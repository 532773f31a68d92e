"""`explain(..., parameters=True)`: which parameters can be half, and why not."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import __main__, explain

X = jnp.ones((4, 8))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.Dense(8, use_bias=False)(nn.LayerNorm(use_bias=False)(x))
        return x


def loss(params, x):
    y = Model().apply({"params": params["net"]}, x)
    return jnp.mean(y @ params["out"]), params["given"]


NET = Model().init(jax.random.key(0), X)["params"]
PARAMS = {"net": NET, "out": jnp.ones((8, 2))}
PARAMS |= {"given": jnp.ones(2), "unread": jnp.ones(2), "count": jnp.ones(2, int)}


@pytest.fixture(scope="module")
def found():
    return explain(loss, backward=False, parameters=True)(PARAMS, X)


def test_each_parameter_has_a_reason(found):
    told = {x.path.removeprefix("params/"): x for x in found.parameters}
    assert "count" not in told
    halves = {path for path, x in told.items() if x.is_half}
    assert halves == {"net/Dense_0/kernel", "net/Dense_1/kernel", "out"}
    assert told["out"].nbytes == 64 and told["out"].reason == ""
    assert told["given"].reason == "it is a result of the function"
    assert told["unread"].reason == "no equation reads it"
    scale = told["net/LayerNorm_0/scale"].reason
    begin, _, line = scale.partition(", ")
    assert begin == "mul in LayerNorm_0 reads it in float32"
    assert line.startswith("tests/debug/test_parameters.py:")


def test_where_half_precision_would_be_another_program():
    def fun(p, x):
        with jax.named_scope("head"):
            return jnp.tanh(x.astype(p.dtype) @ p)

    (found,) = explain(fun, parameters=True)(jnp.ones((8, 8)), X).parameters
    assert not found.is_half
    expected = "tanh in head would compute something else from half precision, "
    assert found.reason.startswith(expected)


def test_the_report(found, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    nbytes = sum(x.nbytes for x in found.parameters)
    halves = sum(x.nbytes for x in found.parameters if x.is_half)
    share = 100 * (1 - halves / 2 / nbytes)
    line = f"{share:.3g} % of their bytes if 3 of 7 are stored in bf16"
    assert line in " ".join(str(found).split())
    text = found.report(only="parameters")
    rows = [row.split() for row in text.splitlines()]
    (kernels,) = (row for row in rows if "params/net/Dense_*/kernel" in row)
    assert kernels[0] == "bf16" and "x2" in kernels
    assert json.loads(json.dumps(found.to_dict()))["parameters"][0]["nbytes"] > 0


def test_they_are_found_if_asked_for():
    found = explain(loss, backward=False)(PARAMS, X)
    assert found.parameters is None and "of their bytes" not in str(found)
    with pytest.raises(ValueError, match=r"expected explain\(\.\.\., parameters=True"):
        found.report(only="parameters")


def test_steps_modules_and_float32():
    state = flax_amp.AmpTrainState.create(params=NET, tx=optax.sgd(0.1))
    of_state = explain(
        state,
        lambda params, x: Model().apply({"params": params}, x).mean(),
        X,
        backward=False,
        parameters=True,
    )
    assert sum(x.is_half for x in of_state.parameters) == 2
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    of_model = explain(lambda m, x: m(x), backward=False, parameters=True)(model, X)
    halves = {x.path.rpartition("/")[2]: x.is_half for x in of_model.parameters}
    assert halves == {"kernel": True, "bias": False}
    options = dict(precision="32-true", backward=False, parameters=True)
    in_float32 = explain(loss, **options)(PARAMS, X).parameters
    assert {x.reason for x in in_float32} == {"the precision is float32"}
    by_name = explain(lambda *, x: x @ x.T, backward=False, parameters=True)(x=X)
    assert by_name.parameters == ()


def to_explain():
    return loss_of_out, (PARAMS, X)


def loss_of_out(params, x):
    return (x @ params["out"]).mean()


def test_the_command(capsys):
    target = "debug.test_parameters"
    assert __main__.main(["explain", target, "--only", "parameters"]) == 0
    assert "params/out" in capsys.readouterr().out
