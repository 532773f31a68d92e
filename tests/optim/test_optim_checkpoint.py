"""Checkpoints of pytree optimizers, and of plain optax for them, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from flax_amp import AmpTrainState, checkpoint, make_train_step, optim
from helpers import assert_identical, orbax_leaves_tasks

pytestmark = orbax_leaves_tasks

PARAMS = {"w": jnp.arange(8.0).reshape(4, 2) / 7, "b": jnp.zeros(2)}
BATCH = jnp.sin(jnp.arange(32.0)).reshape(8, 4)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None] - 1) ** 2)


STEP = make_train_step(loss_fn, donate=False)


def state_of(tx):
    return AmpTrainState.create(params=PARAMS, tx=tx)


def trained(tx, steps=3):
    state = state_of(tx)
    for _ in range(steps):
        state, _ = STEP(state, BATCH)
    return state


def saved(state, directory):
    with checkpoint.manager(directory) as manager:
        checkpoint.save(manager, state)
    return directory


def test_restores_and_goes_on(tmp_path):
    """Hyper-parameters that were replaced come back, and nothing is traced again."""
    state = trained(optim.chain(optim.clip(1.0), optim.adamw(0.1)))
    state = state.replace_hyperparams(learning_rate=0.05)
    target = state_of(optim.chain(optim.clip(1.0), optim.adamw(0.3)))
    with pytest.warns(checkpoint.CheckpointWarning, match="rate is 0.05 on disk"):
        restored = checkpoint.restore(saved(state, tmp_path), target)
    assert restored.hyperparams["learning_rate"] == np.float32(0.05)
    for one, other in zip((state, restored), (restored, state), strict=True):
        assert_identical(jax.tree.leaves(one), jax.tree.leaves(other))
    after, again = STEP(state, BATCH)[0], STEP(restored, BATCH)[0]
    assert_identical(jax.tree.leaves(after), jax.tree.leaves(again))


@pytest.mark.once
def test_comes_from_plain_optax_and_goes_back(tmp_path):
    plain = trained(optax.adam(0.1))
    inner = plain.opt_state.inner_state
    names = {"inner_state": "inner_state/opt_state", "learning_rate": None}
    target = state_of(optim.adam(0.3))
    state = checkpoint.migrate(saved(plain, tmp_path), target, rename=names)
    assert_identical(state.opt_state.inner_state.opt_state, inner)
    assert state.hyperparams["learning_rate"] == np.float32(0.3)  # of the target
    names = {"inner_state/opt_state": "inner_state", "learning_rate": None}
    back = checkpoint.migrate(state, state_of(optax.adam(0.3)), rename=names)
    assert_identical(back.opt_state.inner_state, inner)


@pytest.mark.once
def test_plain_orbax_calls(tmp_path):
    """The state of optax alone, read into the optimizer by plain Orbax."""
    plain = trained(optax.adam(0.1)).opt_state.inner_state
    tx = optim.adam(0.2).init(PARAMS)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "plain", plain)
        saver.wait_until_finished()
        tx = tx.replace(opt_state=saver.restore(tmp_path / "plain", tx.opt_state))
    assert_identical(tx.opt_state, plain)


@pytest.mark.once
def test_mismatches_are_named(tmp_path):
    directory = saved(trained(optim.adam(0.1)), tmp_path)
    with pytest.raises(ValueError, match=r"opt_state/inner_state/b1: not on disk"):
        checkpoint.restore(directory, state_of(optim.adam(0.1, b1=jnp.ones(()))))
