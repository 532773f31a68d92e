"""`find_nonfinite` on planted faults: where each is, why, and what fixes it."""

import functools
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, find_nonfinite

in_float16 = functools.partial(find_nonfinite, compute_dtype=jnp.float16)

THIS = "tests/debug/test_nonfinite.py"
LINES = (Path(__file__).parents[2] / THIS).read_text().splitlines()
TOKENS = jnp.arange(20).reshape(4, 5) % 7


def line(mark):
    """The line of this file that ends with a mark."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{THIS}:{number}"


class Attention(nn.Module):
    gain: float = 1.0

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(8, name=name)(x) for name in "qkv")
        logits = jnp.einsum("bqd,bkd->bqk", q * self.gain, k * self.gain)  # logits
        mask = jnp.tril(jnp.ones((5, 5), bool))
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bqk,bkd->bqd", weights, v)


class Gate(nn.Module):
    gain: float = 1.0

    @nn.compact
    def __call__(self, x):
        return x * jnp.exp(nn.Dense(8)(x) * self.gain)  # exp


class Block(nn.Module):
    attention: float = 1.0
    gate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.attention, name="attn")(nn.LayerNorm()(x))
        return x + Gate(self.gate, name="gate")(nn.LayerNorm()(x))


class GPT(nn.Module):
    """Two layers, of which the second one may have a fault."""

    attention: float = 1.0
    gate: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 8)(tokens)
        x = Block()(x)
        x = Block(self.attention, self.gate)(x)
        return nn.Dense(7, name="head")(nn.LayerNorm()(x))


def make_state(model, *args, precision="16-mixed", **options):
    variables = dict(model.init(jax.random.key(0), *args))
    return AmpTrainState.create(
        apply_fn=model.apply,
        params=variables.pop("params"),
        variables=variables,
        tx=optax.sgd(0.1),
        precision=precision,
        **options,
    )


def cross_entropy(params, batch, state):
    logits = state.apply_fn({"params": params}, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
    return losses.mean()


def gpt(**faults):
    return make_state(GPT(**faults), TOKENS)


def place(finding):
    pass_ = "backward" if finding.backward else "forward"
    return finding.primitive, finding.path, pass_, finding.source


@pytest.mark.once
def test_exp_in_one_module_of_a_gpt():
    policy = flax_amp.default_amp_policy | {
        jax.lax.exp_p: flax_amp.use_compute_precision
    }
    where = "exp", "GPT/Block_1/gate", "forward", line("exp")
    found = find_nonfinite(gpt(gate=9.0), cross_entropy, TOKENS, amp_policy=policy)
    assert place(found.finding) == where
    assert found.finding.dtype == "float16" and found.finding.kind == "inf"
    assert found.verdict == "precision"
    key = '"GPT/Block_1/gate": jnp.float32'
    assert "GPT/Block_1/gate" in found.policy
    assert f"amp_policy=your_policy | {{{key}" in str(found)
    found = find_nonfinite(gpt(gate=300.0), cross_entropy, TOKENS)
    assert place(found.finding) == where
    assert found.verdict == "mathematics" and not found.policy
    assert "subtract the maximum" in found.advice


@pytest.mark.once
def test_attention_logits_of_one_layer():
    found = find_nonfinite(gpt(attention=300.0), cross_entropy, TOKENS)
    where = "dot_general", "GPT/Block_1/attn", "forward", line("logits")
    assert place(found.finding) == where
    assert found.verdict == "precision"
    assert found.policy == {"GPT/Block_1/attn": "float32"}
    assert "amp_policy=flax_amp.default_amp_policy | {" in found.advice
    assert set(found.examples) <= {0, 1, 2, 3} and found.examples
    assert found.reached == ("loss",)
    assert all(x.startswith("f16[4,5,8] up to ") for x in found.finding.operands[:1])


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))


class NormedNNX(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.dense(x))


def batch_norm_loss(params, batch, state):
    variables = {"params": params, **state.variables}
    out, updates = state.apply_fn(variables, batch, mutable=["batch_stats"])
    return (out**2).mean(), {"variables": updates}


@pytest.mark.once
def test_further_arguments_of_a_step():
    """The examples are still those of the batch."""

    def loss_fn(params, batch, weight, rates):
        return (jnp.log(batch @ params["w"]) * weight).mean() * rates["one"].mean()

    state, rates = square_state(), {"one": jnp.ones(2)}
    given = X.at[2].set(0.0), jnp.float32(1), rates
    found = find_nonfinite(state, loss_fn, *given)
    assert found.verdict == "mathematics" and found.examples == (2,)
    found = find_nonfinite(state, loss_fn, X, jnp.float32(jnp.nan), rates)
    assert found.verdict == "inputs" and [*found.inputs] == ["args/0"]
    assert "Correct args/0" in found.advice


@pytest.mark.once
@pytest.mark.parametrize(
    ("which", "item", "advice"),
    [
        ("params", "params/w", "restore an earlier checkpoint"),
        ("x", "x", "Correct or drop example 1 of the batch"),
        ("y", "y", "Correct or drop example 1 of the batch"),
        ("weight", "weight", "Correct weight: no precision helps"),
    ],
)
def test_what_to_do_about_an_argument(which, item, advice):
    """All arguments but the first are data, wherever they stand."""

    def loss(params, x, key, y, weight):
        return jnp.mean((x @ params["w"] - y) * weight)

    ones = {"x": jnp.ones((3, 2)), "y": jnp.ones((3, 1)), "weight": jnp.float32(1)}
    given = {"params": {"w": jnp.ones((2, 1))}, "key": jax.random.key(0)} | ones
    bad = jax.tree.map(
        lambda x: x.at[1:2].set(jnp.nan) if x.ndim else x / 0, given[which]
    )
    given |= {which: bad}
    found = in_float16(loss)(given.pop("params"), **given)
    assert found.verdict == "inputs" and advice in found.advice
    assert found.finding is None and found.reached[0] == "loss"
    assert repr(found) == "<NonfiniteReport of loss: inputs; print it to read it>"
    data = json.loads(json.dumps(found.to_dict()))
    size = 1 if which == "weight" else jax.tree.leaves(bad)[0].shape[1]
    place = "" if which == "weight" else "[1, 0]"
    count = f"{size} element{'s' * (size > 1)}"
    kind = "inf" if which == "weight" else "NaN"
    assert data["inputs"] == {item: f"{kind} in {item}{place} ({count})"}
    assert data["examples"] == ([1] if which in ("x", "y") else [])


@pytest.mark.once
def test_an_inf_in_a_running_mean():
    """The loss and the gradients are finite: the update of the mean is not."""
    state = make_state(Normed(), jnp.ones((4, 3)))
    bad = jax.tree.map(lambda x: x.at[1].set(jnp.inf), state.variables)
    batch = jax.random.normal(jax.random.key(0), (4, 3))
    assert find_nonfinite(state, batch_norm_loss, batch).verdict == "nothing"
    found = find_nonfinite(state.replace(variables=bad), batch_norm_loss, batch)
    assert found.verdict == "inputs" and found.reached == ("updated variables",)
    path = "state/variables/batch_stats/BatchNorm_0/mean"
    assert path in found.inputs
    assert "restore an earlier checkpoint" in found.advice
    state = AmpTrainState.create(model=NormedNNX(), tx=optax.sgd(0.1))
    state.variables["norm"]["mean"] = jnp.array([0, jnp.inf, 0])
    found = find_nonfinite(state, lambda m, x: (m(x) ** 2).mean(), batch)
    assert [*found.inputs] == ["model/norm/mean"]


def squares(params, batch):
    with jax.named_scope("head"):
        return ((batch @ params["w"]) ** 2).sum()  # square


def square_state(precision="16-mixed", **options):
    params = {"w": jnp.full((8, 3), 0.25)}
    return AmpTrainState.create(
        params=params, tx=optax.sgd(0.1), precision=precision, **options
    )


@pytest.mark.once
def test_gradients_overflow_by_the_scale_alone():
    state = square_state(scaler=flax_amp.init_scaler(scaler=2.0**22))
    found = find_nonfinite(state, squares, jnp.ones((4, 8)))
    assert found.verdict == "scale" and found.reached == ("gradient of params/w",)
    assert found.finding.path == "head" and found.finding.backward
    assert found.finding.source == line("square")
    # The gradient is 4 * 2 * 2 * scale, and 65504 ends float16.
    assert "with 2048 the gradients are finite" in found.advice
    assert "skips 11 steps" in found.advice
    found = in_float16(lambda w, x: squares({"w": w}, x), scale=2.0**22)
    assert found(jnp.full((8, 3), 0.25), jnp.ones((4, 8))).verdict == "scale"
    fine = square_state(scaler=flax_amp.init_scaler(scaler=2.0**11))
    assert find_nonfinite(fine, squares, X).verdict == "nothing"


def overflow(params, batch):
    with jax.named_scope("net"):
        with jax.named_scope("bad"):
            y = batch @ (params["w"] * 5e4) * 2e-5
        with jax.named_scope("head"):
            return ((y @ params["w"].T) ** 2).sum()


@pytest.mark.once
def test_a_policy_that_leaves_only_the_scale_too_large():
    state = square_state(scaler=flax_amp.init_scaler(scaler=2.0**22))
    found = find_nonfinite(state, overflow, X)
    assert found.verdict == "precision" and found.finding.path == "net/bad"
    assert found.policy == {"net/bad": "float32"} and "only the scale" in str(found)
    found = find_nonfinite(square_state(), overflow, X, scale=1.0)
    assert found.policy == {"net/bad": "float32"} and not found.notes


@pytest.mark.parametrize("loss_fn", [overflow, lambda p, x: jnp.log(x @ p["w"]).sum()])
def test_a_bad_example_beside_another_fault(loss_fn):
    batch = X.at[1].set(0.0).at[2, 0].set(jnp.nan)
    found = find_nonfinite(square_state(), loss_fn, batch)
    assert found.verdict == "inputs" and found.examples == (2,)
    masked = jnp.where(jnp.arange(4)[:, None] == 2, -jnp.inf, X)
    state = square_state()
    found = find_nonfinite(state, lambda p, x: overflow(p, X) + x.max(), masked)
    assert found.verdict == "precision"


X = jnp.ones((4, 8))


# --- what it takes -------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_precisions(precision):
    def loss_fn(params, batch):
        return (batch @ params["w"] @ params["w"].T).mean() * 1e-6

    found = find_nonfinite(square_state(precision=precision), loss_fn, X * 1e5)
    assert found.verdict == ("precision" if precision == "16-mixed" else "nothing")
    assert str(found).startswith("loss_fn in ") and not found.inputs
    found = find_nonfinite(square_state(precision=precision), loss_fn, X * 1e38)
    assert found.verdict == "mathematics" and found.finding.kind == "inf"


def test_an_overflow_in_bfloat16():
    """It rounds 1.998 to 2."""
    policy = {jax.lax.mul_p: flax_amp.use_compute_precision}
    options = dict(compute_dtype=jnp.bfloat16, amp_policy=policy)
    found = find_nonfinite(lambda w, x: (x * w).max(), **options)(
        X * 1.998, X * 2.0**127
    )
    assert all(x.startswith("bf16[") for x in found.finding.operands)
    assert found.finding.text == "mul(1.70141e+38, 2) = inf"


def test_two_faults():
    """The report is about the one that float32 does not fix."""

    def loss(w, x):
        y = x @ w
        return jnp.log(jnp.abs(y * 0)).mean()  # second

    found = in_float16(loss)(jnp.full((8, 3), 0.25), X * 5e4)
    assert found.verdict == "mathematics" and found.finding.source == line("second")


def test_modules_as_arguments():
    model = NormedNNX()
    model.dense.kernel[...] = model.dense.kernel.at[0, 0].set(jnp.nan)
    before = model.norm.mean[...]
    found = find_nonfinite(lambda m, x: (m(x) ** 2).mean())(model, jnp.ones((4, 3)))
    assert [*found.inputs] == ["m/dense/kernel"]
    assert (model.norm.mean[...] == before).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: find_nonfinite(3), "expected find_nonfinite"),
        (lambda: find_nonfinite(squares, scale=True), "scale is True; expected a pos"),
        (lambda: find_nonfinite(squares, scale=0.0), "scale is 0.0; expected a posi"),
        (
            lambda: find_nonfinite(squares)(jax.ShapeDtypeStruct((3,), "float32"), X),
            "squares got a ShapeDtypeStruct among its arguments; expected arrays",
        ),
        (lambda: jax.jit(find_nonfinite(squares))({"w": X}, X), "got a .*Tracer"),
        (lambda: find_nonfinite(lambda w: w)(X), "as its loss; expected a scalar"),
        (lambda: find_nonfinite(lambda n: n)(3), "has no float arrays"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# --- the policy names what fixes it, not the victim or the whole model ----------------

V = jax.random.normal(jax.random.key(0), (16, 16)) / 4
Y = jax.random.normal(jax.random.key(1), (8, 16))


def victim_behind(w, x):
    """Float16 has no number between 3000 and 3002: a zero remains."""
    with jax.named_scope("cancels"):
        z = jnp.maximum(x @ w, 0.25) + 3000.0
        z = z @ jnp.eye(16) - 3000.0
    with jax.named_scope("mixes"):
        z = z @ jnp.abs(w)
    with jax.named_scope("victim"):
        return jnp.log(z).mean()


def backward_alone(w, x):
    with jax.named_scope("overflows"):
        y = jnp.tanh(x @ w) @ (w * 100)
    with jax.named_scope("between"):
        y = jnp.tanh(y)
    with jax.named_scope("large"):
        return (jnp.sin(y @ w * 2e3) @ w).sum()


def overflows(w, x):
    with jax.named_scope("large"):
        y = jnp.tanh(x @ w) * 6e4
    with jax.named_scope("overflows"):
        y = y @ w
    with jax.named_scope("too"):
        y = y @ w
    with jax.named_scope("last"):
        return (y * 1e-6).mean()


# A program, where its fault is found, and the modules that fix it.
PROGRAMS = {
    "a victim": (victim_behind, "victim", []),
    "in the backward pass": (backward_alone, "overflows", ["overflows"]),
    "in the forward pass": (overflows, "overflows", ["overflows", "too"]),
}


@pytest.mark.parametrize("fun, place, fixing", PROGRAMS.values(), ids=PROGRAMS)
def test_the_policy_is_for_what_fixes_it(fun, place, fixing):
    def loss(w, x):
        with jax.named_scope("net"):
            return fun(w, x)

    found = find_nonfinite(loss, compute_dtype=jnp.float16)(V, Y)
    assert found.verdict == "precision" and found.finding.path == f"net/{place}"
    assert found.policy == {f"net/{name}": "float32" for name in fixing}
    if not fixing:
        assert "flax_amp.compare_precision tells" in found.advice
        return
    policy = flax_amp.default_amp_policy | {key: jnp.float32 for key in found.policy}
    again = find_nonfinite(loss, compute_dtype=jnp.float16, amp_policy=policy)(V, Y)
    assert again.verdict == "nothing"


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_advice_without_a_policy_fits_the_dtype(dtype):
    """The fault is in no module: a product rounds to one what is a little less."""

    def loss(w, x):
        gate = 1 - 1e-5 * x
        return -jnp.log(1 - (gate @ w)).mean()

    report = find_nonfinite(loss, compute_dtype=dtype)(jnp.eye(8), jnp.ones((4, 8)))
    assert report.verdict == "precision"
    assert "flax_amp.amp_stop" in report.advice
    assert ("train with precision='bf16-mixed'" in report.advice) == (
        dtype == jnp.float16
    )


# --- words ---------------------------------------------------------------------------


def test_a_cast_says_what_it_casts():
    """A bad example that is finite in float32, and beyond the range of float16."""

    def loss(w, batch):
        with jax.named_scope("net"):
            y = batch["x"] @ w
            return jnp.tanh((y * 1e5) @ w).mean()

    batch = {"x": X.at[2, 3].set(1e30)}
    found = in_float16(loss)(jnp.eye(8), batch)
    assert found.finding.what == "the cast to float16 of batch/x"
    assert found.examples == (2,) and found.finding.path == "net"
    assert "the cast to float16 of batch/x made inf in the forward pass" in str(found)
    found = in_float16(loss)(jnp.eye(8), {"x": X})
    assert found.finding.what == "the cast to float16 of the result of mul"


def test_a_number_that_was_limited_is_named():
    """An argument that is added is a mask as a rule, and is kept in the range."""

    def loss(w, x, mask):
        with jax.named_scope("net"):
            return jnp.tanh((x @ w + mask) @ w).mean()

    x, mask = jnp.ones((2, 4, 8)), jnp.zeros((1, 4, 8))
    assert not in_float16(loss)(jnp.eye(8), x, mask).notes
    found = in_float16(loss)(jnp.eye(8), x, mask.at[0, 0, 1].set(1e30))
    assert found.verdict == "nothing"
    assert found.notes[0].startswith("mask (net) holds numbers beyond the range of")


class Overflows(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x * 1e5)


def test_a_model_of_nnx_in_each_way_to_call():
    def loss_fn(model, batch):
        return jnp.tanh(model(batch)).mean()

    model = Overflows()
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1), precision="16-mixed")
    for found in (
        in_float16(loss_fn)(model, X),
        in_float16(pair, loss_fn, X),
        find_nonfinite(state, loss_fn, X),
    ):
        assert found.verdict == "precision" and found.name == "loss_fn"
        assert found.policy == {"Overflows/dense": "float32"}


def test_only_the_parameters_that_an_optimizer_trains():
    model = Overflows()
    wrt = nnx.All(nnx.Param, nnx.PathContains("bias"))
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)

    def loss_fn(model, batch):
        return jnp.sqrt((model.dense.kernel[...] * 0).sum() + model.dense.bias.sum())

    found = find_nonfinite(pair, loss_fn, X)
    assert found.reached == ("gradient of model/dense/bias",)
