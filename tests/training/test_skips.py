"""Which steps are skipped, and which of those lower the scale."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from _models import changed
from flax_amp import (
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
    "variables": {"seen": jnp.inf},
    "variables and gradients": {"seen": jnp.nan, "factor": 8e3},
    "loss and gradients": {"loss": -jnp.inf, "factor": 8e3},
}
LOWERS = {"gradients"}


def make_batch(fault):
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
    loss, mean = loss_of(params["w"], state.variables["stats"]["mean"], batch)
    return loss, {"variables": {"stats": {**state.variables["stats"], "mean": mean}}}


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))
        self.mean = nnx.BatchStat(jnp.float32(0.25))
        self.lowest = nnx.BatchStat(jnp.float32(-jnp.inf))


def nnx_loss(model, batch):
    loss, model.mean[...] = loss_of(model.w[...], model.mean[...], batch)
    return loss, {}


def scaler():
    return init_scaler(scaler=SCALE) | {"count": jnp.int32(COUNT)}


def make_state(kind):
    options = dict(tx=optax.adam(0.1), scaler=scaler())
    if kind == "nnx":
        return AmpTrainState.create(model=Model(), **options)
    stats = {"mean": jnp.float32(0.25), "lowest": jnp.float32(-jnp.inf)}
    params = {"w": jnp.float32(1)}
    return AmpTrainState.create(params=params, variables={"stats": stats}, **options)


def check_scaler_after(fault, new, redo):
    skipped = fault != "none" and not (fault in LOWERS and redo)
    lowered = fault in LOWERS
    scale = SCALE / 2 if lowered else SCALE
    count = COUNT + (fault == "none") if not lowered else int(bool(redo))
    assert float(new["scaler"]) == scale
    assert int(new["count"]) == count
    assert int(new["total_resets"]) == int(fault != "none")
    return skipped


def mapped(step, mesh, check_vma):
    spec = PartitionSpec
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec(), spec("data")),
            out_specs=spec(),
            check_vma=check_vma,
        )
    )


WAYS = {
    "plain": {},
    "accumulated": dict(accum_steps=4),
    "redone": dict(redo_on_nan=2),
    "both": dict(accum_steps=2, redo_on_nan=2),
    "devices": dict(axis_name="data"),
    "devices, unchecked": dict(axis_name="data", redo_on_nan=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_only_what_a_lower_scale_mends_lowers_it(mesh, kind, way):
    loss = {"linen": linen_loss, "nnx": nnx_loss}[kind]
    options = dict(has_aux=True, compute_dtype=jnp.float32, donate=False) | WAYS[way]
    over_devices = "axis_name" in options
    step = make_train_step(loss, **options, jit=not over_devices)
    if over_devices:
        step = mapped(step, mesh, check_vma="unchecked" not in way)
    redo = options.get("redo_on_nan", 0)
    state = make_state(kind)
    for fault in FAULTS:
        after, metrics = step(state, make_batch(fault))
        skipped = check_scaler_after(fault, after.scaler, redo)
        assert bool(metrics["grads_finite"]) != skipped, fault
        assert int(metrics["skipped_total"]) == int(skipped)
        assert int(after.opt_state.notfinite_count) == int(skipped)
        moved = {path.split("[")[0] for path in changed(state, after)}
        trained = {".params", ".opt_state.inner_state", ".variables"}
        assert not skipped or not any(x.startswith(tuple(trained)) for x in moved)
        assert skipped or {".params", ".variables"} <= moved
        assert int(after.step) == 1


@pytest.mark.parametrize("accum_steps, redo", [(1, 0), (2, 1)])
def test_the_step_on_an_optimizer_decides_alike(accum_steps, redo):
    step = make_nnx_train_step(
        nnx_loss,
        has_aux=True,
        compute_dtype=jnp.float32,
        accum_steps=accum_steps,
        redo_on_nan=redo,
    )
    tx = optax.apply_if_finite(optax.adam(0.1), 2**31 - 1)
    for fault in FAULTS:
        model = Model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        new, metrics = step(model, optimizer, scaler(), make_batch(fault))
        skipped = check_scaler_after(fault, new, redo)
        assert bool(metrics["grads_finite"]) != skipped
        assert int(metrics["skipped_total"]) == int(skipped)
        assert int(optimizer.opt_state.notfinite_count[...]) == int(skipped)
        assert (float(model.w[...]) == 1, float(model.mean[...]) == 0.25) == (
            skipped,
            skipped,
        )


@pytest.mark.parametrize("way", ["eager", "jit", "redone", "devices"])
def test_gradients_of_a_module_decide_alike(mesh, way):
    """And leave it as it was, with no step around them."""
    redo = 2 if way == "redone" else 0
    axis = "data" if way == "devices" else None
    grad_fn = dynamic_scale_value_and_grad(
        nnx_loss, has_aux=True, redo_on_nan=redo, axis_name=axis
    )

    def pure(state, batch):
        model = nnx.merge(graphdef, state, copy=True)
        new, ((loss, _), grads) = grad_fn(model, batch, dynamic_scaler_state=scaler())
        return nnx.state(model), new, all_finite((loss, grads))

    graphdef, state = nnx.split(Model())
    run = {"eager": pure, "devices": mapped(pure, mesh, True)}.get(way, jax.jit(pure))
    for fault in FAULTS:
        after, new, finite = run(state, make_batch(fault))
        skipped = check_scaler_after(fault, new, redo)
        assert bool(finite) == (not skipped or fault == "variables")
        assert (float(after["mean"][...]) == 0.25) == skipped


def test_a_variable_that_was_infinite_before_is_no_fault():
    """A running maximum begins at -inf; a mask in a buffer stays so."""

    def loss(params, batch, *, state):
        stats = state.variables["stats"]
        new = jax.jit(lambda x: x)(stats["lowest"])  # not the same object any more
        return (params["w"] * batch).sum(), {
            "variables": {"stats": {**stats, "lowest": new}}
        }

    step = make_train_step(loss, has_aux=True)
    state, metrics = step(make_state("linen"), jnp.ones(3))
    assert metrics["grads_finite"]
    assert state.variables["stats"]["lowest"] == -jnp.inf


def digits_run(every, steps=80):
    """A small network on handwritten digits; one NaN in every so many batches."""
    from examples.digits import data

    train, _ = data.load(0)
    images = np.asarray(train["image"], np.float32).reshape(-1, 64)
    labels = np.asarray(train["label"])
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(keys[0], (64, 16)) / 8,
        "out": jax.random.normal(keys[1], (16, 10)) / 4,
    }

    def loss_fn(params, batch):
        logits = jax.nn.relu(batch["x"] @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["y"]
        ).mean()

    step = make_train_step(loss_fn)
    state = AmpTrainState.create(params=params, tx=optax.adam(0.02))
    rng = np.random.default_rng(0)
    for i in range(steps):
        rows = rng.integers(0, len(images), 64)
        x = images[rows].copy()
        if i % every == every - 1:
            x[3] = np.nan
        state, metrics = step(state, {"x": x, "y": labels[rows]})
    logits = jax.nn.relu(images @ state.params["hidden"]) @ state.params["out"]
    return state, float((logits.argmax(-1) == labels).mean())


def test_bad_batches_do_not_drive_the_scale_to_its_floor():
    """Forty of them would have: 29 are enough to go from 2**15 down to 2**-14."""
    state, accuracy = digits_run(every=2)
    assert int(state.opt_state.total_notfinite) == 40
    assert float(state.scaler["scaler"]) == 2.0**15
    assert accuracy > 0.75


# One scaler for two networks


def test_two_networks_share_one_scaler():
    """A loop of the user's own, made of the public parts; no part syncs or branches."""
    import flax_amp

    def scaled(params, factor, scaler):
        loss = (params.astype(jnp.float16) ** 2).astype(jnp.float32).sum() * factor
        return flax_amp.scale_loss(loss, scaler), loss

    @jax.jit
    def step(params, factors, scaler):
        grads, losses = {}, {}
        for name in params:
            grads[name], losses[name] = jax.grad(scaled, has_aux=True)(
                params[name], factors[name], scaler
            )
        grads = flax_amp.unscale_grads(grads, scaler)
        good = flax_amp.all_finite((losses, grads))
        new = jax.tree.map(lambda p, g: jnp.where(good, p - g, p), params, grads)
        return new, flax_amp.update_scaler(
            scaler,
            flax_amp.all_finite(grads),
            loss_finite=flax_amp.all_finite(losses),
        )

    params = {"first": jnp.ones(2), "second": jnp.full(2, 2.0)}
    factors = {"first": jnp.float32(0.25), "second": jnp.float32(0.25)}
    new, after = step(params, factors, scaler())
    np.testing.assert_allclose(new["first"], 0.5)
    np.testing.assert_allclose(new["second"], 1.0)
    assert int(after["count"]) == COUNT + 1
    for bad, scale in ((jnp.float32(8e3), SCALE / 2), (jnp.float32(jnp.nan), SCALE)):
        new, after = step(params, factors | {"second": bad}, scaler())
        np.testing.assert_array_equal(new["first"], params["first"])
        assert float(after["scaler"]) == scale


AXES = {"vmap": jax.vmap, "pmap": jax.pmap}


@pytest.mark.parametrize(
    "transform, axis_name", [*itertools.product(AXES, ["data", ("data",)])]
)
def test_every_device_makes_the_same_of_the_scale(transform, axis_name):
    """Without the name each goes its own way, and none averages."""

    def loss(w, x):
        return (w.astype(jnp.float16)).astype(jnp.float32) * x

    def run(x, axis_name):
        grad_fn = dynamic_scale_value_and_grad(loss, axis_name=axis_name)
        state, (value, grad) = grad_fn(jnp.float32(1), x, dynamic_scaler_state=scaler())
        return state["scaler"], value, grad

    x = jnp.array([1.0, 3.0, 8e3, 2.0])
    over = functools.partial(AXES[transform], axis_name="data")
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
