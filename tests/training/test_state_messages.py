"""Bad states and optimizers: one error that says what was seen and what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from _models import LinenNet
from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
    raising,
    run,
    run_nnx,
    sum_loss,
)
from flax_amp import (
    AmpTrainState,
    check_progress,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
    optim,
    static_scaler,
)
from flax_amp._training import step_call

pytestmark = pytest.mark.once

X = jnp.ones(3)


def loss(params, batch):
    return params["w"].sum() + batch.sum()


def bare(**fields):
    return lambda: linear_state().replace(**fields)


def without(key):
    return {k: v for k, v in init_scaler().items() if k != key}


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_states_of_a_step(make):
    plain = TrainState.create(apply_fn=None, params={"w": X}, tx=optax.sgd(0.1))
    step = make(linear_loss)
    for state, error, message in [
        (plain, TypeError, "state is a TrainState; expected an Amp"),
        ({"w": X}, TypeError, "state is a dict"),
        (bare(opt_state=())(), TypeError, "expected an optax.ApplyIfFiniteState"),
        *(
            (bare(scaler=without(key))(), ValueError, rf"a dict, lacks \['{key}'\]; ex")
            for key in ("scaler", "count", "max_scaler")
        ),
    ]:
        raised(lambda state=state: step(state, linear_batch()), error, message)


def test_a_donated_state_and_a_donated_scaler():
    state, batch = linear_state(), linear_batch()
    step = make_train_step(linear_loss)
    step(state, batch)
    deleted = r"step: state.* was deleted.*donate=Fal"
    for again in (step, make_eval_step(linear_loss)):
        raised(lambda again=again: again(state, batch), RuntimeError, deleted)
    kept, scaler = linear_objects(), init_scaler()
    step = make_nnx_train_step(sum_loss)
    step(*kept, scaler, X)
    deleted = r"train_step: scaler\['\w+'\] was deleted"
    raised(lambda: step(*kept, scaler, X), RuntimeError, deleted)


SHARED = {
    "two fields": lambda s: (s.replace(variables={"a": s.params["w"]}), X),
    "the batch": lambda s: (s, s.params["w"]),
    "keys": lambda s: (s.replace(rngs=dict.fromkeys("ab", jax.random.key(0))), X),
}


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_in_two_places(share, devices, monkeypatch):
    # JAX itself refuses on one device, and only then the step looks for the path.
    found = lambda: devices > 1  # noqa: E731
    monkeypatch.setattr(step_call, "has_several_devices", found)
    state = linear_state(optax.adam(0.1))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    state, batch = share(state)
    step = make_train_step(loss)
    step(jax.tree.map(jnp.copy, state), X)  # a later call is checked as the first is
    with pytest.raises(ValueError, match="train_step: .* are the same array") as caught:
        step(state, batch)
    if share is SHARED["two fields"]:
        both = "state.params['w'] and state.variables['a'] are"
        assert both in str(caught.value)
    # Nothing was deleted, and the advice works.
    step = make_train_step(loss, donate=False)
    new, _ = step(state, batch)
    assert new.step == state.step + 1


def test_arrays_that_are_not_donated_may_be_shared():
    loss = lambda params, batch: (params["w"] * batch["a"] * batch["b"]).sum()  # noqa: E731
    batch = {"a": X, "b": X}
    make_train_step(loss)(linear_state(), batch)
    shared = linear_state()
    shared = shared.replace(variables={"a": shared.params["w"]})
    make_eval_step(loss)(shared, batch)
    jax.jit(make_train_step(loss))(shared, batch)


def test_what_an_optimizer_or_a_scaler_shares_is_copied():
    """The first state of mechanize holds the parameters; a scaler one array twice."""
    ends, tx = [], optax.contrib.mechanize(optax.sgd(0.1))
    for donate in (True, False):
        model, optimizer = linear_objects(tx=tx)
        step = make_nnx_train_step(sum_loss, donate=donate)
        scaler = static_scaler(jnp.float32(8))
        for _ in range(2):
            scaler, _ = step(model, optimizer, scaler, X)
        ends.append(model.kernel[...])
        assert scaler["scaler"] == 8
    assert (ends[0] == ends[1]).all() and optimizer.step[...] == 2


# what is an array of the model, and how the message names both
SHARED_BY_NNX = {
    "batch": (lambda model, scaler: (model.bias[...],), r"model\['bias'\] and batch"),
    "args": (lambda m, s: (X, m.kernel[...]), r"model\['kernel'\] and args\[0\]"),
    "scaler": (lambda m, s: (X, s["scaler"]), r"scaler\['scaler'\] and args\[0\]"),
}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("share", SHARED_BY_NNX.values(), ids=SHARED_BY_NNX)
def test_an_array_of_an_nnx_model_in_two_places(share, several, monkeypatch):
    monkeypatch.setattr(step_call, "has_several_devices", lambda: several)
    model, optimizer = linear_objects()

    def loss(model, x, w=0.0):
        return model(X).sum() + jnp.sum(x) + jnp.sum(w)

    step = make_nnx_train_step(loss)
    scaler, _ = step(model, optimizer, None, X)
    inputs, message = share
    shared = inputs(model, scaler)
    message += " are the same array.*jnp.copy"
    raised(lambda: step(model, optimizer, scaler, *shared), ValueError, message)
    scaler, _ = step(model, optimizer, scaler, *map(jnp.copy, shared))
    assert optimizer.step[...] == 2


class Subclass(AmpTrainState):
    ema: dict


def test_unknown_fields():
    for state in (linear_state(), Subclass.create(params={"w": X}, tx=MINE, ema={})):
        name = type(state).__name__
        message = rf"^{name}.replace: unknown fields \['lr'\]; expected .*'rngs'.*\]"
        raised(lambda state=state: state.replace(lr=0.1), TypeError, message)
        assert state.replace(step=3).step == 3
    raised(lambda: state.replace(lr=0.1), TypeError, "'ema'.*replace_hyperparams")


def test_unknown_fields_of_a_new_state():
    """They are those of a Flax `TrainState` with batch statistics and a scale."""
    fields = dict(batch_stats={}, dynamic_scale=None)
    for cls, given in ((AmpTrainState, {}), (Subclass, {"ema": {}})):
        message = (
            rf"^{cls.__name__}.create: unknown fields \['batch_stats', "
            r"'dynamic_scale'\]; expected some of .*'rngs'.*pass collections such as "
            r"batch_stats as variables=.*the loss scale as scaler"
        )
        create = functools.partial(cls.create, params={"w": X}, tx=MINE, **given)
        raised(lambda create=create: create(**fields), TypeError, message)
        assert create().step == 0
        for name in ("graphdef", "opt_state", "step"):
            message = rf"create: got \['{name}'\], which it makes.*as model=.*Leave"
            raised(lambda c=create, n=name: c(**{n: None}), TypeError, message)


# Optimizers


def fails(grads, state, params=None):
    raise TypeError("mine")


MINE = optax.GradientTransformation(lambda params: (), fails)
LOSS_TOO = "the optimizer's update asks for {} too.*optax.adamw"


OPTIMIZERS = {
    TypeError: {
        "^mine": run(linear_loss, lambda: linear_state(MINE)),
        **{
            f"{name}: {LOSS_TOO.format(asked)}": call
            for tx, asked in [
                (optax.lbfgs(0.1), "value, grad, value_fn"),
                (
                    optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
                    "value",
                ),
            ]
            for name, call in [
                ("make_train_step", run(linear_loss, lambda tx=tx: linear_state(tx))),
                (
                    "make_nnx_train_step",
                    run_nnx(make=functools.partial(linear_objects, tx=tx)),
                ),
            ]
        },
        "model is a dict": run_nnx(make=lambda: ({}, linear_objects()[1])),
        "expected an nnx.Optimizer": run_nnx(
            make=lambda: (linear_objects()[0], optax.sgd(0.1))
        ),
    },
    ValueError: {
        "train_step: 2 parameters are not float32.*kernel": run_nnx(
            make=lambda: linear_objects(param_dtype=jnp.float16)
        ),
        "train_step: wrt=.*selects no variable": run_nnx(
            make=lambda: linear_objects(wrt=nnx.Cache)
        ),
    },
}


@raising(OPTIMIZERS)
def test_optimizers(call, error, message):
    raised(call, error, message)


# What a state is created from

HALF = {
    "dense": {"kernel": jnp.ones(2, jnp.float16), "bias": jnp.ones(2)},
    "norm": np.ones(2, np.float64),
}
NESTED = optax.MultiSteps(optax.apply_if_finite(optax.adam(0.1), 5), 2)


CREATE = {
    ValueError: {
        r"2 .* float32: .*\['kernel'\]: float16, .*\['norm'\]: float64; .*param": dict(
            params=HALF
        ),
        r"9 parameters are not float32: \[0\]: float16, .*\[2\]: float16 and 6 m": dict(
            params=[jnp.ones(2, jnp.float16)] * 9
        ),
        r"\['key'\] is a PRNG key; expected arrays": dict(
            params={"w": X, "key": jax.random.key(0)}
        ),
        r"\['kernel'\]: float16": dict(
            params=None, model=linear_objects(param_dtype=jnp.float16)[0]
        ),
        "selects no variable of the model": dict(
            params=None, model=linear_objects()[0], wrt=nnx.Cache
        ),
        "tx is MultiSteps around apply_if_finite": dict(tx=NESTED),
        "is MultiSteps around apply_if_finite": dict(
            tx=optax.chain(optax.identity(), NESTED.gradient_transformation())
        ),
        "holds the collection 'params'": dict(
            variables={"params": {}, "batch_stats": {}}
        ),
        "unknown keys": dict(scaler={"growth": 1}),
    },
    TypeError: {
        **{
            f"params is a {kind}; expected a dict.*{{'w': array}}": dict(params=params)
            for kind, params in [
                ("Array.*", X),
                ("float", 3.0),
                ("str", "w"),
                ("Rngs", nnx.Rngs(0)),
                ("AmpTrainState", linear_state()),
            ]
        },
        "got neither params nor model": dict(params=None),
        "model is a LinenNet; expected an nnx.Module": dict(
            params=None, model=LinenNet()
        ),
        "model together with params": dict(model=linear_objects()[0]),
        "tx is a NoneType": dict(tx=None),
        r"tx is the function sgd.*Call it: optim.sgd\(": dict(tx=optim.sgd),
        "rngs is a .*expected a dict": dict(rngs=jax.random.key(0)),
        r"rngs\['dropout'\] is int": dict(rngs={"dropout": 0}),
        r"rngs\['dropout'\] is key<fry>\[2\]": dict(
            rngs={"dropout": jax.random.split(jax.random.key(0))}
        ),
        r"rngs\['dropout'\] is float32\[2\]": dict(rngs={"dropout": jnp.ones(2)}),
        "variables is a list; expected a dict": dict(variables=[1]),
        "create: scaler is a int; expected a dict.*no_s": dict(scaler=3),
        "ema": dict(ema=1),
    },
}


@raising(CREATE)
def test_create(call, error, message):
    options = dict(params={"w": X}, tx=optax.sgd(0.1)) | call
    raised(lambda: AmpTrainState.create(**options), error, message)


COUNTLESS = linear_objects(tx=optax.adam(0.1))[1]
PROGRESS = {
    TypeError: {
        "state is a dict": ({},),
        "state is a tuple of int; expected an AmpTrainState, a pair": ((3,),),
        "state is a tuple of AmpTrainState, dict; exp": ((linear_state(), {}),),
        "does not count skipped steps.*is a tuple;.*apply_if_fin": (
            (COUNTLESS, no_scaler()),
        ),
        "does not count skipped steps.*is a dict;.*apply_if_fin": (({}, {}),),
        "does not count .* is a list": (bare(opt_state=[])(),),
        **{
            f"metrics is a {kind}; expected the dict of": (linear_state(), metrics)
            for kind, metrics in [
                ("float", 3.0),
                ("list", [1.0]),
                ("str", "loss"),
                ("ndarray", np.ones(2)),
                ("tuple", ()),
            ]
        },
    },
    ValueError: {
        "state.scaler, a NoneType, lacks .*'count'": (bare(scaler=None)(),),
        "state.scaler, a dict, lacks .*'count'": (bare(scaler={})(),),
        "state.scaler.*lacks .*'adjust.*'count'": (bare(scaler={"scaler": X[0]})(),),
    },
}


@raising(PROGRESS)
def test_check_progress(call, error, message):
    raised(lambda: check_progress(*call), error, f"check_progress: .*{message}")


@pytest.mark.parametrize("skips", [0, 2.5, "3"])
def test_max_skips_and_merge_model(skips):
    message = f"max_skips={skips!r}; expected an integer of at least 1. Leave it"
    state = linear_state()
    raised(lambda: check_progress(state, max_skips=skips), ValueError, message)
    raised(state.merge_model, TypeError, "expected one made with create.model=")
