"""Factories that branch on numbers, which stay leaves; the answers are structure."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _gradients import GRADS, PARAMS
from flax_amp import AmpTrainState, make_train_step, optim
from flax_amp.optim._arguments import BRANCH, STATIC
from helpers import assert_identical


def in_optax(tx):
    return tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]


def of_branches(rate, cut=0.5):
    return optax.sgd(rate if cut > 0.1 else 2 * rate)


def warm_up(peak, end=1e-3):
    return optim.warmup_cosine_decay_schedule(0.0, peak, 5, 30, end)


SCHEDULES = {
    "warmup_cosine_decay_schedule": (0.0, 0.1, 5, 30, 1e-3),
    "exponential_decay": (0.1, 10, 0.5, 2, False, 1e-3),
    "warmup_exponential_decay_schedule": (0.0, 0.1, 5, 10, 0.5, 0, False, 1e-3),
    "cosine_decay_schedule": (0.1, 10, 0.1),
    "linear_schedule": (0.1, 0.0, 10, 3),
    "polynomial_schedule": (0.1, 0.0, 3, 10),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_optax_have_leaves_only(name, count_traces):
    kind, args = getattr(optim, name), SCHEDULES[name]
    schedule, plain = kind(*args), kind.factory(*args)
    assert STATIC not in schedule._fixed.modes.values()
    traced, traces = count_traces(lambda schedule, count: schedule(count))
    traced = jax.jit(traced)
    for count in (0, 3, 7, 29, 40):
        expected = jax.jit(plain)(count)
        assert schedule(count) == plain(count)
        np.testing.assert_allclose(
            traced(schedule, count), expected, rtol=2e-6, atol=1e-8
        )
    for argument in schedule._moving():
        value = getattr(schedule, argument)
        other = value + 1 if value.dtype == np.int32 else float(value) + 0.01
        changed = schedule.replace(**{argument: other})
        assert jax.tree.structure(changed) == jax.tree.structure(schedule)
        traced(changed, 7)
    assert traces() == 1


@pytest.mark.parametrize("value", [0.2, 1, 0.0])
def test_another_answer_is_another_structure(value):
    schedule = warm_up(0.1)
    changed = schedule.replace(peak_value=value)
    same = jax.tree.structure(changed) == jax.tree.structure(schedule)
    assert same == (value != 0)
    expected = optax.warmup_cosine_decay_schedule(0.0, value, 5, 30, 1e-3)(7)
    found = jax.jit(lambda schedule: schedule(7))(changed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_answers_are_those_of_the_number_that_is_given():
    for cut in (0.5, 0.05):
        tx = optim.wrap(of_branches)(0.1, cut).init(PARAMS)
        assert tx._fixed.modes["cut"] == BRANCH
        expected = in_optax(of_branches(0.1, cut))
        assert_identical(jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(tx), expected)
        assert_identical(tx.update(GRADS, PARAMS)[0], expected)


def test_an_answer_that_no_longer_holds_is_no_number():
    """Where only the values are known, too late to take another branch."""
    tx = optim.wrap(of_branches)(0.1).init(PARAMS)
    low = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "cut" in jax.tree_util.keystr(path) else x, tx
    )
    updates = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(low)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
    known = low.update(GRADS, PARAMS)[0]
    np.testing.assert_allclose(known["b"], 0.2 * GRADS["b"] * -1, rtol=1e-6)


def test_a_sweep_over_peaks():
    peaks = np.array([0.1, 0.2, 0.4], np.float32)

    def run(rate):
        tx = optim.sgd(rate, momentum=0.9).init(PARAMS)
        params = PARAMS
        for _ in range(4):
            updates, tx = tx.update(params, params)
            params = optax.apply_updates(params, updates)
        return params["w"]

    rows = jax.jit(jax.vmap(lambda peak: run(warm_up(peak))))(peaks)
    for peak, row in zip(peaks, rows, strict=True):
        schedule = optax.warmup_cosine_decay_schedule(0.0, float(peak), 5, 30, 1e-3)
        np.testing.assert_allclose(row, run(schedule), rtol=1e-5)
    slopes = jax.vmap(jax.grad(lambda peak: run(warm_up(peak)).sum()))(peaks)
    assert np.isfinite(slopes).all() and slopes.all()


def test_in_a_train_step(count_traces):
    traced, traces = count_traces(lambda params, batch: (params["w"] * batch).sum())
    step = make_train_step(traced)
    for peak in (0.1, 0.3):
        state = AmpTrainState.create(
            apply_fn=None, params={"w": jnp.ones(2)}, tx=optim.sgd(warm_up(peak))
        )
        for _ in range(3):
            state, metrics = step(state, jnp.ones(2))
        expected = optax.warmup_cosine_decay_schedule(0.0, peak, 5, 30, 1e-3)(2)
        np.testing.assert_allclose(
            metrics["hyperparams/learning_rate"], expected, rtol=1e-6
        )
    assert traces() == 1


def test_answers_are_pickled():
    tx = optim.adamw(warm_up(0.1)).init(PARAMS)
    read = pickle.loads(pickle.dumps(tx))
    assert jax.tree.structure(read) == jax.tree.structure(tx)


def asks_later(rate, decay):
    def schedule(count):
        return rate * (decay if decay > 0.5 else 0.5) ** count

    return optax.sgd(schedule)


def asks_in_an_array(rate):
    return optax.sgd(jnp.where(rate > 0.5, 0.5, rate) if rate > 0 else 0.0)


def asks_for_the_value(steps):
    return optax.chain(*[optax.scale(0.5)] * int(steps))


@pytest.mark.parametrize(
    "factory, args",
    [(asks_later, (0.1, 0.9)), (asks_in_an_array, (0.7,)), (asks_for_the_value, (3,))],
)
def test_what_is_asked_otherwise_stays_fixed(factory, args):
    tx = optim.wrap(factory)(*args).init(PARAMS)
    assert STATIC in tx._fixed.modes.values()
    expected = in_optax(factory(*args))
    found = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(tx)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected
    )


def test_branches_of_branches():
    def factory(rate, low, high):
        if not low < high:
            raise ValueError("low is not below high")
        middle = (low + high) / 2
        return optax.sgd(low if rate < low else high if rate > high else middle)

    kind = optim.wrap(factory)
    for rate in (0.0, 0.5, 2.0):
        tx = kind(rate, 0.1, 0.9).init(PARAMS)
        found = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(tx)
        assert_identical(found, in_optax(factory(rate, 0.1, 0.9)))
        with pytest.raises(ValueError, match="low is not below high"):
            tx.replace(low=1.0).update(GRADS, PARAMS)


def test_a_copy_of_the_class_decides_by_its_own_numbers():
    """What a trial found is reused only where branches are taken alike."""

    def factory(cut, power):
        if cut > 0.5:
            return optax.sgd(0.1 * power)
        return optax.chain(*[optax.scale(-0.1)] * power)

    kind = optim.wrap(factory)
    for cut, power in ((0.9, 2), (0.1, 3), (0.9, 3), (0.1, 1)):
        tx = kind(cut, power).init(PARAMS)
        found = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(tx)
        expected = in_optax(factory(cut, power))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected
        )


def test_numbers_that_stay_decide_as_they_were_given():
    """0.1 is not equal to its float32."""

    def factory(rate, cut, unit=1.0):
        return optax.sgd(rate if cut == 0.1 and unit > 0 else 2 * rate)

    tx = optim.wrap(factory)(0.5, 0.1).init(PARAMS)
    changed = tx.replace(unit=2.0)
    assert jax.tree.structure(changed) == jax.tree.structure(tx)
    found = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(changed)
    assert_identical(found, in_optax(optax.sgd(0.5)))
