"""Pytree optimizers given what they should not be, or not as usual."""

import copy
import functools
import gc
import pickle
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

from _gradients import GRADS, PARAMS
from flax_amp import AmpTrainState, make_train_step, optim
from helpers import assert_identical


def first_update(tx):
    return tx.init(PARAMS).update(GRADS, PARAMS)[0]


def assert_as_in_optax(factory, *args, rtol=2e-7):
    """With known and with traced numbers."""
    plain = factory(*args)
    expected, _ = plain.update(GRADS, plain.init(PARAMS), PARAMS)
    tx = optim.wrap(factory)(*args).init(PARAMS)
    assert_identical(tx.update(GRADS, PARAMS)[0], expected)
    traced = jax.jit(lambda tx: tx.update(GRADS, PARAMS)[0])(tx)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), traced, expected
    )


# Factories that do more with a number than to compute


def of_a_dict(rates):
    rates = jax.tree.map(lambda rate: 1 - rate, rates)
    return optax.sgd(rates["a"] * (1 - rates["b"]))


def of_large_integers(warm_up):
    return optax.sgd(1e9 / (warm_up * warm_up))


def of_integers_in_python(n):
    wrapped = (n * n) // 7 + (n * n) % 7
    return optax.sgd(wrapped / 1e5 + 2 ** (n // 2000) / 1e12)


def of_a_count(steps):
    return optax.adam(0.1, b2=1 - 1 / steps)


def of_a_lookup(level):
    return optax.sgd({0.1: 0.5, 0.2: 0.25}.get(level, 1.0))


def of_powers(rate):
    return optax.sgd(1 - (1 - rate) ** 3 + rate**7)


@pytest.mark.parametrize(
    "factory, args",
    [
        (of_large_integers, (50_000,)),
        (of_integers_in_python, (100_000,)),
        (of_a_count, (1000,)),
        (of_a_lookup, (0.1,)),
        (of_powers, (0.01,)),
        (optax.sgd, (1 / 3,)),
    ],
)
def test_values_are_those_of_python_numbers(factory, args):
    assert_as_in_optax(factory, *args)


def test_values_that_are_mapped_over():
    """Halves of numbers are not; a trace then has the number in float32 only."""
    assert_as_in_optax(of_a_dict, {"a": 0.9, "b": 0.999}, rtol=1e-4)


def test_known_numbers_are_handed_over_as_they_were_given():
    seen = []

    def factory(rate):
        seen.append(rate)
        return optax.sgd(rate)

    for rate in (0.9, 0.1 + 1e-9, 3e-4, 1 / 3):
        optim.wrap(factory)(rate).init(PARAMS)
        assert type(seen[-1]) is float and abs(seen[-1] - rate) < 1e-14 * rate
    assert {0.9, 0.1 + 1e-9, 3e-4} <= {x for x in seen if type(x) is float}


@pytest.mark.filterwarnings('ignore:"seed" is deprecated')
def test_integers_too_large_for_an_array_are_fixed():
    tx = optim.noisy_sgd(0.1, seed=2**31)
    assert tx.seed == 2**31 and "seed" not in tx.init(PARAMS).hyperparams
    assert tx.replace(seed=5).seed == 5


def test_integers_that_are_arrays_and_too_large():
    with pytest.raises(OverflowError, match="3000000000 does not fit into int32"):
        optim.wrap(of_large_integers)(jnp.uint32(3_000_000_000))


def test_whole_numbers_where_a_float_is_expected():
    for one in (1, np.int64(1), np.array(1), jnp.int32(1)):
        tx = optim.adam(one, b1=0 * one)
        assert tx.learning_rate.dtype == tx.b1.dtype == np.float32
    structure = jax.tree.structure(optim.adam(0.1))
    assert jax.tree.structure(optim.adam(1, b1=0)) == structure


@pytest.mark.parametrize(
    "value", [True, "0.1", [0.1], {"a": 0.1}, 1j, optax.sgd(0.1), None]
)
def test_what_is_no_number_is_refused(value):
    expected = r"adam: learning_rate is .* \(\w+\); expected a number or a schedule"
    with pytest.raises(TypeError, match=expected):
        optim.adam(value)
    with pytest.raises(TypeError, match=expected):
        optim.adam(0.1).init(PARAMS).replace(learning_rate=value)
    with pytest.raises(TypeError, match=r"adam: b1 is .* expected a number\."):
        optim.adam(0.1, b1=value)


def test_a_flag_or_a_number():
    def factory(rate: float | bool = 0.1, mask: float | list[float] = 0.0):
        return optax.sgd(rate or 0.0)

    tx = optim.wrap(factory)(rate=False, mask=[0.5])
    assert tx.rate is False and float(tx.mask[0]) == 0.5


def test_arrays_of_the_user_stay_his_own():
    rate = np.array(0.1, np.float32)
    tx = optim.sgd(rate)
    rate[...] = 7
    assert tx.learning_rate == np.float32(0.1)
    key = jax.random.key(1)
    noisy = optim.add_noise(0.1, 0.5, jax.random.key(0)).init(PARAMS).replace(key=key)
    jax.jit(lambda tx: tx.update(GRADS)[1], donate_argnums=0)(noisy)
    assert not key.is_deleted()


def test_fixed_keys():
    def factory(key):
        return optax.add_noise(0.1, 0.5, key)

    tx = optim.wrap(factory, static_args="key")(jax.random.key(0))
    assert jax.tree.structure(tx) != jax.tree.structure(
        optim.wrap(factory, static_args="key")(jax.random.key(1))
    )


# Trials


def test_a_failed_trial_decides_nothing():
    def factory(rate, decay):
        return optax.sgd(optax.exponential_decay(rate, 10, decay))

    kind = optim.wrap(factory)
    kind(0.1, np.array([0.9, 0.8]))  # optax fails with it, too
    assert_as_in_optax(factory, 0.1, 0.9)


def test_no_closure_is_kept_alive():
    class Weights:
        pass

    weights = Weights()
    alive = weakref.ref(weights)

    def hold(tree, held):
        return tree

    def make(held):
        mask = functools.partial(hold, held=held)
        optim.adamw(0.1, mask=lambda tree: (held, tree)[1])
        optim.adamw(0.1, mask=mask)
        optim.masked(optax.masked(optax.sgd(0.1), mask), True)

    make(weights)
    del weights
    gc.collect()
    assert alive() is None


def in_threads(function, count=8):
    found, failed = [], []
    barrier = threading.Barrier(count)

    def run():
        barrier.wait()
        try:
            found.append(function())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
    return found


def test_threads_get_one_class_and_leave_warnings_alone():
    optim._made_class.cache_clear()
    before = list(warnings.filters)
    names = ["yogi", "adabelief", "novograd", "lamb"]
    for name in names:
        assert len(set(in_threads(lambda name=name: getattr(optim, name)))) == 1
    in_threads(lambda: [optim.cosine_decay_schedule(0.1, n) for n in (7, 8, 9)], 4)
    assert warnings.filters == before


# Shapes, axes and specifications in place of arrays


def test_shapes_have_no_hyperparameters():
    state = AmpTrainState.create(apply_fn=None, params=PARAMS, tx=optim.adam(0.1))
    shapes = jax.eval_shape(lambda: state)
    with pytest.raises(TypeError, match="adam.hyperparams: it holds ShapeDtypeStruct"):
        _ = shapes.hyperparams
    with pytest.raises(TypeError, match=r"adam\.replace: it holds .* Restore"):
        shapes.replace_hyperparams(learning_rate=0.2)
    schedule = jax.eval_shape(lambda: optim.linear_schedule(0.1, 0.0, 5))
    with pytest.raises(TypeError, match=r"linear_schedule\.replace: it holds"):
        schedule.replace(init_value=1.0)


def test_axes_of_one_hyperparameter():
    tx = optim.sgd(0.1).init(PARAMS)
    axes = jax.tree.map(lambda _: None, tx).replace(learning_rate=0)
    assert axes.learning_rate == 0
    swept = tx.replace(learning_rate=np.arange(3.0))
    rows = jax.vmap(lambda tx: tx.update(GRADS)[0], in_axes=(axes,))(swept)
    assert rows["w"].shape == (3, 3, 2)


def test_a_sweep_that_is_sharded(mesh):
    rates = np.linspace(0.1, 0.8, mesh.size, dtype=np.float32)
    swept = jax.vmap(lambda rate: optim.sgd(rate).init(PARAMS))(rates)
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(mesh.axis_names)
    )
    swept = jax.device_put(swept, sharding)
    for rate in (0.7, rates / 2):
        changed = swept.replace(learning_rate=rate)
        assert changed.learning_rate.sharding == sharding
        rows = jax.vmap(lambda tx: tx.update(GRADS)[0])(changed)
        np.testing.assert_allclose(rows["b"][:, 0], 0.2 * rate * np.ones(8), rtol=1e-6)


# Updates and states


@pytest.mark.parametrize(
    "call",
    [
        lambda tx: tx.update(GRADS, tx.opt_state),
        lambda tx: tx.update(GRADS, tx.opt_state, PARAMS),
        lambda tx: tx.update(GRADS, state=tx.opt_state, params=PARAMS),
    ],
)
def test_called_as_a_transformation_of_optax(call):
    with pytest.raises(TypeError, match=r"adam\.update: got grads and a state"):
        call(optim.adam(0.1).init(PARAMS))


def test_states_that_do_not_fit():
    tx = optim.adam(0.1).init(PARAMS)
    for state in (3, optax.sgd(0.1).init(PARAMS)):
        with pytest.raises(
            ValueError, match=r"adam\.replace: opt_state has the struct"
        ):
            tx.replace(opt_state=state)
    with pytest.raises(ValueError, match="another mu_dtype the state has another"):
        tx.replace(mu_dtype=jnp.bfloat16)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tx.opt_state)
    with pytest.raises(ValueError, match="tx .adam. has the state of other parameters"):
        AmpTrainState.create(
            apply_fn=None, params=PARAMS, tx=tx.replace(opt_state=halves)
        )


def test_the_class_in_place_of_an_optimizer():
    with pytest.raises(TypeError, match=r"tx is the class adamw; .* optim\.adamw\("):
        AmpTrainState.create(apply_fn=None, params=PARAMS, tx=optim.adamw)


def test_unknown_names_are_told_once():
    with pytest.raises(TypeError) as error:
        optim.adam(0.1).replace(lr=1)
    assert str(error.value).count("b1") == 1


def test_state_dicts_without_remainders():
    tx = optim.adam(0.1).init(PARAMS)
    state = serialization.to_state_dict(optim.adam(0.3, b1=0.5).init(PARAMS))
    del state["remainders"]
    read = serialization.from_state_dict(tx, state)
    assert float(read.learning_rate) == np.float32(0.3)
    exact = optim.adam(np.float32(0.3), b1=0.5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7),
        read.update(GRADS, PARAMS)[0],
        first_update(exact),
    )


def test_what_else_writes_a_number_need_not_know_of_remainders():
    tx = optim.adam(0.1, b2=0.999).init(PARAMS)
    changed = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.float32(0.95) if "b2" in jax.tree_util.keystr(path) else x,
        tx,
    )
    plain = optim.adam(0.1, b2=float(np.float32(0.95))).init(PARAMS)
    assert_identical(changed.update(GRADS, PARAMS)[0], plain.update(GRADS, PARAMS)[0])


def test_attributes_are_listed():
    assert {"b1", "learning_rate", "opt_state", "replace"} <= set(dir(optim.adam(0.1)))


# Schedules


def test_counts_that_may_differ_are_left_out():
    fall = optax.linear_schedule(1.0, 0.0, 10)
    halves = optax.MultiSteps(optax.sgd(fall), 2).gradient_transformation()
    tx = optim.partition({"a": halves, "b": optim.sgd(fall)}, {"w": "a", "b": "b"})
    _, tx = tx.init(PARAMS).update(GRADS, PARAMS)
    assert tx.hyperparams == {}
    tx = optim.MultiSteps(optim.adamw(fall, weight_decay=fall), 2).init(PARAMS)
    for _ in range(5):
        _, tx = tx.update(GRADS, PARAMS)
    assert tx.hyperparams["learning_rate"] == tx.hyperparams["weight_decay"] == 0.9


@optim.schedule
def decorated(peak):
    return optax.linear_schedule(0.0, peak, 5)


@optim.wrap
def decorated_sgd(learning_rate):
    return optax.sgd(learning_rate)


def test_pickles_what_was_decorated():
    tx = decorated_sgd(decorated(0.1)).init(PARAMS)
    read = pickle.loads(pickle.dumps(tx))
    assert type(read) is decorated_sgd
    assert_identical(read.update(GRADS)[0], tx.update(GRADS)[0])


def test_a_copy_is_of_the_same_class():
    tx = optim.wrap(functools.partial(optax.adam, b1=0.8))(0.1).init(PARAMS)
    assert jax.tree.structure(copy.deepcopy(tx)) == jax.tree.structure(tx)


def test_a_state_like_the_parameters():
    def factory(rate):
        init = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        update = lambda grads, state, params=None: (grads, state)  # noqa: E731
        return optax.GradientTransformation(init, update)

    tx = optim.wrap(factory)(0.1).init(PARAMS)
    assert_identical(tx.update(GRADS, PARAMS)[0], GRADS)


@pytest.mark.parametrize(
    "tx",
    [
        optim.MultiSteps(optim.adam(0.1), 2),
        optim.apply_if_finite(optim.adam(0.1), 3),
        optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30)),
    ],
    ids=["MultiSteps", "apply_if_finite", "adamw"],
)
def test_no_tracer_outlives_its_trace(tx):
    tx = tx.init(PARAMS)
    with jax.checking_leaks():
        jax.jit(lambda tx: tx.update(GRADS, PARAMS))(tx)


# In optax and in NNX


def test_to_optax_begins_anew():
    _, warm = optim.adam(0.1).init(PARAMS).update(GRADS, PARAMS)
    state = AmpTrainState.create(apply_fn=None, params=PARAMS, tx=warm.to_optax())
    assert state.opt_state.inner_state.opt_state[0].count == 0


def test_to_optax_gives_create_the_optimizer_itself(count_traces):
    traced, traces = count_traces(lambda params, batch: (params["w"] * batch).sum())
    step = make_train_step(traced)
    for rate in (0.1, 0.2):
        state = AmpTrainState.create(
            apply_fn=None,
            params={"w": jnp.ones(2)},
            tx=optim.sgd(rate).to_optax(),
        )
        state, metrics = step(state, jnp.ones(2))
        assert metrics["hyperparams/learning_rate"] == np.float32(rate)
    assert traces() == 1


def test_under_nnx_numbers_replace_numbers_only():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optim.adam(0.1).to_optax(), wrt=nnx.Param)
    optimizer.opt_state = optimizer.opt_state.replace(learning_rate=0.3)
    assert repr(optimizer.opt_state).startswith("adam(learning_rate=0.3, b1=0.9, ")
    with pytest.raises(
        ValueError, match=r"adam\.replace: another structure.*Optimizer"
    ):
        optimizer.opt_state.replace(nesterov=True)


def test_jax_says_which_arguments_differ():
    with pytest.raises(TypeError, match=r"Fixed\(nesterov=False\).*nesterov=True"):
        jax.lax.cond(
            True, lambda: optim.adam(0.1), lambda: optim.adam(0.1, nesterov=True)
        )


def test_names_that_optax_has_for_something_else():
    with pytest.raises(AttributeError, match="optax has one, but it is not known as"):
        _ = optim.inject_hyperparams
