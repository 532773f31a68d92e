"""Pytree optimizers inside of a training step, Linen and NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from _gradients import PARAMS
from flax_amp import AmpTrainState, make_train_step, optim
from helpers import assert_identical

# In a training step


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


def batch_of(value=1.0):
    x = jnp.sin(jnp.arange(24.0)).reshape(8, 3) * value
    return {"x": x, "y": jnp.ones((8, 2))}


def state_of(tx, **kwargs):
    return AmpTrainState.create(params=PARAMS, tx=tx, **kwargs)


def test_in_make_train_step(count_traces):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 20)
    counted, traces = count_traces(loss_fn)
    step = make_train_step(counted)
    plain, state = state_of(optax.adamw(schedule)), state_of(optim.adamw(schedule))
    plain_step = make_train_step(loss_fn)
    for i in range(5):
        state, metrics = step(state, batch_of())
        plain, _ = plain_step(plain, batch_of())
        rate = metrics["hyperparams/learning_rate"]
        assert rate == jnp.float32(schedule(i)) == state.hyperparams["learning_rate"]
        assert all(jnp.shape(value) == () for value in metrics.values())
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    first = traces()
    state = state_of(optim.adamw(0.1))
    for rate in (0.1, 0.5):
        state = state.replace_hyperparams(learning_rate=rate)
        state, later = step(state, batch_of())
        assert traces() == first + 1
        assert later["hyperparams/learning_rate"] == np.float32(rate)
    assert metrics["hyperparams/b1"] == np.float32(0.9)


def test_a_skipped_step_changes_nothing():
    state = state_of(optim.chain(optim.clip(1.0), optim.adam(0.1)))
    step = make_train_step(loss_fn, donate=False)
    state, _ = step(state, batch_of())
    skipped, metrics = step(state, batch_of(jnp.nan))
    assert not metrics["grads_finite"] and metrics["skipped_total"] == 1
    assert_identical(skipped.params, state.params)
    assert_identical(skipped.opt_state.inner_state, state.opt_state.inner_state)


def test_state_with_several_optimizers():
    tx = optax.chain(
        optim.adam(1.0).to_optax(in_state=True), optim.sgd(0.1).to_optax(in_state=True)
    )
    state = state_of(tx).replace_hyperparams(**{"1/learning_rate": 0.2})
    assert state.hyperparams["1/learning_rate"] == np.float32(0.2)
    with pytest.raises(TypeError, match="got learning_rate; .*0/learning_rate"):
        state.replace_hyperparams(learning_rate=0.1)
    with pytest.raises(TypeError, match="Expected those of .* of flax_amp.optim"):
        state_of(optax.adam(0.1)).replace_hyperparams(learning_rate=0.1)


def test_sixteen_learning_rates_in_one_step():
    rates = np.geomspace(1e-4, 1.0, 16).astype(np.float32)
    step = make_train_step(loss_fn, jit=False)

    def run(rate):
        state = state_of(optim.adam(rate))
        for i in range(3):
            state, metrics = step(state, batch_of(1e6 if i == 1 else 1.0))
        return state, metrics

    together, metrics = jax.jit(jax.vmap(run))(rates)
    assert_identical(metrics["hyperparams/learning_rate"], jnp.asarray(rates))
    alone = jax.jit(run)
    for i, rate in enumerate(rates):
        expected = alone(rate)[0]
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert mine.opt_state.total_notfinite == expected.opt_state.total_notfinite
        np.testing.assert_allclose(mine.params["w"], expected.params["w"], rtol=1e-5)


# NNX


def test_nnx_optimizer():
    model, plain = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    tx = optim.adam(0.1).to_optax(in_state=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    reference = nnx.Optimizer(plain, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        grads = nnx.grad(lambda model: jnp.mean(model(batch["x"]) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(2):
        step(model, optimizer, batch_of())
        step(plain, reference, batch_of())
    assert_identical(model.kernel[...], plain.kernel[...])
    optimizer.opt_state = optimizer.opt_state.replace(learning_rate=0.5)
    step(model, optimizer, batch_of())
    assert optimizer.opt_state.hyperparams["learning_rate"] == 0.5
    optimizer.opt_state = optimizer.opt_state.replace(b1=0.5)  # static
    step(model, optimizer, batch_of())
    assert optimizer.opt_state.hyperparams["b1"] == 0.5
    with pytest.raises(ValueError, match="an array in the place of a static argument"):
        optimizer.opt_state.replace(b2=jnp.float32(0.5))

    train = flax_amp.make_nnx_train_step(lambda model, b: jnp.mean(model(b["x"]) ** 2))
    metrics = train(model, optimizer, batch_of())
    assert metrics["hyperparams/learning_rate"] == 0.5


TRACES = {
    "jit": lambda f, tx, rates: jax.jit(f)(tx, rates[0]),
    "closed over": lambda f, tx, rates: jax.jit(lambda x: f(tx, x))(rates[0]),
    "a constant": lambda f, tx, rates: jax.jit(lambda tx: f(tx, 0.5))(tx),
    "vmap": lambda f, tx, rates: jax.vmap(f)(
        jax.tree.map(lambda x: jnp.stack([x, x]), tx), rates
    )[0],
    "scan": lambda f, tx, rates: jax.lax.scan(lambda c, x: (c, f(c, x)), tx, rates)[1][
        0
    ],
}


@pytest.mark.parametrize("trace", TRACES)
def test_replacing_under_a_trace(trace):
    """In an optimizer, and in a state whose arrays are committed to a device."""
    tx = optim.adamw(0.1).init(PARAMS)
    state = jax.device_put(state_of(optim.adamw(0.1)), jax.devices()[0])

    def of_optimizer(tx, x):
        return tx.replace(learning_rate=x).hyperparams["learning_rate"]

    def of_state(state, x):
        return state.replace_hyperparams(learning_rate=x).hyperparams["learning_rate"]

    for rate, held in ((of_optimizer, tx), (of_state, state)):
        assert TRACES[trace](rate, held, jnp.array([0.5, 0.25])) == 0.5
