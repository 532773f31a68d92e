"""Hyper-parameters that `optax.inject_hyperparams` copied into the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _gradients import GRADS, PARAMS
from flax_amp import AmpTrainState, make_train_step, optim


def renamed(lr):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=2 * lr)


def test_copies_in_the_state_are_replaced_too():
    tx = optim.wrap(renamed)(0.1).init(PARAMS).replace(lr=0.5)
    updates, tx = tx.update(GRADS, PARAMS)
    np.testing.assert_allclose(updates["b"], 0.2, rtol=1e-6)
    assert tx.hyperparams == {"lr": 0.5, "learning_rate": 1.0}
    updates, _ = tx.replace(learning_rate=3.0).update(GRADS, PARAMS)
    np.testing.assert_allclose(updates["b"], 0.6, rtol=1e-6)


def test_copies_in_the_state_are_the_values_of_the_step():
    tx = optim.wrap(optax.inject_hyperparams(optax.sgd))(learning_rate=0.1).init(PARAMS)
    tx.opt_state.hyperparams["learning_rate"] = jnp.float32(0.7)  # as optax suggests
    assert tx.hyperparams["learning_rate"] == np.float32(0.7)
    chained = optim.chain(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    chained = chained.init(PARAMS).replace(learning_rate=0.3)
    np.testing.assert_allclose(chained.update(GRADS)[0]["b"], 0.06, rtol=1e-6)
    both = optim.chain(*[optax.inject_hyperparams(optax.scale)(1.0)] * 2).init(PARAMS)
    both = both.replace(**{"0/step_size": 3.0})
    assert both.hyperparams == {"0/step_size": 3.0, "1/step_size": 1.0}


def test_copies_in_the_state_of_a_sweep():
    def one(lr):
        tx = optim.wrap(renamed)(0.1).init(PARAMS)
        return tx.replace(lr=lr).update(GRADS)[0]["b"][0]

    rows = jax.vmap(one)(jnp.arange(3.0))
    np.testing.assert_allclose(rows, 0.4 * np.arange(3.0), rtol=1e-6)


def test_copies_in_the_state_of_a_train_step():
    state = AmpTrainState.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=optim.wrap(renamed)(0.1)
    )
    step = make_train_step(lambda params, batch: (params["w"] * batch).sum())
    state, metrics = step(state.replace_hyperparams(lr=0.25), jnp.ones(2))
    assert metrics["hyperparams/learning_rate"] == 0.5
    np.testing.assert_allclose(state.params["w"], 0.5, rtol=1e-6)


def test_copies_that_cannot_be_told_apart():
    def factory(lr):
        return optax.multi_transform({"a": renamed(lr)}, {"k": "a"})

    tx = optim.wrap(factory)(0.1).init({"k": jnp.ones(2)})
    with pytest.raises(ValueError, match="copies in the state.*some of learning_rate"):
        tx.replace(lr=0.5)
    assert tx.replace(learning_rate=0.5).hyperparams["learning_rate"] == 0.5


def doubled(learning_rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=2 * learning_rate)


def test_an_argument_of_the_same_name_as_what_is_computed_of_it():
    tx = optim.wrap(doubled)(0.1).init(PARAMS).replace(learning_rate=0.3)
    np.testing.assert_allclose(tx.hyperparams["learning_rate"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(tx.update(GRADS)[0]["b"], 0.12, rtol=1e-6)


def test_the_last_replacement_counts():
    tx = optim.wrap(renamed)(0.1).init(PARAMS)
    tx = tx.replace(learning_rate=3.0).replace(lr=0.1)
    assert tx.hyperparams == {"lr": np.float32(0.1), "learning_rate": np.float32(0.2)}


def test_copies_and_arguments_of_one_name():
    tx = optim.chain(optim.wrap(doubled)(0.1), optim.adam(0.2)).init(PARAMS)
    rates = {n: float(v) for n, v in tx.hyperparams.items() if "learning_rate" in n}
    assert rates == {
        "args/0/learning_rate": np.float32(0.1),
        "args/1/learning_rate": np.float32(0.2),
        "injected/learning_rate": np.float32(0.2),
    }
    with pytest.raises(TypeError, match="Say which, by its path"):
        tx.replace(learning_rate=0.9)
    changed = tx.replace(**{"args/1/learning_rate": 0.9})
    assert changed.hyperparams["injected/learning_rate"] == np.float32(0.2)
    changed = tx.replace(**{"injected/learning_rate": 0.9})
    assert changed.hyperparams["args/1/learning_rate"] == np.float32(0.2)
    assert changed.hyperparams["injected/learning_rate"] == np.float32(0.9)


def test_others_are_replaced_beside_copies():
    labels = {"w": "a", "b": "b"}
    parts = {"a": optim.wrap(renamed)(0.1), "b": optim.adam(0.2)}
    tx = optim.partition(parts, labels).init(PARAMS)
    tx = tx.replace(**{"transforms/b/learning_rate": 0.9})
    assert float(tx.transforms["b"].learning_rate) == np.float32(0.9)
    with pytest.raises(ValueError, match="copies in the state, and which of them are"):
        tx.replace(**{"transforms/a/lr": 0.9})
