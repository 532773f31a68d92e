"""Bad arguments, losses, states and calls: what was seen, and what to do."""

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from _models import linen_loss, linen_state, make_batch, nnx_loss, nnx_state
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
    AmpOptimizer,
    AmpTrainState,
    check_progress,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
    optim,
)

pytestmark = pytest.mark.once

X = jnp.ones(3)
EXAMPLES = jnp.ones((2, 3))
TRAIN_STEPS = (make_train_step, make_nnx_train_step)
STATE_STEPS = (make_train_step, make_eval_step)
TRANSFORMS = (dynamic_scale_grad, dynamic_scale_value_and_grad)

# Arguments of what makes a step or a gradient


def made_by(makers, fn, *rows):
    """Rows of a table: each of several functions is called in each of several ways."""
    return {
        f"^{make.__name__}: .*{message}": functools.partial(make, fn, **options)
        for make in makers
        for options, message in rows
    }


ARGUMENTS = {
    ValueError: {
        **made_by(
            TRAIN_STEPS,
            linear_loss,
            (dict(accum_steps=0), "accum_steps=0; expected"),
            (dict(accum_steps=1.5), "accum_steps=1.5; expected"),
            (dict(accum_steps=True), "accum_steps=True; expected"),
            (dict(redo_on_nan=-1), "redo_on_nan=-1"),
            (dict(redo_on_nan=np.bool_(True)), "redo_on_nan=.*True"),
        ),
        "redo_on_nan=1.5": lambda: dynamic_scale_grad(linear_loss, redo_on_nan=1.5),
        "state_shardings with jit=False": lambda: make_train_step(
            nnx_loss, state_shardings=3, jit=False
        ),
    },
    TypeError: {
        **made_by(TRAIN_STEPS, 3, ({}, r"loss_fn is int32\[\]; expected a function")),
        "make_eval_step: fn is a NoneType": lambda: make_eval_step(None),
        "fun is a NoneType; expected a function": lambda: dynamic_scale_grad(None),
        "holomorphic=True; expected a real loss": lambda: dynamic_scale_grad(
            jnp.sin, holomorphic=True
        ),
        # JAX and Python say it themselves.
        "unexpected keyword argument 'compute_dtype'": lambda: make_train_step(
            linear_loss, compute_dtype=jnp.float16
        ),
        r"missing 1 required .*'batch'": lambda: make_train_step(linear_loss)(
            linear_state()
        ),
        r"takes 2 positional arguments but 3 were given": lambda: make_train_step(
            linear_loss
        )(linear_state(), linear_batch(), 1.0),
    },
}


@raising(ARGUMENTS)
def test_arguments(call, error, message):
    raised(call, error, message)


def test_arguments_that_are_taken():
    for number in (int, np.int32, np.uint8, np.array, jnp.array):
        options = dict(accum_steps=number(2), redo_on_nan=number(1), jit=False)
        step = make_train_step(linear_loss, **options)
        shapes, _ = jax.eval_shape(step, linear_state(), linear_batch())
        assert shapes.step.shape == ()


# Leaves that are no arrays


def test_leaves_that_are_no_arrays():
    """JAX names them, and the way to them."""
    batch = linear_batch() | {"name": "digits"}
    step = make_nnx_train_step(lambda model, batch: model(batch["x"]).sum())
    calls = [
        functools.partial(make(linear_loss), linear_state()) for make in STATE_STEPS
    ]
    for call in (*calls, functools.partial(step, *linear_objects())):
        raised(functools.partial(call, batch), TypeError, r"'str'.* \S*\['name'\]")
    step = make_eval_step(lambda params, batch: {"name": "digits"}, jit=False)
    assert step(linear_state(), X)["name"] == "digits"


# Losses, and what they return


def pair(aux):
    return lambda params, batch: (params["w"].sum(), aux)


def linen_with(update):
    """The loss of a Linen model that makes something else of its collections."""

    def loss(params, batch, *, state, rngs):
        value, aux = linen_loss(params, batch, state=state, rngs=rngs)
        return value, {"variables": update(aux["variables"])}

    return run(loss, linen_state, make_batch, has_aux=True)


def grows(model, batch):
    model.seen = nnx.BatchStat(jnp.zeros(2))
    return model(batch["x"]).mean()


def fails(*args):
    raise ValueError("mine")


def statistics():
    return linear_state(variables={"batch_stats": {"mean": X}})


def measuring(result):
    return run(linear_loss, metrics_fn=lambda *_: result)


@dataclasses.dataclass
class Unregistered:
    mean: jax.Array


RETURNED = [
    (lambda p, b: p["w"], r"float32\[3\] as its loss.*mean\(\)"),
    (lambda p, b: p["w"].sum().astype(int), r"int32\[\] as its.*scalar float"),
    (lambda p, b: None, "a NoneType as its loss"),
    (lambda p, b: (p["w"].sum(), {}), "tuple as its loss.*has_aux=True"),
]
NO_AUX = {
    r"'str'.*component \[1\]\['name'\]": {"name": "resnet"},
    r"'str'.*component \[1\]\['aux'\]\[1\]": (1.0, "resnet"),
    r"Unregistered'.*component \[1\]\['aux'\]": Unregistered(1.0),
}
LOSSES = {
    TypeError: {
        **{message: run(loss) for loss, message in RETURNED},
        **{message: run(pair(aux), has_aux=True) for message, aux in NO_AUX.items()},
        r"make_train_step: linear_loss returned.*expected a \(loss, aux\) pair": run(
            linear_loss, has_aux=True
        ),
        "make_nnx_train_step: <lambda> returned": run_nnx(
            lambda model, batch: model(batch)
        ),
        r"metrics_fn: its result is float32\[\]; expect": measuring(1.0),
        r"'str'.*component \[1\]\['a'\]": measuring({"a": "b"}),
    },
    ValueError: {
        r"aux\['variables'\] with \['cache'\]; expected .* collections \[\]": run(
            pair({"variables": {"cache": 1}}), has_aux=True
        ),
        r"aux\['variables'\] with float32\[\]; expected a dict .* collections": run(
            lambda p, b: (linear_loss(p, b), {"variables": jnp.sum(b["x"])}),
            has_aux=True,
        ),
        r"\['batch_stats'\].*aux\['variables'\]": run(
            pair({"batch_stats": {"mean": X}}), statistics, has_aux=True
        ),
        r"\['BatchNorm_0'\]\['mean'\]: float32\[8\] before, float32": linen_with(
            lambda updates: jax.tree.map(lambda x: x[None], updates)
        ),
        r"\['mean'\]: float32\[8\] before, absent now": linen_with(
            lambda updates: {"batch_stats": {}}
        ),
        r"\['intermediates'\]; expected .*\['batch_stats'\]": linen_with(
            lambda updates: {"intermediates": {}}
        ),
        r"\['seen'\]: absent before, float32": run(grows, nnx_state, make_batch),
        r"\['loss'\], which the step reports": measuring({"loss": 1}),
        "^mine": run(fails),
    },
}


@raising(LOSSES)
def test_losses(call, error, message):
    raised(call, error, message)


def test_frozen_collections_are_taken():
    state, _ = linen_with(flax.core.freeze)()
    assert type(state.variables["batch_stats"]) is dict


@pytest.mark.parametrize(
    "batch, steps, message",
    [
        ({"x": X[:2], "y": np.ones(4)}, 2, r"\['x'\] has shape \(2,\); batch\['y'\] h"),
        ({"x": np.ones((3, 3)), "n": 3}, 3, r"batch\['n'\] has shape \(\)"),
        (linear_batch(), 3, r"batch\['x'\] has shape \(8, 3\)"),
    ],
)
def test_batches_that_do_not_split(batch, steps, message):
    call = run(pair({}), batch=lambda: batch, has_aux=True, accum_steps=steps)
    expected = f"the same for all.*accum_steps={steps}.*as a further argument"
    raised(call, ValueError, f"{message}.*{expected}")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients(transform):
    def grad(fun, **options):
        grad_fn = transform(fun, **options)
        return lambda: grad_fn({"w": X}, X, dynamic_scaler_state=init_scaler())

    for call, message in [
        *((grad(loss), message) for loss, message in RETURNED),
        (grad(RETURNED[0][0], has_aux=True), r"expected a \(loss, aux\) pair"),
        (grad(linear_loss, argnums=2), "argnums selects the argument 2; got 2"),
        (lambda: transform(linear_loss)(X), "missing .*'dynamic_scaler_state'"),
    ]:
        raised(call, TypeError, message)


# Models that sow


class Sows(nnx.Module):
    def __init__(self):
        self.linear = linear_objects()[0]

    def __call__(self, x):
        out = self.linear(x)
        self.sow(nnx.Intermediate, "out", out)
        return out.sum()


def popping(model, batch):
    return model(batch), nnx.pop(model, nnx.Intermediate)


def sowing_objects(loss, **options):
    model = Sows()
    optimizer = AmpOptimizer(model, optax.sgd(0.1))
    step = make_nnx_train_step(loss, accum_steps=2, **options)
    return [step(model, optimizer, EXAMPLES) for _ in range(2)]


def sowing_state(loss, **options):
    state = AmpTrainState.create(model=Sows(), tx=optax.sgd(0.1))
    return [make_train_step(loss, **options)(state, EXAMPLES)[1]]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("train", [sowing_objects, sowing_state])
def test_models_that_sow(train):
    """The advice works, with both steps."""
    advice = r"return it: \(loss, nnx.pop\(model, nnx.Intermediate\)\), with has_aux"
    message = rf"\['out'\]\[0\]: absent before, float32.*{advice}"
    raised(lambda: train(lambda m, b: m(b)), ValueError, message)
    metrics = train(popping, has_aux=True)[-1]
    (out,) = jax.tree.leaves(metrics["out"])
    assert out.size == 2


# States, and arrays in them


def bare(**fields):
    return linear_state().replace(**fields)


def objects_of(other, tx=None):
    """A model with the optimizer of another one."""
    return run_nnx(
        make=lambda: (
            linear_objects()[0],
            AmpOptimizer(other(), tx or optax.adam(0.1)),
        )
    )


def of_state(make, **changes):
    """A train state with the parameters or the optimizer of another one."""
    loss = lambda params, x: sum(map(jnp.sum, jax.tree.leaves(params))) + x.sum()  # noqa: E731
    return lambda: make_train_step(loss)(make().replace(**changes), EXAMPLES)


ADAM = functools.partial(linear_state, optax.adam(0.1))
STATES = {
    TypeError: {
        "train_step: state is a TrainState; expected an Amp": of_state(
            lambda: TrainState.create(apply_fn=None, params={"w": X}, tx=optax.sgd(0.1))
        ),
        "state is a Linear; .*make_nnx_train_step": lambda: make_train_step(sum_loss)(
            linear_objects()[0], X
        ),
        "state.opt_state is a tuple; expected an optax.Ap": of_state(
            bare, opt_state=()
        ),
        "state.rngs is .*; expected a dict": of_state(bare, rngs=jax.random.key(0)),
        "state.variables is a list; expected a": of_state(bare, variables=[1]),
        "train_step: model is a dict": run_nnx(make=lambda: ({}, linear_objects()[1])),
        "optimizer is an AmpTrainState; expected a flax_amp.AmpOptimizer": run_nnx(
            make=lambda: (linear_objects()[0], linear_state())
        ),
        # optax says what is missing
        "missing 3 required keyword-only arguments: 'value', 'grad', and": run(
            linear_loss, lambda: linear_state(optax.lbfgs(0.1))
        ),
    },
    ValueError: {
        r"state.scaler has the keys .*; expected \['adjust_factor', 'count'": of_state(
            bare, scaler={"scaler": X[0]}
        ),
        r"train_step: .*\['w'\]: float16; ex": of_state(
            bare, params={"w": X.astype(jnp.float16)}
        ),
        "train_step: 2 parameters are not float32.*kernel": run_nnx(
            make=lambda: linear_objects(param_dtype=jnp.float16)
        ),
        "train_step: wrt=.* selects no variable": run_nnx(
            make=lambda: linear_objects(wrt=nnx.Cache)
        ),
        r"make_train_step: .*params\['w'\]: \(1,\) before, \(3,\) now": of_state(
            ADAM, params={"w": X[:1]}
        ),
        r"make_nnx_train_step: .*\['kernel'\].*: \(3, 1\) before, \(3, 2\) now": (
            objects_of(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        ),
    },
}


@raising(STATES)
def test_states(call, error, message):
    raised(call, error, message)


SHARED = {
    r"state.params\['w'\] and state.variables\['a'\]": lambda s: (
        s.replace(variables={"a": s.params["w"]}),
        X,
    ),
    r"state.params\['w'\] and batch": lambda s: (s, s.params["w"]),
    r"state.params\['w'\] and args\[0\]\['x'\]": lambda s: (
        s,
        X,
        {"n": 1.0, "x": s.params["w"]},
    ),
}


@pytest.mark.parametrize("found", SHARED)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_in_two_places(found, devices):
    """With two devices, too, where the step must look before JAX does."""
    state = linear_state(optax.adam(0.1))
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    state, *inputs = SHARED[found](state)

    def loss(params, batch, further=0.0):
        return params["w"].sum() + sum(map(jnp.sum, jax.tree.leaves((batch, further))))

    step = make_train_step(loss)
    step(jax.tree.map(jnp.copy, state), X)  # a later state is checked as the first is
    message = f"train_step: {found}.* are the same array.*jnp.copy"
    raised(lambda: step(state, *inputs), ValueError, message)
    # Nothing was deleted, and the advice works.
    new, _ = make_train_step(loss, donate=False)(state, *inputs)
    assert new.step == state.step + 1


def test_nothing_walks_over_what_the_last_step_returned(monkeypatch):
    step = make_train_step(linear_loss)
    state, _ = step(linear_state(), linear_batch())
    model, optimizer = linear_objects()
    nnx_step = make_nnx_train_step(sum_loss)
    nnx_step(model, optimizer, X)
    monkeypatch.setattr("flax_amp._training.step_call.check_distinct", None)
    for _ in range(2):
        state, _ = step(state, linear_batch())
        nnx_step(model, optimizer, X)
    raised(lambda: step(linear_state(), linear_batch()), TypeError, "not callable")


def test_an_array_in_two_places_in_the_middle_of_a_run():
    """On one device JAX refuses it, and only then the step looks for the path."""
    step = make_train_step(lambda p, x, t=0.0: (p["w"] * x).sum() + jnp.sum(t))
    state, _ = step(linear_state(), X)
    message = r"state.params\['w'\] and args\[0\] are the same array"
    raised(lambda: step(state, X, state.params["w"]), ValueError, message)
    nnx_step = make_nnx_train_step(sum_loss)
    model, optimizer = linear_objects()
    nnx_step(model, optimizer, X)
    optimizer.teacher = nnx.clone(model)
    message = r"model\['bias'\] and optimizer\['teacher'\]\['bias'\] are the same"
    raised(lambda: nnx_step(model, optimizer, X), ValueError, message)


def test_arrays_that_are_deleted():
    state, batch = linear_state(), linear_batch()
    step = make_train_step(linear_loss)
    step(state, batch)
    advice = r".*early stopping.*jax.tree.map\(jnp.copy, state\).*donate=False"
    deleted = rf"step: state.* was deleted{advice}"
    for again in (step, make_eval_step(linear_loss)):
        raised(lambda again=again: again(state, batch), RuntimeError, deleted)
    # A teacher that shares its arrays, before and after the first step.
    (model, optimizer), x = linear_objects(), jnp.ones((2, 3))
    teacher = nnx.clone(model)
    step = make_nnx_train_step(
        lambda m, x, t=None: m(x).sum() - (t(x).sum() if t else 0)
    )
    shared = r"model\['bias'\] and modules\[0\]\['bias'\] are the same array"
    raised(lambda: step(model, optimizer, x, teacher), ValueError, shared)
    step(model, optimizer, x)
    deleted = rf"modules\[0\]\['bias'\] was deleted{advice}"
    raised(lambda: step(model, optimizer, x, teacher), RuntimeError, deleted)


def test_shardings_of_another_state():
    """JAX says where they do not fit."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

    def placed(state):
        return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))

    state = placed(linear_state(optim.adamw(0.1)))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(linear_loss, state_shardings=shardings)
    state, _ = step(state.replace_hyperparams(learning_rate=0.2), linear_batch())
    other = placed(AmpTrainState.create(params={"w": X}, tx=optim.sgd(0.1)))
    raised(lambda: step(other, linear_batch()), ValueError, "out_shardings|pytree")
    for some in (jax.tree.leaves(shardings)[0], None, shardings.replace(params=None)):
        step = make_train_step(linear_loss, state_shardings=some)
        state, _ = step(state, linear_batch())


# What a state is created from

CREATE = {
    ValueError: {
        r"9 parameters are not float32: \[0\]: float16, .*\[2\]: float16 and 6 m": dict(
            params=[jnp.ones(2, jnp.float16)] * 9
        ),
        r"\['key'\]: key<fry>": dict(params={"w": X, "key": jax.random.key(0)}),
        r"\['kernel'\]: float16": dict(
            params=None, model=linear_objects(param_dtype=jnp.float16)[0]
        ),
        "wrt=.*selects no variable": dict(
            params=None, model=linear_objects()[0], wrt=nnx.Cache
        ),
        "param_dtype='float16'; expected float32 or": dict(param_dtype="float16"),
        "has the keys": dict(scaler={"growth": 1}),
    },
    TypeError: {
        "params is a NoneType; expected a dict.*an nnx.Module as model": dict(
            params=None
        ),
        r"params is float32\[3\]; expected a dict": dict(params=X),
        "model is an AmpOptimizer; expected an nnx.Module": dict(
            params=None, model=linear_objects()[1]
        ),
        "model together with params": dict(model=linear_objects()[0]),
        "invalid PRNG key data": dict(rngs={"dropout": 0}),
        "rngs is .*; expected a dict of keys": dict(rngs=jax.random.key(0)),
        "variables is a list; expected a dict": dict(variables=[1]),
        "unexpected keyword argument 'batch_stats'": dict(batch_stats={}),
        "multiple values for keyword argument 'step'": dict(step=1),
    },
}


@raising(CREATE)
def test_create(call, error, message):
    options = dict(params={"w": X}, tx=optax.sgd(0.1)) | call
    raised(lambda: AmpTrainState.create(**options), error, message)


def test_small_messages():
    raised(linear_state().merge_model, TypeError, r"made with create\(model=")
    raised(lambda: linear_state().replace(lr=0.1), TypeError, "unexpected .*'lr'")


# Progress

progress = functools.partial(functools.partial, check_progress)
PLAIN = nnx.Optimizer(linear_objects()[0], optax.adam(0.1), wrt=nnx.Param)
PROGRESS = {
    TypeError: {
        "state is a dict; expected an AmpTrainState, an AmpOptimizer": progress({}),
        "does not count skipped steps.*is a tuple;.*AmpOptimizer": progress(PLAIN),
        "does not count skipped steps.*is a dict;.*apply_if_fin": progress(
            ({}, no_scaler())
        ),
        "metrics is a tuple; expected the dict of": progress(linear_state(), ()),
        "the state is traced; .* outside of jit": lambda: jax.jit(check_progress)(
            linear_state()
        ),
    },
    ValueError: {
        "has the keys": progress((ADAM().opt_state, {})),
        "max_skips=0; expected an integer of at least 1": progress(
            linear_state(), max_skips=0
        ),
    },
}


@raising(PROGRESS)
def test_check_progress(call, error, message):
    raised(call, error, f"check_progress: .*{message}")
