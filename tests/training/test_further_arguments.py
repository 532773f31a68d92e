"""Further arguments of a step, which the loss gets after the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from _steps import (
    assert_same_on_every_device,
    counting,
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
)
from flax_amp import (
    AmpTrainState,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
)
from helpers import assert_identical

OPTIONS = {
    "plain": {},
    "not jitted": {"jit": False},
    "accumulated": {"accum_steps": 2},
    "redone": {"redo_on_nan": 2},
    "both": {"accum_steps": 2, "redo_on_nan": 2},
}


def weighted(params, batch, weight, shift):
    """Its third argument is a number, its fourth a dict without rows of examples."""
    x = batch["x"] + shift["x"]
    return weight * linear_loss(params, batch | {"x": x}), {"seen": weight}


def nnx_weighted(model, batch, weight, shift):
    out = model(batch["x"] + shift["x"])[:, 0]
    return weight * ((out - batch["y"]) ** 2).mean(), {"seen": weight}


WEIGHT, SHIFT = jnp.float32(0.5), {"x": jnp.float32([[0.5, 0.0, -0.5]])}


def on_state(loss, args, **options):
    step = make_train_step(loss, has_aux=True, **options)
    state, metrics = step(linear_state(), linear_batch(), *args)
    return state.params, metrics


def on_nnx_state(loss, args, **options):
    model, optimizer = linear_objects()
    state = AmpTrainState.create(
        model=model, tx=optimizer.tx, scaler=init_scaler(scaler=16)
    )
    step = make_train_step(loss, has_aux=True, **options)
    state, metrics = step(state, linear_batch(), *args)
    return state.params, metrics


def on_objects(loss, args, **options):
    model, optimizer = linear_objects()
    step = make_nnx_train_step(loss, has_aux=True, **options)
    scaler = init_scaler(scaler=16)
    _, metrics = step(model, optimizer, scaler, linear_batch(), *args)
    return nnx.to_pure_dict(nnx.state(model)), metrics


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "run, loss",
    [(on_state, weighted), (on_nnx_state, nnx_weighted), (on_objects, nnx_weighted)],
)
def test_a_step_is_that_of_a_loss_which_closes_over_them(run, loss, options):
    options = options | {"compute_dtype": jnp.bfloat16}
    found = run(loss, (WEIGHT, SHIFT), **options)
    closed = lambda target, batch: loss(target, batch, WEIGHT, SHIFT)  # noqa: E731
    params, metrics = run(closed, (), **options)
    np.testing.assert_allclose(found[1]["seen"], WEIGHT)
    for a, b in zip(*map(jax.tree.leaves, (found, (params, metrics))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_evaluation(jit):
    evaluate = make_eval_step(weighted, jit=jit, compute_dtype=jnp.float32)
    state, batch = linear_state(), linear_batch()
    loss, _ = evaluate(state, batch, WEIGHT, SHIFT)
    expected, _ = weighted(state.params, batch, WEIGHT, SHIFT)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_they_are_traced():
    """Other values of one type compile nothing; a default may be left out."""

    def loss(params, batch, weight, offset=0.0, *, state):
        return weight * linear_loss(params, batch) + offset * state.step

    counted, traces = counting(loss)
    state = linear_state()
    step = make_train_step(counted, donate=False, compute_dtype=jnp.float32)
    losses = [step(state, linear_batch(), jnp.float32(w))[1]["loss"] for w in (1, 2)]
    assert len(traces) == 1 and losses[1] == 2 * losses[0]
    step(state, linear_batch(), jnp.float32(1), jnp.float32(1))
    assert len(traces) == 2


def test_each_device_gets_its_own(mesh):
    """They are not averaged; what the step makes of them is."""

    def loss(params, batch, weight):
        return (weight * linear_loss(params, batch)).sum()

    step = make_train_step(loss, axis_name="data", jit=False, compute_dtype=jnp.float32)
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec(), spec("data"), spec("data")),
        out_specs=spec(),
    )
    batch, weights = linear_batch(16), jnp.arange(8.0)
    state, metrics = jax.jit(mapped)(linear_state(), batch, weights)
    assert_same_on_every_device(state)
    params = linear_state().params
    parts = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(8)]
    each = [w * linear_loss(params, part) for w, part in enumerate(parts)]
    np.testing.assert_allclose(metrics["loss"], np.mean(each), rtol=1e-5)


# Modules


def drawing(model, batch, streams, counter):
    counter[...] = counter[...] + 1
    return model(batch).sum() + streams.noise.uniform()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_modules_of_the_nnx_step_are_updated(options):
    """Variables by themselves too, which are split into micro-batches in a batch."""
    step = make_nnx_train_step(drawing, compute_dtype=jnp.bfloat16, **options)
    model, optimizer = linear_objects()
    rngs, counter = nnx.Rngs(noise=0), nnx.Variable(jnp.int32(0))
    scaler = None
    for x in (jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan), jnp.ones((2, 3))):
        scaler, _ = step(model, optimizer, scaler, x, rngs, counter)
    expected = 2 * options.get("accum_steps", 1)  # the skipped step changes nothing
    assert rngs.noise.count[...] == counter[...] == expected


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_the_steps_on_a_state_refuse_their_changes_by_name(make):
    state = AmpTrainState.create(model=linear_objects()[0], tx=linear_objects()[1].tx)
    step = make(drawing, compute_dtype=jnp.bfloat16)
    call = lambda: step(state, jnp.ones((2, 3)), nnx.Rngs(noise=0), nnx.Variable(0))  # noqa: E731
    message = r"drawing changed args\[0\] \(Rngs.noise.count\), args\[1\].*its argum"
    raised(call, ValueError, message)


# Errors


def positional_state(params, batch, state, weight):
    return params["w"].sum() * weight


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("make", [make_train_step, make_eval_step, make_nnx_train_step])
def test_a_wrong_number(make, jit):
    first = [linear_state()]
    if make is make_nnx_train_step:
        first = [*linear_objects(), None]
    for loss, args, seen in [
        (linear_loss, (1.0,), r"linear_loss has .*\(params, batch\) \(too many"),
        (weighted, (1.0,), r"weighted .*\(params, batch, weight, shift\) .*'shift'"),
        (weighted, (), "weighted has the signature .*'weight'"),
    ]:
        step = make(loss, jit=jit)
        message = f"^{seen}.*; the step got {len(args)} further.*batch. Expected"
        raised(lambda s=step, a=args: s(*first, {}, *a), TypeError, message)


def test_a_keyword_in_their_place():
    step = make_train_step(lambda params, batch, weight, state: 0.0)
    raised(
        lambda: step(linear_state(), {}, 1.0, 2.0),
        TypeError,
        "multiple values for argument 'state'.*rngs come after them",
    )


def test_leaves_that_no_step_takes():
    for step, first in [
        (make_train_step(weighted, has_aux=True), [linear_state()]),
        (make_eval_step(weighted), [linear_state()]),
        (make_nnx_train_step(weighted, has_aux=True), [*linear_objects(), None]),
    ]:
        call = lambda s=step, f=first: s(*f, linear_batch(), 1.0, {"x": "name"})  # noqa: E731
        raised(call, TypeError, r"got args\[1\]\['x'\], a str; expected arrays and num")


def test_an_array_that_is_donated_too():
    state = linear_state()
    step = make_train_step(weighted, has_aux=True)
    call = lambda: step(state, linear_batch(), 1.0, {"x": state.params["w"]})  # noqa: E731
    message = r"state.params\['w'\] and args\[1\]\['x'\] are the same array"
    raised(call, ValueError, message)
    assert_identical(state.params, linear_state().params)
