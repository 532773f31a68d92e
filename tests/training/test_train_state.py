"""AmpTrainState: what it holds from its first moment, and how Flax writes it."""

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
    nnx_state,
)
from _steps import EmaState, linear_state, raised
from flax_amp import AmpTrainState, init_scaler, optim
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


@pytest.mark.parametrize("tx", [optax.adam(0.1), optim.adam(0.1)], ids=["x", "o"])
def test_flax_writes_and_reads_a_state_without_keys(tx):
    state = linear_state(tx)
    target = jax.tree.map(jnp.zeros_like, state)
    found = serialization.from_bytes(target, serialization.to_bytes(state))
    assert type(found) is type(state)
    assert_identical(jax.tree.map(jnp.asarray, found), state)
