"""Checkpoints made by other libraries, and by other optimizers and models."""

import warnings

import jax
import jax.numpy as jnp
import jaxamp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from _foreign import (
    by_legacy_flax,
    by_legacy_flax_with_orbax,
    by_manager,
    by_named_item,
    by_nobody,
    by_standard_checkpointer,
    by_to_bytes,
    image_state,
    image_step,
    run,
)
from _models import (
    changed,
    linen_loss,
    linen_state,
    make_batch,
    optimizer,
)
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step, no_scaler
from flax_amp._training.scaler import update_scaler
from helpers import assert_identical

LIBRARIES = [
    by_manager,
    by_standard_checkpointer,
    by_named_item,
    by_legacy_flax,
    by_legacy_flax_with_orbax,
    by_to_bytes,
    by_nobody,
]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
def test_a_flax_state_goes_on_as_it_was(image, library, tmp_path):
    target = linen_state()
    state = checkpoint.migrate(library(tmp_path, image), target)
    assert isinstance(state, AmpTrainState)
    assert int(state.step) == 3
    assert_identical(state.params, image.params)
    assert_identical(state.opt_state.inner_state, image.opt_state)
    assert_identical(state.variables, {"batch_stats": image.batch_stats})
    assert_identical(state.rngs, target.rngs)
    assert float(state.scaler["scaler"]) == float(image.dynamic_scale.scale) == 2.0**15
    assert int(state.scaler["count"]) == int(image.dynamic_scale.fin_steps) == 1
    assert int(state.scaler["patience"]) == 2000  # Flax does not save its interval


def test_the_migrated_state_trains_like_a_new_one(image):
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return linen_loss(*args, **kwargs)

    counted.__wrapped__ = linen_loss
    step = make_train_step(counted, has_aux=True, donate=False)
    target = linen_state()
    step(target, make_batch())
    state, metrics = step(checkpoint.migrate(image, target), make_batch())
    assert bool(metrics["grads_finite"]) and int(state.step) == 4
    assert len(traces) == 1
    schedule_count = state.opt_state.inner_state[1][0].count
    assert int(schedule_count) == int(image.opt_state[1][0].count) + 1 == 3


# Scalers


@pytest.mark.once
def test_the_count_of_dynamic_scale_goes_on(image):
    """From any count, the two scalers grow on the same step."""
    theirs = image.dynamic_scale
    target = linen_state(scaler=init_scaler(patience=theirs.growth_interval))
    ours = checkpoint.migrate(image, target).scaler
    for i in range(12):
        w = jnp.float32(jnp.inf if i == 9 else 1.0)
        theirs, finite, _, _ = theirs.value_and_grad(lambda x: x * x)(w)
        ours = update_scaler(ours, finite)
        assert float(ours["scaler"]) == float(theirs.scale)
    assert float(ours["scaler"]) == 2.0**16  # grew twice, fell once


def jaxamp_state(steps=5):
    scaler = jaxamp.DynamicScalerState(patience=jnp.array(2))
    grad = jaxamp.dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))
    w = jnp.ones(3)
    for i in range(steps):
        x = jnp.full(3, jnp.inf if i == 0 else 1.0)
        scaler, _ = grad(w, x, dynamic_scaler_state=scaler)
    return scaler


@pytest.mark.once
@pytest.mark.parametrize("library", [by_manager, by_to_bytes])
def test_the_scaler_of_jaxamp(library, tmp_path):
    saved = jaxamp_state()
    tx = optax.sgd(0.1)
    tree = {
        "step": jnp.int32(5),
        "params": {"w": jnp.ones(3)},
        "opt_state": tx.init({"w": jnp.ones(3)}),
        "dynamic_scaler_state": saved,
    }
    target = AmpTrainState.create(
        params={"w": jnp.zeros(3)}, tx=tx, precision="16-mixed"
    )
    state = checkpoint.migrate(library(tmp_path, tree), target)
    assert_identical(state.params, tree["params"])
    for key, value in saved._asdict().items():
        assert float(state.scaler[key]) == float(value), key
    assert float(state.scaler["max_scaler"]) == 2.0**24
    assert int(state.scaler["total_resets"]) > 0  # it tried until it was finite


@pytest.mark.once
@pytest.mark.parametrize(
    "saved, expected",
    [(jnp.inf, 2.0**24), (0.0, 2.0**-14), (jnp.nan, 64.0), (3.0, 3.0)],
)
def test_a_scale_without_limits_is_brought_within_them(image, saved, expected):
    broken = image.replace(dynamic_scale=DynamicScale(scale=saved))
    state = checkpoint.migrate(broken, linen_state(scaler=init_scaler(scaler=64)))
    assert float(state.scaler["scaler"]) == expected


def resumed(state, target, how, directory):
    if how == "migrate":
        return checkpoint.migrate(state, target)
    with checkpoint.manager(directory) as manager:
        checkpoint.save(manager, state)
    with pytest.warns(checkpoint.CheckpointWarning, match="the target's is used") as w:
        restored = checkpoint.restore(directory, target)
    assert w[0].filename == __file__
    return restored


@pytest.mark.once
@pytest.mark.parametrize("how", ["restore", "migrate"])
def test_between_float16_and_bfloat16(how, tmp_path):
    """The number of resets goes on, the scale is what the new run was made with."""
    used = init_scaler(scaler=8, patience=9) | {"total_resets": jnp.int32(4)}
    half = linen_state(scaler=used)
    bfloat16 = resumed(half, linen_state(scaler=no_scaler()), how, tmp_path / "a")
    assert float(bfloat16.scaler["scaler"]) == 1
    assert int(bfloat16.scaler["total_resets"]) == 4
    assert not changed(half.replace(scaler={}), bfloat16.replace(scaler={}))

    again = linen_state(scaler=init_scaler(scaler=256, patience=5))
    half = resumed(bfloat16, again, how, tmp_path / "b")
    assert float(half.scaler["scaler"]) == 256
    assert int(half.scaler["patience"]) == 5
    assert int(half.scaler["total_resets"]) == 4


@pytest.mark.once
def test_a_run_changes_its_compute_dtype(tmp_path):
    """Or accumulates; neither needs a migration."""
    state = linen_state()
    for dtype, parts in ((jnp.float16, 1), (jnp.bfloat16, 2), (jnp.float32, 1)):
        step = make_train_step(
            linen_loss, has_aux=True, compute_dtype=dtype, accum_steps=parts
        )
        with checkpoint.manager(tmp_path) as manager:
            state, metrics = step(state, make_batch())
            assert checkpoint.save(manager, state)
        state = checkpoint.restore(tmp_path, linen_state())
        assert bool(metrics["grads_finite"])
    assert int(state.step) == 3


@pytest.mark.once
@pytest.mark.parametrize(
    "options, on_disk",
    [
        ({"exclude": "scaler"}, True),
        ({"exclude": "scaler"}, False),
        ({"include": "params"}, True),
        ({"include": "params"}, False),
        ({}, False),
    ],
)
def test_a_scaler_that_is_not_read_stays(options, on_disk):
    """Whatever its values are: it is neither copied nor limited nor checked."""
    odd = {**init_scaler(), "scaler": jnp.float32(2.0**30), "patience": jnp.int32(-1)}
    saved, target = linen_state(), linen_state().replace(scaler=odd)
    if not on_disk:
        saved = saved.replace(scaler={})
    state = checkpoint.migrate(saved, target, **options)
    assert_identical(state.params, saved.params)
    assert all(state.scaler[key] is value for key, value in odd.items())


@pytest.mark.once
def test_a_scaler_without_values_begins_as_a_new_one():
    state = linen_state()
    source = {"step": state.step, "params": state.params, "rngs": state.rngs}
    source |= {"opt_state": state.opt_state, "variables": state.variables}
    target = jax.eval_shape(lambda: state)
    assert_identical(checkpoint.migrate(source, target).scaler, init_scaler())


# Paths


@pytest.mark.once
@pytest.mark.parametrize("field", ["params", "stats"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_no_array_vanishes_behind_the_common_path_of_another(field, number):
    """`value` at the end of paths is that of an `nnx.State`, or of a user."""
    names = ["w" + "/value" * i for i in range(number)]
    tree = {field: {f"{i}_": np.float32(i) for i in range(number)}}
    rename = {f"{i}_": name for i, name in enumerate(names)}
    for target in ("w", "other"):
        with pytest.raises(ValueError, match="does not fit the target") as error:
            checkpoint.migrate(tree, {field: {target: np.float32(0)}}, rename=rename)
        unmatched = names[1:] if target == "w" and field == "params" else names
        for name in unmatched:
            line = f"\n  {field}/{name}: float32[] on disk, not in the target\n"
            assert line in str(error.value), name


# Optimizers


def every_second(inner):
    return optax.MultiSteps(inner, 2)


@pytest.mark.once
def test_a_wrapped_plain_optimizer(tmp_path):
    saved = image_state(
        tx=optax.apply_if_finite(optimizer(), 5), dynamic_scale=DynamicScale()
    )
    saved = image_step(image_step(saved, make_batch(0)), make_batch(1))
    state = checkpoint.migrate(by_manager(tmp_path, saved), linen_state())
    assert_identical(tuple(state.opt_state), tuple(saved.opt_state))


@pytest.mark.once
def test_multi_steps_added_later():
    saved = run(linen_state(), 4)
    saved = saved.replace(
        opt_state=saved.opt_state._replace(total_notfinite=jnp.int32(1))
    )
    target = linen_state(tx=every_second(optimizer()))
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.migrate({"opt_state": saved.opt_state}, target, include="params")
    state = checkpoint.migrate(saved, target)
    inner = state.opt_state.inner_state
    assert_identical(inner.inner_opt_state, saved.opt_state.inner_state)
    assert int(inner.gradient_step) == 3 and int(inner.mini_step) == 0
    assert int(state.opt_state.total_notfinite) == 1
    before = jax.tree.map(jnp.copy, state.params)
    state = run(state, 1)
    assert not changed(before, state.params)
    assert changed(before, run(state, 1).params)


@pytest.mark.once
def test_multi_steps_taken_away():
    saved = run(linen_state(tx=every_second(optimizer())), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = checkpoint.migrate(saved, linen_state())
    assert_identical(
        state.opt_state.inner_state, saved.opt_state.inner_state.inner_opt_state
    )
    with pytest.warns(checkpoint.CheckpointWarning, match="gradients of 1 steps") as w:
        checkpoint.migrate(run(saved, 1), linen_state())
    assert w[0].filename == __file__


@pytest.mark.once
def test_masked_optimizers_and_those_without_state():
    params = {"w": jnp.ones(3), "n": jnp.int32(1)}
    plain = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(1))
    target = AmpTrainState.create(params=params, tx=optax.adam(1e-3))
    tree = {
        "step": 7,
        "params": params,
        "opt_state": optax.adam(1e-3).init({"w": params["w"]}),
    }
    state = checkpoint.migrate(tree, target)
    assert int(state.step) == 7
    target = AmpTrainState.create(params={"w": jnp.zeros(3)}, tx=optax.sgd(1))
    assert_identical(checkpoint.migrate(plain, target).params, plain.params)


@pytest.mark.once
def test_a_damaged_step_is_passed_over(tmp_path, image):
    directory = by_legacy_flax(tmp_path, image)
    good = (directory / "checkpoint_3").read_bytes()
    (directory / "checkpoint_20").write_bytes(good[: len(good) // 2])
    with pytest.warns(checkpoint.CheckpointWarning, match="step 20 is damaged") as w:
        state = checkpoint.migrate(directory, linen_state())
    assert w[0].filename == __file__
    assert_identical(state.params, image.params)
