"""Gradient accumulation: within a step, over steps with MultiSteps, and both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics

from _models import changed, make_batch
from _steps import linear_batch, linear_loss, linear_state, setup
from flax_amp import AmpTrainState, init_scaler, make_train_step, no_scaler
from helpers import assert_close, assert_identical

CLIP = 0.05  # far below the norm of the gradient: it always clips
POISONED = {"x": np.full((2, 3), np.inf, np.float32), "y": np.zeros(2, np.float32)}


def part(i, parts):
    return jax.tree.map(lambda leaf: leaf[i::parts], linear_batch())


def make_state(tx, scaler=None):
    return linear_state(tx, scaler=scaler or no_scaler())


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))


@functools.cache
def step(accum_steps=1):
    return make_train_step(
        linear_loss, precision="32-true", donate=False, accum_steps=accum_steps
    )


@functools.cache
def full_batch_steps(count):
    state = make_state(optimizer())
    for _ in range(count):
        state, _ = step()(state, linear_batch())
    return state


def guarded(tx):
    return optax.apply_if_finite(tx.gradient_transformation(), 2**30)


@pytest.mark.parametrize(
    "accum_steps, every, wrap",
    [(4, 1, None), (1, 4, None), (2, 2, None), (2, 4, None), (1, 2, guarded)],
)
def test_any_way_to_accumulate_equals_the_full_batch(accum_steps, every, wrap):
    """The clip sees the mean gradient of all the examples, whatever the way."""
    tx = optax.MultiSteps(optimizer(), every)
    state = make_state(wrap(tx) if wrap else tx)
    for i in range(3 * every):
        state, _ = step(accum_steps)(state, part(i % every, every))
    assert_close(state.params, full_batch_steps(3).params, jnp.float32)
    assert int(state.step) == 3 * every


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_micro_step_is_not_counted(bad):
    """MultiSteps waits for one more: its window holds good gradients only."""
    batches = [part(i, 4) for i in range(4)]
    batches.insert(bad, POISONED)
    state = make_state(optax.MultiSteps(optimizer(), 4))
    for batch in batches:
        before = state
        state, metrics = step()(state, batch)
        assert bool(metrics["grads_finite"]) == (batch is not POISONED)
        if batch is POISONED:
            assert_identical(state.opt_state.inner_state, before.opt_state.inner_state)
    assert_close(state.params, full_batch_steps(1).params, jnp.float32)
    assert int(metrics["skipped_total"]) == 1


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_micro_batch_skips_the_whole_step(bad):
    batch = linear_batch()
    batch["x"][bad] = np.inf  # every 4th example makes a micro-batch
    state = make_state(optimizer())
    after, metrics = step(4)(state, batch)
    assert not metrics["grads_finite"]
    assert not changed(state.params, after.params)
    assert not changed(state.opt_state.inner_state, after.opt_state.inner_state)


def test_the_scale_moves_once_in_a_step():
    state = make_state(optimizer(), scaler=init_scaler(scaler=8, patience=1))
    scales = []
    for _ in range(4):
        state, metrics = step(4)(state, linear_batch())
        scales.append(float(metrics["scaler"]))
    assert scales == [8, 16, 16, 32]


def test_metrics_are_averaged_reduced_or_stacked(steps=2):
    """Each micro-batch draws from keys of its own."""

    def loss(params, batch, *, rngs):
        error = batch["x"] @ params["w"] - batch["y"]
        values = batch["x"][:, 0]
        aux = {
            "mse": (error**2).mean(),
            "each": error,
            "noise": jax.random.normal(rngs["noise"], (1,)),
            "mean_x": clu_metrics.Average.from_model_output(values=values),
        }
        return (error**2).mean(), aux

    def run(accum_steps):
        state = linear_state(rngs={"noise": jax.random.key(0)})
        step = make_train_step(loss, has_aux=True, accum_steps=accum_steps)
        return step(state, linear_batch())

    full, metrics = run(1)
    split, parts = run(steps)
    np.testing.assert_allclose(full.params["w"], split.params["w"], rtol=1e-3)
    for key in ("loss", "mse", "grad_norm"):
        np.testing.assert_allclose(metrics[key], parts[key], rtol=1e-3)
    # Micro-batch i holds the examples i, i + steps, i + 2 * steps, ...
    stacked = np.reshape(metrics["each"], (8 // steps, steps)).T
    np.testing.assert_allclose(parts["each"], stacked, rtol=1e-2, atol=1e-2)
    mean = linear_batch()["x"][:, 0].mean()
    np.testing.assert_allclose(parts["mean_x"].compute(), mean, rtol=1e-5)
    assert len(set(np.asarray(parts["noise"]).ravel().tolist())) == steps
    assert int(split.scaler["count"]) == 1  # one update of the scaler


def test_accumulation_is_in_float32():
    def loss(params, batch):
        return params["w"].astype(jnp.float16).astype(jnp.float32) * batch.mean()

    values = np.r_[np.float32(2048), np.ones(255, np.float32)]
    state = AmpTrainState.create(
        params={"w": jnp.float32(0)}, tx=optax.sgd(1.0), precision="bf16-mixed"
    )
    state, _ = make_train_step(loss, accum_steps=256)(state, values)
    assert float(state.params["w"]) == -(2048 + 255) / 256


@pytest.mark.once
def test_statistics_go_through_the_micro_batches():
    """Four updates with momentum 0.9 leave less of the old mean than one does."""
    state, _ = setup("nnx", accum_steps=1, donate=False)
    moved = []
    for accum_steps in (1, 4):
        _, step = setup("nnx", accum_steps=accum_steps, donate=False)
        old, new = (s.variables for s in (state, step(state, make_batch())[0]))
        counts = [int(v["dropout"]["rngs"]["count"]) for v in (old, new)]
        assert counts[1] == counts[0] + accum_steps
        moved.append(jnp.abs(new["norm"]["var"] - old["norm"]["var"]).sum())
    assert moved[1] > 1.5 * moved[0]
