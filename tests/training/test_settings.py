"""Every setting of a step beside a model in Python, over core.py, passes.py, scaler.py.

A run meets faults at random: in its loss, its data, its gradients and its variables.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import changed
from _steps import EmaState, arrays, assert_same_on_every_device, counting, mapped
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    optim,
)

SIZE = 8
SCALE, PATIENCE, LARGEST = 16.0, 2, 65504

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
# Each of them after a good step, and some at random.
RANDOM = np.random.default_rng(0)
RUN = [x for fault in FAULTS for x in (fault, "none")]
RUN += ["none", *RANDOM.choice([*FAULTS], 5, p=[0.3] + [0.1] * 7), "none"]


def batch_with(fault):
    """Good examples but for the last."""
    good = {"loss": 0.0, "factor": 1.0, "seen": 1.0}
    bad = good | FAULTS[fault]
    return {key: np.float32([good[key]] * (SIZE - 1) + [bad[key]]) for key in good}


class Expected:
    """What a run holds, in Python."""

    def __init__(self, redo_on_nan=0, accum_steps=1, **_):
        self.scale, self.count, self.redo = SCALE, 0, redo_on_nan
        self.updates = accum_steps
        self.total, self.mean = 0, np.float32(0.25)

    def step(self, fault):
        """Takes a step; returns whether it is applied."""
        values = FAULTS[fault]
        applied = np.isfinite([values.get(key, 0) for key in values]).all()
        for _ in range(self.redo + 1 if applied else 0):
            applied = values.get("factor", 1) * self.scale <= LARGEST
            if applied:
                self.count += 1
                break
            self.scale, self.count = self.scale / 2, 0
        if self.count > PATIENCE:
            self.scale, self.count = self.scale * 2, 0
        self.total += not applied
        if applied:  # each micro-batch updates it
            for _ in range(self.updates):
                self.mean = (self.mean + 1) / 2
        return applied


# Runs: what takes a step, and what returns all that the run holds


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
    """One of its variables is infinite, as a running minimum is, which is no fault.

    Others are weakly typed, or a number of Python. A parameter is -0.0.
    """

    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))
        self.zero = nnx.Param(jnp.asarray(-0.0))
        self.mean = nnx.BatchStat(jnp.asarray(0.25))
        self.number = nnx.Variable(0.0)
        self.lowest = nnx.BatchStat(jnp.float32(-jnp.inf))


def nnx_loss(model, batch):
    loss, model.mean[...] = loss_of(model.w[...], model.mean[...], batch)
    model.number.set_value(model.number.get_value() + 1)
    return loss, {"ratio": jnp.nan}


def first_scaler():
    return init_scaler(scaler=SCALE, patience=PATIENCE)


def on_state(kind, wrap=lambda step: step, tx=None, **options):
    """Returns what takes a step, what the run holds, and the traces of its loss."""
    loss, traces = counting({"linen": linen_loss, "nnx": nnx_loss}[kind])
    step = wrap(make_train_step(loss, **options))
    made = dict(tx=tx or optax.adam(0.1), scaler=first_scaler())
    if kind == "nnx":
        state = AmpTrainState.create(model=Model(), **made)
    else:
        stats = {"mean": jnp.float32(0.25), "lowest": jnp.float32(-jnp.inf)}
        params = {"w": jnp.float32(1), "zero": jnp.float32(-0.0)}
        made |= dict(params=params, variables={"stats": stats})
        state = EmaState.create(ema={"p": made["params"], "n": 0}, **made)

    def take(batch):
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return take, lambda: jax.tree.map(jnp.copy, (state, state.scaler)), traces


def on_objects(tx=None, **options):
    loss, traces = counting(nnx_loss)
    step = make_nnx_train_step(loss, **options)
    model = Model()
    optimizer = AmpOptimizer(model, tx or optax.adam(0.1), scaler=first_scaler())

    def held():
        scaler = {key: x[...] for key, x in optimizer.scaler.items()}
        return jax.tree.map(jnp.copy, (arrays(model, optimizer), scaler))

    return lambda batch: step(model, optimizer, batch), held, traces


def over_devices(kind, check_vma, **options):
    mesh = jax.make_mesh((SIZE,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    wrap = functools.partial(mapped, mesh=mesh, check_vma=check_vma)
    return on_state(kind, wrap, axis_name="data", jit=False, **options)


linen, nnx_state = (functools.partial(on_state, kind) for kind in ("linen", "nnx"))
ACCUMULATED, REDONE = dict(accum_steps=4), dict(redo_on_nan=2)
# Each kind has a run with micro-batches and a run with retries. Both are together in a
# run of Linen, and apart in runs of NNX, where a fault of the one hides no other fault.
ROWS = {
    "linen": (linen, {}),
    "linen, both": (linen, ACCUMULATED | REDONE),
    "linen, eager": (linen, dict(jit=False) | REDONE),
    "linen, not donated": (linen, dict(donate=False)),
    "linen, devices": (functools.partial(over_devices, "linen", True), {}),
    "nnx, accumulated": (nnx_state, ACCUMULATED),
    "nnx, devices": (functools.partial(over_devices, "nnx", False), REDONE),
    "objects": (on_objects, {}),
    "objects, accumulated": (on_objects, ACCUMULATED),
    "objects, redone": (on_objects, REDONE),
    "objects, eager": (on_objects, dict(jit=False) | REDONE),
    "objects, not donated": (on_objects, dict(donate=False)),
    "objects, measured": (on_objects, dict(metrics_fn=lambda *_: {"n": 1.0})),
    "objects, optim": (on_objects, dict(tx=optim.adam(0.1))),
}


def held_mean(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    (mean,) = [x for path, x in leaves if "'mean'" in jax.tree_util.keystr(path)]
    return float(mean)


COUNTERS = "notfinite_count", "last_finite", "total_notfinite"


@pytest.mark.parametrize("name", ROWS)
def test_a_run_with_faults(name):
    """Only what a lower scale may help lowers it, and a skip changes nothing else."""
    make, options = ROWS[name]
    take, held, traces = make(has_aux=True, precision="32-true", **options)
    expected = Expected(**options)
    may_change = (*COUNTERS, "step")
    is_eager = options.get("jit") is False
    for fault in RUN[:12] if is_eager else RUN:
        before, _ = held()
        metrics = take(batch_with(fault))
        after, scaler = held()
        applied = expected.step(fault)
        assert bool(metrics["grads_finite"]) == applied, fault
        assert float(scaler["scaler"]) == metrics["scaler"] == expected.scale, fault
        assert int(scaler["count"]) == expected.count, fault
        assert int(metrics["skipped_total"]) == expected.total
        assert held_mean(after) == expected.mean
        assert np.isnan(metrics["ratio"])  # it makes no difference
        moved = {path.rstrip("']") for path in changed(before, after)}
        others = {p for p in moved if "scaler" not in p and not p.endswith(may_change)}
        assert bool(others) == applied, (fault, others)
        assert not any("lowest" in path or "zero" in path for path in others)
    assert_same_on_every_device(after)
    # Over devices, the first state lies on one of them.
    assert is_eager or len(traces) == 1 + ("devices" in name)


@pytest.mark.parametrize(
    "transform, axis_name", [(jax.vmap, ("data",)), (jax.pmap, "data")]
)
def test_every_device_makes_the_same_of_the_scale(transform, axis_name):
    """Without the name each goes its own way, and none averages."""

    def loss(w, x):
        return (w.astype(jnp.float16)).astype(jnp.float32) * x

    def run(x, axis_name):
        grad_fn = dynamic_scale_value_and_grad(loss, axis_name=axis_name)
        scaler, w = first_scaler(), jnp.float32(1)
        state, (value, grad) = grad_fn(w, x, dynamic_scaler_state=scaler)
        return state["scaler"], value, grad

    x = jnp.array([1.0, 3.0, 8e3, 2.0])
    over = functools.partial(transform, axis_name="data")
    alone = over(lambda x: run(x, None))
    together = over(lambda x: run(x, axis_name))
    assert set(alone(x)[0].tolist()) == {SCALE, SCALE / 2}
    scales, values, _ = together(x)
    assert set(scales.tolist()) == {SCALE / 2}
    assert set(values.tolist()) == {float(x.mean())}
    scales, values, grads = together(x.at[2].set(2.0))
    assert set(scales.tolist()) == {SCALE}
    assert set(grads.tolist()) == set(values.tolist()) == {2.0}
    assert set(together(x.at[0].set(jnp.nan))[0].tolist()) == {SCALE}
