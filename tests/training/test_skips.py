"""Which steps are skipped, what those change, and which of them lower the scale.

First a matrix: every fault, for every kind of state and of step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import changed, make_batch
from _steps import (
    SKIP_LEAVES,
    WORDS,
    EmaState,
    arrays,
    copy,
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    mapped,
    setup,
)
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    all_finite,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
)

SIZE = 8
SCALE, COUNT = 16.0, 3

# What the batch does to the step: its loss, its gradients and its updated variables.
FAULTS = {
    "none": {},
    "loss": {"loss": jnp.nan},
    "data": {"factor": jnp.nan},
    "gradients": {"factor": 8e3},  # times 16 it is beyond float16, times 8 it is not
    "large gradients": {"factor": 6.4e4},  # times 2 it still is
    "variables": {"seen": jnp.inf},
    "variables and gradients": {"seen": jnp.nan, "factor": 8e3},
    "loss and gradients": {"loss": -jnp.inf, "factor": 8e3},
}
# How often a fault lowers the scale, if it may do so as often as it wants.
LOWERS = {"gradients": 1, "large gradients": 4}
SCALER_LEAVES = {".scaler['scaler']", ".scaler['count']"}


def batch_with(fault):
    """Good examples but for the last."""
    good = {"loss": 0.0, "factor": 1.0, "seen": 1.0}
    bad = good | FAULTS[fault]
    return {key: np.float32([good[key]] * (SIZE - 1) + [bad[key]]) for key in good}


def loss_of(w, mean, batch):
    """The loss, and the new running mean; the cotangent of the cast is float16."""
    loss = w.astype(jnp.float16).astype(jnp.float32) * batch["factor"].max()
    loss += jax.lax.stop_gradient(batch["loss"].sum())
    return loss, 0.5 * mean + 0.5 * batch["seen"].max()


def linen_loss(params, batch, *, state):
    stats = state.variables["stats"]
    loss, mean = loss_of(params["w"], stats["mean"], batch)
    lowest = jax.jit(lambda x: x)(stats["lowest"])  # not the same object any more
    stats = {"mean": mean, "lowest": lowest}
    return loss, {"variables": {"stats": stats}, "ratio": jnp.nan}


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))
        self.zero = nnx.Param(jnp.float32(-0.0))
        self.mean = nnx.BatchStat(jnp.float32(0.25))
        self.lowest = nnx.BatchStat(jnp.float32(-jnp.inf))


def nnx_loss(model, batch):
    loss, model.mean[...] = loss_of(model.w[...], model.mean[...], batch)
    return loss, {"ratio": jnp.nan}


def first_scaler():
    return init_scaler(scaler=SCALE) | {"count": jnp.int32(COUNT)}


def make_state(kind):
    """One of its variables is infinite, as a running minimum is, which is no fault."""
    options = dict(tx=optax.adam(0.1), scaler=first_scaler())
    if kind == "nnx":
        return AmpTrainState.create(model=Model(), **options)
    stats = {"mean": jnp.float32(0.25), "lowest": jnp.float32(-jnp.inf)}
    params = {"w": jnp.float32(1), "zero": jnp.float32(-0.0)}
    return AmpTrainState.create(params=params, variables={"stats": stats}, **options)


def check_scaler_after(fault, new, redo):
    """Checks what a fault makes of the scaler; returns whether the step is skipped."""
    needed = LOWERS.get(fault, 0)
    lowered = min(needed, redo + 1)
    skipped = fault != "none" and not 0 < needed <= redo
    if fault == "none":
        count = COUNT + 1
    elif lowered:
        count = int(not skipped)
    else:
        count = COUNT
    assert float(new["scaler"]) == SCALE / 2**lowered, fault
    assert int(new["count"]) == count, fault
    return skipped


# Of a Linen model, and of one of NNX, by turns.
WAYS = {
    "plain": {},
    "accumulated": dict(accum_steps=4),
    "both": dict(accum_steps=2, redo_on_nan=2),
    "redone": dict(redo_on_nan=2),
    "devices, unchecked": dict(axis_name="data", redo_on_nan=1),
    "devices": dict(axis_name="data"),
}


@pytest.mark.parametrize("kind, way", [*zip(["linen", "nnx"] * 3, WAYS, strict=True)])
def test_only_what_a_lower_scale_mends_lowers_it(mesh, kind, way):
    loss = {"linen": linen_loss, "nnx": nnx_loss}[kind]
    options = dict(has_aux=True, precision="32-true", donate=False) | WAYS[way]
    over_devices = "axis_name" in options
    step = make_train_step(loss, **options, jit=not over_devices)
    if over_devices:
        step = mapped(step, mesh, "unchecked" not in way)
    redo = options.get("redo_on_nan", 0)
    state = make_state(kind)
    for fault in FAULTS:
        after, metrics = step(state, batch_with(fault))
        skipped = check_scaler_after(fault, after.scaler, redo)
        assert bool(metrics["grads_finite"]) != skipped, fault
        assert int(metrics["skipped_total"]) == int(skipped)
        assert np.isnan(metrics["ratio"])  # it makes no difference
        moved = changed(state, after)
        if skipped:
            lowered = SCALER_LEAVES if fault in LOWERS else set()
            assert moved == SKIP_LEAVES | lowered, fault
        else:
            kinds = {path.split("[")[0] for path in moved}
            assert {".params", ".variables"} <= kinds, fault
        assert not any("lowest" in path for path in moved), fault
        assert int(after.step) == 1


def test_the_step_on_an_optimizer_decides_alike():
    options = dict(has_aux=True, precision="32-true", accum_steps=2)
    step = make_nnx_train_step(nnx_loss, redo_on_nan=1, **options)
    for fault in FAULTS:
        model = Model()
        optimizer = AmpOptimizer(model, optax.adam(0.1), scaler=first_scaler())
        before = arrays(model, optimizer)
        metrics = step(model, optimizer, batch_with(fault))
        new = {key: x[...] for key, x in optimizer.scaler.items()}
        skipped = check_scaler_after(fault, new, redo=1)
        assert bool(metrics["grads_finite"]) != skipped
        assert int(metrics["skipped_total"]) == int(skipped)
        moved = changed(before, arrays(model, optimizer))
        counters = {"last_finite", "notfinite_count", "total_notfinite"}
        kinds = {path.split("'")[-2] for path in moved}
        if skipped:
            assert kinds - {"scaler", "count"} == counters, fault
        assert skipped or kinds >= {"w", "mean", "step"}, fault


@pytest.mark.parametrize("way", ["redone", "devices"])
def test_gradients_of_a_module_decide_alike(mesh, way):
    """And leave it as it was, with no step around them."""
    redo = 2 if way == "redone" else 0
    axis = "data" if way == "devices" else None
    grad_fn = dynamic_scale_value_and_grad(
        nnx_loss, has_aux=True, redo_on_nan=redo, axis_name=axis
    )

    def pure(state, batch):
        model = nnx.merge(graphdef, state, copy=True)
        new, ((loss, _), grads) = grad_fn(
            model, batch, dynamic_scaler_state=first_scaler()
        )
        return nnx.state(model), new, all_finite((loss, grads))

    graphdef, state = nnx.split(Model())
    run = jax.jit(pure) if way == "redone" else mapped(pure, mesh)
    for fault in FAULTS:
        after, new, finite = run(state, batch_with(fault))
        skipped = check_scaler_after(fault, new, redo)
        assert bool(finite) == (not skipped or fault == "variables")
        assert (float(after["mean"][...]) == 0.25) == skipped


# Real models and optimizers


@pytest.mark.parametrize(
    "name, dtype, cls, accum_steps",
    [
        ("linen", jnp.float16, AmpTrainState, 1),
        pytest.param("nnx", jnp.float32, EmaState, 4, marks=pytest.mark.once),
    ],
)
def test_poisoned_batch_changes_no_other_bit(name, dtype, cls, accum_steps):
    state, step = setup(name, cls=cls, precision=WORDS[dtype], accum_steps=accum_steps)
    after, metrics = step(copy(state), make_batch(poisoned=True))
    assert changed(state, after) == SKIP_LEAVES
    assert not metrics["grads_finite"] and int(metrics["skipped_total"]) == 1
    assert int(after.step) == int(state.step) + 1
    # The next good step is what it would have been, but for its number and scale.
    if name == "linen":  # whose dropout follows the step; NNX counts applied ones
        after = after.replace(step=state.step)
    after = after.replace(scaler=state.scaler)
    seen, _ = step(copy(after), make_batch(5))
    never, _ = step(copy(state), make_batch(5))
    counters = {".opt_state.total_notfinite", ".step"}
    assert changed(seen, never) - counters == set()
    assert seen.opt_state.notfinite_count == 0


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(0.1), 2),
        # It tests gradients after they were added up.
        optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 2),
        optax.apply_if_finite(optax.adam(0.1), 0),  # applies the NaN at once
        optax.chain(optax.apply_if_finite(optax.adam(0.1), 0)),
        optax.contrib.schedule_free_sgd(0.1),
    ],
)
def test_skips_whatever_the_optimizer(tx):
    """Many steps in a row do no harm, and are left again."""
    step = make_train_step(linear_loss)
    state = linear_state(tx)
    for _ in range(3):
        state, _ = step(state, linear_batch())
    after = copy(state)
    for _ in range(40):
        after, metrics = step(after, linear_batch(poisoned=True))
    assert changed(state, after) <= SKIP_LEAVES
    assert (float(metrics["scaler"]), int(metrics["skipped_total"])) == (16.0, 40)
    for _ in range(2):
        after, metrics = step(after, linear_batch())
    assert metrics["grads_finite"] and changed(state.params, after.params)


# Devices


@pytest.mark.parametrize(
    "transform, axis_name", [(jax.vmap, ("data",)), (jax.pmap, "data")]
)
def test_every_device_makes_the_same_of_the_scale(transform, axis_name):
    """Without the name each goes its own way, and none averages."""

    def loss(w, x):
        return (w.astype(jnp.float16)).astype(jnp.float32) * x

    def run(x, axis_name):
        grad_fn = dynamic_scale_value_and_grad(loss, axis_name=axis_name)
        state, (value, grad) = grad_fn(
            jnp.float32(1), x, dynamic_scaler_state=first_scaler()
        )
        return state["scaler"], value, grad

    x = jnp.array([1.0, 3.0, 8e3, 2.0])
    over = functools.partial(transform, axis_name="data")
    scales, _, _ = over(lambda x: run(x, None))(x)
    assert set(scales.tolist()) == {SCALE, SCALE / 2}
    scales, values, _ = over(lambda x: run(x, axis_name))(x)
    assert set(scales.tolist()) == {SCALE / 2}
    assert set(values.tolist()) == {float(x.mean())}
    scales, values, grads = over(lambda x: run(x, axis_name))(x.at[2].set(2.0))
    assert set(scales.tolist()) == {SCALE}
    assert set(grads.tolist()) == set(values.tolist()) == {2.0}
    scales, _, _ = over(lambda x: run(x, axis_name))(x.at[0].set(jnp.nan))
    assert set(scales.tolist()) == {SCALE}


# What an optimizer of NNX counts

GOOD, BAD = jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan, jnp.float32)
GUARDED = optax.apply_if_finite(optax.sgd(0.1), 2**31 - 1)


def mean_loss(model, batch):
    return model(batch).mean()


@pytest.mark.parametrize(
    "options, make",
    [
        ({}, AmpOptimizer),
        ({"accum_steps": 2, "redo_on_nan": 2, "jit": False}, AmpOptimizer),
        ({}, nnx.Optimizer),
    ],
)
def test_skipped_steps_are_counted(options, make):
    model, _ = linear_objects()
    tx = optax.sgd(0.1) if make is AmpOptimizer else GUARDED
    optimizer = make(model, tx, wrt=nnx.Param)
    step = make_nnx_train_step(mean_loss, **options)
    expected = [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]
    for batch, counts in zip((GOOD, BAD, BAD, GOOD, BAD), expected, strict=True):
        metrics = step(model, optimizer, batch)
        state = optimizer.opt_state
        found = state.notfinite_count, state.total_notfinite
        assert tuple(int(x[...]) for x in found) == counts
        assert metrics["skipped_total"] == counts[1]
    assert int(optimizer.step[...]) == 2


def test_a_plain_optimizer_counts_nothing():
    model, _ = linear_objects()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    metrics = make_nnx_train_step(mean_loss)(model, optimizer, BAD)
    assert set(metrics) == {"loss", "grads_finite", "scaler", "grad_norm"}
    assert int(optimizer.step[...]) == 0


def test_in_a_scan():
    step = make_nnx_train_step(mean_loss, jit=False)
    graphdef, state = nnx.split(linear_objects())

    def body(state, batch):
        objects = nnx.merge(graphdef, state)
        metrics = step(*objects, batch)
        return nnx.state(objects), metrics

    _, metrics = jax.lax.scan(body, state, jnp.stack([GOOD, BAD, BAD]))
    assert metrics["skipped_total"].tolist() == [0, 1, 2]
