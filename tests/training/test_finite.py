"""The optimizer of a state: it skips by a select, and is equal where that is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _steps import arrays
from flax_amp import (
    AmpTrainState,
    StuckError,
    all_finite,
    check_progress,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from flax_amp._training.optimizer import apply_if_finite
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
    assert AmpTrainState.create(params=INTEGERS, tx=tx).tx != states[0].tx
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


def updated(way, tx, params, batch, **options):
    """Returns parameters, optimizer state and scaler before and after a step."""
    scaler, x = init_scaler(scaler=1.0), batch
    if way == "nnx":
        model = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = arrays(model, optimizer.opt_state)
        options |= dict(precision="32-true", donate=False)
        step = make_nnx_train_step(relu_loss, **options)
        scaler, metrics = step(model, optimizer, scaler, x)
        return before, arrays(model, optimizer.opt_state), scaler, metrics
    state = AmpTrainState.create(
        params=params, tx=tx, precision="32-true", scaler=scaler
    )
    if way == "apply_gradients":
        new = state.apply_gradients(grads=jax.grad(relu_loss)(params, x))
        metrics = {"grads_finite": new.opt_state.last_finite}
    else:
        new, metrics = make_train_step(relu_loss, donate=False, **options)(state, x)
    read = lambda state: (state.params, state.opt_state.inner_state)  # noqa: E731
    return read(state), read(new), new.scaler, metrics


@pytest.mark.parametrize("way", ["linen", "nnx", "apply_gradients"])
@pytest.mark.parametrize("case", NOT_FINITE.values(), ids=NOT_FINITE)
def test_an_update_that_is_not_finite_skips_the_step(case, way):
    tx, make = case
    before, after, scaler, metrics = updated(way, tx, *make())
    assert not metrics["grads_finite"]
    assert_identical(after, before)
    # No scale mends an optimizer.
    assert scaler["scaler"] == 1 and scaler["count"] == scaler["total_resets"] == 0
    if way != "apply_gradients":
        assert metrics["skipped_total"] == 1


@pytest.mark.parametrize("way", ["linen", "nnx"])
def test_the_check_of_the_update_can_be_left_out(way):
    tx, make = NOT_FINITE["adam"]
    before, after, _, metrics = updated(way, tx, *make(), check_update=False)
    assert metrics["grads_finite"] and not all_finite(after) and all_finite(before)


def test_check_progress_tells_of_the_optimizer():
    state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(float("nan")))
    step = make_train_step(lambda params, x: (params["w"] * x).sum())
    for _ in range(20):
        state, metrics = step(state, jnp.ones(2))
    with pytest.raises(StuckError, match="or the update of the optimizer are not"):
        check_progress(state, metrics)


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
