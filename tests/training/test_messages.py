"""Error messages of bad arguments, losses and states, over all files of `_training`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from _models import linen_loss, linen_state, make_batch, nnx_state
from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
    run,
    run_nnx,
    sum_loss,
)
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    check_progress,
    dynamic_scale_grad,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
)

pytestmark = pytest.mark.once

X, HALF = jnp.ones(3), jnp.ones(3, jnp.float16)
ADAM = functools.partial(linear_state, optax.adam(0.1))
PLAIN = nnx.Optimizer(linear_objects()[0], optax.adam(0.1), wrt=nnx.Param)
MODEL, OPTIMIZER = linear_objects()


def later(fn, *args, **options):
    return lambda: fn(*args, **options)


made = functools.partial(later, make_train_step)
made_nnx = functools.partial(later, make_nnx_train_step)
checked = functools.partial(later, check_progress)


def pair(aux):
    return lambda params, batch: (params["w"].sum(), aux)


def created(**options):
    options = dict(params={"w": X}, tx=optax.sgd(0.1)) | options
    return later(AmpTrainState.create, **options)


def of_state(make=linear_state, **changes):
    """A step on a state with other fields."""
    loss = lambda params, x: params["w"].sum() + x.sum()  # noqa: E731
    return lambda: make_train_step(loss)(make().replace(**changes), X)


def on(state):
    return lambda: make_train_step(sum_loss)(state, X)


def nnx_on(*objects, **options):
    return run_nnx(make=lambda: objects or linear_objects(**options))


def grad(fun, **options):
    grad_fn = dynamic_scale_grad(fun, **options)
    return lambda: grad_fn({"w": X}, X, dynamic_scaler_state=init_scaler())


def linen_with(update):
    """The loss of a Linen model that makes something else of its collections."""

    def loss(params, batch, *, state, rngs):
        value, aux = linen_loss(params, batch, state=state, rngs=rngs)
        return value, {"variables": update(aux["variables"])}

    return run(loss, linen_state, make_batch, has_aux=True)


def grows(model, batch):
    model.seen = nnx.BatchStat(jnp.zeros(2))
    return model(batch["x"]).mean()


def splitting(batch, steps):
    return run(pair({}), batch=lambda: batch, has_aux=True, accum_steps=steps)


def matrix(params, batch):
    return params["w"]


STATS = {"batch_stats": {"mean": X}}
OLD_KIND = nnx.ModelAndOptimizer(MODEL, optax.adam(0.1))
WIDER = AmpOptimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.adam(0.1))
FLAX = TrainState.create(apply_fn=None, params={"w": X}, tx=optax.sgd(0.1))

# error -> what is said -> a call that raises it
TABLE = {
    ValueError: {
        # arguments
        "^make_train_step: accum_steps=0; expected": made(linear_loss, accum_steps=0),
        "^make_nnx_train_step: accum_steps=1.5": made_nnx(sum_loss, accum_steps=1.5),
        "redo_on_nan=-1; expected": made(linear_loss, redo_on_nan=-1),
        "redo_on_nan=1.5": later(dynamic_scale_grad, linear_loss, redo_on_nan=1.5),
        "state_shardings with jit": made(linear_loss, state_shardings=3, jit=False),
        "param_dtype='float16'; expected float32 or": created(param_dtype="float16"),
        r"9 parameters that train .*: \[0\]: float16, .*\[2\]: float16 and 6 m": (
            created(params=[HALF] * 9)
        ),
        r"\['key'\]: key<fry>": created(params={"w": X, "key": jax.random.key(0)}),
        "create: wrt=.*selects no variable": created(
            params=None, model=MODEL, wrt=nnx.Cache
        ),
        "create: scaler has the keys": created(scaler={"growth": 1}),
        # what a loss returns
        r"returned aux with \['batch_stats'\].*aux\['variables'\]": run(
            pair(STATS), lambda: linear_state(variables=STATS), has_aux=True
        ),
        r"\['cache'\]: absent before, int32\[\] now": run(
            pair({"variables": {"cache": 1}}), has_aux=True
        ),
        r"\['BatchNorm_0'\]\['mean'\]: float32\[8\] before, float32": linen_with(
            lambda updates: jax.tree.map(lambda x: x[None], updates)
        ),
        r"\['mean'\]: float32\[8\] before, absent now": linen_with(
            lambda updates: {"batch_stats": {}}
        ),
        r"\['seen'\]: absent before, float32": run(grows, nnx_state, make_batch),
        # a batch
        r"\['x'\] has shape \(2,\); batch\['y'\] h.*accum_steps=2.*further arg": (
            splitting({"x": X[:2], "y": np.ones(4)}, 2)
        ),
        r"\['n'\] has shape \(\).*the same for all": splitting({"x": X, "n": 3}, 3),
        r"batch\['x'\] has shape \(8, 3\).*divisible by": splitting(linear_batch(), 3),
        # a state
        r"the scaler has the keys .*; expected a dict of \['adjust_fa": of_state(
            scaler={"scaler": X[0]}
        ),
        r"train_step: .*\['w'\]: float16; ex": of_state(params={"w": HALF}),
        r"make_train_step: .*params\['w'\]: \(1,\) before, \(3,\) now": of_state(
            ADAM, params={"w": X[:1]}
        ),
        "train_step: 2 parameters that train are not float32.*kernel": nnx_on(
            param_dtype=jnp.float16
        ),
        "AmpOptimizer: wrt=.* selects no variable": later(
            linear_objects, wrt=nnx.Cache
        ),
        r"make_nnx_train_step: .*\['kernel'\].*: \(3, 1\) before, \(3, 2\) now": (
            nnx_on(MODEL, WIDER)
        ),
    },
    TypeError: {
        # arguments
        r"^make_train_step: the function is int32\[\]; expected a function": made(3),
        "make_eval_step: the function is a NoneType": later(make_eval_step, None),
        "fun is a NoneType; expected a function": later(dynamic_scale_grad, None),
        "params is a NoneType; expected .*nnx.Module as model": created(params=None),
        r"params is float32\[3\]; expected a dict": created(params=X),
        "model is an AmpOptimizer; expected an nnx.Module": created(model=OPTIMIZER),
        "model together with params": created(model=MODEL),
        "got wrt=.* without model": created(wrt=nnx.LoRAParam),
        "rngs is .*; expected a dict": created(rngs=jax.random.key(0)),
        "state is a dict; expected an AmpTrainState, an AmpOptimizer": checked({}),
        "does not count skipped steps.*is a tuple;.*AmpOptimizer": checked(PLAIN),
        # what a loss returns
        r"float32\[3\] as its loss.*mean\(\)": run(matrix),
        r"int32\[\] as its.*scalar float": run(lambda p, b: p["w"].sum().astype(int)),
        "a NoneType as its loss": run(lambda p, b: None),
        "tuple as its loss.*has_aux=True": run(pair({})),
        r"make_train_step: linear_loss returned.*expected a \(loss, aux\) pair": run(
            linear_loss, has_aux=True
        ),
        "make_nnx_train_step: <lambda> returned": run_nnx(lambda m, b: m(b)),
        r"matrix returned float32\[3\] as its loss": grad(matrix),
        r"matrix returned .*\(loss, aux\) pair": grad(matrix, has_aux=True),
        "argnums=.* requires at least 3 positional": grad(linear_loss, argnums=2),
        # a state
        "train_step: state is a TrainState; expected an Amp": on(FLAX),
        "state is a Linear; .*make_nnx_train_step": on(MODEL),
        "train_step: model is a dict": nnx_on({}, OPTIMIZER),
        "is an AmpTrainState; expected a flax_amp.AmpOpt": nnx_on(MODEL, ADAM()),
        r"graphdef is a NoneType; .*create\(model=": linear_state().merge_model,
        r"step is float32\[\]; expected an integer": of_state(step=1.5),
        r"optimizer is a tuple; .*opt_state._replace\(inner_state=": of_state(
            opt_state=optax.sgd(0.1).init({"w": X})
        ),
        # near misses
        "AmpTrainState.create: got 'adam'; .*call the function: optax": created(
            tx=optax.adam, param_dtype=jnp.bfloat16
        ),
        "AmpOptimizer: got 'adam'": later(AmpOptimizer, MODEL, optim.adam),
        "got 'int'; expected an optimizer": created(tx=3),
        r"metrics_fn\['n'\] is a str": run(
            linear_loss, metrics_fn=lambda *_: {"n": "name"}
        ),
        "a str as aux\\['weight'\\]; expected a scalar": run(
            pair({"weight": "n"}), has_aux=True
        ),
        "is an nnx.ModelAndOptimizer; .*flax_amp.AmpOptimizer\\(model, tx, w": nnx_on(
            MODEL, OLD_KIND
        ),
        "model is an AmpOptimizer; expected an nnx.Module: train_step\\(model": nnx_on(
            OPTIMIZER, MODEL
        ),
        "metrics_fn is int32.*of \\(state, grads, updates\\)": made(
            linear_loss, metrics_fn=3
        ),
        "the result of metrics_fn is a NoneType; expected a dict": run(
            linear_loss, metrics_fn=lambda *_: None
        ),
        "donate is a str; expected True or False": made(linear_loss, donate="no"),
        "make_nnx_train_step: jit is a NoneType": made_nnx(sum_loss, jit=None),
        "has_aux is int32": made(linear_loss, has_aux=2),
        r"train_step: batch\['n'\] is a str; expected arrays": run(
            linear_loss, batch=lambda: {"x": X, "y": X, "n": "name"}
        ),
        r"train_step: args\[0\] is a str": later(
            make_nnx_train_step(sum_loss), *linear_objects(), X, "name"
        ),
        r"aux\['n'\] is a str; expected arrays": run(pair({"n": "name"}), has_aux=True),
        r"eval_step: state is a dict; .*jax.jit\(flax_amp.amp\(fn\)\)": later(
            make_eval_step(linear_loss), {"w": X}, linear_batch()
        ),
        "learning_rate=None; expected a number or a schedule": later(
            linear_state(optim.adam(0.1)).replace_hyperparams, learning_rate=None
        ),
        "learning_rate='x'; expected a number": later(
            AmpOptimizer(MODEL, optim.adam(0.1)).replace_hyperparams, learning_rate="x"
        ),
        # weights
        r"float32\[3\] as aux\['weight'\]; expected a scalar": run(
            pair({"weight": X}), has_aux=True
        ),
        r"a NoneType as aux\['weight'\]": run(pair({"weight": None}), has_aux=True),
        r"complex64\[\] as aux\['weight'\]": run(pair({"weight": 1j}), has_aux=True),
    },
}
ROWS = [(call, error, m) for error, rows in TABLE.items() for m, call in rows.items()]


@pytest.mark.parametrize("call, error, message", ROWS, ids=[row[2] for row in ROWS])
def test_messages(call, error, message):
    raised(call, error, message)


@pytest.mark.parametrize("holder", ["state", "plain"])
def test_the_precision_of_the_step_wins(holder):
    """The message says so where float16 has no scale."""
    step = make_train_step(linear_loss, precision="16-mixed")
    nnx_step = make_nnx_train_step(sum_loss, precision="16-mixed")
    plain = nnx.Optimizer(MODEL, optax.sgd(0.1), wrt=nnx.Param)
    state = linear_state(precision="bf16-mixed", scaler=None)
    call, error, held = {
        "state": (lambda: step(state, linear_batch()), UserWarning, "'bf16-mixed' of"),
        "plain": (
            lambda: nnx_step(MODEL, plain, X),
            TypeError,
            "the precision of a plain",
        ),
    }[holder]
    raised(call, error, f"precision='16-mixed' of the step wins over {held}")


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


def sowing(loss, **options):
    model = Sows()
    step = make_nnx_train_step(loss, accum_steps=2, **options)
    optimizer = AmpOptimizer(model, optax.sgd(0.1))
    return [step(model, optimizer, jnp.ones((2, 3))) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_models_that_sow():
    """The advice works."""
    advice = r"return these values: \(loss, nnx.pop\(model, nnx.Intermediate\)\)"
    message = rf"\['out'\]\[0\]: absent before, float32.*{advice}"
    raised(lambda: sowing(lambda m, b: m(b)), ValueError, message)
    (out,) = jax.tree.leaves(sowing(popping, has_aux=True)[-1]["out"])
    assert out.size == 2
