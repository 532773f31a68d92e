"""The optimizer of a state: it skips by a select, and is equal where that is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import changed
from _steps import (
    SKIP_LEAVES,
    copy,
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    sum_loss,
)
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from helpers import assert_identical, equations

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


@pytest.mark.parametrize("params", [FLOATS, INTEGERS], ids="".join)
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_states_of_one_optimizer_have_one_structure(tx, params):
    states = [AmpTrainState.create(params=params, tx=tx) for _ in range(2)]
    a, b = map(jax.tree.structure, states)
    assert a == b and hash(a) == hash(b)
    other = AmpTrainState.create(params=params, tx=optax.sgd(0.1))
    assert a != jax.tree.structure(other)


def takes_value(updates, state, params=None, *, value, **_):
    return jax.tree.map(lambda u: u * value, updates), state


TAKES_VALUE = optax.GradientTransformationExtraArgs(optax.identity().init, takes_value)


@pytest.mark.parametrize(
    "tx, expected",
    [(optax.scale(-0.1), 0.9), (TAKES_VALUE, 4), (optim.sgd(0.1), 0.9)]
    + [(optim.wrap(lambda: TAKES_VALUE)(), 4)],
)
def test_an_update_takes_more_arguments_than_its_optimizer(tx, expected):
    state = AmpTrainState.create(params=INTEGERS, tx=tx)
    grads = jax.tree.map(jnp.ones_like, INTEGERS)
    updates, _ = state.tx.update(grads, state.opt_state, INTEGERS, value=3.0)
    np.testing.assert_allclose(INTEGERS["w"] + updates["w"], expected, rtol=1e-6)


def test_a_step_selects_once():
    """No leaf of parameters or optimizer goes through two selects, and none becomes
    NaN to make the optimizer skip."""
    params = {"w": jnp.ones((3, 5))}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    step = make_train_step(lambda p, batch: (p["w"] * batch).sum(), jit=False)
    found = equations(jax.make_jaxpr(step)(state, jnp.ones((3, 5))))
    selects = [x for _, x in found if x.primitive.name == "select_n"]
    shapes = [x.outvars[0].aval.shape for x in selects]
    assert shapes.count((3, 5)) == 3  # the parameters and two moments
    assert "cond" not in {x.primitive.name for _, x in found}


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

    @jax.jit
    def two_updates(state, x):
        grads = jax.grad(relu_loss)(state.params, x)
        first = state.apply_gradients(grads=grads)
        return first, first.apply_gradients(grads=jax.tree.map(jnp.ones_like, grads))

    @nnx.jit
    def update(model, optimizer, x):
        optimizer.update(model, nnx.grad(relu_loss)(model, x))

    for tx, make in NOT_FINITE.values():
        params, x = make()
        state = AmpTrainState.create(params=params, tx=tx)
        new, again = two_updates(state, x)
        assert not new.opt_state.last_finite and new.opt_state.total_notfinite == 1
        assert_identical(new.params, state.params)
        assert again.opt_state.last_finite and again.opt_state.total_notfinite == 1
        model = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        optimizer = AmpOptimizer(model, tx)
        update(model, optimizer, x)
        assert not optimizer.opt_state.last_finite[...]
        assert_identical(nnx.to_pure_dict(nnx.state(model)), params)


def test_a_step_decides_by_the_squares_of_the_gradients():
    """They overflow where those of Adam would. A division by zero is not looked at."""
    for name, (tx, make) in NOT_FINITE.items():
        params, x = make()
        state = AmpTrainState.create(params=params, tx=tx, precision="32-true")
        new, metrics = make_train_step(relu_loss, donate=False)(state, x)
        assert metrics["grads_finite"] == (name == "adam")
        assert metrics["skipped_total"] == (name == "overflow")
        assert bool(changed(new.params, state.params)) == (name == "adam")
        assert new.scaler["scaler"] == 1


# Skipped steps


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(0.1), 2),
        # It tests gradients after they were added up.
        optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 2),
        optax.apply_if_finite(optax.adam(0.1), 0),  # applies the NaN at once
        optax.chain(optax.apply_if_finite(optax.adam(0.1), 0)),
        optax.contrib.schedule_free_sgd(0.1),
    ],
)
def test_skips_whatever_the_optimizer(tx):
    """Many steps in a row do no harm, and are left again."""
    step = make_train_step(linear_loss)
    state = linear_state(tx)
    for _ in range(3):
        state, _ = step(state, linear_batch())
    after = copy(state)
    for _ in range(40):
        after, metrics = step(after, linear_batch(poisoned=True))
    assert changed(state, after) <= SKIP_LEAVES
    assert (float(metrics["scaler"]), int(metrics["skipped_total"])) == (16.0, 40)
    for _ in range(2):
        after, metrics = step(after, linear_batch())
    assert metrics["grads_finite"] and changed(state.params, after.params)


X, NAN = jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan, jnp.float32)
GUARDED = optax.apply_if_finite(optax.sgd(0.1), 2**31 - 1)


def test_a_plain_optimizer_of_nnx():
    """It counts skipped steps if its optimizer of optax does."""
    for tx, counts in ((GUARDED, [0, 1, 2, 2, 3]), (optax.sgd(0.1), None)):
        model, _ = linear_objects()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = make_nnx_train_step(sum_loss)
        found = [step(model, optimizer, x) for x in (X, NAN, NAN, X, NAN)]
        if counts:
            assert [int(metrics["skipped_total"]) for metrics in found] == counts
            assert int(optimizer.opt_state.notfinite_count[...]) == 1
        else:
            assert set(found[0]) == {"loss", "grads_finite", "scaler", "grad_norm"}
        assert int(optimizer.step[...]) == 5
