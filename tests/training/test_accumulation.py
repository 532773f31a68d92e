"""Gradient accumulation: within a step, over steps with MultiSteps, and both."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import changed
from flax_amp import AmpTrainState, init_scaler, make_train_step, no_scaler
from helpers import assert_close, assert_identical

SIZE, EXAMPLES = 4, 16
CLIP = 0.05  # far below the norm of the gradient: it always clips


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def make_batch(seed=0, size=EXAMPLES):
    x = jax.random.normal(jax.random.key(seed), (size, SIZE))
    return {"x": x, "y": x.sum(1, keepdims=True) + 1}


def part(batch, i, parts):
    return jax.tree.map(lambda leaf: leaf[i::parts], batch)


def make_state(tx):
    params = {"w": jnp.zeros((SIZE, 1))}
    return AmpTrainState.create(params=params, tx=tx, scaler=no_scaler())


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))


def step(**options):
    return make_train_step(loss_fn, compute_dtype=jnp.float32, donate=False, **options)


def full_batch_steps(count, tx=None):
    state = make_state(tx or optimizer())
    for seed in range(count):
        state, _ = step()(state, make_batch(seed))
    return state


@pytest.mark.parametrize("accum_steps, every", [(4, 1), (1, 4), (2, 2), (2, 4)])
def test_any_way_to_accumulate_equals_the_full_batch(accum_steps, every):
    """The clip sees the mean gradient of all the examples, whatever the way."""
    state = make_state(optax.MultiSteps(optimizer(), every))
    train_step = step(accum_steps=accum_steps)
    for seed in range(3):
        for i in range(every):
            batch = part(make_batch(seed), i, every)
            state, metrics = train_step(state, batch)

    expected = full_batch_steps(3)
    assert_close(state.params, expected.params, jnp.float32)
    assert int(state.step) == 3 * every


def test_a_clip_outside_clips_each_micro_batch():
    """Legal, another method, and not the full batch's."""
    tx = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.MultiSteps(optax.sgd(0.1), 2)
    )
    tx = optax.GradientTransformation(tx.init, tx.update)
    state = make_state(tx)
    for i in range(2):
        state, _ = step()(state, part(make_batch(), i, 2))
    inside = full_batch_steps(
        1, optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(0.1))
    )
    norms = [float(optax.tree.norm(s.params)) for s in (state, inside)]
    assert norms[0] < norms[1]


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_micro_step_is_not_counted(bad):
    """MultiSteps waits for one more: its window holds good gradients only."""
    poisoned = {"x": jnp.full((4, SIZE), jnp.inf), "y": jnp.zeros((4, 1))}
    parts = [part(make_batch(), i, 4) for i in range(4)]
    batches = parts[:bad] + [poisoned] + parts[bad:]

    state = make_state(optax.MultiSteps(optimizer(), 4))
    for batch in batches:
        before = state
        state, metrics = step()(state, batch)
        assert bool(metrics["grads_finite"]) == (batch is not poisoned)
        if batch is poisoned:
            assert_identical(state.opt_state.inner_state, before.opt_state.inner_state)

    assert_close(state.params, full_batch_steps(1).params, jnp.float32)
    assert int(metrics["skipped_total"]) == 1


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_micro_batch_skips_the_whole_step(bad):
    batch = make_batch()
    batch["x"] = batch["x"].at[bad, 0].set(jnp.inf)  # every 4th makes a micro-batch
    state = make_state(optimizer())
    after, metrics = step(accum_steps=4)(state, batch)

    assert not metrics["grads_finite"]
    assert not changed(state.params, after.params)
    assert not changed(state.opt_state.inner_state, after.opt_state.inner_state)


def test_the_scale_moves_once_in_a_step():
    params = {"w": jnp.zeros((SIZE, 1))}
    state = AmpTrainState.create(
        params=params, tx=optimizer(), scaler=init_scaler(scaler=8, patience=1)
    )
    train_step = make_train_step(loss_fn, accum_steps=4, donate=False)
    scales = []
    for seed in range(4):
        state, metrics = train_step(state, make_batch(seed))
        scales.append(float(metrics["scaler"]))
    np.testing.assert_array_equal(scales, [8, 16, 16, 32])


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.apply_if_finite(optax.sgd(0.1), 5), 2),
        optax.apply_if_finite(
            optax.chain(
                optax.identity(),
                optax.MultiSteps(
                    optax.apply_if_finite(optax.adam(0.1), 5), 2
                ).gradient_transformation(),
            ),
            5,
        ),
    ],
    ids=["plain", "nested"],
)
def test_the_order_that_kills_a_run_is_named(tx):
    with pytest.raises(ValueError, match="MultiSteps around apply_if_finite"):
        make_state(tx)


def test_the_other_order_is_right():
    tx = optax.apply_if_finite(
        optax.MultiSteps(optimizer(), 2).gradient_transformation(), 2**30
    )
    state = make_state(tx)
    for seed in range(3):
        for i in range(2):
            state, _ = step()(state, part(make_batch(seed), i, 2))
    assert_close(state.params, full_batch_steps(3).params, jnp.float32)
