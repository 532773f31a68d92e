"""Modules in the batch: random streams, metrics, teachers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors, nnx

from _steps import raised
from flax_amp import (
    AmpTrainState,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    static_scaler,
)
from helpers import assert_identical

SIZE = 4
X = jnp.linspace(-1, 1, 4 * SIZE).reshape(4, SIZE)


def scaler():
    return static_scaler(8.0)


class Net(nnx.Module):
    """Dropout without streams of its own, as in the mnist example of Flax."""

    def __init__(self):
        self.linear = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs=None):
        return self.dropout(self.linear(x), rngs=rngs)


def dropout_loss(model, batch):
    loss = (model(batch["x"], rngs=batch["rngs"]) ** 2).mean()
    return loss, {"drawn": jax.random.uniform(batch["rngs"].noise())}


def objects(tx=None):
    model = Net()
    return model, nnx.Optimizer(model, tx or optax.sgd(0.1), wrt=nnx.Param)


def make_state(**options):
    options = dict(model=Net(), tx=optax.sgd(0.1), scaler=scaler()) | options
    return AmpTrainState.create(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(accum_steps=2),
        pytest.param(dict(redo_on_nan=2), marks=pytest.mark.once),
        pytest.param(dict(jit=False), marks=pytest.mark.once),
    ],
    ids=str,
)
def test_streams_in_the_batch_go_on(options):
    """Each step draws anew; a step that is skipped draws nothing."""
    step = make_nnx_train_step(dropout_loss, has_aux=True, **options)
    model, optimizer = objects()
    rngs = nnx.Rngs(dropout=0, noise=1)
    drawn = []
    for x in (X, X, X.at[0, 0].set(jnp.nan), X):
        _, metrics = step(model, optimizer, scaler(), {"x": x, "rngs": rngs})
        if metrics["grads_finite"]:
            drawn.append(float(metrics["drawn"]))
    count = 3 * options.get("accum_steps", 1)
    assert int(rngs.dropout.count[...]) == int(rngs.noise.count[...]) == count
    assert len(set(drawn)) == 3


def test_the_step_is_that_of_nnx_with_the_same_stream():
    model, optimizer = objects()
    rngs = nnx.Rngs(dropout=3, noise=4)
    step = make_nnx_train_step(dropout_loss, has_aux=True, compute_dtype=jnp.float32)
    step(model, optimizer, scaler(), {"x": X, "rngs": rngs})
    twin, twin_optimizer = objects()
    streams = nnx.Rngs(dropout=3, noise=4)
    grad_fn = nnx.grad(dropout_loss, has_aux=True)
    grads, _ = grad_fn(twin, {"x": X, "rngs": streams})
    twin_optimizer.update(twin, grads)
    pairs = zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, twin)), strict=True)
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_metrics_teachers_and_shared_streams():
    """What model and batch share stays shared; a teacher does not train."""
    model, optimizer = objects()
    model.dropout.rngs = nnx.Rngs(dropout=0).dropout
    metric, teacher = nnx.metrics.Average(), nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(1))
    before = jax.tree.map(jnp.copy, nnx.state(teacher))

    def loss_fn(model, batch):
        x, (metric, teacher, stream) = batch
        loss = ((model(x) - teacher(x)) ** 2).mean()
        stream()
        metric.update(values=loss)
        return loss

    step = make_nnx_train_step(loss_fn)
    for _ in range(3):
        step(model, optimizer, scaler(), (X, (metric, teacher, model.dropout.rngs)))
    assert int(metric.count[...]) == 3 and jnp.isfinite(metric.compute())
    assert int(model.dropout.rngs.count[...]) == 6
    assert_identical(nnx.state(teacher), before)


@pytest.mark.parametrize("options", [{}, dict(accum_steps=2), dict(jit=False)], ids=str)
def test_the_step_on_a_state_refuses_changes_by_name(options):
    rngs = nnx.Rngs(dropout=0, noise=1)
    message = r"dropout_loss changed batch\['rngs'\] \(Rngs.dropout.count\).*nnx.Rngs\("
    step = make_train_step(dropout_loss, has_aux=True, **options)
    raised(lambda: step(make_state(), {"x": X, "rngs": rngs}), ValueError, message)
    assert int(rngs.dropout.count[...]) == 0

    def counts(model, batch):
        batch["n"][...] += 1
        return model.linear(batch["x"]).sum()

    batch = {"x": X, "n": nnx.Variable(jnp.ones(4))}
    message = r"counts changed batch\['n'\] \(Variable\)"
    step = make_train_step(counts, **options)
    raised(lambda: step(make_state(), batch), ValueError, message)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_modules_that_stay_as_they_are_may_be_in_any_batch(accum_steps):
    """They are no rows of examples either."""
    teacher = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(1))

    def loss_fn(model, batch):
        return ((model.linear(batch["x"]) - batch["teacher"](batch["x"])) ** 2).mean()

    options = dict(compute_dtype=jnp.float32, accum_steps=accum_steps)
    step = make_train_step(loss_fn, **options)
    _, metrics = step(make_state(), {"x": X, "teacher": teacher})
    expected = loss_fn(Net(), {"x": X, "teacher": teacher})
    assert jnp.allclose(metrics["loss"], expected)


@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("jit", [True, False])
def test_bare_variables_hold_rows_of_the_batch(accum_steps, jit):
    def loss_fn(model, batch):
        assert batch["x"].shape == batch["y"].shape == (4 // accum_steps, SIZE)
        return (model.linear(batch["x"][...]) * batch["y"]).sum()

    options = dict(compute_dtype=jnp.float32, accum_steps=accum_steps, jit=jit)
    batch = {"x": nnx.Variable(X), "y": X + 1}
    model, optimizer = objects()
    expected = (model.linear(X) * batch["y"]).sum() / accum_steps
    _, on_state = make_train_step(loss_fn, **options)(make_state(), batch)
    step = make_nnx_train_step(loss_fn, **options)
    _, on_model = step(model, optimizer, scaler(), batch)
    assert jnp.allclose(on_state["loss"], expected)
    assert jnp.allclose(on_model["loss"], expected)


def test_the_way_out_is_a_way():
    """Streams made of the state's keys: others at each step."""

    def loss_fn(model, batch, *, rngs):
        return (model(batch["x"], rngs=nnx.Rngs(**rngs)) ** 2).mean()

    step = make_train_step(loss_fn, donate=False)
    state = make_state(rngs={"dropout": jax.random.key(0)})
    _, first = step(state, {"x": X})
    _, again = step(state, {"x": X})
    _, later = step(state.replace(step=state.step + 1), {"x": X})
    assert first["loss"] == again["loss"] != later["loss"]


def test_an_eval_step_loses_nothing_in_silence():
    def measure(model, batch):
        batch["metric"].update(values=model.linear(batch["x"]))

    batch = {"x": X, "metric": nnx.metrics.Average()}
    message = r"eval_step: measure changed batch\['metric'\]"
    raised(lambda: make_eval_step(measure)(make_state(), batch), ValueError, message)
    nnx.jit(make_eval_step(measure, jit=False))(make_state(), batch)
    assert int(batch["metric"].count[...]) == X.size


def test_modules_that_a_function_closes_over():
    """The error of NNX stays, with a note that says where to put them."""
    rngs = nnx.Rngs(dropout=0, noise=1)

    def closure(model, batch):
        return dropout_loss(model, {**batch, "rngs": rngs})[0]

    batch = {"x": X}
    calls = [
        lambda: make_nnx_train_step(closure)(*objects(), scaler(), batch),
        lambda: make_train_step(closure)(make_state(), batch),
        lambda: make_eval_step(closure)(make_state(), batch),
    ]
    for call in calls:
        with pytest.raises(errors.TraceContextError, match="Cannot mutate") as caught:
            call()
        [note] = [note for note in caught.value.__notes__ if "flax_amp" in note]
        assert "into the batch of make_nnx_train_step" in note
