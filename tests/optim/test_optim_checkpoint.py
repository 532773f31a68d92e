"""Checkpoints of pytree optimizers, and of plain optax for them, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from flax_amp import AmpTrainState, checkpoint, make_train_step, optim
from helpers import assert_identical, orbax_leaves_tasks

pytestmark = orbax_leaves_tasks

PARAMS = {"w": jnp.arange(8.0).reshape(4, 2) / 7, "b": jnp.zeros(2)}
BATCH = jnp.sin(jnp.arange(32.0)).reshape(8, 4)
MASK = {"w": True, "b": False}


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
    restored = checkpoint.restore(saved(state, tmp_path), target)
    assert restored.hyperparams["learning_rate"] == np.float32(0.05)
    for one, other in zip((state, restored), (restored, state), strict=True):
        assert_identical(jax.tree.leaves(one), jax.tree.leaves(other))
    after, again = STEP(state, BATCH)[0], STEP(restored, BATCH)[0]
    assert_identical(jax.tree.leaves(after), jax.tree.leaves(again))


CASES = {
    "adam": (lambda o: o.adam(0.1), lambda o: o.adam(0.3)),
    "chain": (
        lambda o: o.chain(o.clip(1.0), o.adamw(0.1)),
        lambda o: o.chain(o.clip(2.0), o.adamw(0.3)),
    ),
    "masked": (
        lambda o: o.masked(o.adam(0.1), MASK),
        lambda o: o.masked(o.adam(0.3), MASK),
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_comes_from_plain_optax_and_goes_back(tmp_path, name):
    make, other = CASES[name]
    plain = trained(make(optax))
    state = checkpoint.migrate(saved(plain, tmp_path), state_of(other(optim)))
    inner = plain.opt_state.inner_state
    assert_identical(state.opt_state.inner_state.opt_state, inner)
    assert state.hyperparams["learning_rate"] == np.float32(0.3)  # of the target
    assert_identical(state.params, plain.params)

    back = checkpoint.migrate(state, state_of(other(optax)))
    assert_identical(back.opt_state.inner_state, inner)
    target = TrainState.create(apply_fn=None, params=PARAMS, tx=other(optax))
    assert_identical(checkpoint.migrate(state, target).opt_state, inner)


@pytest.mark.once
def test_comes_from_a_plain_train_state():
    plain = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adamw(0.1))
    plain = plain.apply_gradients(grads=PARAMS)
    state = checkpoint.migrate(plain, state_of(optim.MultiSteps(optim.adamw(0.1), 2)))
    inside = state.opt_state.inner_state.opt_state
    assert_identical(inside.inner_opt_state, plain.opt_state)
    assert inside.gradient_step == 1


@pytest.mark.once
def test_hyperparameters_of_another_kind(tmp_path):
    """By name: what both have is read, the rest stays, and is said."""
    state = trained(optim.sgd(0.1, momentum=jnp.float32(0.9)))
    target = state_of(optim.sgd(0.3, momentum=0.8))
    with pytest.warns(
        checkpoint.CheckpointWarning, match="hyper-parameters momentum, w"
    ):
        result = checkpoint.migrate(saved(state, tmp_path), target)
    tx = result.opt_state.inner_state
    assert_identical(tx.opt_state, state.opt_state.inner_state.opt_state)
    assert tx.learning_rate == np.float32(0.1) and tx.momentum == 0.8


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
