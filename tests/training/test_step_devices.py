"""The training step over devices: shard_map, vmap, and jit with a sharded batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from _models import MODELS, changed, make_batch
from _steps import SKIP_LEAVES, copy, counting, linear_batch, linear_loss, linear_state
from flax_amp import init_scaler, make_train_step


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("accum_steps, redo_on_nan", [(1, 0), (2, 1)])
def test_shard_map_equals_one_device(mesh, check_vma, accum_steps, redo_on_nan):
    options = dict(compute_dtype=jnp.float32, redo_on_nan=redo_on_nan)
    step = jax.jit(
        jax.shard_map(
            make_train_step(
                linear_loss,
                axis_name="data",
                jit=False,
                accum_steps=accum_steps,
                **options,
            ),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    single = make_train_step(linear_loss, donate=False, **options)
    state, alone = linear_state(), linear_state()
    batch = linear_batch(32)
    for _ in range(2):
        state, metrics = step(state, batch)
        alone, expected = single(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], alone.params["w"], rtol=1e-5)
    # One device of eight sees the inf; all of them skip.
    after, metrics = step(state, linear_batch(32, poisoned=True))
    assert not metrics["grads_finite"]
    assert changed(state, after) == SKIP_LEAVES
    for leaf in jax.tree.leaves(after):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((c == copies[0]).all() for c in copies)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma, accum_steps", [(True, 2), (False, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_shard_map_with_all_collections(mesh, name, check_vma, accum_steps):
    make, loss = MODELS[name]
    step = make_train_step(
        loss, has_aux=True, axis_name="data", jit=False, accum_steps=accum_steps
    )
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    state, _ = step(make(scaler=init_scaler(scaler=16)), make_batch(size=32))
    bad, metrics = step(state, make_batch(size=32, poisoned=True))
    assert changed(state, bad) == SKIP_LEAVES
    good, metrics = step(bad, make_batch(3, size=32))
    assert metrics["grads_finite"] and changed(bad.variables, good.variables)
    for leaf in jax.tree.leaves((good.params, good.variables)):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((c == copies[0]).all() for c in copies)


def test_devices_draw_different_keys(mesh):
    def loss(params, batch, *, rngs):
        return (params["w"] * 0).sum(), {"noise": jax.random.normal(rngs["a"], (1,))}

    step = make_train_step(loss, has_aux=True, axis_name="data", jit=False)

    def noise(state, batch):
        return step(state, batch)[1]["noise"]

    noise = jax.shard_map(
        noise,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    drawn = jax.jit(noise)(linear_state(rngs={"a": jax.random.key(0)}), linear_batch())
    assert len(set(np.asarray(drawn).tolist())) == 8


def test_vmapped_axis():
    step = make_train_step(
        linear_loss, axis_name="data", jit=False, compute_dtype=jnp.float32
    )
    batch = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), linear_batch())
    state, _ = jax.vmap(step, axis_name="data", in_axes=(None, 0))(
        linear_state(), batch
    )
    alone, _ = make_train_step(linear_loss, compute_dtype=jnp.float32)(
        linear_state(), linear_batch()
    )
    for row in state.params["w"]:
        np.testing.assert_allclose(row, alone.params["w"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_jit_with_sharded_batch(mesh, name, accum_steps):
    make, loss = MODELS[name]
    tx = optax.sgd(0.1)  # Adam makes a step of the noise before a BatchNorm
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    scaler = init_scaler(scaler=16)
    state = jax.jit(lambda: make(scaler=scaler, tx=tx), out_shardings=everywhere)()
    counted, traces = counting(loss)
    step = make_train_step(counted, has_aux=True, accum_steps=accum_steps)
    for poisoned in (False, True, False):
        batch = jax.device_put(make_batch(size=32, poisoned=poisoned), split)
        before = copy(state)
        state, metrics = step(state, batch)
        assert bool(metrics["grads_finite"]) != poisoned
        assert (changed(before, state) == SKIP_LEAVES) == poisoned
    assert len(traces) == 1
    alone = make(scaler=scaler, tx=tx)
    step = make_train_step(loss, has_aux=True, accum_steps=accum_steps)
    for poisoned in (False, True, False):
        alone, _ = step(alone, make_batch(size=32, poisoned=poisoned))
    for a, b in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)
