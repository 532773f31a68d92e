"""Arguments that JAX or Python would refuse in words of their own."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_amp import (
    AmpTrainState,
    check_progress,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    static_scaler,
)

B = jnp.ones(8)


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


def make_state(**fields):
    state = AmpTrainState.create(params={"w": jnp.ones(8)}, tx=optax.adam(0.1))
    return state.replace(**fields)


@pytest.mark.parametrize("metrics", [3.0, [1.0], "loss", jnp.ones(2), ()])
def test_metrics_that_are_no_mapping_are_named(metrics):
    kind = type(metrics).__name__
    with pytest.raises(TypeError, match=f"metrics is a {kind}; expected the dict of"):
        check_progress(make_state(), metrics)


@pytest.mark.parametrize("axis", [3, ("data", 3), ["data"], True, {"data"}])
def test_an_axis_that_is_no_name_is_named(axis):
    for make in (
        make_train_step,
        make_nnx_train_step,
        dynamic_scale_grad,
        dynamic_scale_value_and_grad,
    ):
        with pytest.raises(TypeError) as caught:
            make(loss_fn, axis_name=axis)
        assert f"{make.__name__}: axis_name={axis!r}; expected the name" in str(
            caught.value
        )


def test_any_other_name_of_an_axis_is_taken():
    for axis in ("data", object(), (("rows", 0),)):
        make_train_step(loss_fn, axis_name=axis)


def test_arrays_that_are_not_donated_may_be_shared():
    state = make_state()
    loss = lambda params, batch: loss_fn(params, batch["a"] * batch["b"])  # noqa: E731
    make_train_step(loss)(state, {"a": B, "b": B})
    shared = make_state()
    shared = shared.replace(variables={"a": shared.params["w"]})
    make_eval_step(loss_fn)(shared, B)
    jax.jit(make_train_step(loss_fn))(shared, B)


SHARED = {
    "two fields": lambda s: (s.replace(variables={"a": s.params["w"]}), B),
    "the batch": lambda s: (s, s.params["w"]),
    "keys": lambda s: (s.replace(rngs=dict.fromkeys("ab", jax.random.key(0))), B),
}


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_in_two_places_is_named(share, devices):
    state = make_state()
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    state, batch = share(state)
    step = make_train_step(loss_fn)
    with pytest.raises(ValueError, match=r"train_step: .* and .* are the same array"):
        step(state, batch)
    # Nothing was deleted, and the advice works.
    new, _ = make_train_step(loss_fn, donate=False)(state, batch)
    assert new.step == state.step + 1


def test_both_places_are_named():
    state = make_state()
    state = state.replace(variables={"a": state.params["w"]})
    with pytest.raises(ValueError) as caught:
        make_train_step(loss_fn)(state, B)
    assert "state.params['w'] and state.variables['a'] are" in str(caught.value)


def test_an_optimizer_that_holds_the_parameters_can_be_donated():
    """Its first state is copied; it then trains as it does without donation."""
    ends, tx = [], optax.contrib.mechanize(optax.sgd(0.1))
    for donate in (True, False):
        model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = make_nnx_train_step(
            lambda model, batch: model(batch).sum(), donate=donate
        )
        scaler = init_scaler()
        for _ in range(2):
            scaler, _ = step(model, optimizer, scaler, B)
        ends.append(model.kernel[...])
    assert (ends[0] == ends[1]).all() and optimizer.step[...] == 2


def test_a_scaler_made_from_an_array_can_be_donated():
    value = jnp.float32(8)
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, batch: model(batch).sum())
    scaler, _ = step(model, optimizer, static_scaler(value), B)
    assert scaler["scaler"] == value


class Subclass(AmpTrainState):
    ema: dict


def test_unknown_fields_are_named():
    state = make_state()
    for state in (
        make_state(),
        Subclass.create(params={"w": B}, tx=optax.sgd(0.1), ema={}),
    ):
        name = type(state).__name__
        message = rf"^{name}.replace: unknown fields \['lr'\]; expected .*'rngs'.*\]"
        with pytest.raises(TypeError, match=message):
            state.replace(lr=0.1)
        assert state.replace(step=3).step == 3
    with pytest.raises(TypeError, match="'ema'.*replace_hyperparams"):
        state.replace(lr=0.1)
