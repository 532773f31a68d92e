"""`find_nonfinite` on planted faults: where each is, why, and what mends it."""

import functools
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, find_nonfinite
from flax_amp.debug import NonfiniteReport, report_nonfinite

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
    assert place(found.finding) == where and found.finding.finite_in_float32
    assert found.finding.result.dtype == "float16" and found.finding.kind == "inf"
    assert found.verdict == "precision"
    key = '"GPT/Block_1/gate": jnp.float32'
    assert found.policy[0] == ("GPT/Block_1/gate", "float32")
    assert f"amp_policy=your_policy | {{{key}" in str(found)
    found = find_nonfinite(gpt(gate=300.0), cross_entropy, TOKENS)
    assert place(found.finding) == where and not found.finding.finite_in_float32
    assert found.verdict == "mathematics" and not found.policy
    assert "subtract the maximum" in found.advice


@pytest.mark.once
def test_attention_logits_of_one_layer():
    found = find_nonfinite(gpt(attention=300.0), cross_entropy, TOKENS)
    where = "dot_general", "GPT/Block_1/attn", "forward", line("logits")
    assert place(found.finding) == where
    assert found.verdict == "precision" and found.finding.finite_in_float32
    assert found.policy == (("GPT/Block_1/attn", "float32"),)
    assert "amp_policy=flax_amp.default_amp_policy | {" in found.advice
    assert set(found.finding.examples) <= {0, 1, 2, 3} and found.finding.examples
    assert found.reached == ("loss",)
    assert all(40 < x.largest < 65504 for x in found.finding.operands)


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
    assert found.verdict == "mathematics" and found.finding.examples == (2,)
    found = find_nonfinite(state, loss_fn, X, jnp.float32(jnp.nan), rates)
    (item,) = found.inputs
    assert found.verdict == "inputs" and item.path == "args/0" and item.is_batch
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
    (row,) = json.loads(json.dumps(found.to_dict()))["inputs"]
    size = bad.size if which == "weight" else jax.tree.leaves(bad)[0].shape[1]
    assert (row["path"], row["bad"]) == (item, size)
    assert row["first"] == [[1, 0], []][which == "weight"]
    assert row["examples"] == ([1] if which in ("x", "y") else [])


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
    assert path in [item.path for item in found.inputs]
    assert "restore an earlier checkpoint" in found.advice
    state = AmpTrainState.create(model=NormedNNX(), tx=optax.sgd(0.1))
    state.variables["norm"]["mean"] = jnp.array([0, jnp.inf, 0])
    found = find_nonfinite(state, lambda m, x: (m(x) ** 2).mean(), batch)
    assert [x.path for x in found.inputs] == ["state/variables/norm/mean"]


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
    state = square_state(scaler={"scaler": 2.0**22})
    found = find_nonfinite(state, squares, jnp.ones((4, 8)))
    assert found.verdict == "scale" and found.reached == ("gradient of params/w",)
    assert found.finding.path == "head" and found.finding.backward
    assert found.finding.source == line("square")
    # The gradient is 4 * 2 * 2 * scale, and 65504 ends float16.
    assert "with 2048 the gradients are finite" in found.advice
    assert "skips 11 steps" in found.advice
    fixed = square_state(scaler=flax_amp.static_scaler(2.0**22))
    assert "lower its min_scaler" in find_nonfinite(fixed, squares, X).advice
    found = in_float16(lambda w, x: squares({"w": w}, x), scale=2.0**22)
    assert found(jnp.full((8, 3), 0.25), jnp.ones((4, 8))).verdict == "scale"
    fine = square_state(scaler={"scaler": 2.0**11})
    assert find_nonfinite(fine, squares, X).verdict == "nothing"


def overflow(params, batch):
    with jax.named_scope("net"):
        with jax.named_scope("bad"):
            y = batch @ (params["w"] * 5e4) * 2e-5
        with jax.named_scope("head"):
            return ((y @ params["w"].T) ** 2).sum()


@pytest.mark.once
def test_a_policy_that_leaves_only_the_scale_too_large():
    state = square_state(scaler={"scaler": 2.0**22})
    found = find_nonfinite(state, overflow, X)
    assert found.verdict == "precision" and found.finding.path == "net/bad"
    assert found.policy == (("net/bad", "float32"),) and "only the scale" in str(found)
    found = find_nonfinite(square_state(), overflow, X, scale=1.0)
    assert found.policy == (("net/bad", "float32"),) and not found.notes


@pytest.mark.parametrize("loss_fn", [overflow, lambda p, x: jnp.log(x @ p["w"]).sum()])
def test_a_bad_example_beside_another_fault(loss_fn):
    batch = X.at[1].set(0.0).at[2, 0].set(jnp.nan)
    found = find_nonfinite(square_state(), loss_fn, batch)
    assert found.verdict == "inputs" and found.inputs[0].examples == (2,)
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
    assert {x.dtype for x in found.finding.operands} == {"bfloat16"}
    assert found.finding.text == "mul(1.70141e+38, 2) = inf"


def test_two_faults():
    """The report is about the one that float32 does not mend."""

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
    assert [x.path for x in found.inputs] == ["m/dense/kernel"]
    assert (model.norm.mean[...] == before).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: find_nonfinite(3), "expected find_nonfinite"),
        (lambda: find_nonfinite(squares, scale=True), "scale=True; expected a pos"),
        (lambda: find_nonfinite(squares, scale=0.0), "scale is 0.0; expected a posi"),
        (
            lambda: find_nonfinite(squares)(jax.ShapeDtypeStruct((3,), "float32"), X),
            "squares got a ShapeDtypeStruct among its arguments; expected arrays",
        ),
        (lambda: jax.jit(find_nonfinite(squares))({"w": X}, X), "got a .*Tracer"),
        (lambda: find_nonfinite(lambda w: w)(X), "as its loss; expected a scalar"),
        (lambda: find_nonfinite(lambda n: n)(3), "has no float arrays"),
        (lambda: report_nonfinite(3, squares), "train_step is a int; expected a step"),
        (lambda: report_nonfinite(squares, 3), "loss_fn"),
        (lambda: report_nonfinite(squares, squares, limit=0), "limit=0; expected"),
        (lambda: report_nonfinite(squares, squares, scale=-1), "scale is -1"),
        (lambda: report_nonfinite(squares, squares, dtype=1), "argument 'dtype'"),
        (lambda: report_nonfinite(squares, squares)(3, X, X), "got int, .*; expected"),
        (
            lambda: jax.jit(report_nonfinite(squares, squares))(square_state(), X),
            "got a tracer; expected arrays with values: call it in a Python loop",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# --- the step ------------------------------------------------------------------------


def noisy(params, batch, rngs):
    noise = jax.random.normal(rngs["noise"], batch.shape)
    return jnp.log(batch + 0 * noise).mean() * params["w"].mean() + noise.mean()


def test_reports_of_skipped_steps():
    state = square_state(rngs={"noise": jax.random.key(0)})
    reports: list[NonfiniteReport] = []
    train_step = flax_amp.make_train_step(noisy)
    step = report_nonfinite(train_step, noisy, report=reports.append, limit=2)
    bad = X.at[2, 3].set(0.0)
    for batch in (X, bad, X, X, bad):
        state, metrics = step(state, batch)
    assert len(reports) == 1 and bool(metrics["grads_finite"]) is False
    step.check(state)
    step.check(state)
    assert [x.verdict for x in reports] == ["mathematics"] * 2
    assert reports[0].finding.examples == (2,)
    for batch in (bad, X):
        state, _ = step(state, batch)
    assert len(reports) == 2 and int(state.step) == 7


def test_the_search_for_a_scale_is_no_fault():
    reports: list[NonfiniteReport] = []
    state = square_state(scaler={"scaler": 2.0**24})
    train_step = flax_amp.make_train_step(squares)
    step = report_nonfinite(train_step, squares, report=reports.append)
    for _ in range(8):
        state, _ = step(state, X)
    assert not reports and float(state.scaler["scaler"]) == 2.0**16
    step.check(state)  # so many in a row are worth a look
    assert [x.verdict for x in reports] == ["scale"]
    assert reports[0].scale == 2.0**17


def root(params, batch):
    return jnp.sqrt((batch @ params["w"]) ** 2).sum()


@pytest.mark.parametrize("loss_fn, bad", [(root, 0.0), (squares, 60.0)])
def test_a_skip_after_a_finite_step_of_the_same_scale(loss_fn, bad):
    """The scale falls for a NaN of the gradients, too."""
    reports: list[NonfiniteReport] = []
    state = square_state(scaler={"scaler": 2.0**3})
    step = flax_amp.make_train_step(loss_fn)
    step = report_nonfinite(step, loss_fn, report=reports.append)
    for i in range(5):
        state = state.replace(params=square_state().params)
        state, _ = step(state, X.at[0].set(bad) if i % 2 else X)
    assert float(state.scaler["scaler"]) < 8.0
    assert [x.verdict for x in reports] == ["mathematics"] * 2 * (loss_fn is root)


def test_memory_that_is_used_again_for_batches_and_further_arguments():
    """And the limit holds for the step that was pending."""

    def loss_fn(params, batch, offset):
        return jnp.log((batch @ params["w"]) ** 2 + offset).sum()

    reports: list[NonfiniteReport] = []
    step = flax_amp.make_train_step(loss_fn)
    step = report_nonfinite(step, loss_fn, report=reports.append, limit=1)
    state = square_state(scaler={"scaler": 8.0})
    batch, offset = np.ones((4, 8), np.float32), np.ones((4, 1), np.float32)
    for value in (1, 0, 1, 0, 1):
        batch[:] = offset[:] = value
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            step.check(state)
        state, metrics = step(state, batch, offset)
    step.check(state)
    assert [x.verdict for x in reports] == ["mathematics"]
    assert bool(metrics["grads_finite"])


def test_a_failure_of_the_search_does_not_end_the_training():
    def fails(params, batch):
        raise RuntimeError("no such file")

    reports: list[NonfiniteReport] = []
    for loss_fn in (fails, squares):  # not the loss of the step
        step = flax_amp.make_train_step(root)
        step = report_nonfinite(step, loss_fn, report=reports.append)
        state, _ = step(square_state(scaler=flax_amp.static_scaler(8.0)), X * 0)
        if loss_fn is squares:
            step.check(state)
            continue
        with pytest.warns(UserWarning, match="find_nonfinite failed: .* no such file"):
            step.check(state)
    assert "the step was skipped, which this run does not show" in str(*reports)
