"""The training step: what it computes, one trace, accumulation; evaluation."""

import copy as python_copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import MODELS, changed, make_batch
from _steps import copy, linear_batch, linear_loss, linear_state, mapped, setup
from flax_amp import (
    AmpTrainState,
    init_scaler,
    make_eval_step,
    make_train_step,
    no_scaler,
    static_scaler,
)
from helpers import assert_close, assert_identical, assert_same_avals

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


@pytest.mark.parametrize("name", MODELS)
def test_statistics_and_dropout(name):
    """Another step draws another mask, the same step the same one."""
    state, step = setup(name, donate=False)
    after, metrics = step(state, make_batch())
    assert changed(state.variables, after.variables)
    assert not changed(state.rngs, after.rngs)
    assert step(state, make_batch())[1]["loss"] == metrics["loss"]
    later = state.replace(step=state.step + 1, variables=after.variables)
    assert step(later, make_batch())[1]["loss"] != metrics["loss"]
    if name == "nnx":
        count = state.merge_model().dropout.rngs.count
        assert int(count[...]) == 2 == after.variables["dropout"]["rngs"]["count"] - 1


# One trace, also in a loop


@pytest.mark.parametrize("name", MODELS)
def test_scan_over_steps_equals_the_steps(name):
    """One compiled epoch, with a bad batch in it, is the loop of steps.

    The loop transfers nothing: metrics stay on the device until somebody asks.
    """
    make, loss_fn = MODELS[name]
    scaler = init_scaler(scaler=2.0**6, patience=2)
    batches = jax.device_put([make_batch(i, poisoned=i == 2) for i in range(6)])
    step = make_train_step(loss_fn, has_aux=True, donate=False)

    evaluate = make_eval_step(loss_fn)
    looped, history = make(tx=optax.sgd(0.1), scaler=scaler), []
    with jax.transfer_guard("disallow"):
        for batch in batches:
            looped, metrics = step(looped, batch)
            history.append(metrics)
            evaluate(looped, batch)

    inner = make_train_step(loss_fn, has_aux=True, jit=False)
    epoch = jax.jit(lambda state, batches: jax.lax.scan(inner, state, batches))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    start = make(tx=optax.sgd(0.1), scaler=scaler)
    scanned, metrics = epoch(start, stacked)
    assert metrics["grads_finite"].tolist() == [True] * 2 + [False] + [True] * 3
    assert metrics["loss"].shape == (6,)
    assert_identical(scanned.scaler, looped.scaler)
    assert_close(scanned.params, looped.params, jnp.float16, gradient=True)
    good = jnp.array([0, 1, 3, 4, 5])
    losses = jnp.stack([metrics["loss"] for metrics in history])
    assert_close(metrics["loss"][good], losses[good], jnp.float16)
    # The state is a fixed point of the step: types, weak ones too, and structure.
    out, _ = jax.eval_shape(inner, start, batches[0])
    assert_same_avals(start, out)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(out))


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


partial = functools.partial
# How a user binds keywords, and which ones in this test.
BINDERS = {
    "neither": (lambda **bound: names, ()),
    "partial": (lambda **bound: partial(names, **bound), ("state", "rngs")),
    "jitted inside": (lambda **bound: partial(jax.jit(names), **bound), ("state",)),
    "jitted": (lambda **bound: jax.jit(partial(names, **bound)), ("rngs",)),
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


# Gradient accumulation: within a step, over steps with MultiSteps, and both

CLIP = 0.05  # far below the norm of the gradient: it always clips


def part(i, parts):
    return jax.tree.map(lambda leaf: leaf[i::parts], linear_batch())


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))


@functools.cache
def clipped_step(accum_steps=1):
    return make_train_step(
        linear_loss, precision="32-true", donate=False, accum_steps=accum_steps
    )


@functools.cache
def full_batch_steps(count):
    state = linear_state(optimizer(), scaler=no_scaler())
    for _ in range(count):
        state, _ = clipped_step()(state, linear_batch())
    return state


def guarded(tx):
    return optax.apply_if_finite(tx.gradient_transformation(), 2**30)


@pytest.mark.parametrize(
    "accum_steps, every, wrap",
    [(4, 1, None), (1, 4, None), (2, 2, None), (2, 4, None), (1, 2, guarded)],
)
def test_any_way_to_accumulate_equals_the_full_batch(accum_steps, every, wrap):
    """The clip sees the mean gradient of all the examples, whatever the way."""
    tx = optax.MultiSteps(optimizer(), every)
    state = linear_state(wrap(tx) if wrap else tx, scaler=no_scaler())
    for i in range(3 * every):
        state, _ = clipped_step(accum_steps)(state, part(i % every, every))
    assert_close(state.params, full_batch_steps(3).params, jnp.float32)
    assert int(state.step) == 3 * every


def test_accumulation_is_in_float32():
    def loss(params, batch):
        return params["w"].astype(jnp.float16).astype(jnp.float32) * batch.mean()

    values = np.r_[np.float32(2048), np.ones(255, np.float32)]
    state = AmpTrainState.create(
        params={"w": jnp.float32(0)}, tx=optax.sgd(1.0), precision="bf16-mixed"
    )
    state, _ = make_train_step(loss, accum_steps=256)(state, values)
    assert float(state.params["w"]) == -(2048 + 255) / 256


@pytest.mark.once
def test_statistics_go_through_the_micro_batches():
    """Four updates with momentum 0.9 leave less of the old mean than one does."""
    state, _ = setup("nnx", accum_steps=1, donate=False)
    moved = []
    for accum_steps in (1, 4):
        _, step = setup("nnx", accum_steps=accum_steps, donate=False)
        old, new = (s.variables for s in (state, step(state, make_batch())[0]))
        counts = [int(v["dropout"]["rngs"]["count"]) for v in (old, new)]
        assert counts[1] == counts[0] + accum_steps
        moved.append(jnp.abs(new["norm"]["var"] - old["norm"]["var"]).sum())
    assert moved[1] > 1.5 * moved[0]


# Special parameters


def test_integer_parameters_pass_through():
    def loss(params, batch):
        return (params["w"][params["order"]] * batch).sum()

    params = {"w": jnp.ones(3), "order": jnp.array([2, 0, 1])}
    state = AmpTrainState.create(params=params, tx=optax.adamw(0.1))
    after, metrics = make_train_step(loss)(copy(state), np.float32(2))
    assert changed(state.params, after.params) == {"['w']"}
    assert metrics["grads_finite"]


@pytest.mark.parametrize("way", ["plain", "accumulated", "devices"])
def test_fp8_statistics_are_neither_unscaled_nor_summed(way, mesh):
    """They are the largest of all parts; a NaN in one part skips the step."""

    @jax.custom_vjp
    def record(stat, x):
        return x

    def backward(x, g):
        return jnp.where(x > 6, jnp.nan, x), g

    record.defvjp(lambda stat, x: (x, x), backward)

    def loss(params, batch):
        stat = params["_overwrite_with_gradient"]["stat"]
        return (record(stat, batch.max()) * params["params"]["w"]).sum()

    params = {
        "params": {"w": jnp.ones(2)},
        "_overwrite_with_gradient": {"stat": jnp.float32(0)},
    }
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    options = {
        "plain": {},
        "accumulated": {"accum_steps": 4},
        "devices": {"axis_name": "data", "jit": False},
    }[way]
    step = make_train_step(loss, precision="32-true", **options)
    step = mapped(step, mesh) if way == "devices" else step
    good, bad = np.float32([[3, 5] + [1] * 6, [3, 7] + [1] * 6])
    after, _ = step(copy(state), good)
    assert float(after.params["_overwrite_with_gradient"]["stat"]) == 5
    after, metrics = step(copy(state), bad)
    assert not metrics["grads_finite"]
    assert not changed(state.params, after.params)
    assert int(metrics["skipped_total"]) == 1


# Evaluation


def predict_linen(params, batch, *, state):
    variables = {"params": params, **state.variables}
    return state.apply_fn(variables, batch["x"], train=False)


def predict_nnx(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", ["linen", "nnx", "model"])
def test_eval_step(name, jit):
    """In evaluation mode, and without a change of the state."""
    state, _ = setup("linen" if name == "linen" else "nnx")
    before, batch = copy(state), make_batch()
    predict = predict_linen if name == "linen" else predict_nnx
    given = state.merge_model() if name == "model" else state
    out = make_eval_step(predict, precision="fp16", jit=jit)(given, batch)
    assert not changed(before, state)
    if name == "model":
        rest = nnx.state(given, nnx.Not(nnx.Param))
        assert not changed(before.variables, nnx.to_pure_dict(rest))
    if name == "linen":
        expected = predict(state.params, batch, state=state)
    else:
        model = state.merge_model()
        model.eval()
        expected = predict(model, batch)
    assert_close(out, expected, jnp.float16)
    assert out.dtype == jnp.float32


def test_eval_step_folds_its_keys_with_the_step():
    eval_step = make_eval_step(lambda p, b, *, rngs: jax.random.normal(rngs["a"]))
    state = linear_state(rngs={"a": jax.random.key(0)})
    later = state.replace(step=state.step + 1)
    first, again, other = (eval_step(s, linear_batch()) for s in (state, state, later))
    assert first == again != other
