"""AmpTrainState: what it holds from its first moment, and how Flax writes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from _models import (
    FEATURES,
    MODELS,
    NnxNet,
    changed,
    leaves_by_path,
    linen_state,
    make_batch,
    nnx_loss,
    nnx_state,
)
from _steps import EmaState, counting, linear_state, raised
from flax_amp import AmpTrainState, init_scaler, make_train_step, optim
from helpers import assert_identical


def simple(cls=AmpTrainState, **options):
    options = dict(params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)) | options
    return cls.create(**options)


def donate(state):
    return jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(state)


@pytest.mark.parametrize("make", [linen_state, nnx_state])
def test_every_leaf_is_a_strongly_typed_array(make):
    hyper = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    state = make(cls=EmaState, tx=hyper, ema={"decay": 0.9, "n": 3, "on": True})
    assert isinstance(state, TrainState)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        assert isinstance(leaf, jax.Array), path
        assert not leaf.aval.weak_type, path
    assert (state.step.dtype, state.step.shape, int(state.step)) == (jnp.int32, (), 0)
    assert set(state.scaler) == set(init_scaler())


def test_small_things():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float32)}
        assert simple(params=params).step.dtype == jnp.int32
    key, scaler = jax.random.PRNGKey(3), init_scaler(scaler=8)
    state = simple(rngs={"dropout": key}, scaler=scaler)
    assert (state.variables, state.graphdef, simple().rngs) == ({}, None, {})
    assert state.rngs["dropout"] == jax.random.key(3)
    assert float(state.scaler["scaler"]) == 8
    state = simple(cls=EmaState, ema={"w": np.ones(2, np.float32)})
    assert isinstance(state.ema["w"], jax.Array)
    raised(lambda: simple(cls=EmaState), TypeError, "ema")


def test_nnx_model_round_trips():
    model = NnxNet(nnx.Rngs(3))
    before = nnx.to_pure_dict(nnx.state(model))
    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
    assert state.apply_fn is None
    assert type(state.params["last"][0]) is dict
    merged = state.merge_model()
    assert isinstance(merged, NnxNet)
    assert not changed(before, nnx.to_pure_dict(nnx.state(merged)))
    x = jnp.ones((4, FEATURES))
    np.testing.assert_array_equal(merged(x), model(x))  # dropout and statistics too
    assert not changed(before, {**nnx.to_pure_dict(nnx.state(state.merge_model()))})


def test_no_leaf_shares_memory():
    params = {"w": jnp.ones(3), "b": jnp.zeros(2)}
    # Schedule-free optimizers start from a copy of the parameters, by reference.
    tx = optax.contrib.schedule_free_sgd(0.1)
    key = jax.random.key(0)
    state = AmpTrainState.create(params=params, tx=tx, rngs={"a": key, "b": key})
    jax.block_until_ready(donate(state))
    assert float(params["w"].sum()) == 3  # not deleted
    assert jax.random.key_data(key).shape == (2,)
    model = NnxNet(nnx.Rngs(0))
    donate(AmpTrainState.create(model=model, tx=optax.sgd(0.1)))
    assert model(jnp.ones((2, FEATURES))).shape == (2, 3)


@pytest.mark.parametrize("name", MODELS)
def test_create_under_eval_shape_and_jit(name, mesh):
    make, _ = MODELS[name]
    state = make()
    shapes = jax.eval_shape(make)
    assert jax.tree.structure(shapes.params) == jax.tree.structure(state.params)
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (shapes, state)]
    assert kinds[0] == kinds[1]
    everywhere = NamedSharding(mesh, PartitionSpec())
    born = jax.jit(make, out_shardings=everywhere)()
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(born))
    assert set(leaves_by_path(born)) == set(leaves_by_path(state))


def test_integers_and_fp8_statistics_stay_out_of_the_optimizer():
    """Of gradients that a loop of the user's own applies."""
    table = {"w": jnp.ones(2), "table": jnp.arange(3)}
    params = {"params": table, "_overwrite_with_gradient": {"s": 1.0}}
    state = simple(params=params, tx=optax.adamw(0.1))
    for dtype in (jnp.int32, jnp.float32, jax.dtypes.float0):
        grads = {"w": jnp.ones(2), "table": np.zeros(3, dtype)}
        grads = {"params": grads, "_overwrite_with_gradient": {"s": 5.0}}
        after = jax.jit(lambda s, g=grads: s.apply_gradients(grads=g))(state).params
        assert after["_overwrite_with_gradient"] == {"s": 5.0}
        assert changed(state.params["params"], after["params"]) == {"['w']"}
        assert after["params"]["table"].dtype == jnp.int32


def test_shardings_of_the_parameters_are_kept(mesh):
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = simple(params={"w": jax.device_put(jnp.ones(16), split)})
    assert state.params["w"].sharding == split


def test_partitioned_parameters_keep_their_boxes():
    model = nn.Dense(
        4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b"))
    )
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = simple(params=params)
    assert isinstance(state.params["kernel"], nn.Partitioned)


# `flax.serialization` writes and reads a state, its keys included


class Extended(AmpTrainState):
    """A subclass with keys and other fields of its own."""

    sampler: Any
    ema: Any


class Further(Extended):
    note: jax.Array


def keys(impl=None):
    return {"dropout": jax.random.key(1, impl=impl), "noise": jax.random.key(2)}


def extended(cls=Extended, **options):
    return cls.create(
        params={"w": jnp.ones(3)},
        tx=optax.adam(0.1),
        rngs=keys(),
        sampler={"each": jax.random.split(jax.random.key(3), 4), "n": 1},
        ema=(jnp.ones(3), [jax.random.key(4, impl="rbg")]),
        **options,
    )


STATES = {
    "no keys": lambda: linear_state(optax.adam(0.1)),
    "two implementations": lambda: linear_state(rngs=keys("rbg")),
    "nnx": nnx_state,
    "optim": lambda: linear_state(optim.adam(0.1), rngs=keys()),
    "subclass": lambda: extended(Further, note=jnp.zeros(2)),
    "key in the optimizer": lambda: linear_state(
        optax.add_noise(0.1, 0.5, key=jax.random.key(5))
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_round_trip(name):
    state = STATES[name]()

    def other(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.shape
        return jax.random.fold_in(x, 1) if is_key else jnp.copy(x)

    target = jax.tree.map(other, state)
    saved = serialization.to_state_dict(state)
    for leaf in jax.tree.leaves(saved):
        assert not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    for found in (
        serialization.from_bytes(target, serialization.to_bytes(state)),
        serialization.from_state_dict(target, saved),
    ):
        assert type(found) is type(state)
        assert_identical(jax.tree.map(jnp.asarray, found), state)


def test_a_run_goes_on():
    """Its next step draws the same numbers, and compiles nothing."""
    loss, traces = counting(nnx_loss)
    step = make_train_step(loss, has_aux=True, donate=False, precision="32-true")
    start = nnx_state()
    state, _ = step(start, make_batch())
    restored = serialization.from_bytes(start, serialization.to_bytes(state))
    expected, found = (step(s, make_batch())[0] for s in (state, restored))
    assert_identical(found, expected)
    assert len(traces) == 1
    # The target may be abstract.
    shapes = jax.eval_shape(lambda: linear_state(rngs=keys()))
    saved = serialization.to_bytes(linear_state(rngs=keys()))
    assert_identical(serialization.from_bytes(shapes, saved).rngs, keys())


@pytest.mark.once
def test_keys_of_another_implementation():
    saved = serialization.to_state_dict(linear_state(rngs=keys()))
    rbg = linear_state(rngs=keys("rbg"))
    told = r"key_data.shape to end with \(4,\); got shape=\(2,\)"
    raised(lambda: serialization.from_state_dict(rbg, saved), TypeError, told)
