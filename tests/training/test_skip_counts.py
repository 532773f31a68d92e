"""What `make_nnx_train_step` counts in its scaler, whatever the optimizer is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _steps import counting, linear_objects, linear_state
from flax_amp import (
    StuckError,
    check_progress,
    init_scaler,
    make_nnx_train_step,
    no_scaler,
    scale_loss,
    update_scaler,
)
from helpers import assert_identical

SKIP_COUNTS = ("skipped_in_a_row", "skipped_total")
GOOD, BAD = jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan, jnp.float32)
GUARDED = optax.apply_if_finite(optax.sgd(0.1), 2**31 - 1)


def loss_fn(model, batch):
    return model(batch).mean()


def narrow_loss(model, batch):
    """Its gradients overflow where the scale is above 4."""
    return 2.0**13 * model(batch).astype(jnp.float16).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    "options", [{}, {"accum_steps": 2}, {"redo_on_nan": 2}, {"jit": False}], ids=str
)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), GUARDED], ids=["sgd", "guarded"])
@pytest.mark.parametrize(
    "first", [lambda: None, init_scaler, no_scaler, lambda: {"patience": 5}]
)
def test_skipped_steps_are_counted(tx, options, first):
    model, optimizer = linear_objects(tx=tx)
    step = make_nnx_train_step(loss_fn, precision="bf16-mixed", **options)
    scaler, expected = first(), [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]
    for batch, counts in zip((GOOD, BAD, BAD, GOOD, BAD), expected, strict=True):
        scaler, metrics = step(model, optimizer, scaler, batch)
        assert tuple(int(scaler[key]) for key in SKIP_COUNTS) == counts
        assert metrics["skipped_total"] == counts[1]
    assert set(scaler) == {*init_scaler(), *SKIP_COUNTS}


def test_a_retry_is_no_skipped_step():
    """`total_resets` counts each pass that was not finite."""
    model, optimizer = linear_objects()
    step = make_nnx_train_step(narrow_loss, precision="16-mixed", redo_on_nan=3)
    scaler = init_scaler(scaler=16)
    for _ in range(2):
        scaler, metrics = step(model, optimizer, scaler, GOOD)
        assert metrics["grads_finite"]
    assert scaler["total_resets"] > 0
    assert scaler["skipped_total"] == metrics["skipped_total"] == 0


def test_the_first_scaler_has_no_trace_of_its_own():
    counted, traces = counting(loss_fn)
    model, optimizer = linear_objects()
    step = make_nnx_train_step(counted, precision="bf16-mixed")
    scaler = None
    for batch in (GOOD, BAD, GOOD):
        scaler, _ = step(model, optimizer, scaler, batch)
    # As a checkpoint may hold it.
    restored = {key: np.asarray(value) for key, value in scaler.items()}
    restored["skipped_total"] = 7
    scaler, metrics = step(model, optimizer, restored, BAD)
    assert metrics["skipped_total"] == 8 and len(traces) == 1


@pytest.mark.parametrize("counts", [(), SKIP_COUNTS])
def test_a_scaler_that_is_carried_keeps_its_keys(counts):
    step = make_nnx_train_step(loss_fn, precision="bf16-mixed", jit=False)
    model, optimizer = linear_objects()
    graphdef, state = nnx.split((model, optimizer))

    def body(carry, batch):
        state, scaler = carry
        objects = nnx.merge(graphdef, state)
        scaler, metrics = step(*objects, scaler, batch)
        return (nnx.state(objects), scaler), metrics

    first = no_scaler() | {key: jnp.int32(0) for key in counts}
    batches = jnp.stack([GOOD, BAD, BAD])
    (_, scaler), metrics = jax.lax.scan(body, (state, first), batches)
    assert scaler.keys() == first.keys()
    assert ("skipped_total" in metrics) is bool(counts)
    if counts:
        assert metrics["skipped_total"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tx", [optax.adam(0.1), GUARDED], ids=["adam", "guarded"])
def test_check_progress_reads_them(tx):
    model, optimizer = linear_objects(tx=tx)
    step = make_nnx_train_step(loss_fn, precision="bf16-mixed")
    scaler, metrics = step(model, optimizer, None, GOOD)
    for _ in range(20):
        check_progress((optimizer, scaler), metrics)
        scaler, metrics = step(model, optimizer, scaler, BAD)
    with pytest.raises(StuckError, match="last 20 steps .*step 1, loss nan, 20 steps"):
        check_progress((optimizer, scaler), metrics)
    scaler, metrics = step(model, optimizer, scaler, GOOD)
    check_progress((optimizer, scaler), metrics)


def test_others_leave_them_out():
    """They are no keys of a scaler: a loop or a state takes it without them."""
    model, optimizer = linear_objects()
    step = make_nnx_train_step(loss_fn, precision="bf16-mixed")
    scaler, _ = step(model, optimizer, None, GOOD)
    plain = {key: scaler[key] for key in no_scaler()}
    assert_identical(
        linear_state(scaler=scaler).scaler, linear_state(scaler=plain).scaler
    )
    assert_identical(update_scaler(scaler, False), update_scaler(plain, False))
    assert scale_loss(jnp.float32(2), scaler) == 2
