"""The hyper-parameters that `optax.inject_hyperparams` keeps are reported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _steps import linear_batch, linear_loss, linear_state
from flax_amp import make_train_step, no_scaler, optim

FALL = optax.linear_schedule(0.1, 0.0, 10)
ADAM = optax.inject_hyperparams(optax.adam)
SGD = optax.inject_hyperparams(optax.sgd)
LABELS = {"w": "a"}


def nested():
    """Hyper-parameters of an optimizer that holds another such one."""

    def make(max_norm):
        return optax.chain(optax.clip_by_global_norm(max_norm), SGD(FALL))

    return optax.inject_hyperparams(make)(max_norm=1.0)


# name -> an optimizer, the name of its rate, and how many steps make an update
OPTIMIZERS = {
    "chain": (optax.chain(optax.clip(1.0), ADAM(FALL)), "learning_rate", 1),
    "masked": (optax.masked(ADAM(FALL), {"w": True}), "learning_rate", 1),
    "two": (
        optax.multi_transform({"a": ADAM(FALL), "b": SGD(0.5)}, LABELS),
        "a/learning_rate",
        1,
    ),
    "micro-steps": (optax.MultiSteps(ADAM(FALL), 2), "learning_rate", 2),
    "around micro-steps": (
        optax.inject_hyperparams(
            lambda rate: optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation()
        )(FALL),
        "rate",
        1,
    ),
    "nested": (nested(), "1/learning_rate", 1),
    "optim beside": (
        optax.chain(optim.sgd(1.0).to_optax(in_state=True), ADAM(FALL)),
        "1/learning_rate",
        1,
    ),
    "guarded": (optax.apply_if_finite(ADAM(FALL), 2**31 - 1), "learning_rate", 1),
}


@pytest.mark.parametrize("tx, name, every", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.once
def test_the_rate_of_each_update(tx, name, every):
    """It is that of a count of updates, which a skipped step does not raise."""
    step = make_train_step(linear_loss, precision="32-true")
    state = linear_state(tx, scaler=no_scaler())
    assert state.hyperparams[name] == np.float32(FALL(0))
    kept, updates = state.hyperparams, 0
    for i in range(5):
        state, metrics = step(state, linear_batch(poisoned=i == 2))
        if i != 2:
            updates = ((i if i < 2 else i - 1) + 1) // every
        rate = metrics[f"hyperparams/{name}"]
        assert rate == np.float32(FALL(max(updates - 1, 0))) == state.hyperparams[name]
    assert kept[name] == np.float32(FALL(0))  # a copy, which no step deletes


def test_a_hyperparameter_of_a_sweep():
    """Arrays that are no scalars are in the state, and no metrics."""
    state = jax.vmap(lambda rate: linear_state(SGD(rate)))(jnp.float32([0.1, 0.2]))
    assert state.hyperparams["learning_rate"].shape == (2,)
    step = jax.vmap(make_train_step(linear_loss, jit=False), in_axes=(0, None))
    _, metrics = step(state, linear_batch())
    np.testing.assert_allclose(metrics["hyperparams/learning_rate"], [0.1, 0.2])


def test_they_are_not_replaced():
    """Optax would overwrite that of a schedule."""
    state = linear_state(OPTIMIZERS["optim beside"][0])
    assert state.replace_hyperparams(**{"0/learning_rate": 0.5}).step == 0
    message = "got 1/learning_rate; .*what optax.inject_hyperparams keeps cannot"
    with pytest.raises(TypeError, match=message):
        state.replace_hyperparams(**{"1/learning_rate": 0.5})
    with pytest.raises(TypeError, match="got learning_rate; the optimizer has"):
        linear_state(ADAM(0.1)).replace_hyperparams(learning_rate=0.5)


def test_the_state_of_the_optimizer_is_found_as_without_the_wrapper():
    """Loops read and set what is inside, by the labels of the user."""
    tx = optax.multi_transform({"a": ADAM(0.1), "b": SGD(0.5)}, LABELS)
    state = linear_state(tx, precision="32-true")
    inside = state.opt_state.inner_states["a"].inner_state
    assert inside.hyperparams["learning_rate"] == np.float32(0.1)
    inside.hyperparams["learning_rate"] = jnp.float32(0.2)
    state, metrics = make_train_step(linear_loss)(state, linear_batch())
    assert metrics["hyperparams/a/learning_rate"] == np.float32(0.2)
    assert set(state.hyperparams) >= {"a/learning_rate", "b/learning_rate"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        state.opt_state.nothing  # noqa: B018
