"""What a step hands on to the loss: further arguments, and modules among its inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _steps import (
    counting,
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
)
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    static_scaler,
)
from helpers import assert_close, assert_identical

OPTIONS = {
    "plain": {},
    "accumulated and redone": {"accum_steps": 2, "redo_on_nan": 2},
}
options_of_steps = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)

# Further arguments


def weighted(params, batch, weight, shift):
    """Its third argument is a number, its fourth a dict without rows of examples."""
    x = batch["x"] + shift["x"]
    return weight * linear_loss(params, batch | {"x": x}), {"seen": weight}


def nnx_weighted(model, batch, weight, shift):
    out = model(batch["x"] + shift["x"])[:, 0]
    return weight * ((out - batch["y"]) ** 2).mean(), {"seen": weight}


WEIGHT, SHIFT = jnp.float32(0.5), {"x": jnp.float32([[0.5, 0.0, -0.5]])}


def linear_nnx_state():
    return AmpTrainState.create(model=linear_objects()[0], tx=optax.sgd(0.1))


def on_state(loss, args, make=linear_state, **options):
    step = make_train_step(loss, **options)
    state, metrics = step(make(), linear_batch(), *args)
    return state.params, metrics


def on_nnx_state(loss, args, **options):
    return on_state(loss, args, linear_nnx_state, **options)


def on_objects(loss, args, **options):
    model, optimizer = linear_objects()
    metrics = make_nnx_train_step(loss, **options)(
        model, optimizer, linear_batch(), *args
    )
    return nnx.to_pure_dict(nnx.state(model)), metrics


# The plain step on objects with further arguments is in
# `test_the_nnx_step_updates_modules`, and the plain step on a state is a pass of the
# accumulated step.
@pytest.mark.parametrize(
    "run, loss, options",
    [
        (on_state, weighted, OPTIONS["accumulated and redone"]),
        (on_nnx_state, nnx_weighted, OPTIONS["plain"]),
        (on_objects, nnx_weighted, OPTIONS["accumulated and redone"]),
    ],
)
def test_a_step_is_that_of_a_loss_which_closes_over_them(run, loss, options):
    options = options | {"precision": "bf16-mixed", "has_aux": True}
    found = run(loss, (WEIGHT, SHIFT), **options)
    closed = lambda target, batch: loss(target, batch, WEIGHT, SHIFT)  # noqa: E731
    expected = run(closed, (), **options)
    np.testing.assert_allclose(found[1]["seen"], WEIGHT)
    assert_close(found, expected, jnp.float32)


def test_they_are_traced():
    """Other values of one type compile nothing; a default may be left out."""

    def loss(params, batch, weight, offset=0.0, *, state):
        return weight * linear_loss(params, batch) + offset * state.step

    counted, traces = counting(loss)
    state = linear_state()
    step = make_train_step(counted, donate=False, precision="32-true")
    losses = [step(state, linear_batch(), jnp.float32(w))[1]["loss"] for w in (1, 2)]
    assert len(traces) == 1 and losses[1] == 2 * losses[0]
    step(state, linear_batch(), jnp.float32(1), jnp.float32(1))
    assert len(traces) == 2


# Modules: random streams, metrics, teachers

SIZE = 4
X = jnp.linspace(-1, 1, 4 * SIZE).reshape(4, SIZE)


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


def drawing(model, batch, streams, counter):
    """It draws from a module in the batch, and from one beside it."""
    counter[...] = counter[...] + 1
    loss, aux = dropout_loss(model, batch)
    return loss + streams.noise.uniform(), aux


MADE = dict(tx=optax.sgd(0.1), scaler=static_scaler(8.0))


def objects():
    model = Net()
    return model, AmpOptimizer(model, **MADE)


def make_state():
    return AmpTrainState.create(model=Net(), **MADE)


def streams():
    return nnx.Rngs(dropout=0, noise=1)


@options_of_steps
def test_the_nnx_step_updates_modules(options):
    """Each step draws anew; a step that is skipped draws nothing.

    Variables by themselves are updated too, which in a batch are split into
    micro-batches.
    """
    step = make_nnx_train_step(drawing, has_aux=True, **options)
    model, optimizer = objects()
    in_batch, beside, counter = streams(), streams(), nnx.Variable(jnp.int32(0))
    drawn = []
    for x in (X, X, X.at[0, 0].set(jnp.nan), X):
        batch = {"x": x, "rngs": in_batch}
        metrics = step(model, optimizer, batch, beside, counter)
        if metrics["grads_finite"]:
            drawn.append(float(metrics["drawn"]))
    counts = (in_batch.dropout.count, in_batch.noise.count, beside.noise.count, counter)
    expected = 3 * options.get("accum_steps", 1)
    assert [int(count[...]) for count in counts] == [expected] * 4
    assert len(set(drawn)) == 3


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
        step(model, optimizer, (X, (metric, teacher, model.dropout.rngs)))
    assert int(metric.count[...]) == 3 and jnp.isfinite(metric.compute())
    assert int(model.dropout.rngs.count[...]) == 6
    assert_identical(nnx.state(teacher), before)


@options_of_steps
def test_the_steps_on_a_state_refuse_changes_by_name(options):
    rngs = streams()
    batch = {"x": X, "rngs": rngs, "n": nnx.Variable(jnp.ones(4))}

    def counts(model, batch):
        batch["n"][...] += 1
        return model.linear(batch["x"]).sum(), {}

    advice = r".*stay as they are.*nnx.Rngs\("
    for loss, args, named in [
        (dropout_loss, (), r"dropout_loss changed batch\['rngs'\] \(Rngs.dropout.coun"),
        (counts, (), r"counts changed batch\['n'\] \(Variable\)"),
        (
            drawing,
            (streams(), nnx.Variable(jnp.int32(0))),
            r"drawing changed .*, args\[0\] \(Rngs.noise.count\), args\[1\]",
        ),
    ]:
        step = make_train_step(loss, has_aux=True, **options)
        call = lambda s=step, a=args: s(make_state(), batch, *a)  # noqa: E731
        raised(call, ValueError, named + advice)
    call = lambda: make_eval_step(counts)(make_state(), batch)  # noqa: E731
    raised(call, ValueError, r"eval_step: counts changed batch\['n'\]" + advice)
    assert int(rngs.dropout.count[...]) == 0


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_modules_that_stay_as_they_are_may_be_in_any_batch(accum_steps):
    """They are no rows of examples either."""
    teacher = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(1))
    batch = {"x": X, "teacher": teacher}

    def loss_fn(model, batch):
        return ((model.linear(batch["x"]) - batch["teacher"](batch["x"])) ** 2).mean()

    expected = loss_fn(Net(), batch)
    options = dict(precision="32-true", accum_steps=accum_steps)
    _, on_state = make_train_step(loss_fn, **options)(make_state(), batch)
    on_model = make_nnx_train_step(loss_fn, **options)(*objects(), batch)
    assert jnp.allclose(on_state["loss"], expected)
    assert jnp.allclose(on_model["loss"], expected)
