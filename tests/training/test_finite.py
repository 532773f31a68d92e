"""The optimizer of a state: it skips by a select, and is equal where that is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpTrainState,
    all_finite,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from flax_amp._training.finite import apply_if_finite
from helpers import assert_identical, assert_same_avals, equations

PARAMS = {"w": jnp.ones(3), "b": jnp.ones((), jnp.bfloat16)}
GOOD = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
BAD = {"w": jnp.array([0.0, jnp.nan, 1.0]), "b": jnp.ones((), jnp.bfloat16)}


def test_gives_what_optax_gives():
    """Updates and states, through skips; only that it never gives up."""
    mine = apply_if_finite(optax.adam(0.1))
    theirs = optax.apply_if_finite(optax.adam(0.1), 2**31 - 1)
    state, state_ = mine.init(PARAMS), theirs.init(PARAMS)
    for grads in (GOOD, BAD, GOOD, BAD, BAD, GOOD):
        updates, state = mine.update(grads, state, PARAMS)
        updates_, state_ = theirs.update(grads, state_, PARAMS)
        assert_same_avals((updates, state), (updates_, state_))
        for x, y in zip(
            *map(jax.tree.leaves, ((updates, state), (updates_, state_))), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6
            )


def test_has_no_branch():
    tx = apply_if_finite(optax.adam(0.1))
    text = str(jax.make_jaxpr(tx.update)(GOOD, tx.init(PARAMS), PARAMS))
    assert "cond[" not in text


# Two states of one optimizer


class Mine:
    """An optimizer that is no NamedTuple, and cannot be hashed."""

    __hash__ = None

    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, grads), state


OPTIMIZERS = {
    "optax": optax.adam(0.1),
    "chain": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "extra args": optax.with_extra_args_support(optax.sgd(0.1)),
    "multi steps": optax.MultiSteps(optax.sgd(0.1), 2),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "optim": optim.adam(0.1),
    "object": Mine(),
}
INTEGERS = {"floats": {}, "integers": {"table": jnp.arange(3)}}


@pytest.mark.parametrize("params", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_states_of_one_optimizer_have_one_structure(tx, params):
    make = functools.partial(
        AmpTrainState.create, params={"w": jnp.ones(3)} | params, tx=tx
    )
    a, b = make(), make()
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    jax.tree.map(lambda x, y: x, a, b)


def takes_value(updates, state, params=None, *, value, **_):
    return jax.tree.map(lambda u: u * value, updates), state


@pytest.mark.parametrize("params", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize(
    "tx, expected",
    [
        (optax.scale(-0.1), 0.9),
        (optax.GradientTransformationExtraArgs(optax.identity().init, takes_value), 4),
        (optim.sgd(0.1), 0.9),
    ],
    ids=["takes none", "takes some", "optim"],
)
def test_an_update_takes_more_arguments_than_its_optimizer(tx, expected, params):
    params = {"w": jnp.ones(3)} | params
    state = AmpTrainState.create(params=params, tx=tx)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = state.tx.update(grads, state.opt_state, params, value=3.0)
    np.testing.assert_allclose(params["w"] + updates["w"], expected, rtol=1e-6)


def test_states_of_different_optimizers_differ():
    make = functools.partial(AmpTrainState.create, params={"w": jnp.ones(3)})
    a, b = make(tx=optax.sgd(0.1)), make(tx=optax.sgd(0.2))
    assert jax.tree.structure(a) != jax.tree.structure(b)
    integers = {"w": jnp.ones(3), "table": jnp.arange(3)}
    tx = optax.sgd(0.1)
    assert make(tx=tx).tx != make(params=integers, tx=tx).tx


def test_a_step_serves_every_state_of_its_optimizer(count_traces):
    counted, traces = count_traces(lambda params, batch: (params["w"] * batch).sum())
    step = make_train_step(counted, donate=False)
    tx = optax.adam(0.1)
    results = [
        step(AmpTrainState.create(params={"w": jnp.ones(3)}, tx=tx), jnp.ones(3))[0]
        for _ in range(2)
    ]
    assert traces() == 1 and step._cache_size() == 1
    assert_identical(*results)
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *results)
    np.testing.assert_allclose(mean.params["w"], results[0].params["w"])


def test_a_step_selects_once():
    """No leaf of parameters or optimizer goes through two selects, and none becomes
    NaN to make the optimizer skip."""
    params = {"w": jnp.ones((3, 5))}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    step = make_train_step(lambda p, batch: (p["w"] * batch).sum(), jit=False)
    jaxpr = jax.make_jaxpr(step)(state, jnp.ones((3, 5)))
    selects = [
        eqn
        for _, eqn in equations(jaxpr)
        if eqn.primitive.name == "select_n" and eqn.outvars[0].aval.shape == (3, 5)
    ]
    assert len(selects) == 3  # the parameters and two moments


# Updates that are not finite, of gradients that are


MAKE_NANS = {
    "adam": optax.adam(0.1, eps=0),
    "rmsprop": optax.rmsprop(0.1, eps=0),
    "adagrad": optax.adagrad(0.1, initial_accumulator_value=0, eps=0),
    "a scheduled division": optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: -0.1 * g / jnp.abs(g), grads)
    ),
}


def dead_unit_loss(params, batch):
    """The second hidden unit is always off, so its weights have no gradient."""
    return (jax.nn.relu(batch @ params["w"]) @ params["v"]).mean()


def dead_unit():
    return {"w": jnp.array([[1.0, -1.0]]), "v": jnp.ones((2, 1))}


def trained(way, tx):
    """Returns the leaves of a state after three steps, and their gradients' flag."""
    batch, finite = jnp.ones((4, 1)), True
    if way == "nnx":
        model = nnx.Dict({name: nnx.Param(x) for name, x in dead_unit().items()})
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step, scaler = make_nnx_train_step(dead_unit_loss, precision="bf16-mixed"), None
        for _ in range(3):
            scaler, metrics = step(model, optimizer, scaler, batch)
            finite &= bool(metrics["grads_finite"])
        return nnx.to_pure_dict(nnx.state(model)), optimizer.opt_state, finite
    state = AmpTrainState.create(params=dead_unit(), tx=tx, precision="bf16-mixed")
    step = make_train_step(dead_unit_loss, donate=False)
    for _ in range(3):
        if way == "apply_gradients":
            grads = jax.grad(dead_unit_loss)(state.params, batch)
            state = state.apply_gradients(grads=grads)
        else:
            state, metrics = step(state, batch)
            finite &= bool(metrics["grads_finite"])
    return state.params, state.opt_state, finite


@pytest.mark.parametrize("way", ["linen", "nnx", "apply_gradients"])
@pytest.mark.parametrize("tx", MAKE_NANS.values(), ids=MAKE_NANS)
def test_an_optimizer_that_makes_nans_poisons_nothing(tx, way):
    params, opt_state, finite = trained(way, tx)
    assert finite and all_finite((params, opt_state))
    old = dead_unit()
    for name, dead in {"w": (0, 1), "v": (1, 0)}.items():
        assert params[name][dead] == old[name][dead]  # keeps its value
        assert params[name][0, 0] < old[name][0, 0]  # and the others train


def test_what_was_not_finite_before_may_stay_so():
    params = {"w": jnp.ones(2), "mask": jnp.array([0.0, -jnp.inf])}
    state = AmpTrainState.create(params=params, tx=optax.sgd(0.1))
    step = make_train_step(lambda p, x: (jnp.exp(p["mask"]) * p["w"] * x).sum())
    state, metrics = step(state, jnp.ones(2))
    assert metrics["grads_finite"] and state.params["mask"][1] == -jnp.inf
    assert state.params["w"][0] < 1
