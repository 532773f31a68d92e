"""The training step: what it computes, and one trace; evaluation."""

import copy as python_copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import changed, make_batch
from _steps import (
    copy,
    linear_batch,
    linear_loss,
    linear_state,
    setup,
)
from flax_amp import (
    AmpTrainState,
    init_scaler,
    make_eval_step,
    make_train_step,
    static_scaler,
)
from helpers import assert_close

# What a step computes


def test_float32_step_is_plain_training():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    state = linear_state(tx, scaler=static_scaler(2.0**12))
    params, opt_state = state.params, tx.init(state.params)
    step = make_train_step(linear_loss, precision="32-true", donate=False)
    for _ in range(3):
        loss, grads = jax.value_and_grad(linear_loss)(params, linear_batch())
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, linear_batch())
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        norm = optax.tree.norm(grads)  # before clipping
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


def test_loss_and_update_are_right_on_growing_and_skipped_steps():
    """A step in half precision is near that in float32, which is exact here."""

    def loss(params, batch):
        return params["w"] * batch

    state = AmpTrainState.create(
        params={"w": jnp.float32(1)},
        tx=optax.sgd(1.0),
        precision="16-mixed",
        scaler=init_scaler(scaler=2.0**4, patience=1),
    )
    step = make_train_step(loss)
    scales, expected = [], 1.0
    for x in (1.0, 1.0, np.inf, 1.0, 1.0):
        state, metrics = step(state, np.float32(x))
        scales.append(float(metrics["scaler"]))
        if np.isfinite(x):
            assert (metrics["loss"], metrics["grad_norm"]) == (expected, 1)
            expected -= 1
        assert state.params["w"] == expected
    assert scales == [16, 32, 32, 32, 64]
    results = [
        make_train_step(linear_loss, precision=word)(linear_state(), linear_batch())[
            0
        ].params["w"]
        for word in ("fp16", "bf16", "fp32")
    ]
    for result, tolerance in zip(results, (2e-3, 2e-2), strict=False):
        np.testing.assert_allclose(result, results[2], rtol=tolerance, atol=tolerance)


def test_statistics_and_dropout():
    state, step = setup("linen", donate=False)
    after, metrics = step(state, make_batch())
    assert changed(state.variables, after.variables)
    assert not changed(state.rngs, after.rngs)
    # Another step draws another mask, the same step the same one.
    still = state.replace(step=state.step + 1)
    assert step(state, make_batch())[1]["loss"] == metrics["loss"]
    assert step(still, make_batch())[1]["loss"] != metrics["loss"]

    state, step = setup("nnx", donate=False)
    after, _ = step(state, make_batch())
    counts = [int(s.variables["dropout"]["rngs"]["count"]) for s in (state, after)]
    assert counts == [2, 3]
    assert changed(state.variables["norm"], after.variables["norm"])
    assert int(state.merge_model().dropout.rngs.count[...]) == 2


def test_loss_gets_state_and_rngs_only_if_it_declares_them():
    seen = {}

    def loss(params, batch, *, rngs, state):
        seen.update(state=state, rngs=rngs)
        assert state.params is params
        return linear_loss(params, batch)

    state = linear_state(rngs={"a": jax.random.key(0)})
    make_train_step(loss)(state, linear_batch())
    assert isinstance(seen["state"], AmpTrainState)
    assert set(seen["rngs"]) == {"a"}


# One trace


def test_donation_deletes_the_old_state_and_nothing_else():
    state, step = setup("linen")
    batch = jax.device_put(make_batch())
    after, metrics = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    _, _ = step(after, batch)
    assert all(np.isfinite(value) for value in metrics.values())  # of the step before
    state, step = setup("linen", donate=False)
    step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_compiled_step_is_still_one_of_jax():
    step, state = make_train_step(linear_loss, donate=False), linear_state()
    assert step.__name__ == "train_step"
    loss = linear_loss(state.params, linear_batch())
    for twin in (
        step.lower(state, linear_batch()).compile(),
        python_copy.copy(step),
        python_copy.deepcopy(step),
    ):
        assert twin(state, linear_batch())[1]["loss"] == loss
    assert jax.eval_shape(step, state, linear_batch())[1]["loss"].shape == ()
    assert twin.__name__ == "train_step"
    for make in (make_train_step, make_eval_step):
        assert not hasattr(make(linear_loss, jit=False), "lower")


def names(params, batch, *, state=None, rngs=None):
    """The parameters that it got, and the number of its streams."""
    return params["w"].sum() * state.params["w"].sum() * len(rngs)


def wrapped(fn):
    return functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))


class Owner:
    def method(self, params, batch, *, state=None, rngs=None):
        return names(params, batch, state=state, rngs=rngs)


partial = functools.partial
# How a user binds keywords, and which ones in this test.
BINDERS = {
    "neither": (lambda **bound: names, ()),
    "partial": (lambda **bound: partial(names, **bound), ("state", "rngs")),
    "nested": (lambda **bound: partial(wrapped(partial(names, **bound))), ("state",)),
    "outside": (lambda **bound: partial(partial(names), **bound), ("rngs",)),
    "jitted inside": (lambda **bound: partial(jax.jit(names), **bound), ("state",)),
    "jitted": (lambda **bound: jax.jit(partial(names, **bound)), ("rngs",)),
    "wrapped": (lambda **bound: wrapped(partial(names, **bound)), ("state",)),
    "wrapped inside": (lambda **bound: partial(wrapped(names), **bound), ("rngs",)),
    "method": (lambda **bound: partial(Owner().method, **bound), ("state",)),
    "tree_util": (lambda **bound: jax.tree_util.Partial(names, **bound), ("rngs",)),
}


@pytest.mark.parametrize("binder", BINDERS)
@pytest.mark.once
def test_keywords_that_the_user_has_bound(binder):
    """A teacher of functools.partial stays what it is; the others are the step's."""
    teacher = linear_state(w=jnp.full(3, 2.0))
    values = {"state": teacher, "rngs": dict.fromkeys("abc", jax.random.key(0))}
    bind, bound = BINDERS[binder]
    fn = bind(**{name: values[name] for name in bound})
    rngs = {"a": jax.random.key(0)}
    state = linear_state(rngs=rngs, w=jnp.ones(3), precision="32-true")
    expected = 3.0 * (6 if "state" in bound else 3) * (3 if "rngs" in bound else 1)
    assert make_eval_step(fn)(state, 0.0) == expected
    assert make_train_step(fn, donate=False)(state, 0.0)[1]["loss"] == expected


# Special parameters


def test_integer_parameters_pass_through():
    def loss(params, batch):
        return (params["w"][params["order"]] * batch).sum()

    params = {"w": jnp.ones(3), "order": jnp.array([2, 0, 1])}
    state = AmpTrainState.create(params=params, tx=optax.adamw(0.1))
    after, metrics = make_train_step(loss)(copy(state), np.float32(2))
    assert changed(state.params, after.params) == {"['w']"}
    assert metrics["grads_finite"]


def test_fp8_statistics_are_neither_unscaled_nor_summed():
    @jax.custom_vjp
    def record(stat, x):
        return x

    def backward(x, g):
        return jnp.where(x > 6, jnp.inf, x), g

    record.defvjp(lambda stat, x: (x, x), backward)

    def loss(params, batch):
        stat = params["_overwrite_with_gradient"]["stat"]
        return (record(stat, batch.max()) * params["params"]["w"]).sum()

    params = {
        "params": {"w": jnp.ones(2)},
        "_overwrite_with_gradient": {"stat": jnp.float32(0)},
    }
    for accum_steps in (1, 2):
        state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
        step = make_train_step(loss, accum_steps=accum_steps, precision="32-true")
        good, _ = step(copy(state), np.array([3.0, 5.0], np.float32))
        assert float(good.params["_overwrite_with_gradient"]["stat"]) == 5
        bad, metrics = step(copy(state), np.array([3.0, 7.0], np.float32))
        assert not metrics["grads_finite"]
        assert not changed(state.params, bad.params)
        assert int(metrics["skipped_total"]) == 1


# Evaluation


def predict_linen(params, batch, *, state):
    variables = {"params": params, **state.variables}
    return state.apply_fn(variables, batch["x"], train=False)


def predict_nnx(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize(
    "predict, word, dtype",
    [(predict_linen, "fp16", jnp.float16), (predict_nnx, "bf16", jnp.bfloat16)],
)
def test_eval_step(predict, word, dtype):
    """In evaluation mode, and without a change of the state."""
    state, _ = setup("linen" if predict is predict_linen else "nnx")
    before = copy(state)
    out = make_eval_step(predict, precision=word)(state, make_batch())
    assert not changed(before, state)
    if predict is predict_linen:
        expected = predict(state.params, make_batch(), state=state)
    else:
        model = state.merge_model()
        model.eval()
        expected = predict(model, make_batch())
    assert_close(out, expected, dtype)
    assert out.dtype == jnp.float32


def test_eval_step_folds_its_keys_with_the_step():
    def noise(params, batch, *, rngs):
        return jax.random.normal(rngs["a"])

    state = linear_state(rngs={"a": jax.random.key(0)})
    eval_step = make_eval_step(noise)
    first = eval_step(state, linear_batch())
    assert first == eval_step(state, linear_batch())
    later = state.replace(step=state.step + 1)
    assert first != eval_step(later, linear_batch())
