"""The optimizer of a state: it skips by a select, and is equal where that is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    make_train_step,
    optim,
)
from flax_amp._training.optimizer import skipping
from helpers import assert_identical, assert_same_avals, equations

PARAMS = {"w": jnp.ones(3), "b": jnp.ones((), jnp.bfloat16)}
GOOD = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
BAD = {"w": jnp.array([0.0, jnp.nan, 1.0]), "b": jnp.ones((), jnp.bfloat16)}


def test_gives_what_optax_gives():
    """Updates and states, through skips; only that it never gives up."""
    mine, _ = skipping(optax.adam(0.1), PARAMS)
    theirs = optax.apply_if_finite(optax.adam(0.1), 2**31 - 1)
    state, state_ = mine.init(PARAMS), theirs.init(PARAMS)
    for grads in (GOOD, BAD, GOOD, BAD, BAD, GOOD):
        updates, state = mine.update(grads, state, PARAMS)
        updates_, state_ = theirs.update(grads, state_, PARAMS)
        plain = optax.ApplyIfFiniteState(*state)  # a subclass of which it is
        assert_same_avals((updates, plain), (updates_, state_))
        for x, y in zip(
            *map(jax.tree.leaves, ((updates, plain), (updates_, state_))), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6
            )
    # It has no branch.
    assert "cond[" not in str(jax.make_jaxpr(mine.update)(GOOD, state, PARAMS))


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
FLOATS = {"w": jnp.ones(3)}
INTEGERS = FLOATS | {"table": jnp.arange(3)}
both_kinds = pytest.mark.parametrize("params", [FLOATS, INTEGERS], ids="".join)


@both_kinds
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_states_of_one_optimizer_have_one_structure(tx, params):
    a, b = (AmpTrainState.create(params=params, tx=tx) for _ in range(2))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    other = AmpTrainState.create(params=params, tx=optax.sgd(0.1))
    assert jax.tree.structure(a) != jax.tree.structure(other)


def takes_value(updates, state, params=None, *, value, **_):
    return jax.tree.map(lambda u: u * value, updates), state


@both_kinds
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
    state = AmpTrainState.create(params=params, tx=tx)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = state.tx.update(grads, state.opt_state, params, value=3.0)
    np.testing.assert_allclose(params["w"] + updates["w"], expected, rtol=1e-6)


def test_a_step_serves_every_state_of_its_optimizer(count_traces):
    counted, traces = count_traces(lambda params, batch: (params["w"] * batch).sum())
    step = make_train_step(counted, donate=False)
    tx = optax.adam(0.1)
    states = [AmpTrainState.create(params=FLOATS, tx=tx) for _ in range(2)]
    results = [step(state, jnp.ones(3))[0] for state in states]
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


def nan_of_zeros():
    """The second hidden unit is always off, so its weights have no gradient."""
    params = {"w": jnp.array([[1.0, -1.0]]), "v": jnp.ones((2, 1))}
    return params, jnp.ones((4, 1))


def overflow():
    """The square of a gradient overflows, which is an inf in Adam's second moment."""
    params = {"w": jnp.ones((1, 1)), "v": jnp.ones((1, 1))}
    return params, jnp.full((1, 1), 1e20)


# optimizer, parameters and batch
NOT_FINITE = {
    "adam": (optax.adam(0.1, eps=0), nan_of_zeros),
    "overflow": (optax.adamw(0.1), overflow),
}


def relu_loss(params, batch):
    return (jax.nn.relu(batch @ params["w"]) @ params["v"]).mean()


def test_an_update_outside_of_a_step_skips_itself():
    """In a loop of the user's own; with NNX, too."""
    for tx, make in NOT_FINITE.values():
        params, x = make()
        state = AmpTrainState.create(params=params, tx=tx)
        new = state.apply_gradients(grads=jax.grad(relu_loss)(params, x))
        assert not new.opt_state.last_finite and new.opt_state.total_notfinite == 1
        assert_identical(new.params, state.params)
        model = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        optimizer = AmpOptimizer(model, tx)
        optimizer.update(model, nnx.grad(relu_loss)(model, x))
        assert not optimizer.opt_state.last_finite[...]
        assert_identical(nnx.to_pure_dict(nnx.state(model)), params)


def test_a_step_decides_by_the_squares_of_the_gradients():
    """They overflow where those of Adam would. A division by zero is not looked at."""
    tx, make = NOT_FINITE["overflow"]
    params, x = make()
    state = AmpTrainState.create(params=params, tx=tx, precision="32-true")
    new, metrics = make_train_step(relu_loss, donate=False)(state, x)
    assert not metrics["grads_finite"] and metrics["skipped_total"] == 1
    assert_identical(new.params, state.params)
    assert new.scaler["scaler"] == 1
    tx, make = NOT_FINITE["adam"]
    params, x = make()
    state = AmpTrainState.create(params=params, tx=tx, precision="32-true")
    _, metrics = make_train_step(relu_loss)(state, x)
    assert metrics["grads_finite"]


class Best(AmpTrainState):
    best: jax.Array

    def apply_gradients(self, **kwargs):
        return super().apply_gradients(**kwargs).replace(best=jnp.float32(jnp.inf))


def test_a_field_of_a_subclass_may_become_an_inf():
    params = {"w": jnp.ones(2)}
    state = Best.create(params=params, tx=optax.sgd(0.1), best=jnp.float32(1))
    step = make_train_step(lambda params, x: (params["w"] * x).sum())
    state, metrics = step(state, jnp.ones(2))
    assert metrics["grads_finite"] and state.best == jnp.inf


def test_what_was_not_finite_before_may_stay_so():
    params = {"w": jnp.ones(2), "mask": jnp.array([0.0, -jnp.inf])}
    state = AmpTrainState.create(params=params, tx=optax.sgd(0.1))
    step = make_train_step(lambda p, x: (jnp.exp(p["mask"]) * p["w"] * x).sum())
    state, metrics = step(state, jnp.ones(2))
    assert metrics["grads_finite"] and state.params["mask"][1] == -jnp.inf
    assert state.params["w"][0] < 1
