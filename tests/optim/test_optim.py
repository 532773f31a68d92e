"""Pytree optimizers: their interface, and what they are inside of each other."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

from _gradients import GRADS, PARAMS
from flax_amp import optim
from helpers import assert_identical


def trained(tx, steps=3, params=PARAMS, grads=GRADS):
    tx = tx.init(params)
    for _ in range(steps):
        updates, tx = tx.update(grads, params)
        params = optax.apply_updates(params, updates)
    return params, tx


# The thread that asked for it


def test_the_example_of_the_thread_runs_as_written():
    """Apart from its typos, and with the class made for it."""
    SGD, params, grads = optim.sgd, PARAMS, GRADS

    tx = SGD(3e-4)
    tx = tx.init(params)
    updates, tx = tx.update(grads)
    params = optax.apply_updates(params, updates)

    plain = optax.sgd(3e-4)
    expected, _ = plain.update(grads, plain.init(PARAMS))
    assert_identical(params, optax.apply_updates(PARAMS, expected))


def test_the_class_of_the_thread_is_one_line():
    """Its five fields, `init`, `update` and `replace`."""
    SGD = optim.wrap(optax.sgd)
    assert SGD is optim.sgd
    names = [field.name for field in dataclasses.fields(SGD)]
    assert names[:4] == "learning_rate momentum nesterov accumulator_dtype".split()
    tx = SGD(learning_rate=3e-4, momentum=0.9, nesterov=True).init(PARAMS)
    assert tx.nesterov is True and tx.accumulator_dtype is None
    assert tx.momentum == np.float32(0.9) and tx.opt_state is not None


def test_benefit_through_jit(count_traces):
    step, traces = count_traces(lambda tx, grads: tx.update(grads))
    step, tx = jax.jit(step), optim.sgd(0.1, momentum=0.9).init(PARAMS)
    for _ in range(3):
        _, tx = step(tx, GRADS)
    assert traces() == 1 and step._cache_size() == 1
    expected = 0.3 * (1 + 0.9 + 0.9**2)
    np.testing.assert_allclose(tx.opt_state[0].trace["w"], expected, rtol=1e-6)


def test_benefit_replace_does_not_compile_again(count_traces):
    step, traces = count_traces(lambda tx, grads: tx.update(grads, PARAMS))
    step, tx = jax.jit(step), optim.adamw(0.1).init(PARAMS)
    changes = [
        {"learning_rate": 0.5},
        {"learning_rate": np.float64(0.25), "b1": jnp.float32(0.8)},
        {"weight_decay": 1, "eps": np.float16(0.5)},
        {"learning_rate": jnp.bfloat16(0.5)},
    ]
    for change in changes:
        tx = tx.replace(**change)
        _, tx = step(tx, GRADS)
    assert traces() == 1 and step._cache_size() == 1
    assert tx.learning_rate == 0.5 and tx.weight_decay == 1.0 and tx.eps == 0.5


def test_a_replaced_number_is_as_exact_as_a_given_one():
    tx = optim.adam(0.1).init(PARAMS).replace(b1=0.95, b2=0.9999)
    plain = optax.adam(0.1, b1=0.95, b2=0.9999)
    updates, _ = jax.jit(lambda tx: tx.update(GRADS))(tx)
    expected, _ = jax.jit(lambda state: plain.update(GRADS, state))(plain.init(PARAMS))
    assert_identical(updates, expected)


def test_benefit_one_object():
    tx = optim.adam(0.1).init(PARAMS)
    plain = optax.adam(0.1).init(PARAMS)
    assert_identical(tx.opt_state, plain)
    names = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tx)
    ]
    assert names[:2] == [".learning_rate", ".b1"] and ".opt_state[0].count" in names
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tx))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(tx))


def test_benefit_hyperparams_of_this_step():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = optim.adamw(schedule, b1=0.8).init(PARAMS)
    assert tx.hyperparams["learning_rate"] == 1.0  # of the first step
    seen = []
    for _ in range(4):
        _, tx = tx.update(GRADS, PARAMS)
        seen.append(float(tx.hyperparams["learning_rate"]))
    np.testing.assert_allclose(seen, [1.0, 0.9, 0.8, 0.7], rtol=1e-6)
    assert tx.hyperparams["b1"] == np.float32(0.8)
    assert tx.learning_rate is schedule


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "lion", "rmsprop", "adafactor", "yogi", "muon"]
)
def test_hyperparams_are_what_optax_was_given(name):
    seen = []

    def schedule(count):
        seen.append(float(0.1 / (count + 1)))
        return 0.1 / (count + 1)

    factory = getattr(optim, name).factory
    plain, tx = factory(schedule), getattr(optim, name)(schedule).init(PARAMS)
    state = plain.init(PARAMS)
    for _ in range(3):
        _, state = plain.update(GRADS, state, PARAMS)
        last = seen[-1]
        _, tx = tx.update(GRADS, PARAMS)
        np.testing.assert_allclose(tx.hyperparams["learning_rate"], last, rtol=1e-6)


# No sequence


@pytest.mark.parametrize(
    "use, word",
    [
        (lambda tx: tx[0], "indexed"),
        (lambda tx: list(tx), "iterated over"),
        (lambda tx: (lambda a, b: None)(*tx), "unpacked"),
        (len, "measured with len"),
        (lambda tx: 1 in tx, "searched"),
    ],
)
def test_is_no_sequence(use, word):
    tx = optim.adam(0.1).init(PARAMS)
    with pytest.raises(TypeError, match=rf"{word}.*tx.update\(grads, params\)"):
        use(tx)
    assert tx


def test_is_frozen():
    tx = optim.adam(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tx.learning_rate = 0.2
    assert dataclasses.is_dataclass(tx) and tx.learning_rate.dtype == jnp.float32


# Arguments


def test_wraps_every_kind_of_parameter():
    def factory(rate, /, decay=0.9, *parts, names=("a", "b"), flag=True, **more):
        assert names == ("a", "b") and flag and len(parts) == 1 and list(more) == ["x"]
        return optax.chain(optax.scale(-rate * more["x"]), optax.trace(decay))

    tx = optim.wrap(factory)(0.5, 0.8, 2.0, x=3.0)
    params, tx = trained(tx)
    assert set(tx.hyperparams) == {"rate", "decay", "parts/0", "more/x"}
    expected, _ = trained(optim.chain(optim.scale(-1.5), optim.trace(0.8)))
    assert_identical(params, expected)
    again = dataclasses.replace(tx, rate=0.25)
    assert again.rate == 0.25 and again.opt_state is tx.opt_state
    assert_identical(again.remainders[1:], tx.remainders[1:])


def test_numbers_used_in_python_stay_fixed():
    def factory(rate, power=2):
        return optax.chain(*[optax.scale(rate)] * power)  # a length

    tx = optim.wrap(factory)(0.5)
    assert tx.power == 2 and not isinstance(tx.power, np.ndarray)
    assert list(tx.hyperparams) == ["rate"]
    kept = optim.wrap(optax.adam, static_args=("b1", "b2"))(0.1)
    assert kept.b1 == 0.9 and "b1" not in kept.hyperparams
    assert optim.lbfgs(0.1, memory_size=3).memory_size == 3


def test_whole_numbers_are_floats_where_floats_are_expected():
    assert optim.sgd(1).learning_rate.dtype == jnp.float32
    assert optim.adamw(1, weight_decay=0).weight_decay.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "rmsprop"])
def test_keeps_the_dtypes_of_optax(name, dtype):
    params, grads = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, GRADS))
    plain, tx = getattr(optax, name)(0.1), getattr(optim, name)(0.1).init(params)
    expected = jax.jit(plain.update)(grads, plain.init(params), params)
    updates, tx = jax.jit(lambda tx: tx.update(grads, params))(tx)
    assert_identical((updates, tx.opt_state), expected)


def test_masks_are_structure():
    mask = {"w": True, "b": False}
    tx = optim.adamw(0.1, mask=mask)
    assert jax.tree.structure(tx) == jax.tree.structure(
        optim.adamw(0.2, mask=mask | {})
    )
    assert jax.tree.structure(tx) != jax.tree.structure(optim.adamw(0.2, mask=None))
    plain = optax.adamw(0.1, mask=mask)
    updates, _ = tx.init(PARAMS).update(GRADS, PARAMS)
    assert_identical(updates, plain.update(GRADS, plain.init(PARAMS), PARAMS)[0])


def test_extra_arguments():
    tx = optim.polyak_sgd().init(PARAMS)
    updates, _ = tx.update(GRADS, PARAMS, value=jnp.float32(0.5))
    plain = optax.polyak_sgd()
    state = plain.init(PARAMS)
    expected, _ = plain.update(GRADS, state, PARAMS, value=jnp.float32(0.5))
    assert_identical(updates, expected)


# Inside of each other


def composed(peak=0.1):
    schedule = optim.cosine_decay_schedule(peak, 100)
    return optim.chain(
        optim.clip_by_global_norm(1.0),
        optax.zero_nans(),
        optim.partition(
            {"a": optim.adamw(schedule), "b": optim.sgd(0.01, momentum=0.9)},
            {"w": "a", "b": "b"},
        ),
    )


def test_hyperparams_inside():
    tx = composed().init(PARAMS)
    names = set(tx.hyperparams)
    path = "args/2/transforms"
    assert {"max_norm", "momentum", "b1", f"{path}/a/learning_rate"} <= names
    changed = tx.replace(**{"max_norm": 2.0, f"{path}/b/learning_rate": 0.5})
    assert changed.hyperparams[f"{path}/b/learning_rate"] == 0.5
    assert changed.args[0].max_norm == 2.0
    assert jax.tree.structure(changed) == jax.tree.structure(tx)


def test_composed_as_plain():
    schedule = optax.cosine_decay_schedule(0.1, 100)
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.zero_nans(),
        optax.partition(
            {"a": optax.adamw(schedule), "b": optax.sgd(0.01, momentum=0.9)},
            {"w": "a", "b": "b"},
        ),
    )
    step = jax.jit(lambda tx: tx.update(GRADS, PARAMS))
    plain_step = jax.jit(lambda state: plain.update(GRADS, state, PARAMS))
    tx, state = composed().init(PARAMS), plain.init(PARAMS)
    for _ in range(3):
        (updates, tx), (expected, state) = step(tx), plain_step(state)
        assert_identical((updates, tx.opt_state), (expected, state))


def test_schedules_are_pytrees(count_traces):
    schedule = optim.cosine_decay_schedule(0.1, decay_steps=10)
    assert schedule.decay_steps == 10 or int(schedule.decay_steps) == 10
    plain = optax.cosine_decay_schedule(0.1, 10)
    for count in (0, 3, 20):
        assert schedule(count) == jnp.float32(plain(count))
    step, traces = count_traces(lambda tx: tx.update(GRADS))
    step, tx = jax.jit(step), optim.sgd(schedule).init(PARAMS)
    _, tx = step(tx)
    tx = tx.replace(learning_rate=tx.learning_rate.replace(init_value=0.5))
    updates, tx = step(tx)
    assert traces() == 1
    np.testing.assert_allclose(updates["b"], 0.2 * 0.5 * plain(1) / 0.1, rtol=1e-6)
    slope = jax.grad(lambda peak: schedule.replace(init_value=peak)(5))(0.1)
    np.testing.assert_allclose(slope, plain(5) / 0.1, rtol=1e-6)


def test_through_optax_and_flax():
    tx = optim.adam(0.1)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx.to_optax())
    state = state.apply_gradients(grads=GRADS)
    state = state.replace(opt_state=state.opt_state.replace(learning_rate=0.5))
    chained = optax.chain(optax.clip(0.1), tx.to_optax())
    _, inside = chained.update(GRADS, chained.init(PARAMS), PARAMS)
    assert state.opt_state.opt_state[0].count == inside[1].opt_state[0].count == 1


# Errors


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: optim.adam(), TypeError, "adam: missing .*learning_rate.*expected"),
        (lambda: optim.adam(0.1, beta=1), TypeError, "adam: .*beta.*optax.adam: learn"),
        (
            lambda: optim.adam(0.1).update(GRADS),
            RuntimeError,
            r"tx = tx.init\(params\)",
        ),
        (lambda: optim.adam(0.1).replace(lr=1), TypeError, "no lr; expected .*b1"),
        (
            lambda: optim.adam(0.1).lr,
            AttributeError,
            "adam has no lr; it has learning_",
        ),
        (
            lambda: optim.linear_schedule(0, 1, 2).replace(x=1),
            TypeError,
            "no x; expected",
        ),
        (lambda: optim.nothing, AttributeError, "no 'nothing'.*optim.wrap"),
        (
            lambda: optim.wrap(3),
            TypeError,
            "wrap: the factory is a int; expected a func",
        ),
        (lambda: optim.wrap(lambda init: 0), TypeError, "arguments named init, which"),
        (
            lambda: optim.wrap(lambda a: 0, static_args="b"),
            TypeError,
            "names b; expected",
        ),
        (
            lambda: optim.wrap(lambda a: 0)(1).init({}),
            TypeError,
            "returned a int; expec",
        ),
        (
            lambda: jax.jit(lambda m: optim.lbfgs(0.1, m))(3),
            TypeError,
            "memory_size is t",
        ),
        (
            lambda: optim.sgd(0.1).init(PARAMS).replace(opt=1),
            TypeError,
            "no opt; expec",
        ),
    ],
)
def test_messages(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_message_for_a_number_that_only_the_true_parameters_need():
    def factory(rate, cut):
        def update(grads, state, params=None):
            if "special" in grads and cut > 0:  # not so in a trial
                grads = jax.tree.map(lambda g: rate * g, grads)
            return grads, state

        return optax.GradientTransformation(lambda params: (), update)

    tx = optim.wrap(factory)(0.1, 0.5).init({"special": jnp.ones(2)})
    with pytest.raises(TypeError, match="used in Python.*static_args"):
        jax.jit(lambda tx: tx.update({"special": jnp.ones(2)}))(tx)
    fixed = optim.wrap(factory, static_args="cut")(0.1, 0.5).init({})
    jax.jit(lambda tx: tx.update({"special": jnp.ones(2)}))(fixed)


def test_making_one_starts_no_backend():
    """So that `jax.distributed.initialize` can come after it."""
    code = """
from flax_amp import optim
tx = optim.chain(optim.clip(1.0), optim.adamw(optim.cosine_decay_schedule(0.1, 9)))
print(tx.replace(b1=0.5))
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# Copies and state dicts


def test_pickles_schedules_and_compositions():
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(optim.linear_schedule(1.0, 0.0, 9))
    ).init(PARAMS)
    read = pickle.loads(pickle.dumps(tx))
    assert_identical(read, tx)
    assert pickle.loads(pickle.dumps(optim.adamw)) is optim.adamw
    assert_identical(copy.deepcopy(tx), tx)


def test_state_dict_is_a_dict_of_arrays():
    tx = optim.adam(0.1).init(PARAMS)
    state = serialization.to_state_dict(tx)
    assert set(state) == {*tx.hyperparams, "remainders", "opt_state"}
    assert_identical(
        state["opt_state"], serialization.to_state_dict(optax.adam(0.1).init(PARAMS))
    )
    other = optim.adam(0.7, b1=0.3).init(PARAMS)
    assert_identical(serialization.from_state_dict(other, state), tx)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.masked(optim.adam(0.1), {"w": True, "b": False}),
        lambda: optim.wrap(optax.inject_hyperparams(optax.adam))(0.1),
    ],
)
def test_state_dicts_of_masked_and_injected_state(make):
    _, tx = trained(make())
    saved = serialization.to_state_dict(tx)["opt_state"]
    loaded = serialization.from_state_dict(make().init(PARAMS), saved)
    assert_identical(loaded.opt_state, tx.opt_state)


def test_state_dicts_that_do_not_fit():
    tx = optim.adam(0.1)
    state = serialization.to_state_dict(tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"the target has no opt_state.*tx.init"):
        serialization.from_state_dict(tx, state)
    with pytest.raises(ValueError, match="the state has rate; expected some of learn"):
        serialization.from_state_dict(tx.init(PARAMS), state | {"rate": 1})
