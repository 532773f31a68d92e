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
    EmaState,
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
EXAMPLES = jnp.ones((2, 3))


def loss(params, batch):
    return sum(map(jnp.sum, jax.tree.leaves(params))) + batch.sum()


def bare(**fields):
    return linear_state().replace(**fields)


# The state of a call, and arrays in it


STATES = {
    TypeError: {
        "state is a TrainState; expected an Amp": lambda: TrainState.create(
            apply_fn=None, params={"w": X}, tx=optax.sgd(0.1)
        ),
        "state is a dict": lambda: {"w": X},
        r"state is a Linear; .*make_nnx_train_step, .*nnx.jit\(flax_amp.amp": lambda: (
            linear_objects()[0]
        ),
        "state.opt_state is a tuple; expected an optax.Ap": lambda: bare(opt_state=()),
        "state.rngs is a NoneType; expected a dict": lambda: bare(rngs=None),
        r"state.rngs is a (PRNGKeyArray|\w*Tracer); expected": lambda: bare(
            rngs=jax.random.key(0)
        ),
        "state.variables is a NoneType; expected a": lambda: bare(variables=None),
    },
    ValueError: {
        r"state.scaler, a dict, lacks \['count'\]; ex": lambda: bare(
            scaler={k: v for k, v in init_scaler().items() if k != "count"}
        )
    },
}


@raising(STATES)
def test_states_of_a_step(call, error, message):
    for make in (make_train_step, make_eval_step):
        step = functools.partial(make(linear_loss), call(), linear_batch())
        raised(step, error, f"{make.__name__[5:]}: {message}")
    step = functools.partial(make_train_step(linear_loss, jit=False), call(), {})
    raised(step, error, f"train_step: {message}")


def test_a_donated_state_and_a_donated_scaler():
    state, batch = linear_state(), linear_batch()
    step = make_train_step(linear_loss)
    step(state, batch)
    deleted = r"step: state.* was deleted.*donate=Fal"
    for again in (step, make_eval_step(linear_loss)):
        raised(lambda again=again: again(state, batch), RuntimeError, deleted)
    # Also before anything looks at its scaler.
    deleted = "'max_scaler'.*deleted"
    state = linear_state()
    state.scaler["max_scaler"].delete()
    step = make_train_step(linear_loss)
    raised(lambda: step(state, batch), RuntimeError, deleted)
    kept, scaler = linear_objects(), init_scaler()
    step = make_nnx_train_step(sum_loss)
    step(*kept, scaler, X)
    deleted = r"train_step: scaler\['\w+'\] was deleted"
    raised(lambda: step(*kept, scaler, X), RuntimeError, deleted)


def two_fields(state):
    return state.replace(variables={"a": state.params["w"]}), X


SHARED = {
    r"state.params\['w'\] and state.variables\['a'\]": two_fields,
    r"state.params\['w'\] and batch": lambda s: (s, s.params["w"]),
    r"state.params\['w'\] and args\[0\]\['x'\]": lambda s: (
        s,
        X,
        {"n": 1.0, "x": s.params["w"]},
    ),
    "state.rngs": lambda s: (s.replace(rngs=dict.fromkeys("ab", jax.random.key(0))), X),
}


@pytest.mark.parametrize("found", SHARED)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_in_two_places(found, devices, monkeypatch):
    # JAX itself refuses on one device, and only then the step looks for the path.
    monkeypatch.setattr(step_call, "has_several_devices", lambda: devices > 1)
    state = linear_state(optax.adam(0.1))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    state, *inputs = SHARED[found](state)

    def with_args(params, batch, further=0.0):
        return loss(params, batch) + sum(map(jnp.sum, jax.tree.leaves(further)))

    step = make_train_step(with_args)
    step(jax.tree.map(jnp.copy, state), X)  # a later call is checked as the first is
    message = f"train_step: {found}.* are the same array"
    raised(lambda: step(state, *inputs), ValueError, message)
    # Nothing was deleted, and the advice works.
    step = make_train_step(with_args, donate=False)
    new, _ = step(state, *inputs)
    assert new.step == state.step + 1


def test_arrays_that_are_not_donated_may_be_shared():
    product = lambda params, batch: (params["w"] * batch["a"] * batch["b"]).sum()  # noqa: E731
    batch = {"a": X, "b": X}
    make_train_step(product)(linear_state(), batch)
    shared, _ = two_fields(linear_state())
    make_eval_step(product)(shared, batch)
    jax.jit(make_train_step(product))(shared, batch)


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


# how a message names an array of the model or the scaler, and where it is passed again
SHARED_BY_NNX = {
    r"model\['bias'\] and batch": lambda model, scaler: (model.bias[...],),
    r"model\['kernel'\] and args\[0\]": lambda m, s: (X, m.kernel[...]),
    r"scaler\['scaler'\] and args\[0\]": lambda m, s: (X, s["scaler"]),
}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("found", SHARED_BY_NNX)
def test_an_array_of_an_nnx_model_in_two_places(found, several, monkeypatch):
    monkeypatch.setattr(step_call, "has_several_devices", lambda: several)
    model, optimizer = linear_objects()

    def loss(model, x, w=0.0):
        return model(X).sum() + jnp.sum(x) + jnp.sum(w)

    step = make_nnx_train_step(loss)
    scaler, _ = step(model, optimizer, None, X)
    shared = SHARED_BY_NNX[found](model, scaler)
    message = f"{found} are the same array.*jnp.copy"
    raised(lambda: step(model, optimizer, scaler, *shared), ValueError, message)
    scaler, _ = step(model, optimizer, scaler, *map(jnp.copy, shared))
    assert optimizer.step[...] == 2


# Optimizers, and states that do not belong together


def fails(grads, state, params=None):
    raise TypeError("mine")


MINE = optax.GradientTransformation(lambda params: (), fails)
LOSS_TOO = "the optimizer's update asks for {} too.*optax.adamw"
TOO_MANY = optax.apply_if_finite(optax.sgd(0.1), 2**31)
UPDATE_FAILED = r"flax_amp: {}: the update .* failed. If .* make .*int32"
STRUCTURE = ".*expected the same leaves and shapes.*anew"
OTHERS = ".*: it was made for another model or by another optimizer: .*"


class Deep(nnx.Module):
    def __init__(self):
        self.linear = linear_objects()[0]


def of_state(make, **changes):
    """A train state with the parameters or the optimizer of another one."""
    return lambda: make_train_step(loss)(make().replace(**changes), EXAMPLES)


def of_objects(other, tx=None):
    """A model with the optimizer of another one."""

    def objects():
        optimizer = nnx.Optimizer(other(), tx or optax.adam(0.1), wrt=nnx.Param)
        return linear_objects()[0], optimizer

    return run_nnx(make=objects)


ADAM = functools.partial(linear_state, optax.adam(0.1))
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
        r"train_step: .*\['w'\]: float16; ex": run(
            linear_loss, lambda: bare(params={"w": X.astype(jnp.float16)})
        ),
        "train_step: 2 parameters are not float32.*kernel": run_nnx(
            make=lambda: linear_objects(param_dtype=jnp.float16)
        ),
        "train_step: wrt=.*selects no variable": run_nnx(
            make=lambda: linear_objects(wrt=nnx.Cache)
        ),
        rf"make_train_step{OTHERS}mu\['v'\]: absent in its state, \(3,\) for these para"
        ".*; expected.* anew": of_state(ADAM, params={"v": X}),
        f"make_train_step{OTHERS}absent for these parameters": of_state(
            linear_state, tx=optax.adam(0.1)
        ),
        rf"make_nnx_train_step{OTHERS}\[0\].mu\['linear'\]\['bias'\]: \(1,\) in its "
        "state.* and 5 more; expected.* anew": of_objects(Deep),
        r"make_train_step: .*params\['w'\]: \(1,\) before, \(3,\) now"
        + STRUCTURE: of_state(ADAM, params={"w": X[:1]}),
        r"make_nnx_train_step: .*\['kernel'\].*: \(3, 1\) before, \(3, 2\) now"
        + STRUCTURE: of_objects(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
    },
    Exception: {
        UPDATE_FAILED.format("make_train_step"): of_state(
            lambda: linear_state(TOO_MANY)
        ),
        UPDATE_FAILED.format("make_nnx_train_step"): of_objects(
            lambda: linear_objects()[0], TOO_MANY
        ),
    },
    RuntimeError: {
        r"no state.*Inside of optax.chain .*, pass tx.to_optax\(\)": of_state(
            lambda: linear_state(optax.chain(optax.clip(1.0), optim.adam(0.1)))
        ),
    },
}


@raising(OPTIMIZERS)
def test_optimizers(call, error, message):
    raised(call, error, message)


def on_one_device(state):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


@pytest.mark.parametrize(
    "other",
    [
        lambda state: state.replace_hyperparams(b1=0.8),
        lambda state: linear_state(optim.sgd(0.1)),
        lambda state: AmpTrainState.create(params={"v": X}, tx=optim.adamw(0.1)),
    ],
    ids=["static number", "another tx", "other parameters"],
)
def test_shardings_of_another_state(other):
    state = on_one_device(linear_state(optim.adamw(0.1)))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(loss, state_shardings=shardings)
    message = "(?s)state_shardings do not fit the state: .*static numbers. Make the st"
    raised(lambda: step(on_one_device(other(state)), EXAMPLES), ValueError, message)


def test_shardings():
    state = on_one_device(linear_state(optim.adamw(0.1)))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(loss, state_shardings=shardings)
    state, _ = step(state.replace_hyperparams(learning_rate=0.2), EXAMPLES)
    for some in (jax.tree.leaves(shardings)[0], None, shardings.replace(params=None)):
        state, _ = make_train_step(loss, state_shardings=some)(state, EXAMPLES)
    message = "(?s)make_train_step: state_shardings holds something that is not a shard"
    for leaf in ("data", 3, X):
        for wrong in (leaf, linear_state().replace(params={"w": leaf})):
            make = functools.partial(make_train_step, loss, state_shardings=wrong)
            raised(make, TypeError, rf"{message}ing \(.*; expected one fo")


# What a state is created from, and what is replaced in it


def subclassed(**fields):
    return EmaState.create(**dict(params={"w": X}, tx=MINE, ema={}) | fields)


@pytest.mark.parametrize("make", [linear_state, subclassed])
def test_unknown_fields(make):
    """Those of a new state are as in a `TrainState` with statistics and a scale."""
    state = make()
    name = type(state).__name__
    for fields, error, message in [
        (dict(lr=0.1), TypeError, r"unknown fields \['lr'\]; expected .*'rngs'.*\]"),
        (dict(lr=0.1), TypeError, "replace_hyperparams"),
        (dict(precision="fp9"), ValueError, "precision is 'fp9'; expected one"),
    ]:
        call = functools.partial(state.replace, **fields)
        raised(call, error, f"^{name}.replace: .*{message}")
    assert state.replace(step=3).step == 3
    message = (
        rf"^{name}.create: unknown fields \['batch_stats', 'dynamic_scale'\]; expected "
        "some of .*'rngs'.*pass collections such as batch_stats as variables=.*the "
        "loss scale as scaler"
    )
    create = functools.partial(make, batch_stats={}, dynamic_scale=None)
    raised(create, TypeError, message)
    for field in ("graphdef", "opt_state", "step"):
        message = rf"create: got \['{field}'\], which it makes.*as model=.*Leave"
        raised(functools.partial(make, **{field: None}), TypeError, message)


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
        "tx is MultiSteps around apply_if_finite": dict(
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
                ("Rngs", nnx.Rngs(0)),
            ]
        },
        "got neither params nor model": dict(params=None),
        "model is a LinenNet; expected an nnx.Module": dict(
            params=None, model=LinenNet()
        ),
        "model together with params": dict(model=linear_objects()[0]),
        "got wrt=.*LoRAParam.* without model; .*nnx.Module": dict(wrt=nnx.LoRAParam),
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


# Progress


progress = functools.partial(functools.partial, check_progress)
COUNTLESS = linear_objects(tx=optax.adam(0.1))[1]
PROGRESS = {
    TypeError: {
        "state is a dict": progress({}),
        "state is a tuple of int; expected an AmpTrainState, a pair": progress((3,)),
        "state is a tuple of AmpTrainState, dict; exp": progress((linear_state(), {})),
        "does not count skipped steps.*is a tuple;.*apply_if_fin": progress(
            (COUNTLESS, no_scaler())
        ),
        "does not count skipped steps.*is a dict;.*apply_if_fin": progress(({}, {})),
        "does not count .* is a list": progress(bare(opt_state=[])),
        **{
            f"metrics is a {kind}; expected the dict of": progress(
                linear_state(), metrics
            )
            for kind, metrics in [("float", 3.0), ("tuple", ())]
        },
    },
    ValueError: {
        "state.scaler, a NoneType, lacks .*'count'": progress(bare(scaler=None)),
        "state.scaler.*lacks .*'adjust.*'count'": progress(
            bare(scaler={"scaler": X[0]})
        ),
        **{
            f"max_skips={skips!r}; expected an integer of at least 1. Leave it": (
                progress(linear_state(), max_skips=skips)
            )
            for skips in (0, 2.5)
        },
    },
}


@raising(PROGRESS)
def test_check_progress(call, error, message):
    raised(call, error, f"check_progress: .*{message}")


def test_merge_model():
    message = "expected one made with create.model="
    raised(linear_state().merge_model, TypeError, message)
