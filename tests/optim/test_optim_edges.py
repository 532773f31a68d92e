"""Pytree optimizers under uses that broke them once, or might."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from _gradients import GRADS, PARAMS
from flax_amp import AmpTrainState, make_train_step, optim
from helpers import assert_identical


def update(tx):
    return jax.jit(lambda tx: tx.update(GRADS, PARAMS))(tx)


def after(plain, steps=1):
    state = plain.init(PARAMS)
    step = jax.jit(lambda state: plain.update(GRADS, state, PARAMS))
    for _ in range(steps):
        updates, state = step(state)
    return updates, state


# Remainders: a second part of each number, which must never speak for itself


def test_remainders_have_no_gradient():
    def loss(tx):
        params, tx = PARAMS, tx.init(PARAMS)
        for i in range(4):
            grads = jax.tree.map(lambda leaf, i=i: leaf * (i - 1.3), GRADS)
            updates, tx = tx.update(grads, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params["w"] ** 2)

    tx = optim.adam(0.1)
    slope = jax.grad(loss)(tx)
    assert not slope.remainders.any() and slope.learning_rate != 0
    step = 1e-3
    ahead, back = (loss(tx.replace(b1=0.9 + s)) for s in (step, -step))
    np.testing.assert_allclose(slope.b1, (ahead - back) / (2 * step), rtol=1e-2)
    slope_of_all = jax.jit(jax.grad(loss))(tx)
    np.testing.assert_allclose(slope_of_all.b1, slope.b1, rtol=1e-4)


@pytest.mark.parametrize("rate", [optax.constant_schedule(0.1), 0.1])
@pytest.mark.parametrize("first", [optax.constant_schedule(0.3), 0.3])
def test_remainders_follow_their_numbers(first, rate):
    changed, fresh = optim.adam(first).replace(learning_rate=rate), optim.adam(rate)
    if not callable(rate) and callable(first):
        assert changed.remainders.shape == fresh.remainders.shape
    assert_identical(changed.remainders, fresh.remainders)
    assert_identical(update(changed.init(PARAMS))[0], update(fresh.init(PARAMS))[0])


def test_remainders_of_tuples():
    tx = optim.prodigy(betas=(0.9, 0.999)).init(PARAMS)
    changed = tx.replace(**{"betas/0": 0.8})
    fresh = optim.prodigy(betas=(0.8, 0.999)).init(PARAMS)
    assert_identical(changed.remainders, fresh.remainders)
    assert changed.hyperparams["betas/0"] == np.float32(0.8)


def test_a_remainder_goes_with_its_number():
    """However that was changed."""
    tx = optim.sgd(1000.1).init(PARAMS)
    zero = jax.tree.map(lambda leaf: leaf, tx)
    zero = dataclasses.replace(zero, learning_rate=jnp.float32(0))
    by_path = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0 if "learning_rate" in str(path) else leaf, tx
    )
    for changed in (zero, by_path):
        for updates, _ in (changed.update(GRADS), update(changed)):
            assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("sgd", "momentum", 0.9),
        ("adam", "b1", 0.9),
        ("adam", "b2", 0.99),
        ("adamw", "weight_decay", 0.01),
        ("rmsprop", "decay", 0.9),
    ],
)
def test_hypergradients_against_finite_differences(name, argument, value):
    """Through five updates; in float64, where differences can be trusted."""

    def loss(params):
        return jnp.sum(jnp.sin(params["w"]) ** 2) + jnp.sum(params["b"] ** 4)

    def final(hyper):
        # Away from 0, where the root of the second moment has no derivative.
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) + 0.5, PARAMS)
        tx = getattr(optim, name)(0.05, **{argument: value})
        tx = tx.replace(**{argument: hyper}).init(params)
        for _ in range(5):
            updates, tx = tx.update(jax.grad(loss)(params), params)
            params = optax.apply_updates(params, updates)
        return loss(params)

    with jax.enable_x64(True):
        slope, final, step = jax.jit(jax.grad(final))(value), jax.jit(final), 1e-5
        expected = (final(value + step) - final(value - step)) / (2 * step)
        np.testing.assert_allclose(slope, expected, rtol=1e-5)
        assert abs(slope) > 1e-6


# Numbers and other arguments


def test_fixed_numbers_do_not_decide_for_later_ones():
    assert isinstance(optim.linear_schedule(0.1, 0.0, 0), optim.Schedule)
    tx = optim.sgd(optim.linear_schedule(0.1, 0.0, 10)).init(PARAMS)
    updates, _ = update(tx)
    np.testing.assert_allclose(updates["b"], 0.02, rtol=1e-6)


def test_a_factory_that_takes_another_way_gets_an_array():
    tx = optim.wrap(optax.inject_hyperparams(optax.adam))(0.1).init(PARAMS)
    updates, tx = update(tx)
    _, state = after(optax.inject_hyperparams(optax.adam)(0.1))
    assert jax.tree.structure(tx.opt_state) == jax.tree.structure(state)
    np.testing.assert_allclose(updates["b"], 0.1, rtol=1e-5)


def test_schedules_are_arrays_outside_and_promote_inside():
    schedule = optim.constant_schedule(0.1)
    for value in (schedule(3), jax.jit(lambda s: s(3))(schedule)):
        assert value.dtype == jnp.float32 and not value.weak_type
    assert jax.grad(lambda s: s(3))(schedule).value == 1.0
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    updates, _ = optim.sgd(schedule).init(params).update(params)
    assert updates["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.bool_])
def test_masks_of_any_bool(kind):
    mask = {"w": kind(True), "b": kind(False)}
    updates, _ = update(optim.adamw(0.1, mask=mask).init(PARAMS))
    assert_identical(updates, after(optax.adamw(0.1, mask=mask))[0])


class Callable:
    def __call__(self, rate, _decay=0.9):
        return optax.sgd(rate, momentum=_decay)


@pytest.mark.parametrize(
    "factory, name",
    [
        (functools.partial(optax.sgd, momentum=0.9), "sgd"),
        (Callable(), "Callable"),
        (lambda rate: optax.sgd(rate, momentum=0.9), "<lambda>"),
    ],
)
def test_wraps_whatever_can_be_called(factory, name):
    tx = optim.wrap(factory)(0.1)
    assert repr(tx).startswith(f"{name}(")
    assert_identical(update(tx.init(PARAMS))[0], after(optax.sgd(0.1, 0.9))[0])


def test_annotations_that_cannot_be_resolved():
    def factory(rate: "optax.ScalarOrSchedule", other: "Unknown" = None):  # noqa: F821
        return optax.sgd(rate)

    assert optim.wrap(factory)(1).rate.dtype == jnp.float32
    assert "rate" in optim.wrap(factory)(optax.constant_schedule(0.1)).hyperparams


def test_init_copies_the_arrays_of_the_user():
    rate = jnp.float32(0.1)
    tx = optim.sgd(rate).init(PARAMS)
    jax.jit(lambda tx: tx.update(GRADS)[1], donate_argnums=0)(tx)
    assert not rate.is_deleted()


# Replacing


def test_one_number_for_all_runs_of_a_sweep():
    runs = [
        optim.chain(optim.clip(1.0), optim.adam(r)).init(PARAMS) for r in (0.1, 0.2)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
    assert stacked.hyperparams["learning_rate"].shape == (2,)
    changed = stacked.replace(learning_rate=0.5)
    assert jax.tree.structure(changed) == jax.tree.structure(stacked)
    updates, _ = jax.vmap(lambda tx: tx.update(GRADS, PARAMS))(changed)
    np.testing.assert_allclose(updates["b"], 0.5, rtol=1e-5)


def test_rates_for_vmap_by_in_axes():
    tx = optim.sgd(0.1, momentum=0.9).init(PARAMS)
    rates = tx.replace(learning_rate=jnp.array([0.1, 0.2, 0.3]))
    axes = jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if "learning_rate" in str(path[0]) else None, tx
    )
    updates, _ = jax.vmap(lambda tx: tx.update(GRADS), in_axes=(axes,))(rates)
    np.testing.assert_allclose(updates["b"][:, 0], [0.02, 0.04, 0.06], rtol=1e-6)


def test_a_change_of_the_state_is_refused():
    tx = optim.sgd(0.1).init(PARAMS)
    for change in ({"momentum": 0.9}, {"learning_rate": optax.constant_schedule(0.1)}):
        with pytest.raises(ValueError, match="another structure.*opt_state=None"):
            tx.replace(**change)
        fresh = tx.replace(**change, opt_state=None).init(PARAMS)
        assert update(fresh)[1].opt_state is not None
    schedules = optim.sgd(optax.constant_schedule(0.1)).init(PARAMS)
    other = schedules.replace(learning_rate=optax.constant_schedule(0.2))
    np.testing.assert_allclose(update(other)[0]["b"], 0.04, rtol=1e-6)


def test_paths_are_names_always():
    tx = optim.chain(optim.clip(1.0), optim.adam(0.1))
    assert tx.replace(**{"args/1/learning_rate": 0.2}).hyperparams[
        "learning_rate"
    ] == np.float32(0.2)
    two = optim.chain(optim.sgd(0.1), optim.sgd(0.2))
    with pytest.raises(TypeError, match="args/0/learning_rate.*Say which, by its path"):
        two.replace(learning_rate=0.3)


def test_schedules_that_count_apart():
    falling = optax.linear_schedule(1.0, 0.0, 10)
    slow = optim.MultiSteps(optim.sgd(falling), 4)
    labels = {"w": "slow", "b": "fast"}
    tx = optim.partition({"slow": slow, "fast": optim.sgd(falling)}, labels).init(
        PARAMS
    )
    for _ in range(6):
        _, tx = update(tx)
    values = tx.hyperparams
    np.testing.assert_allclose(values["transforms/fast/learning_rate"], 0.5, rtol=1e-6)
    assert values["transforms/slow/opt/learning_rate"] == 1.0


def test_schedules_that_nothing_counts_are_left_out():
    def factory(rate):
        return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rate(0), grads))

    tx = optim.wrap(factory)(optax.constant_schedule(0.1))
    assert set(tx.hyperparams) == {"rate"}
    assert tx.init(PARAMS).hyperparams == {}


def replaced_within(tx):
    """Numbers for numbers, in tuples and in schedules inside."""
    yield tx.replace(**{"betas/0": 0})
    yield tx.replace(betas=(0, 0.9))
    yield tx.replace(betas=(jnp.float32(0.5), jnp.bfloat16(0.5)), estim_lr0=1)
    yield tx.replace(
        learning_rate=tx.learning_rate.replace(init_value=3)
        if isinstance(tx.learning_rate, optim.Schedule)
        else 3
    )


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rate", [0.1, optim.cosine_decay_schedule(0.1, 10)])
def test_numbers_within_keep_the_structure(stacked, rate, count_traces):
    tx = optim.prodigy(rate).init(PARAMS)
    step, traces = count_traces(lambda tx: tx.update(GRADS, PARAMS))
    if stacked:
        tx = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tx)
        step = jax.vmap(step)
    step = jax.jit(step)
    step(tx)
    for changed in replaced_within(tx):
        assert jax.tree.structure(changed) == jax.tree.structure(tx)
        step(changed)
    assert traces() == 1 and step._cache_size() == 1
    other = tx.replace(betas=(jnp.float32(0.9), jnp.float32(0.5)))
    plain = (
        optim.prodigy(rate).init(PARAMS).replace(betas=(0.9, float(np.float32(0.5))))
    )
    if not stacked:
        assert_identical(update(other)[0], update(plain)[0])


def test_numbers_within_stay_on_their_mesh(mesh):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tx = jax.device_put(optim.prodigy(0.1).init(PARAMS), sharding)
    for changed in (tx.replace(**{"betas/0": 0.5}), tx.replace(learning_rate=1)):
        leaves = jax.tree.leaves(changed)
        assert all(leaf.sharding == sharding for leaf in leaves)


def test_stacked_optimizers_change_their_structure():
    runs = [optim.adam(rate).init(PARAMS) for rate in (0.1, 0.2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
    for changed in (
        stacked.replace(nesterov=True),
        dataclasses.replace(stacked, b1=0.5),
    ):
        assert changed._fixed.places == stacked._fixed.places
    changed = stacked.replace(nesterov=True)
    assert_identical(changed.remainders, stacked.remainders)
    jax.vmap(lambda tx: tx.update(GRADS, PARAMS))(changed)


# Buffers


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def test_nothing_is_donated_twice_or_deleted_elsewhere():
    step, batch = make_train_step(loss_fn), jnp.ones((4, 3))
    state = AmpTrainState.create(params=PARAMS, tx=optim.adam(0.1))
    state = state.replace_hyperparams(b1=state.hyperparams["b2"])
    seen = state.hyperparams
    state, _ = step(state, batch)
    assert seen["learning_rate"] == np.float32(0.1)
    rate = jnp.float32(0.2)
    for _ in range(2):
        step(
            AmpTrainState.create(params=PARAMS, tx=optim.adam(0.1)).replace_hyperparams(
                learning_rate=rate
            ),
            batch,
        )
    assert rate == np.float32(0.2)


def test_states_share_one_compiled_step():
    """Hyper-parameters are in the state; nothing of them is in `state.tx`."""
    step, batch = make_train_step(loss_fn), jnp.ones((4, 3))
    for rate in (0.1, 0.2):
        state = AmpTrainState.create(params=PARAMS, tx=optim.adam(rate))
        _, metrics = step(state, batch)
        assert metrics["hyperparams/learning_rate"] == np.float32(rate)
    assert step._cache_size() == 1
    with pytest.raises(TypeError, match="is in state.opt_state, not in state.tx"):
        state.tx.init(PARAMS)
    with jax.checking_leaks():
        jax.vmap(lambda r: AmpTrainState.create(params=PARAMS, tx=optim.sgd(r)))(
            jnp.ones(2)
        )


def test_metrics_hold_numbers_only():
    def factory(rate, prior):
        return optax.chain(optax.scale(prior.sum()), optax.sgd(rate))

    tx = optim.wrap(factory)(0.1, jnp.ones(5))
    state = AmpTrainState.create(params=PARAMS, tx=tx)
    _, metrics = make_train_step(loss_fn)(state, jnp.ones((4, 3)))
    assert "hyperparams/rate" in metrics and "hyperparams/prior" not in metrics


# States


def test_a_warm_optimizer_with_integer_parameters():
    params = PARAMS | {"i": jnp.arange(3)}
    state = AmpTrainState.create(params=params, tx=optim.adam(0.1))
    grads = jax.tree.map(jnp.ones_like, params)
    state = state.apply_gradients(grads=grads)
    warm = state.opt_state.inner_state.inner_state
    again = AmpTrainState.create(params=params, tx=warm)
    assert_identical(again.opt_state.inner_state.inner_state, warm)


def test_state_dicts_that_lack_something():
    fixed = optim.wrap(optax.adam, static_args="b1")(0.1).init(PARAMS)
    state = serialization.to_state_dict(fixed)
    with pytest.raises(ValueError, match="adam: the state has no b1; expected all"):
        serialization.from_state_dict(optim.adam(0.3).init(PARAMS), state)


def test_every_name_of_optax():
    for name in ("nadam", "nadamw", "monitor", "MultiSteps", "dog", "microbatch"):
        found = getattr(optim, name, None)
        assert (found is None) == (name == "microbatch"), name
    tx = optim.nadamw(0.1).init(PARAMS)
    assert repr(tx).startswith("nadamw(") and optim.wrap(optax.nadamw) is optim.nadamw
    assert_identical(pickle.loads(pickle.dumps(tx)), tx)
    assert_identical(update(tx)[0], after(optax.nadamw(0.1))[0])


def test_states_are_kept_or_refused():
    tx = update(optim.adam(0.1).init(PARAMS))[1]
    state = AmpTrainState.create(params=PARAMS, tx=tx)
    assert state.opt_state.inner_state.opt_state[0].count == 1
    other = optim.adam(0.1).init({"w": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"the state of other parameters.*opt_state=None"
    ):
        AmpTrainState.create(params=PARAMS, tx=other)
    with pytest.raises(ValueError, match="args holds an optimizer with a state of its"):
        optim.chain(optim.clip(1.0), tx)
    with pytest.raises(ValueError, match="the state has no opt_state, but nothing"):
        serialization.from_state_dict(tx, {})


def test_a_forgotten_to_optax_is_named():
    chained = optax.chain(optax.clip(1.0), optim.adam(0.1))
    with pytest.raises(TypeError, match=r"adam.update: got grads and.*tx.to_optax\(\)"):
        chained.update(GRADS, chained.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="tx is a type; expected an optax optimizer"):
        AmpTrainState.create(params=PARAMS, tx=optax.MultiSteps)
