"""Bad arguments, losses and calls: one error that says what was seen and what to do."""

import dataclasses
import functools
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
    AmpTrainState,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
)

pytestmark = pytest.mark.once

X = jnp.ones(3)
EXAMPLES = jnp.ones((2, 3))
TRAIN_STEPS = (make_train_step, make_nnx_train_step)
STATE_STEPS = (make_train_step, make_eval_step)
TRANSFORMS = (dynamic_scale_grad, dynamic_scale_value_and_grad)

# Arguments of what makes a step or a gradient


def made_by(makers, *rows):
    """Rows of a table: each of several functions is called in each of several ways."""
    return {
        f"^{make.__name__}: .*{message}": functools.partial(make, fn, **options)
        for make in makers
        for fn, options, message in rows
    }


def with_options(*rows):
    return [(linear_loss, options, message) for options, message in rows]


AXES = [3, ("data", 3), ["data"]]
A_FUNCTION = r"metrics_fn is a int; expected a function of \(state, grads"

ARGUMENTS = {
    ValueError: {
        **made_by(
            TRAIN_STEPS,
            *with_options(
                (dict(accum_steps=0), "accum_steps=0; expected"),
                (dict(accum_steps=1.5), "accum_steps=1.5; expected"),
                (dict(accum_steps=True), "accum_steps=True; expected"),
                (dict(redo_on_nan=-1), "redo_on_nan=-1"),
                (dict(redo_on_nan=np.bool_(True)), "redo_on_nan=.*True"),
            ),
        ),
        **made_by(TRANSFORMS, (linear_loss, dict(redo_on_nan=1.5), "redo_on_nan=1.5")),
        "state_shardings with jit=False": lambda: make_train_step(
            nnx_loss, state_shardings=3, jit=False
        ),
    },
    TypeError: {
        "compute_dtype.*int8": lambda: make_train_step(sum, compute_dtype=jnp.int8),
        "compute_dtype.*uint8": lambda: make_nnx_train_step(sum, compute_dtype="uint8"),
        "compute_dtype.*float17": lambda: make_eval_step(sum, compute_dtype="float17"),
        **made_by(
            TRAIN_STEPS,
            (3, {}, "loss_fn is a int; expected a function"),
            *with_options(
                (dict(metrics_fn=3), A_FUNCTION),
                (dict(metrics_fn=lambda g: {}), r"signature \(g\).*all three"),
                (dict(check_update=1), "check_update is a int; expected True or F"),
            ),
        ),
        "make_eval_step: fn is a NoneType": lambda: make_eval_step(None),
        "make_nnx_train_step.*'rngs'.*before keywords": lambda: make_nnx_train_step(
            lambda model, batch, *, rngs: 0.0
        ),
        **made_by(
            STATE_STEPS,
            (lambda params: 0.0, {}, r"signature \(params\) \(too many positional"),
            (
                lambda p, b, *, key: 0.0,
                {},
                "'key'.*keywords state and rngs.*functools",
            ),
            (lambda p, state, b: 0.0, {}, "multiple values for argument 'state'"),
        ),
        **made_by(
            TRANSFORMS,
            (None, {}, "fun is a NoneType; expected a function"),
            (jnp.sin, dict(holomorphic=True), "holomorphic=True; expected a real loss"),
        ),
        **made_by(
            (*TRAIN_STEPS, *TRANSFORMS),
            *with_options(
                *(
                    (dict(axis_name=axis), re.escape(f"axis_name={axis!r}; expected"))
                    for axis in AXES
                )
            ),
        ),
    },
}


@raising(ARGUMENTS)
def test_arguments(call, error, message):
    raised(call, error, message)


def test_arguments_that_are_taken():
    for axis in ("data", object(), (("rows", 0),)):
        make_train_step(linear_loss, axis_name=axis)
    for number in (int, np.int32, np.uint8, np.array, jnp.array):
        options = dict(accum_steps=number(2), redo_on_nan=number(1), jit=False)
        step = make_train_step(linear_loss, **options)
        shapes, _ = jax.eval_shape(step, linear_state(), linear_batch())
        assert shapes.step.shape == ()


# Arguments of a call


def step_calls():
    """Each step, the arguments of a call, and how a message lists them."""
    for make in STATE_STEPS:
        for jit in (True, False):
            args = linear_state(), linear_batch()
            yield make(linear_loss, jit=jit), args, r"\(state, batch, \*args\)"
    args = (*linear_objects(), None, EXAMPLES)
    names = r"\(model, optimizer, scaler, batch, \*args\)"
    yield make_nnx_train_step(sum_loss), args, names


def test_arguments_that_a_step_does_not_take():
    for step, args, names in step_calls():
        *first, batch = args
        for call, seen in [
            (functools.partial(step, *args, rngs=X), "unexpected .* 'rngs'"),
            (functools.partial(step, *first), "missing .* argument: 'batch'"),
        ]:
            advice = "Pass what else the loss takes by position, after the batch"
            message = rf"{step.__name__}: .*{seen}; expected the arguments {names}"
            raised(call, TypeError, rf"^{message}\. {advice}")
        step(*first, batch=batch)


def weighted(params, batch, weight, shift):
    return weight * linear_loss(params, batch | {"x": batch["x"] + shift["x"]}), {}


FURTHER = [
    (linear_loss, (1.0,), r"linear_loss has .*\(params, batch\) \(too many"),
    (weighted, (1.0,), r"weighted .*\(params, batch, weight, shift\) .*'shift'"),
    (weighted, (), "weighted has the signature .*'weight'"),
]


@pytest.mark.parametrize("make", [*STATE_STEPS, make_nnx_train_step])
def test_further_arguments(make):
    first = [linear_state()]
    if make is make_nnx_train_step:
        first = [*linear_objects(), None]
    for loss, args, seen in FURTHER:
        message = f"^{seen}.*; the step got {len(args)} further.*batch. Expected"
        raised(functools.partial(make(loss), *first, {}, *args), TypeError, message)
    call = functools.partial(make(weighted), *first, linear_batch(), 1.0, {"x": "name"})
    raised(call, TypeError, r"got args\[1\]\['x'\], a str; expected arrays and num")


NOT_NUMERIC = {
    "a str": "name",
    "a function": linear_loss,
    "a NumPy array of object": np.array([None]),
    "a NumPy array of datetime64.*": np.array(["2020"], "datetime64"),
}


@pytest.mark.parametrize("kind", NOT_NUMERIC)
def test_leaves_that_are_no_arrays(kind):
    leaf = NOT_NUMERIC[kind]
    batch = linear_batch() | {"name": leaf}
    state, returned = linear_state(), rf"eval_step: .*returned \['name'\], {kind}; exp"
    step = make_nnx_train_step(lambda model, batch: model(batch["x"]).sum())
    calls = [functools.partial(make(linear_loss), state) for make in STATE_STEPS]
    for call in (*calls, functools.partial(step, *linear_objects(), None)):
        expected = rf"step: got batch\['name'\], {kind}; expected arrays and numbers"
        raised(functools.partial(call, batch), TypeError, expected)
    for fields, path in [
        ({"w": {"w": leaf}}, r"params\['w'\]"),
        ({"variables": {"a": leaf}}, r"variables\['a'\]"),
    ]:
        message = rf"AmpTrainState.create: got {path}.*, {kind}; expected arrays and"
        raised(functools.partial(linear_state, **fields), TypeError, message)
    # What a compiled step returns.
    bare = make_eval_step(lambda params, batch: leaf)
    raised(lambda: bare(state, X), TypeError, f"returned {kind}; expected")
    step = make_eval_step(lambda params, batch: {"name": leaf})
    raised(lambda: step(state, X), TypeError, f"{returned}.*can return")
    open_step = make_eval_step(lambda params, batch: {"name": leaf}, jit=False)
    assert open_step(state, X)["name"] is leaf


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
    r"aux with the keys \['a', 0\]; expected only strings": {"a": 1.0, 0: 1.0},
    r"the keys \['variables', 0\]; expected only st": {"variables": {}, 0: 1.0},
    r"returned aux\['name'\], a str; expected arr": {"name": "resnet"},
    r"returned aux\[1\], a str; expected arr": (1.0, "resnet"),
    r"returned aux, a Unregistered; .*flax.struct.dataclass": Unregistered(1.0),
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
        "metrics_fn: its result is a float; expect": measuring(1.0),
        r"the names \[0\]; expected strings": measuring({0: 1.0}),
        r"metrics\['a'\], a str; expected arrays": measuring({"a": "b"}),
        "multiple values for argument 'state'.*rngs come after them": lambda: (
            make_train_step(lambda params, batch, weight, state: 0.0)(
                linear_state(), {}, 1.0, 2.0
            )
        ),
    },
    ValueError: {
        r"aux\['variables'\] with \['cache'\]; expected .* collections \[\]": run(
            pair({"variables": {"cache": 1}}), has_aux=True
        ),
        r"aux\['variables'\] with \w*Tracer; expected a dict .* collections": run(
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
        "with NoneType; expected a dict": linen_with(lambda updates: None),
        r"\['seen'\]: absent before, float32": run(grows, nnx_state, make_batch),
        "model's own state is collected": run(
            lambda model, batch: (model(batch["x"]).sum(), {"variables": {"n": 1}}),
            nnx_state,
            make_batch,
            has_aux=True,
        ),
        r"\['loss'\], which the step reports": measuring({"loss": 1}),
        "^mine": run(fails),
    },
    NameError: {
        "make_train_step: axis_name='data' is not the axis of a map around this c": run(
            linear_loss, axis_name="data"
        ),
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
        return lambda: transform(fun, **options)({"w": X}, X, dynamic_scaler_state={})

    name = transform.__name__
    for call, message in [
        *((grad(loss), message) for loss, message in RETURNED),
        (grad(RETURNED[0][0], has_aux=True), r"expected a \(loss, aux\) pair"),
        (grad(linear_loss, argnums=2), f"^{name}: argnums=2 names an argument"),
        (grad(linear_loss, argnums=(0, "x")), r"argnums=\(0, 'x'\); exp.* int.* Leave"),
        (lambda: transform(linear_loss)(X), f"^{name}: .*scaler_state is missing"),
    ]:
        raised(call, TypeError, message)
    unbound = f"{name}: axis_name='data' is not the axis of a map around this call"
    raised(grad(linear_loss, axis_name="data"), NameError, unbound)


# Random numbers


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))


class NnxDropped(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x, rngs):
        dropout = nnx.Dropout(0.5, deterministic=False, rngs=rngs)
        return nnx.view(dropout, deterministic=False)(self.linear(x)).mean()


def linen_dropped(**options):
    streams = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = Dropped().init(streams, EXAMPLES)["params"]
    return AmpTrainState.create(params=params, tx=optax.sgd(0.1), **options)


def nnx_dropped(**options):
    return AmpTrainState.create(model=NnxDropped(), tx=optax.sgd(0.1), **options)


def dropped(params, **options):
    return Dropped().apply({"params": params}, EXAMPLES, **options).mean()


def noise(key):
    return jax.random.normal(key, (3,)).sum()


READERS = {
    "key": (linear_state, lambda p, b, rngs: p["w"].sum() * noise(rngs["dropout"])),
    "get": (linear_state, lambda p, b, rngs: noise(rngs.get("dropout"))),
    "linen": (linen_dropped, lambda p, b, rngs: dropped(p, rngs=rngs)),
    "linen without the keyword": (linen_dropped, lambda p, b: dropped(p)),
    "nnx": (nnx_dropped, lambda m, b, rngs: m(EXAMPLES, nnx.Rngs(**rngs))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", STATE_STEPS)
def test_streams_that_the_state_lacks(make, reader):
    make_state, loss = READERS[reader]
    advice = r".*create\(rngs=\{'dropout': jax.random.key\(0\)\}\), declare the keyword"
    raised(lambda: make(loss)(make_state(), 0.0), Exception, "state has none" + advice)
    if reader != "get":  # which asks for no stream in particular
        state = make_state(rngs={"noise": jax.random.key(0)})
        found = r"state has \['noise'\]"
        raised(lambda: make(loss)(state, 0.0), Exception, found + advice)
    if "without" not in reader:
        state = make_state(rngs={"dropout": jax.random.key(0)})
        jax.eval_shape(make(loss), state, 0.0)


def test_errors_that_are_not_for_want_of_a_stream():
    """A loss may declare `rngs` and use none; other errors have no note."""
    make_train_step(lambda p, b, rngs: p["w"].sum() * len(rngs))(linear_state(), 0.0)
    for loss in (lambda p, b: p["v"], lambda p, b, rngs: 1 / 0):
        state = linear_state(rngs={"dropout": jax.random.key(0)})
        with pytest.raises((KeyError, ZeroDivisionError)) as caught:
            make_train_step(loss)(state, 0.0)
        assert "flax_amp" not in str(getattr(caught.value, "__notes__", ""))


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
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(loss, accum_steps=2, **options)
    return [step(model, optimizer, None, EXAMPLES)[1] for _ in range(2)]


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
