"""A run that is stuck is told, one that looks for its scale is not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpTrainState,
    StuckError,
    check_progress,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
)
from helpers import assert_identical


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])


def run(state, *batches):
    step = make_train_step(loss_fn)
    metrics = None
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def make_state(scaler):
    return AmpTrainState.create(
        params={"w": jnp.ones(2)}, tx=optax.sgd(0.1), scaler=scaler
    )


def test_says_what_happened_and_what_to_try():
    scaler = init_scaler(scaler=4.0, min_scaler=1.0)
    state, metrics = run(make_state(scaler), GOOD, *[BAD] * 25)

    with pytest.raises(StuckError) as caught:
        check_progress(state, metrics)
    message = str(caught.value)
    told = "last 25 steps were skipped", "scale 1 is", "step 26, loss nan, 25 steps"
    for text in (*told, "learning rate", "amp_stop", "bfloat16", "min_scaler"):
        assert text in message
    assert jnp.isfinite(state.params["w"]).all()


def test_the_loss_is_told_only_if_it_is_known():
    state, _ = run(make_state(no_scaler()), *[BAD] * 20)
    with pytest.raises(StuckError, match=r"\(step 20, 20 steps skipped in all\)"):
        check_progress(state)


@pytest.mark.parametrize(
    "scaler, batches",
    [
        (init_scaler(), []),
        (init_scaler(), [BAD] * 25),  # it may still fall
        (init_scaler(scaler=4.0, min_scaler=1.0), [BAD] * 19),
        (init_scaler(scaler=4.0, min_scaler=1.0), [*[BAD] * 25, GOOD]),
        (no_scaler(), [GOOD] * 3),
        (no_scaler(), [BAD, GOOD] * 20),  # every other one trains
    ],
    ids=["new", "looking", "few", "recovered", "good", "alternating"],
)
def test_is_silent_otherwise(scaler, batches):
    state, metrics = run(make_state(scaler), *batches)
    check_progress(state, metrics)


def test_the_limit_is_an_argument():
    state, metrics = run(make_state(no_scaler()), BAD, BAD)
    check_progress(state, metrics, max_skips=3)
    with pytest.raises(StuckError, match="last 2 steps"):
        check_progress(state, metrics, max_skips=2)


def test_an_epoch_in_one_scan_tells_the_last_loss():
    inner = make_train_step(loss_fn, jit=False)
    batches = jnp.stack([GOOD] * 2 + [BAD] * 25)
    state, metrics = jax.lax.scan(inner, make_state(no_scaler()), batches)
    with pytest.raises(StuckError, match="step 27, loss nan, 25 steps"):
        check_progress(state, metrics)


def test_one_of_several_runs():
    """A sweep by vmap: the first stuck run is told."""
    step = jax.vmap(make_train_step(loss_fn, jit=False))
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), make_state(no_scaler()))
    batches = jnp.stack([GOOD, BAD, GOOD])
    for _ in range(20):
        states, metrics = step(states, batches)
    with pytest.raises(StuckError, match="last 20 steps of run 1 .*step 20, loss nan"):
        check_progress(states, metrics)
    check_progress(states, metrics, max_skips=21)


def nnx_objects(tx):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_loops_that_keep_their_optimizer():
    """`apply_if_finite` inside of it counts, and nothing else moves on a bad step."""
    model, optimizer = nnx_objects(optax.apply_if_finite(optax.adam(0.1), 2**31 - 1))
    step = make_nnx_train_step(lambda model, x: model(x[None]).mean())
    scaler, metrics = step(model, optimizer, no_scaler(), GOOD)
    kernel, moments = jnp.copy(model.kernel[...]), optimizer.opt_state.inner_state
    moments = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(moments)))
    for _ in range(20):
        check_progress((optimizer, scaler), metrics)
        scaler, metrics = step(model, optimizer, scaler, BAD)

    assert int(metrics["skipped_total"]) == 20
    assert (model.kernel[...] == kernel).all()
    after = nnx.to_pure_dict(nnx.state(optimizer.opt_state.inner_state))
    assert_identical(after, moments)
    with pytest.raises(StuckError, match="last 20 steps .*step 1, loss nan, 20 steps"):
        check_progress((optimizer, scaler), metrics)


def test_an_optimizer_that_does_not_count_is_named():
    _, optimizer = nnx_objects(optax.adam(0.1))
    with pytest.raises(TypeError, match="does not count skipped steps.*apply_if_fin"):
        check_progress((optimizer, no_scaler()))


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="state is a dict"):
        check_progress({})
    with pytest.raises(ValueError, match="max_skips=0"):
        check_progress(make_state(no_scaler()), max_skips=0)
