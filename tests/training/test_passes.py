"""What a step averages over the parts of a batch, and by which weights."""

import functools

import _losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _losses import BATCH, LENGTH, PARAMS, WIDTH, WORDS
from clu import metrics as clu_metrics
from flax import nnx
from jax.sharding import PartitionSpec as P

from _models import changed
from _steps import DTYPES, linear_batch, linear_loss, linear_state, mapped
from _steps import WORDS as PRECISIONS
from examples.sharded import make_mesh
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
)
from helpers import TOLERANCE, relative_error

# --- weights -------------------------------------------------------------------------

SIZE = 32


def make_rows(most=LENGTH):
    """Rows of random lengths, of which some parts of the batch have none."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, WORDS, (SIZE, LENGTH))
    length = generator.integers(0, most + 1, SIZE)
    length = np.where(np.arange(SIZE) % 4 == 1, 0, length)
    mask = (np.arange(LENGTH) < length[:, None]).astype(np.float32)
    return {"x": x, "y": np.roll(x, -1, 1), "mask": mask}


class Net(nnx.Module):
    """The model of `_losses.masked`, with statistics of what it has seen."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)
        self.largest = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        return self.head(self.embed(x))


def nnx_total(model, batch):
    # 0/0 in a part without tokens, as the loss.
    model.largest[...] = (
        batch["mask"].max() + 0 * batch["mask"].sum() / batch["mask"].sum()
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["y"]
    )
    return (losses * batch["mask"]).sum()


def token_mean(total, mesh=None):
    def loss_fn(target, batch):
        count = batch["mask"].sum()
        loss = total(target, batch) / count
        aux = {"weight": count, "copy": loss}
        if mesh is None:  # a metric of clu reduces itself, but not over devices
            values = batch["mask"].sum(1)
            aux["each"] = clu_metrics.Average.from_model_output(values=values)
        return loss, aux

    return loss_fn


def gradients(target, grads, updates):
    return {"grads": grads}


# 2**15 is too much for a sum over tokens, and a retry finds a scale.
MADE = dict(tx=optax.sgd(0.1), scaler=init_scaler(scaler=2.0**10))


def leaves_of(grads):
    """The arrays of gradients, of a tree or of NNX, in one order."""
    return jax.tree.leaves(grads if type(grads) is dict else nnx.to_pure_dict(grads))


def on_linen(precision, mesh, rows, **options):
    step = make_train_step(token_mean(_losses.masked, mesh), **options)
    step = mapped(step, mesh) if mesh else step
    params = {key: PARAMS[key] for key in ("embed", "head")}
    state = AmpTrainState.create(params=params, precision=precision, **MADE)
    _, metrics = step(state, rows)
    return metrics, leaves_of(metrics["grads"])


def on_nnx_state(precision, mesh, rows, **options):
    step = make_train_step(token_mean(nnx_total, mesh), **options)
    step = mapped(step, mesh) if mesh else step
    state = AmpTrainState.create(model=Net(), precision=precision, **MADE)
    new, metrics = step(state, rows)
    assert new.variables["largest"] == 1
    return metrics, leaves_of(metrics["grads"])


def on_objects(precision, mesh, rows, **options):
    step = make_nnx_train_step(token_mean(nnx_total, mesh), **options)
    model = Net()
    optimizer = AmpOptimizer(model, precision=precision, **MADE)
    if mesh:
        specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
        step = nnx.jit(nnx.shard_map(step, mesh=mesh, **specs))
    metrics = step(model, optimizer, rows)
    assert model.largest[...] == 1
    return metrics, leaves_of(metrics["grads"])


KINDS = [on_linen, on_nnx_state, on_objects]


@functools.cache
def whole_batch(kind):
    """The loss and the gradients of all tokens, in float32."""
    rows = make_rows()
    if kind is on_linen:
        params = {key: PARAMS[key] for key in ("embed", "head")}
        loss_fn, grad = token_mean(_losses.masked), jax.grad
    else:
        params, loss_fn, grad = Net(), token_mean(nnx_total), nnx.grad
    grads, aux = grad(loss_fn, has_aux=True)(params, rows)
    return aux["copy"], leaves_of(grads)


# Micro-batches and devices. In the first and the last pair, whole micro-batches have no
# tokens.
PARTS = [(16, 1), (1, 8), (4, 2)]


def averages():
    """A Latin square: each kind meets all parts and all dtypes, each dtype all parts.

    The averages get gradients in float32 in every dtype, and trees of every kind.
    """
    for i, kind in enumerate(KINDS):
        for j, parts in enumerate(PARTS):
            dtype = DTYPES[(i + j) % len(DTYPES)]
            marks = [] if dtype == jnp.float32 else [pytest.mark.once]
            yield pytest.param(dtype, kind, *parts, marks=marks)


@pytest.mark.parametrize("dtype, kind, accum_steps, devices", [*averages()])
def test_the_average_is_that_of_the_whole_batch(dtype, kind, accum_steps, devices):
    """Also if some parts have no tokens: their loss is 0/0, and counts nothing."""
    mesh = None
    if devices > 1:
        mesh = make_mesh(data=devices)
    rows = make_rows()
    options = dict(accum_steps=accum_steps, metrics_fn=gradients)
    if dtype == jnp.float16:
        options["redo_on_nan"] = 1
    if mesh:
        options |= dict(axis_name="data", jit=False)
    metrics, grads = kind(PRECISIONS[dtype], mesh, rows, has_aux=True, **options)
    loss, exact = whole_batch(kind)
    bounds = (1e-6, 1e-6) if dtype == jnp.float32 else TOLERANCE[jnp.dtype(dtype)]
    assert metrics["grads_finite"] and not metrics["skipped_total"]
    assert metrics["weight"] == rows["mask"].sum()
    for value in (metrics["loss"], metrics["copy"]):
        assert relative_error(value, loss) < bounds[0]
    assert relative_error(grads, exact) < bounds[1]
    if not mesh:
        average = float(metrics["each"].compute())
        np.testing.assert_allclose(average, rows["mask"].sum(1).mean(), rtol=1e-6)


@pytest.mark.parametrize("empty", [0, 1])
def test_variables_over_devices_of_other_weights(empty):
    """They keep their dtypes; a device without examples decides nothing."""

    class Counts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(1))
            self.mean = nnx.BatchStat(jnp.bfloat16(0))
            self.left = nnx.BatchStat(jnp.int32(5))

    def loss_fn(model, rows):
        model.mean[...] = rows.mean().astype(jnp.bfloat16)
        model.left[...] = model.left[...] - 1
        return model.w[...] * rows.mean(), {"weight": jnp.isfinite(rows).sum()}

    state = AmpTrainState.create(model=Counts(), tx=optax.sgd(0.1))
    mesh = make_mesh(data=2)
    step = make_train_step(loss_fn, has_aux=True, axis_name="data", jit=False)
    rows = jnp.full(4, 2.0).at[2 * empty : 2 * empty + 2].set(jnp.nan)
    new, metrics = mapped(step, mesh)(state, rows)
    assert metrics["grads_finite"] and metrics["loss"] == 2
    assert new.variables["mean"].dtype == jnp.bfloat16
    assert new.variables["mean"] == 2 and new.variables["left"] == 4


class Noisy(nnx.Module):
    """Its random streams are among the variables, with typed keys."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("over", ["micro-batches", "devices", "both"])
def test_random_streams_of_parts_without_examples(over):
    """A part of weight 0 leaves its stream as it was; the other one draws once."""

    def loss_fn(model, rows):
        count = rows["mask"].sum()
        losses = (model(rows["x"]) ** 2).sum(1)
        return (losses * rows["mask"]).sum() / count, {"weight": count}

    options = {"accum_steps": 1 if over == "devices" else 2}
    if over != "micro-batches":
        options |= dict(axis_name="data", jit=False)
    step = make_train_step(loss_fn, has_aux=True, **options)
    if over != "micro-batches":
        mesh = make_mesh(data=2)
        step = mapped(step, mesh)
    rows = {"x": jnp.ones((8, 4)), "mask": jnp.float32([0, 0, 0, 0, 1, 0, 1, 0])}
    state = AmpTrainState.create(model=Noisy(), tx=optax.sgd(0.1))
    count = int(state.variables["dropout"]["rngs"]["count"])
    new, metrics = step(state, rows)
    assert metrics["grads_finite"] and metrics["weight"] == 2
    assert new.variables["dropout"]["rngs"]["count"] == count + 1


WAYS = {
    "one pass": {},
    "redone": {"redo_on_nan": 3},
    "micro-batches": {"accum_steps": 4, "redo_on_nan": 3},
    "devices": {"axis_name": "data", "jit": False},
    "both": {"axis_name": "data", "jit": False, "accum_steps": 2},
}


# The two kinds take turns: whether the sum of the weights is 0 is decided after the
# averages, in the same way for both.
EMPTY = [(way, (on_objects, on_linen)[i % 2]) for i, way in enumerate(WAYS)]


@pytest.mark.parametrize("way, kind", EMPTY)
def test_a_batch_without_weight_is_skipped(way, kind):
    """And the scale stays: no lower one would help. A guarded loss is 0, not NaN."""
    options = WAYS[way] | {"metrics_fn": gradients, "has_aux": True}
    mesh = make_mesh(data=2) if "axis_name" in options else None
    rows = make_rows(most=0)
    if kind is on_objects:  # which looks at its statistics
        model = Net()
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        optimizer = AmpOptimizer(model, precision="16-mixed", **MADE)
        step = make_nnx_train_step(token_mean(nnx_total, mesh), **options)
        if mesh:
            specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
            step = nnx.jit(nnx.shard_map(step, mesh=mesh, **specs))
        metrics = step(model, optimizer, rows)
        assert not changed(before, nnx.to_pure_dict(nnx.state(model)))
    else:
        metrics, _ = kind("16-mixed", mesh, rows, **options)
    assert not metrics["grads_finite"] and metrics["skipped_total"] == 1
    assert np.isnan(metrics["loss"]) and metrics["weight"] == 0
    assert metrics["scaler"] == 2.0**10


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_a_guarded_loss_without_weight(accum_steps):
    """It is 0, and finite; its step is skipped all the same."""

    def loss_fn(params, batch):
        count = batch["mask"].sum()
        loss = _losses.masked(params, batch) / jnp.maximum(count, 1)
        return loss, {"weight": count}

    state = AmpTrainState.create(params=PARAMS, tx=optax.adamw(0.1))
    step = make_train_step(loss_fn, has_aux=True, accum_steps=accum_steps, donate=False)
    new, metrics = step(state, make_rows(most=0))
    assert not metrics["grads_finite"] and np.isnan(metrics["loss"])
    assert not changed(state.params, new.params)


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_a_weight_that_is_no_number_of_tokens(accum_steps):
    def loss_fn(params, batch, weight):
        return _losses.mean(params, batch), {"weight": weight}

    state = AmpTrainState.create(params=PARAMS, tx=optax.sgd(0.1))
    step = make_train_step(loss_fn, has_aux=True, accum_steps=accum_steps, donate=False)
    for weight in (np.nan, np.inf, -1.0, 1.0):
        _, metrics = step(state, BATCH, np.float32(weight))
        assert metrics["grads_finite"] == (weight == 1)


def test_a_part_with_weight_that_is_not_finite_skips_the_step():
    rows = make_rows()
    rows["mask"][2, 0] = np.nan
    options = dict(has_aux=True, accum_steps=4, metrics_fn=gradients)
    metrics, _ = on_linen("bf16-mixed", None, rows, **options)
    assert not metrics["grads_finite"]


def test_a_scan_of_weighted_steps_is_the_loop():
    step = make_train_step(
        token_mean(_losses.masked), has_aux=True, accum_steps=4, jit=False
    )
    params = {key: PARAMS[key] for key in ("embed", "head")}
    state = AmpTrainState.create(params=params, precision="32-true", **MADE)
    batches = [make_rows(), make_rows(most=0), make_rows(most=2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, stacked)
    for batch in batches:
        state, _ = jax.jit(step)(state, batch)
    assert metrics["grads_finite"].tolist() == [True, False, True]
    assert metrics["weight"].tolist() == [rows["mask"].sum() for rows in batches]
    assert relative_error(scanned.params, state.params) < 1e-6


def test_kinds_of_weights():
    """Numbers of Python and of NumPy; equal weights change nothing."""
    weights = [3, 3.0, np.int64(3), np.float32(3), True]

    def weighted(weight):
        def loss_fn(params, batch):
            return linear_loss(params, batch), {"weight": weight}

        return make_train_step(loss_fn, has_aux=True, **options)

    options = dict(jit=False, accum_steps=2)
    steps = [make_train_step(linear_loss, **options), *map(weighted, weights)]
    state = linear_state(precision="32-true", scaler=None)
    # One program compiles faster than six.
    results = jax.jit(lambda *args: [step(*args) for step in steps])
    (plain, _), *found = results(state, linear_batch())
    for weight, (new, metrics) in zip(weights, found, strict=True):
        assert metrics["weight"] == 2 * float(weight)
        assert relative_error(new.params, plain.params) < 1e-6
